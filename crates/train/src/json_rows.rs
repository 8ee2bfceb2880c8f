//! Small files of JSON lines, an object a line, that are held whole. (What a run trains on is read row by row: `data`.)

use serde_json::{Map, Value};

/// Each line of a text that is not blank, with its number from 1: as it stands, and the object that it is, or why it is none. A byte order mark at
/// the beginning is passed over.
pub fn objects(text: &str) -> impl Iterator<Item = (usize, &str, Result<Map<String, Value>, String>)> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(number, line)| (number, line, object(line)))
}

/// The object of a line.
///
/// # Errors
/// Why it is none.
pub fn object(line: &str) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(line).map_err(|error| no_json(&error))? {
        Value::Object(object) => Ok(object),
        _ => Err("is no object: a line of JSON lines is one".into()),
    }
}

/// What the parser says of a line: where in it, and not in which line, as it was given one.
pub(crate) fn no_json(error: &serde_json::Error) -> String {
    format!("is no JSON: {}", error.to_string().replace(" at line 1 column ", ", column "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_objects_or_say_why_not() {
        let text = "\u{feff}{\"a\": 1}\n\n  \n[1]\r\n{\n";
        let said: Vec<(usize, Result<usize, String>)> =
            objects(text).map(|(number, _, object)| (number, object.map(|object| object.len()))).collect();
        assert_eq!(said[0], (1, Ok(1)));
        assert_eq!(said[1], (4, Err("is no object: a line of JSON lines is one".into())));
        let (number, why) = &said[2];
        assert!(
            *number == 5
                && why
                    .as_ref()
                    .is_err_and(|why| why.starts_with("is no JSON: ") && why.contains(", column "))
        );
        assert_eq!(said.len(), 3);
    }
}
