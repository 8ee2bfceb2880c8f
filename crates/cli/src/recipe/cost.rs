//! `nibble recipe --cost`: the multiply-adds of a step by code width, and a recipe's work outside GEMMs.

use nibble_command::console::thousands;
use nibble_command::error::Result;
use nibble_command::say;
use nibble_core::Recipe;
use nibble_train::checks::{for_run, load_recipe, notes};
use nibble_train::config::Config;
use nibble_train::cost::{Cost, Engine, KindCost};

/// Code widths that always have a column.
const BITS: [u32; 5] = [4, 6, 8, 16, 32];

/// The HiFloat4 study's published figures of other recipes, for GEMMs of X `[M, K]`, W `[N, K]` and D `[M, N]`.
const PUBLISHED: [&str; 12] = [
    "published, HiFloat4 study, Table 1: additions beside products and quantization",
    "(X [M,K], W [N,K], D [M,N]; r: length of a transform; j: rank of a decomposition)",
    "              fprop                 dgrad                           wgrad",
    "  NVIDIA      -                     -                               M log2 r (N + K)",
    "  Quartet II  2 K (M + N)           N (1 + log2 r) (M + K)          M (1 + log2 r) (N + K)",
    "  Metis       M j (K + N)           M N (log2 j + j) + K j (M + N)  K j (M + N)",
    "Table 2: % of a step in 4 bits, all linear layers but the output layer",
    "                 q, k, v  output  gate, up   down  total",
    "  OpenPangu-1B     10.61    5.30     42.45  21.22  79.58",
    "  Llama3-8B         8.86    5.91     41.37  20.68  76.82",
    "  Qwen3-MoE-30B     3.13    2.50     60.18  30.09  95.90",
    "(of a step with attention; the last line is that of 64 experts a token, where the model has 8)",
];

/// Name of the table row that sums all layers.
const ALL: &str = "all";

/// Prints the cost of a training step with a recipe. With `all`, also prints the published figures of other recipes.
pub fn run(recipe: &str, config: &str, all: bool) -> Result<()> {
    let (name, config) = (config, Config::load(config, &[])?);
    let recipe = for_run(&config, load_recipe(recipe)?);
    let cost = Cost::of(&config, &recipe)?;
    notes(&config, &recipe).iter().for_each(|note| say!("{note}"));
    let (tokens, total) = (thousands(cost.tokens), scientific(cost.total()));
    say!(
        "a step of `{name}` under {}, the mean over {} steps: {tokens} tokens",
        recipe.name,
        config.train.steps
    );
    say!("{total} multiply-adds of linear layers, in %, by the codes of the wider operand");
    products(&cost);
    techniques(&cost, &recipe);
    match all {
        true => PUBLISHED.iter().for_each(|line| say!("{line}")),
        false => say!("--all adds the figures of other recipes that the HiFloat4 study published"),
    }
    Ok(())
}

/// Prints the fraction of multiply-adds by code width, one row per kind of layer.
fn products(cost: &Cost) {
    let mut bits = BITS.to_vec();
    bits.extend(cost.kinds.iter().flat_map(|kind| &kind.products).map(|products| products.bits));
    bits.sort_unstable();
    bits.dedup();
    let title: String = bits.iter().map(|bits| format!("{:>9}", format!("{bits} bits"))).collect();
    say!("  {:<22}{:>9}{title}  GPU", "layers", "all");
    let row = |name: &str, kinds: &[KindCost]| {
        let sum = |of: &dyn Fn(&KindCost) -> f64| kinds.iter().map(of).sum::<f64>();
        let cells = bits.iter().map(|bits| percent(sum(&|kind| kind.in_bits(*bits)), cost.total()));
        let cells: String =
            std::iter::once(percent(sum(&KindCost::total), cost.total())).chain(cells).collect();
        let engines = if name == ALL { String::new() } else { engines(kinds) };
        say!("{}", format!("  {name:<22}{cells}  {engines}").trim_end());
    };
    cost.kinds.iter().for_each(|kind| row(kind.name, std::slice::from_ref(kind)));
    row(ALL, &cost.kinds);
    let more = 100.0 * cost.attention / cost.total();
    say!("  a GPU computes them in {}", engines(&cost.kinds));
    say!("  attention's scores and values, of the keys that queries see, are {more:.2} % more");
}

fn percent(part: f64, whole: f64) -> String {
    match part > 0.0 {
        true => format!("{:>9.2}", 100.0 * part / whole),
        false => format!("{:>9}", "-"),
    }
}

/// Formats the engines of a layer, for example `FP8`, or `FP8 94.2 %, BF16 5.8 %`.
fn engines(kinds: &[KindCost]) -> String {
    let through = |engine: Engine| kinds.iter().map(|kind| kind.through(engine)).sum::<f64>();
    let all: f64 = kinds.iter().map(KindCost::total).sum();
    let used: Vec<(Engine, f64)> = Engine::ALL
        .map(|engine| (engine, through(engine)))
        .into_iter()
        .filter(|(_, made)| *made > 0.0)
        .collect();
    match used.as_slice() {
        [(engine, _)] => engine.to_string(),
        several => {
            let parts = several.iter().map(|(engine, made)| format!("{engine} {:.1} %", 100.0 * made / all));
            parts.collect::<Vec<_>>().join(", ")
        }
    }
}

/// Prints the work outside GEMMs, one row per technique of the recipe.
fn techniques(cost: &Cost, recipe: &Recipe) {
    if cost.techniques.is_empty() {
        say!("{} does no work on tensors besides products", recipe.name);
        return;
    }
    say!("work on tensors besides products, per step; each formula is of one product");
    say!("  {:<32}{:<24}{:>22}", "", "of X [M,K], W [N,K]", "in all");
    for (technique, count) in &cost.techniques {
        let (count, unit) = (scientific(*count), technique.unit());
        say!("  {:<32}{:<24}{count:>22} {unit}", technique.name(), technique.formula());
    }
}

/// Formats a count: exact if it is short, otherwise in powers of ten.
fn scientific(count: f64) -> String {
    if count < 1e9 { thousands(count.round() as u64) } else { format!("{count:.3e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_whole_while_they_can_be_read() {
        assert_eq!([0.4, 1234.0, 2.5e9].map(scientific), ["0", "1,234", "2.500e9"]);
        assert_eq!([percent(1.0, 3.0), percent(0.0, 3.0)], ["    33.33", "        -"]);
    }

    /// Lines of the published tables are at most 100 columns wide, like those of other tables.
    #[test]
    fn lines_are_at_most_a_hundred_columns() {
        assert!(PUBLISHED.iter().all(|line| line.len() <= 100), "{PUBLISHED:#?}");
    }
}
