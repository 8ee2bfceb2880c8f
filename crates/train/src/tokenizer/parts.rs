//! Texts that follow one another, each with tokens of its own.
//!
//! Tokenizers do something at the beginning of a text: those of SentencePiece's kind put a space there, some strip one. A part that stands behind
//! others does not begin a text. So all parts are made tokens of together, and the tokens are given out by where they stand. Where a token lies across two
//! parts, the text is cut there: what precedes the cut is what a model sees as its prompt, and what follows it is made tokens of behind some other text,
//! with which none of its tokens joins.

use crate::error::Result;

/// A token, and the bytes of its text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    pub id: i32,
    pub begin: usize,
    pub end: usize,
}

/// Makes tokens of a text.
type Encode<'a> = dyn Fn(&str) -> Result<Vec<Placed>> + 'a;

/// Texts behind which another goes on, of which the first is taken whose tokens do not join with it. What a tokenizer splits or joins depends on what
/// characters meet: a line break, a letter, a sign, a digit and so on are enough for all kinds known.
const BEFORE: [&str; 8] = ["\n", "a", ".", "1", " ", "é", "中", "\u{2028}"];

/// The ids of each part. `continues`: whether more text stands before the first one.
///
/// # Errors
/// What `encode` says.
pub(super) fn encode(encode: &Encode<'_>, parts: &[&str], continues: bool) -> Result<Vec<Vec<i32>>> {
    let cuts = match together(encode, parts, continues)? {
        Given::Apart(ids) => return Ok(ids),
        Given::Across(cuts) => cuts,
    };
    let (mut all, mut first) = (Vec::with_capacity(parts.len()), 0);
    for end in cuts.into_iter().chain([parts.len()]) {
        let run = &parts[first..end];
        match together(encode, run, continues || first > 0)? {
            Given::Apart(ids) => all.extend(ids),
            // One that did not lie across before: rare enough to make tokens of each part alone.
            Given::Across(_) => {
                for at in first..end {
                    match together(encode, &parts[at..=at], continues || at > 0)? {
                        Given::Apart(ids) => all.extend(ids),
                        // There is no place within one part where it could be.
                        Given::Across(_) => all.push(Vec::new()),
                    }
                }
            }
        }
        first = end;
    }
    Ok(all)
}

/// The tokens of parts that were made tokens of together.
enum Given {
    /// Of each part its own.
    Apart(Vec<Vec<i32>>),
    /// The parts that a token lies across the beginning of.
    Across(Vec<usize>),
}

/// Makes tokens of parts together.
fn together(encode: &Encode<'_>, parts: &[&str], continues: bool) -> Result<Given> {
    let text = parts.concat();
    if !continues || text.is_empty() {
        return Ok(given(&encode(&text)?, parts, 0));
    }
    match behind(encode, &text)? {
        Some((before, first, tokens)) => Ok(given(&tokens[first..], parts, before.len())),
        // A tokenizer that joins everything makes one token of a text, whatever stands before it.
        None => Ok(given(&encode(&text)?, parts, 0)),
    }
}

/// The tokens of a text behind another, with that and the number of its tokens; none where all join.
fn behind(encode: &Encode<'_>, text: &str) -> Result<Option<(&'static str, usize, Vec<Placed>)>> {
    for before in BEFORE {
        let tokens = encode(&format!("{before}{text}"))?;
        let joins = |token: &Placed| token.begin < before.len() && token.end > before.len();
        if !tokens.iter().any(joins) {
            let first = tokens.iter().take_while(|token| token.begin < before.len()).count();
            return Ok(Some((before, first, tokens)));
        }
    }
    Ok(None)
}

/// Bytes of a text that say what it may stand behind.
const START: usize = 512;

/// The ids of a long text that goes on behind another. `ids` makes them without their places, which takes less memory.
///
/// # Errors
/// What `encode` and `ids` say.
pub(super) fn going_on(
    encode: &Encode<'_>,
    ids: &dyn Fn(&str) -> Result<Vec<i32>>,
    text: &str,
) -> Result<Vec<i32>> {
    let end = (0..=START.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    let start = &text[..end];
    if let Some((before, first, tokens)) = behind(encode, start)? {
        let mut all = ids(&format!("{before}{text}"))?;
        let is_alike =
            all.len() >= first && all.iter().zip(&tokens[..first]).all(|(id, token)| *id == token.id);
        if is_alike {
            return Ok(all.split_off(first));
        }
    }
    Ok(self::encode(encode, &[text], true)?.concat())
}

/// Gives tokens to the parts that they stand in; the first part begins at byte `from`.
fn given(tokens: &[Placed], parts: &[&str], from: usize) -> Given {
    let (mut ids, mut across) = (vec![Vec::new(); parts.len()], Vec::new());
    let ends: Vec<usize> = parts
        .iter()
        .scan(from, |end, part| {
            *end += part.len();
            Some(*end)
        })
        .collect();
    let mut part = 0;
    for token in tokens {
        while part + 1 < parts.len() && token.begin >= ends[part] {
            part += 1;
        }
        // All that begin before its end.
        let mut at = part;
        while at + 1 < parts.len() && token.end > ends[at] {
            at += 1;
            if token.begin < ends[at - 1] {
                across.push(at);
            }
        }
        ids[part].push(token.id);
    }
    across.sort_unstable();
    across.dedup();
    if across.is_empty() { Given::Apart(ids) } else { Given::Across(across) }
}
