//! Formats values as Python does, because templates expect that `{{ true }}` gives `True`.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The type of a JSON value, for an error message.
pub(super) fn kind(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::None => "null",
        ValueKind::Bool => "true or false",
        ValueKind::Number => "a number",
        ValueKind::String => "a text",
        ValueKind::Seq => "a list",
        _ => "an object",
    }
}

/// Whether a value is iterable in Python. `None` is not iterable, a text is iterable, and an undefined value is an empty iterable in
/// Jinja2.
pub(super) fn has_items(value: &Value) -> bool {
    !matches!(value.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number)
}

/// The result of `str(value)` in Python; empty if the value is undefined.
pub(super) fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => repr(value),
    }
}

/// The result of `repr(value)` in Python.
fn repr(value: &Value) -> String {
    let list =
        |of: &Value| -> Vec<String> { of.try_iter().into_iter().flatten().map(|item| repr(&item)).collect() };
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => number(value),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => format!("[{}]", list(value).join(", ")),
        ValueKind::Map => {
            let pairs = pairs(value).map(|(key, item)| format!("{}: {}", repr(&key), repr(&item)));
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

fn pairs(map: &Value) -> impl Iterator<Item = (Value, Value)> + '_ {
    let keys = map.try_iter().into_iter().flatten();
    keys.map(|key| (key.clone(), map.get_item(&key).unwrap_or_default()))
}

/// An integer, or a float formatted like `repr(float)` in Python.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(x) if x.is_nan() => "nan".into(),
        Ok(x) if x.is_infinite() => if x > 0.0 { "inf" } else { "-inf" }.into(),
        Ok(x) => float(x),
        Err(_) => value.to_string(),
    }
}

/// The shortest digits that round-trip. Numbers from 1e16 on and below 1e-4 have an exponent of at least two digits.
fn float(x: f64) -> String {
    let size = x.abs();
    if size == 0.0 || (1e-4..1e16).contains(&size) {
        let text = format!("{x}");
        return if text.contains('.') { text } else { text + ".0" };
    }
    let text = format!("{x:e}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) =
                exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text,
    }
}

/// The result of `repr(str)` in Python: in single quotes, unless the text contains single quotes and no double quotes.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out += "\\n",
            '\r' => out += "\\r",
            '\t' => out += "\\t",
            '\\' => out += "\\\\",
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if !is_printable(c) => {
                out += &match u32::from(c) {
                    code @ ..0x100 => format!("\\x{code:02x}"),
                    code @ ..0x1_0000 => format!("\\u{code:04x}"),
                    code => format!("\\U{code:08x}"),
                }
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// Whether Python's `str.isprintable` is true: no control characters, no white space except the space, and no format characters.
fn is_printable(c: char) -> bool {
    let formats = matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2064}' | '\u{feff}');
    c == ' ' || !(c.is_control() || c.is_whitespace() || formats)
}

/// Applies Jinja2's filter `indent`, which keeps a final line break.
///
/// # Errors
/// Returns an error for unsupported arguments, and passes on the errors of `make` for this number of bytes.
pub(super) fn indent(
    text: String,
    width: Option<usize>,
    options: Kwargs,
    make: &dyn Fn(usize) -> Result<(), Error>,
) -> Result<String, Error> {
    let width = match width {
        Some(width) => width,
        None => options.get::<Option<usize>>("width")?.unwrap_or(4),
    };
    let [first, blank] = ["first", "blank"].map(|name| options.get::<Option<bool>>(name));
    let (first, blank) = (first?.unwrap_or(false), blank?.unwrap_or(false));
    options.assert_all_used()?;
    let lines = text.matches('\n').count() + 1;
    make(lines.saturating_mul(width).saturating_add(text.len()))?;
    let before = " ".repeat(width);
    let lines = text.split('\n').enumerate().map(|(number, line)| match number {
        0 if first => before.clone() + line,
        0 => line.to_owned(),
        _ if line.is_empty() && !blank => String::new(),
        _ => before.clone() + line,
    });
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

/// The result of `json.dumps(value, ensure_ascii=False, indent=indent)` in Python.
///
/// # Errors
/// Returns an error for values that JSON cannot represent, and passes on the errors of `make` for this number of bytes.
pub(super) fn json(
    value: &Value,
    indent: Option<usize>,
    make: &dyn Fn(usize) -> Result<(), Error>,
) -> Result<String, Error> {
    let mut out = String::new();
    write_json(&mut out, value, &Indent { width: indent, make }, 0)?;
    Ok(out)
}

/// The indentation of nested JSON, and the counter of the bytes of this indentation.
struct Indent<'a> {
    width: Option<usize>,
    make: &'a dyn Fn(usize) -> Result<(), Error>,
}

fn write_json(out: &mut String, value: &Value, indent: &Indent<'_>, depth: usize) -> Result<(), Error> {
    let line = |out: &mut String, depth: usize| -> Result<(), Error> {
        if let Some(width) = indent.width {
            let spaces = width.saturating_mul(depth);
            (indent.make)(spaces)?;
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', spaces));
        }
        Ok(())
    };
    let comma = if indent.width.is_some() { "," } else { ", " };
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => match number(value).as_str() {
            "nan" => out.push_str("NaN"),
            "inf" => out.push_str("Infinity"),
            "-inf" => out.push_str("-Infinity"),
            finite => out.push_str(finite),
        },
        ValueKind::String => write_json_text(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            out.push('[');
            for (number, item) in items.iter().enumerate() {
                out.push_str(if number > 0 { comma } else { "" });
                line(out, depth + 1)?;
                write_json(out, item, indent, depth + 1)?;
            }
            if !items.is_empty() {
                line(out, depth)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            let items: Vec<(Value, Value)> = pairs(value).collect();
            out.push('{');
            for (number, (key, item)) in items.iter().enumerate() {
                out.push_str(if number > 0 { comma } else { "" });
                line(out, depth + 1)?;
                write_json_text(out, &text(key));
                out.push_str(": ");
                write_json(out, item, indent, depth + 1)?;
            }
            if !items.is_empty() {
                line(out, depth)?;
            }
            out.push('}');
        }
        kind => {
            let why = format!("{kind} has no JSON form");
            return Err(Error::new(ErrorKind::InvalidOperation, why));
        }
    }
    Ok(())
}

fn write_json_text(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if u32::from(c) < 0x20 => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_json_has_a_name() {
        for (json, name) in [
            ("null", "null"),
            ("false", "true or false"),
            ("1", "a number"),
            ("\"x\"", "a text"),
            ("[1]", "a list"),
            ("{\"x\": 1}", "an object"),
        ] {
            assert_eq!(
                kind(&Value::from_serialize(serde_json::from_str::<serde_json::Value>(json).unwrap())),
                name
            );
        }
    }

    #[test]
    fn numbers_are_those_of_python() {
        for (x, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (9999999999999998.0, "9999999999999998.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-2.5e-10, "-2.5e-10"),
            (1e100, "1e+100"),
        ] {
            assert_eq!(float(x), expected);
        }
    }

    #[test]
    fn texts_are_quoted_as_in_python() {
        for (text, expected) in
            [("a", "'a'"), ("it's", "\"it's\""), ("'\"", "'\\'\"'"), ("\n\\\u{7}é", "'\\n\\\\\\x07é'")]
        {
            assert_eq!(quoted(text), expected);
        }
    }
}
