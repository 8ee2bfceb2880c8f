//! `--stop`: ends a generated text before a given text.

/// Ends a stream of bytes before the first stop text that occurs in it, no matter how the stream is split into pieces.
///
/// The stop text that is completed first takes effect; if several stop texts are completed by the same byte, the longest one does. Bytes
/// that may be the start of a stop text are not returned until this is decided.
#[derive(Debug)]
pub struct StopTexts<'a> {
    texts: &'a [String],
    /// The longest suffix of the text so far that may be the start of a stop text.
    held: Vec<u8>,
}

impl<'a> StopTexts<'a> {
    /// Creates the state for the beginning of a text. No stop text may be empty.
    pub fn new(texts: &'a [String]) -> Self {
        Self { texts, held: Vec::new() }
    }

    /// Adds bytes. Returns the bytes that are no longer held back, and whether the text ends after them.
    pub fn push(&mut self, bytes: &[u8]) -> (Vec<u8>, bool) {
        let mut certain = Vec::with_capacity(bytes.len());
        for byte in bytes {
            self.held.push(*byte);
            let whole = self.texts.iter().filter(|text| self.held.ends_with(text.as_bytes()));
            if let Some(longest) = whole.map(|text| text.len()).max() {
                self.held.truncate(self.held.len() - longest);
                certain.append(&mut self.held);
                return (certain, true);
            }
            let begins =
                |at: &usize| self.texts.iter().any(|text| text.as_bytes().starts_with(&self.held[*at..]));
            let at = (0..self.held.len()).find(begins).unwrap_or(self.held.len());
            certain.extend(self.held.drain(..at));
        }
        (certain, false)
    }

    /// Returns the bytes that are still held back; for a text that ended without a stop text.
    pub fn finish(self) -> Vec<u8> {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The resulting text, and whether a stop text ended it.
    fn through(texts: &[&str], parts: &[&[u8]]) -> (String, bool) {
        let texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
        let mut stop = StopTexts::new(&texts);
        let mut out = Vec::new();
        for part in parts {
            let (certain, is_end) = stop.push(part);
            out.extend(certain);
            if is_end {
                return (String::from_utf8(out).unwrap(), true);
            }
        }
        out.extend(stop.finish());
        (String::from_utf8(out).unwrap(), false)
    }

    #[test]
    fn a_text_ends_before_the_first_stop_text_wherever_its_tokens_part() {
        let cases: [(&[&str], &str, &str, bool); 8] = [
            (&[], "all of it", "all of it", false),
            (&["\n\n"], "one\ntwo\n\nthree", "one\ntwo", true),
            (&["aab"], "aaaab", "aa", true),
            (&["abab!", "c"], "ababab!c", "ab", true),
            (&["abcX", "c"], "abcX", "ab", true),
            (&["User:", "er:"], "to User: x", "to ", true),
            (&["é!"], "caféé!", "café", true),
            (&["end"], "it has no en", "it has no en", false),
        ];
        for (texts, text, expected, is_end) in cases {
            for size in 1..=text.len() {
                let parts: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
                assert_eq!(through(texts, &parts), (expected.to_owned(), is_end), "{text:?} by {size}");
            }
        }
    }

    #[test]
    fn only_what_may_begin_a_stop_text_is_held_back() {
        let texts = ["END".to_owned()];
        let mut stop = StopTexts::new(&texts);
        assert_eq!(stop.push(b"the E"), (b"the ".to_vec(), false));
        assert_eq!(stop.push(b"N"), (Vec::new(), false));
        assert_eq!(stop.push(b"E"), (b"EN".to_vec(), false));
        assert_eq!(stop.push(b"ND, more"), (Vec::new(), true));
    }
}
