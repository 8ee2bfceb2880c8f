//! The built-in language: a grammar with long-range structure, whose entropy rate is computed exactly, not estimated.
//!
//! A text is a sequence of independent records of 32 tokens:
//!
//! ```text
//!  0        1      2 … 28                     29       30     31
//!  opener   name   27 letters                 marker   name   closer
//!  ⟦one of 8⟧ ⟦of 7⟧ ⟦Markov chain of the dialect⟧  =     again  matches the opener
//! ```
//!
//! The opener determines which of four dialects the letters follow. Each dialect has its own table of successors. In this table, a letter
//! has four possible successors of unequal probability; the first letter depends on the name in the same way. A model that sees only the
//! last token sees a mixture of four dialects; a model that attends to the opener knows the table. A model that remembers the beginning of
//! the record can predict the name and the closer at the end with certainty.
//!
//! Given all tokens since the opener, the process has no hidden state. So the entropy rate is the mean, over the 32 places, of the entropy
//! of the next token given the past. The entropy rate follows from the marginal distributions of the chain. Probabilities are multiples of
//! 2⁻¹⁶ and are sampled with sixteen random bits. The sampler therefore has exactly the distribution from which the entropy is computed.

use nibble_formats::philox::{Purpose, Stream, fnv1a32};

/// Number of tokens in each record of the built-in language.
pub const RECORD_TOKENS: usize = 32;

/// Number of distinct tokens.
pub const SYNTHETIC_VOCAB: usize = 64;

const OPENERS: usize = 8;
const NAMES: usize = 7;
const LETTERS: usize = 40;
const DIALECTS: usize = 4;
const SUCCESSORS: usize = 4;

// Token ids are numbered in this order: openers, closers, names, marker, letters.
const FIRST_CLOSER: usize = OPENERS;
const FIRST_NAME: usize = FIRST_CLOSER + OPENERS;
const MARKER: usize = FIRST_NAME + NAMES;
const FIRST_LETTER: usize = MARKER + 1;
const _: () = assert!(FIRST_LETTER + LETTERS == SYNTHETIC_VOCAB);

// Places of tokens within a record.
const NAME_AT: usize = 1;
const BODY_AT: usize = 2;
const MARKER_AT: usize = RECORD_TOKENS - 3;
const NAME_AGAIN_AT: usize = RECORD_TOKENS - 2;
const CLOSER_AT: usize = RECORD_TOKENS - 1;

/// 2¹⁶: the sum of the integer probabilities of a choice.
const ONE: u32 = 1 << 16;

/// Probabilities of a letter's four successors, in units of 1/65536: about 0.55, 0.25, 0.13, 0.07.
const SUCCESSOR_WEIGHTS: [u32; SUCCESSORS] = [36_045, 16_384, 8_520, 4_587];
const _: () =
    assert!(SUCCESSOR_WEIGHTS[0] + SUCCESSOR_WEIGHTS[1] + SUCCESSOR_WEIGHTS[2] + SUCCESSOR_WEIGHTS[3] == ONE);

/// Seed of the language's tables, which is the same in every run.
const LANGUAGE_SEED: u64 = 0x6e69_6262_6c65;

/// One printable character per token, in the order of the ids.
const SYMBOLS: &str = "([{<«‹⟨⌈)]}>»›⟩⌉ABCDEFG=abcdefghijklmnopqrstuvwxyz0123456789+-*/";

/// Training or held-out records. Records of training and of held-out data are unrelated, even if they have equal seeds and indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Records to train on.
    Train,
    /// Held-out records.
    Valid,
}

/// Two entropies, in nats per token, with which the loss of a model of the built-in language can be compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Entropy {
    /// Entropy rate H of the language: the loss of a perfect model.
    pub rate: f64,
    /// Entropy U of a token without its context: the loss of a model that knows only how frequent each token is.
    pub unigram: f64,
}

/// The possible successors of a letter or a name in a dialect, most likely first, with the probabilities [`SUCCESSOR_WEIGHTS`].
type Row = [u8; SUCCESSORS];

/// The built-in language: its tables, its sampler, and its exact entropy.
#[derive(Debug, Clone)]
pub struct Language {
    /// `successors[dialect][state]`: the successors of a state. The state is a letter, or, for the first letter, `LETTERS` + name.
    successors: [[Row; LETTERS + NAMES]; DIALECTS],
}

impl Default for Language {
    fn default() -> Self {
        Self::new()
    }
}

impl Language {
    /// Creates the language. All instances are equal.
    #[must_use]
    pub fn new() -> Self {
        let site = fnv1a32("data.language");
        let mut successors = [[[0; SUCCESSORS]; LETTERS + NAMES]; DIALECTS];
        for (dialect, table) in successors.iter_mut().enumerate() {
            for (state, row) in table.iter_mut().enumerate() {
                let number = (dialect * (LETTERS + NAMES) + state) as u32;
                *row = distinct_letters(&Stream::new(LANGUAGE_SEED, Purpose::Data, site, number));
            }
        }
        Self { successors }
    }

    /// Record number `index` of the training or held-out records. The record is a pure function of `seed`, `split` and `index`.
    #[must_use]
    pub fn record(&self, seed: u64, split: Split, index: u64) -> [i32; RECORD_TOKENS] {
        let name = match split {
            Split::Train => "data.train",
            Split::Valid => "data.valid",
        };
        let draw = Stream::new(seed, Purpose::Data, fnv1a32(name), 0);
        let mut drawn = [0; RECORD_TOKENS];
        draw.fill_u16(index * RECORD_TOKENS as u64, &mut drawn);
        let bits = |place: usize| u32::from(drawn[place]);

        let opener = (0..OPENERS).position(|i| bits(0) < uniform_bound(i, OPENERS)).unwrap_or(OPENERS - 1);
        let name = (0..NAMES).position(|i| bits(NAME_AT) < uniform_bound(i, NAMES)).unwrap_or(NAMES - 1);
        let table = &self.successors[opener % DIALECTS];

        let mut record = [0; RECORD_TOKENS];
        record[0] = opener as i32;
        record[NAME_AT] = (FIRST_NAME + name) as i32;
        let mut state = LETTERS + name;
        for (place, token) in record.iter_mut().enumerate().take(MARKER_AT).skip(BODY_AT) {
            state = usize::from(pick(&table[state], bits(place)));
            *token = (FIRST_LETTER + state) as i32;
        }
        record[MARKER_AT] = MARKER as i32;
        record[NAME_AGAIN_AT] = (FIRST_NAME + name) as i32;
        record[CLOSER_AT] = (FIRST_CLOSER + opener) as i32;
        record
    }

    /// Sequence `index` of a split: `seq_len + 1` tokens from the beginning of a record. The last of these tokens is the next record's
    /// opener. `seq_len` must be a multiple of [`RECORD_TOKENS`], which [`super::Dataset::open`] checks. Sequences share no record except
    /// the record of this opener.
    pub(super) fn sequence(&self, seed: u64, split: Split, index: u64, seq_len: usize) -> Vec<i32> {
        let records = seq_len / RECORD_TOKENS;
        let first = index * records as u64;
        let mut tokens: Vec<i32> =
            (0..=records as u64).flat_map(|i| self.record(seed, split, first + i)).collect();
        tokens.truncate(seq_len + 1);
        tokens
    }

    /// The negative log-probability of a record under the language, in nats. The result is infinite if the record violates the grammar of
    /// the language.
    #[must_use]
    pub fn nats(&self, record: &[i32; RECORD_TOKENS]) -> f64 {
        let place = |at: usize, first: usize, count: usize| {
            usize::try_from(record[at]).ok().and_then(|id| id.checked_sub(first)).filter(|&i| i < count)
        };
        let (Some(opener), Some(name)) = (place(0, 0, OPENERS), place(NAME_AT, FIRST_NAME, NAMES)) else {
            return f64::INFINITY;
        };
        let ends_well = record[MARKER_AT] == MARKER as i32
            && record[NAME_AGAIN_AT] == record[NAME_AT]
            && record[CLOSER_AT] == (FIRST_CLOSER + opener) as i32;
        if !ends_well {
            return f64::INFINITY;
        }
        let mut nats = -uniform_share(opener, OPENERS).ln() - uniform_share(name, NAMES).ln();
        let mut state = LETTERS + name;
        for at in BODY_AT..MARKER_AT {
            let Some(letter) = place(at, FIRST_LETTER, LETTERS) else { return f64::INFINITY };
            let row = &self.successors[opener % DIALECTS][state];
            let Some(rank) = row.iter().position(|&next| usize::from(next) == letter) else {
                return f64::INFINITY;
            };
            nats -= share(SUCCESSOR_WEIGHTS[rank]).ln();
            state = letter;
        }
        nats
    }

    /// The exact entropies H and U of the language, in nats per token.
    ///
    /// H = (H(opener) + H(name) + Σ H(successor)) / 32, because every row of a transition table has the same successor probabilities, and
    /// the tokens after the letters are certain. U is the entropy of the distribution of tokens, averaged over the 32 positions of a
    /// record. To compute U, the function propagates the distribution of letters through the Markov chain of each dialect.
    #[must_use]
    pub fn entropy(&self) -> Entropy {
        let openers: Vec<f64> = (0..OPENERS).map(|i| uniform_share(i, OPENERS)).collect();
        let names: Vec<f64> = (0..NAMES).map(|i| uniform_share(i, NAMES)).collect();
        let successor: Vec<f64> = SUCCESSOR_WEIGHTS.map(share).to_vec();
        let body = (MARKER_AT - BODY_AT) as f64;
        let rate = (shannon(&openers) + shannon(&names) + body * shannon(&successor)) / RECORD_TOKENS as f64;

        let mut expected = [0.0; SYNTHETIC_VOCAB]; // expected occurrences in a record
        for (opener, p) in openers.iter().enumerate() {
            expected[opener] += p;
            expected[FIRST_CLOSER + opener] += p;
            self.add_letters(opener % DIALECTS, *p, &names, &mut expected);
        }
        for (name, p) in names.iter().enumerate() {
            expected[FIRST_NAME + name] += 2.0 * p;
        }
        expected[MARKER] += 1.0;
        let unigram = expected.map(|count| count / RECORD_TOKENS as f64);
        Entropy { rate, unigram: shannon(&unigram) }
    }

    /// Adds the expected letters of a record in `dialect`. The dialect has probability `weight`.
    fn add_letters(&self, dialect: usize, weight: f64, names: &[f64], expected: &mut [f64; SYNTHETIC_VOCAB]) {
        let mut now = [0.0; LETTERS + NAMES];
        now[LETTERS..].copy_from_slice(names);
        for _ in BODY_AT..MARKER_AT {
            let mut next = [0.0; LETTERS + NAMES];
            for (p, row) in now.iter().zip(&self.successors[dialect]) {
                for (&letter, &weight) in row.iter().zip(&SUCCESSOR_WEIGHTS) {
                    next[usize::from(letter)] += p * share(weight);
                }
            }
            for (letter, p) in next.iter().take(LETTERS).enumerate() {
                expected[FIRST_LETTER + letter] += weight * p;
            }
            now = next;
        }
    }
}

/// The first four letters of a random permutation (Fisher and Yates, from the front).
fn distinct_letters(draw: &Stream) -> Row {
    let mut letters: [u8; LETTERS] = std::array::from_fn(|i| i as u8);
    for i in 0..SUCCESSORS {
        let rest = (LETTERS - i) as u32;
        letters.swap(i, i + (draw.u32_at(i as u64) % rest) as usize);
    }
    std::array::from_fn(|i| letters[i])
}

/// The successor that is selected by sixteen random bits.
fn pick(row: &Row, bits: u32) -> u8 {
    let mut bound = 0;
    for (&letter, weight) in row.iter().zip(SUCCESSOR_WEIGHTS) {
        bound += weight;
        if bits < bound {
            return letter;
        }
    }
    row[SUCCESSORS - 1] // unreachable, because the bounds end at 2^16
}

/// Sixteen random bits below this number select one of the first `i + 1` of `n` equally likely items.
fn uniform_bound(i: usize, n: usize) -> u32 {
    ONE * (i as u32 + 1) / n as u32
}

/// The exact probability of choice `i` of `n`: 1/n rounded to a multiple of 2⁻¹⁶.
fn uniform_share(i: usize, n: usize) -> f64 {
    let below = if i == 0 { 0 } else { uniform_bound(i - 1, n) };
    share(uniform_bound(i, n) - below)
}

fn share(weight: u32) -> f64 {
    f64::from(weight) / f64::from(ONE)
}

/// The entropy −Σ p ln p of a distribution.
fn shannon(probabilities: &[f64]) -> f64 {
    probabilities.iter().filter(|&&p| p > 0.0).map(|p| -p * p.ln()).sum()
}

/// The character of a token id; `None` for an id that does not exist in the language.
#[must_use]
pub fn render_symbol(id: i32) -> Option<char> {
    SYMBOLS.chars().nth(usize::try_from(id).ok()?)
}

/// The token id of a character; `None` for a character that does not exist in the language.
#[must_use]
pub fn symbol_of(character: char) -> Option<i32> {
    SYMBOLS.chars().position(|symbol| symbol == character).map(|id| id as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_are_distinct_and_as_many_as_tokens() {
        assert_eq!(SYMBOLS.chars().count(), SYNTHETIC_VOCAB);
        for id in 0..SYNTHETIC_VOCAB as i32 {
            assert_eq!(render_symbol(id).and_then(symbol_of), Some(id));
        }
        assert_eq!(render_symbol(64), None);
        assert_eq!(render_symbol(-1), None);
    }

    #[test]
    fn rows_have_four_different_letters_and_dialects_differ() {
        let language = Language::new();
        for table in &language.successors {
            for row in table {
                assert!(
                    (0..4).all(|i| usize::from(row[i]) < LETTERS && !row[..i].contains(&row[i])),
                    "{row:?}"
                );
            }
        }
        let same = (0..LETTERS).filter(|&s| language.successors[0][s] == language.successors[1][s]).count();
        assert!(same < 3, "{same} equal rows in two dialects");
    }

    #[test]
    fn grammar_breaks_cost_infinitely_much() {
        let language = Language::new();
        let good = language.record(1, Split::Train, 7);
        assert!(language.nats(&good).is_finite());
        for at in 0..RECORD_TOKENS {
            // The bad record has a letter that is no successor, a wrong closer, or a name in the marker's place. At every place, at least
            // one of the 63 other tokens is wrong; outside the letters, all 63 are wrong.
            let wrong = (0..SYNTHETIC_VOCAB as i32).filter(|&id| {
                let mut bad = good;
                bad[at] = id;
                id != good[at] && language.nats(&bad).is_infinite()
            });
            let expected = if (BODY_AT..MARKER_AT).contains(&at) { 60 } else { 63 };
            assert!(wrong.count() >= expected, "place {at}");
        }
        let mut negative = good;
        negative[5] = -3;
        assert!(language.nats(&negative).is_infinite());
    }

    #[test]
    fn a_perfect_model_gains_much_by_looking_back() {
        // The entropy of the four dialects' mixed rows is the best loss of a model that sees only the last letter.
        let language = Language::new();
        let mixed: f64 = (0..LETTERS)
            .map(|state| {
                let mut next = [0.0; LETTERS];
                for table in &language.successors {
                    for (&letter, &weight) in table[state].iter().zip(&SUCCESSOR_WEIGHTS) {
                        next[usize::from(letter)] += share(weight) / DIALECTS as f64;
                    }
                }
                shannon(&next)
            })
            .sum::<f64>()
            / LETTERS as f64;
        let entropy = language.entropy();
        let own = shannon(&SUCCESSOR_WEIGHTS.map(share));
        assert!(mixed > own + 0.8, "dialects too alike: {mixed} against {own}");
        assert!(entropy.unigram > entropy.rate + 2.0, "{entropy:?}");
    }
}
