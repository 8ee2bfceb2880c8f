//! Tokenizes consecutive texts so that each has tokens of its own.
//!
//! Tokenizers treat the beginning of a text specially: SentencePiece's kind adds a space there, others strip one. A part that follows
//! others is not such a beginning. So all parts are tokenized together, and the tokens are assigned to parts by their offsets. If a token
//! crosses a boundary, the text is cut there: the text before the cut is tokenized as a model sees its prompt, and the text after it is
//! tokenized after a short other text with which none of its tokens joins.

use crate::error::Result;

/// A token and the byte range of its text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    pub id: i32,
    pub begin: usize,
    pub end: usize,
}

/// Tokenizes a text.
type Encode<'a> = dyn Fn(&str) -> Result<Vec<Placed>> + 'a;

/// Texts to put before a continued text: the first one whose tokens do not join with it is used. Splits and joins depend on the kinds of
/// characters that meet; a line break, a letter, a sign, a digit and so on suffice for all known tokenizers.
const BEFORE: [&str; 8] = ["\n", "a", ".", "1", " ", "é", "中", "\u{2028}"];

/// The ids of each part. `continues`: whether other text precedes the first part.
///
/// # Errors
/// Those of `encode`.
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
            // A token that crosses a boundary only now is so rare that each part is tokenized alone.
            Given::Across(_) => {
                for at in first..end {
                    match together(encode, &parts[at..=at], continues || at > 0)? {
                        Given::Apart(ids) => all.extend(ids),
                        // A single part has no boundary to cross.
                        Given::Across(_) => all.push(Vec::new()),
                    }
                }
            }
        }
        first = end;
    }
    Ok(all)
}

/// The tokens of parts that were tokenized together.
enum Given {
    /// The ids of each part.
    Apart(Vec<Vec<i32>>),
    /// The parts at whose beginning a token crosses the boundary.
    Across(Vec<usize>),
}

/// Tokenizes parts together.
fn together(encode: &Encode<'_>, parts: &[&str], continues: bool) -> Result<Given> {
    let text = parts.concat();
    if !continues || text.is_empty() {
        return Ok(given(&encode(&text)?, parts, 0));
    }
    match behind(encode, &text)? {
        Some((before, first, tokens)) => Ok(given(&tokens[first..], parts, before.len())),
        // A tokenizer that joins everything gives one token per text, whatever precedes it.
        None => Ok(given(&encode(&text)?, parts, 0)),
    }
}

/// The tokens of a text after one of `BEFORE`, that text and the number of its tokens; `None` if all of them join.
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

/// Bytes of a text that decide which text to put before it.
const START: usize = 512;

/// The ids of a long continued text. `ids` tokenizes without offsets, which takes less memory.
///
/// # Errors
/// Those of `encode` and `ids`.
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

/// Assigns tokens to parts by their offsets; the first part begins at byte `from`.
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
        // All parts that begin before the token's end.
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
