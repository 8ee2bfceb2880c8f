//! Tokenizes consecutive texts so that each text has its own tokens.
//!
//! Tokenizers treat the beginning of a text specially: SentencePiece tokenizers add a space there, and others strip a space. A part that
//! follows other parts is not such a beginning. So all parts are tokenized together, and the tokens are assigned to parts by their offsets.
//! If a token crosses a boundary, the text is cut at this boundary. The text before the cut is tokenized as a model sees its prompt. The
//! text after the cut is tokenized after a short prefix, with which none of its tokens joins.

use crate::error::Result;

/// A token and the byte range of its text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    pub id: i32,
    pub begin: usize,
    pub end: usize,
}

/// A function that tokenizes a text.
type Encode<'a> = dyn Fn(&str) -> Result<Vec<Placed>> + 'a;

/// Prefixes for a continued text. The first prefix whose tokens do not join with the text is used. Splits and joins depend on the kinds of
/// characters that meet; a line break, a letter, a sign, a digit and so on suffice for all known tokenizers.
const BEFORE: [&str; 8] = ["\n", "a", ".", "1", " ", "é", "中", "\u{2028}"];

/// The ids of each part. `continues` says whether other text precedes the first part.
///
/// # Errors
/// Returns the errors of `encode`.
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
            // Only in rare cases does a token cross a boundary after the cuts. Each part is then tokenized separately.
            Given::Across(_) => {
                for at in first..end {
                    match together(encode, &parts[at..=at], continues || at > 0)? {
                        Given::Apart(ids) => all.extend(ids),
                        // This branch is never taken, because a single part has no inner boundary.
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
        // No prefix works with a tokenizer that gives one token per text. The text is then tokenized without a prefix.
        None => Ok(given(&encode(&text)?, parts, 0)),
    }
}

/// Tokenizes a text after a prefix from `BEFORE`. Returns the prefix, the number of its tokens, and all tokens; `None` if every prefix
/// joins with the text.
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

/// Number of bytes at the beginning of a text that decide which prefix is used.
const START: usize = 512;

/// The ids of a long continued text. `ids` tokenizes without offsets, which needs less memory.
///
/// # Errors
/// Returns the errors of `encode` and `ids`.
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

/// Assigns tokens to parts by their offsets. The first part begins at byte `from`.
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
        // The loop visits all parts that begin before the end of the token.
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
