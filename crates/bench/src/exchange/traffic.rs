//! Bytes per token for each leg of the exchange, for both methods of combine.

use super::routing::Routing;
use super::{EXPERTS, RANKS, Rows, TOKENS, TOP_K};
use nibble_command::say;
use nibble_train::moe::{Combine, ExchangeBytes, SlotCounts};
use serde_json::{Value, json};

/// The traffic that a sampled routing causes on a number of ranks.
#[derive(Debug, Clone, Copy)]
pub struct Traffic {
    routing: Routing,
    ranks: usize,
    /// All traffic.
    all: Sent,
    /// All traffic except what ranks send to themselves.
    leaving: Sent,
}

/// Number of slots of all ranks, and the bytes of both methods of combine.
#[derive(Debug, Clone, Copy)]
struct Sent {
    counts: SlotCounts,
    slots: ExchangeBytes,
    tree: ExchangeBytes,
}

impl Sent {
    fn new(counts: SlotCounts, rows: Rows) -> Self {
        let of = |way, combine| ExchangeBytes::of(counts, way, rows.dispatch, combine);
        let (slots, tree) = (of(Combine::Slots, rows.combine), of(Combine::Tree, [rows.tree; 2]));
        Self { counts, slots, tree }
    }

    /// The ratio of slots to tree, for the combine legs and for all legs.
    fn ratios(&self) -> [f64; 2] {
        let of = |bytes: fn(&ExchangeBytes) -> usize| bytes(&self.slots) as f64 / bytes(&self.tree) as f64;
        [of(combined), of(ExchangeBytes::total)]
    }

    fn figures(&self) -> Value {
        let way = |bytes: &ExchangeBytes| {
            let mut figures: Value =
                bytes.legs().iter().map(|(leg, n)| ((*leg).to_owned(), json!(a_token(*n)))).collect();
            figures["total"] = json!(a_token(bytes.total()));
            figures["combine_share"] = json!(share(bytes));
            figures
        };
        let [combine, total] = self.ratios();
        json!({
            "ranks_a_token": a_token(self.counts.tokens), "slots": way(&self.slots), "tree": way(&self.tree),
            "slots_by_tree": { "combine": combine, "total": total },
        })
    }
}

/// Bytes of the combine legs.
fn combined(bytes: &ExchangeBytes) -> usize {
    bytes.combine + bytes.combine_backward
}

/// The fraction of the combine legs in all bytes.
fn share(bytes: &ExchangeBytes) -> f64 {
    combined(bytes) as f64 / bytes.total() as f64
}

fn a_token(n: usize) -> f64 {
    n as f64 / TOKENS as f64
}

impl Traffic {
    /// The traffic of all routings on all numbers of ranks.
    pub fn each(rows: Rows) -> Vec<Self> {
        let of = |routing: Routing| {
            let experts = routing.draw(TOKENS, TOP_K, EXPERTS);
            RANKS.map(|ranks| Self::of(routing, &experts, ranks, rows))
        };
        Routing::ALL.into_iter().flat_map(of).collect()
    }

    /// The traffic for these experts of each (token, slot); every rank has an equal, contiguous share of experts and tokens.
    fn of(routing: Routing, experts: &[i32], ranks: usize, rows: Rows) -> Self {
        let experts_each = EXPERTS / ranks;
        let mut leaving = SlotCounts { top_k: TOP_K, ..SlotCounts::default() };
        for (home, own) in experts.chunks(experts.len() / ranks).enumerate() {
            let counts = SlotCounts::leaving(own, TOP_K, experts_each, home);
            leaving.tokens += counts.tokens;
            leaving.slots += counts.slots;
        }
        let all = SlotCounts::of(experts, TOP_K, experts_each);
        Self { routing, ranks, all: Sent::new(all, rows), leaving: Sent::new(leaving, rows) }
    }

    /// Prints the traffic as a table.
    pub fn table(&self) {
        let Self { routing, ranks, all, leaving } = self;
        let on = a_token(all.counts.tokens);
        say!("");
        say!("{} routing on {ranks} ranks; a token goes to {on:.2} of them", routing.name());
        say!("{:<22} {:>19} {:>19} {:>19}", "", "slots", "tree", "slots : tree");
        let columns = format!(" {:>9} {:>9}", "all", "leaves").repeat(3);
        say!("{:<22}{columns}", "");
        let line = |name: &str, bytes: [usize; 4]| {
            let [slots, slots_leaving, tree, tree_leaving] = bytes;
            let cells: String = bytes.iter().map(|n| format!(" {:>9.0}", a_token(*n))).collect();
            let (all, leaving) = (slots as f64 / tree as f64, slots_leaving as f64 / tree_leaving as f64);
            say!("{name:<22}{cells} {all:>9.2} {leaving:>9.2}");
        };
        let ways = [all.slots, leaving.slots, all.tree, leaving.tree];
        for (i, (leg, _)) in all.slots.legs().iter().enumerate() {
            line(leg, ways.map(|way| way.legs()[i].1));
        }
        line("combine, both", ways.map(|way| combined(&way)));
        line("total", ways.map(|way| way.total()));
        let shares: String = ways.iter().map(|way| format!(" {:>7.1} %", 100.0 * share(way))).collect();
        say!("{:<22}{shares}", "combine of total");
    }

    /// The traffic as JSON.
    pub fn figures(&self) -> Value {
        json!({
            "routing": self.routing.name(), "ranks": self.ranks,
            "all": self.all.figures(), "leaving": self.leaving.figures(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_core::Recipe;

    fn all_of(recipe: &str) -> Vec<Traffic> {
        Traffic::each(Rows::of(&Recipe::builtin(recipe).unwrap()))
    }

    /// Expected number of ranks that have at least one of a token's experts. Experts are sampled without replacement. A rank has none if
    /// all experts of the token are among the other ranks' experts.
    fn expected_ranks(ranks: usize) -> f64 {
        let others = EXPERTS - EXPERTS / ranks;
        let missed: f64 = (0..TOP_K).map(|i| (others - i) as f64 / (EXPERTS - i) as f64).product();
        ranks as f64 * (1.0 - missed)
    }

    fn near(got: f64, want: f64) {
        assert!((got / want - 1.0).abs() < 0.02, "{got}, expected {want}");
    }

    #[test]
    fn totals_are_the_sums_of_legs() {
        for traffic in Recipe::names().flat_map(all_of) {
            let figures = traffic.figures();
            for (sent, way) in [("all", "slots"), ("all", "tree"), ("leaving", "slots"), ("leaving", "tree")]
            {
                let figures = figures[sent][way].as_object().unwrap();
                let of = |name: &str| figures[name].as_f64().unwrap();
                let legs = figures.keys().filter(|name| !["total", "combine_share"].contains(&name.as_str()));
                assert_eq!(legs.clone().count(), 6);
                // The byte counts are divided by a power of two, so that their sums are exact.
                assert_eq!(legs.map(|leg| of(leg)).sum::<f64>(), of("total"));
                let both = of("combine, forward") + of("combine, backward");
                assert_eq!(both / of("total"), of("combine_share"));
            }
        }
    }

    #[test]
    fn a_balanced_routing_is_as_a_formula_says() {
        for (traffic, rounded) in all_of("mxfp4-hopper").iter().zip([4.02, 2.22, 1.51]) {
            let (ranks, want) = (traffic.ranks, expected_ranks(traffic.ranks));
            assert_eq!(traffic.routing, Routing::Balanced);
            near(a_token(traffic.all.counts.tokens), want);
            assert_eq!(traffic.all.counts.slots, TOKENS * TOP_K);
            let others = (ranks - 1) as f64 / ranks as f64;
            near(a_token(traffic.leaving.counts.tokens), want * others);
            near(a_token(traffic.leaving.counts.slots), TOP_K as f64 * others);
            // The bytes of rows are computed by hand: codes, then a scale per 32 values or per 128 values.
            let (fp4, e4m3, bf16) = (7168 / 2 + 224, 7168 + 56, 2 * 7168);
            let record = 4 + 8 * TOP_K;
            for sent in [traffic.all, traffic.leaving] {
                let part = if sent.counts.slots == TOKENS * TOP_K { 1.0 } else { others };
                let once = want * part * (record + fp4 + e4m3) as f64 + part * (4 * TOP_K) as f64;
                let slots = once + part * (TOP_K * 2 * bf16) as f64;
                let tree = once + part * want * (2 * bf16) as f64;
                near(a_token(sent.slots.total()), slots);
                near(a_token(sent.tree.total()), tree);
                let [combine, total] = sent.ratios();
                near(combine, TOP_K as f64 / want);
                near(combine, rounded);
                near(total, slots / tree);
            }
        }
    }

    #[test]
    fn busy_ranks_leave_fewer_rows() {
        let all = all_of("bf16");
        let (balanced, zipf) = all.split_at(RANKS.len());
        for (balanced, zipf) in balanced.iter().zip(zipf) {
            assert_eq!((balanced.ranks, zipf.routing), (zipf.ranks, Routing::Zipf));
            assert!(zipf.all.counts.tokens < balanced.all.counts.tokens);
            assert!(zipf.all.ratios()[0] > balanced.all.ratios()[0]);
            assert_eq!(zipf.all.slots.combine, balanced.all.slots.combine);
        }
    }
}
