//! Tokens of a Rust source.

/// A word or a sign, with its line, counted from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    pub text: String,
    pub line: usize,
}

/// Whether this is a name or a keyword.
pub fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Names and signs (`::` is one sign), without comments, literals and lifetimes.
pub fn tokens(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let (mut found, mut at, mut line) = (Vec::new(), 0, 1);
    while at < chars.len() {
        let end = match chars[at] {
            c if c.is_whitespace() => at + 1,
            '/' if chars.get(at + 1) == Some(&'/') => end_of_line(&chars, at),
            '/' if chars.get(at + 1) == Some(&'*') => end_of_comment(&chars, at),
            '"' => end_of_text(&chars, at),
            '\'' => end_of_quote(&chars, at),
            'r' | 'b' | 'c' if end_of_prefixed(&chars, at).is_some() => {
                end_of_prefixed(&chars, at).unwrap_or(at + 1)
            }
            c if c.is_alphanumeric() || c == '_' => {
                let is_of_word = |c: &char| c.is_alphanumeric() || *c == '_';
                let end = at + chars[at..].iter().take_while(|c| is_of_word(c)).count();
                if !c.is_numeric() {
                    found.push(Token { text: chars[at..end].iter().collect(), line });
                }
                end
            }
            ':' if chars.get(at + 1) == Some(&':') => {
                found.push(Token { text: "::".into(), line });
                at + 2
            }
            sign => {
                found.push(Token { text: sign.into(), line });
                at + 1
            }
        };
        line += chars[at..end.min(chars.len())].iter().filter(|c| **c == '\n').count();
        at = end;
    }
    found
}

fn end_of_line(chars: &[char], at: usize) -> usize {
    chars[at..].iter().position(|c| *c == '\n').map_or(chars.len(), |len| at + len)
}

/// The end of a comment; comments may nest.
fn end_of_comment(chars: &[char], at: usize) -> usize {
    let (mut at, mut depth) = (at, 0);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (at, depth) = (at + 2, depth + 1),
            ('*', Some('/')) => (at, depth) = (at + 2, depth - 1),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// The end of a string that begins with its quotation mark here.
fn end_of_text(chars: &[char], at: usize) -> usize {
    let mut at = at + 1;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// The end of a character literal or a lifetime.
fn end_of_quote(chars: &[char], at: usize) -> usize {
    match (chars.get(at + 1), chars.get(at + 2)) {
        (Some('\\'), _) => {
            chars[at + 3..].iter().position(|c| *c == '\'').map_or(chars.len(), |len| at + 4 + len)
        }
        (_, Some('\'')) => at + 3,
        _ => at + 1 + chars[at + 1..].iter().take_while(|c| c.is_alphanumeric() || **c == '_').count(),
    }
}

/// The end of `r"…"`, `b'…'`, `br#"…"#` and the like; `None` if a name begins here.
fn end_of_prefixed(chars: &[char], at: usize) -> Option<usize> {
    let letters = chars[at..].iter().take_while(|c| matches!(c, 'r' | 'b' | 'c')).count();
    let raw = chars[at..at + letters].contains(&'r');
    let marks = chars[at + letters..].iter().take_while(|c| **c == '#').count();
    match (chars.get(at + letters + marks)?, raw) {
        ('"', false) if marks == 0 => Some(end_of_text(chars, at + letters)),
        ('\'', false) if marks == 0 && chars[at] == 'b' => Some(end_of_quote(chars, at + letters)),
        ('"', true) => {
            let closes = |i: &usize| {
                chars[*i] == '"' && chars[*i + 1..].iter().take(marks).filter(|c| **c == '#').count() == marks
            };
            let end = (at + letters + marks + 1..chars.len()).find(closes);
            Some(end.map_or(chars.len(), |end| end + 1 + marks))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_signs_are_found_with_their_lines_and_nothing_in_texts() {
        let words = |source: &str| {
            let all: Vec<String> =
                tokens(source).into_iter().map(|t| format!("{}{}", t.text, t.line)).collect();
            all.join(" ")
        };
        assert_eq!(words("use a::b_2;\n// c\nx/* d /* e */ \n f */ y"), "use1 a1 ::1 b_21 ;1 x3 y4");
        assert_eq!(words("'a' '\\'' 'b: &'c d b'e' 1u32"), ":1 &1 d1");
        assert_eq!(words("\"a\\\"b\" r#\"c\"d\"# br\"e\" b\"f\" r\n\"g\nh\" i"), "r1 i3");
    }
}
