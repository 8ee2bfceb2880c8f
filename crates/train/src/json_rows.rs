//! Small JSON Lines files, with one object per line, that are read into memory completely. (Training data is read row by row, by `data`.)

use serde_json::{Map, Value};

/// The non-blank lines of a text. Each item contains the line number (from 1), the line's text, and the JSON object or the reason why the
/// line is not an object. A byte order mark at the beginning of the text is skipped.
pub fn objects(text: &str) -> impl Iterator<Item = (usize, &str, Result<Map<String, Value>, String>)> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(number, line)| (number, line, object(line)))
}

/// The JSON object in a line.
///
/// # Errors
/// Returns the reason why the line is not a JSON object.
pub fn object(line: &str) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(line).map_err(|error| no_json(&error))? {
        Value::Object(object) => Ok(object),
        _ => Err("is no object: a line of JSON lines is one".into()),
    }
}

/// The parser's error for a line, with the column but without the line number, because the parser saw only one line.
pub(crate) fn no_json(error: &serde_json::Error) -> String {
    format!("is no JSON: {}", error.to_string().replace(" at line 1 column ", ", column "))
}

/// Refuses a row with a prompt if the row also has a non-empty value under a key that other trainers read and Nibble does not.
///
/// # Errors
/// The error names the key and gives advice on what to do.
pub fn require_prompt_alone(row: &Map<String, Value>) -> Result<(), String> {
    let mut known = row.iter().filter_map(|(key, value)| Some((RowKey::of_pair(key)?, value)));
    known.try_for_each(|(key, value)| key.refuse_value(value))
}

/// A key that other trainers read in data rows and Nibble does not. Ignoring the key silently would change what the model learns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowKey {
    name: &'static str,
    /// Advice on the key.
    advice: &'static str,
}

impl RowKey {
    fn find(table: &[(&'static str, &'static str)], name: &str) -> Option<Self> {
        let mut keys =
            table.iter().flat_map(|(names, advice)| names.split(' ').map(|name| Self { name, advice }));
        keys.find(|key| key.name == name)
    }

    /// Looks up `name` among the keys that Nibble refuses in rows with an answer. Returns `None` if Nibble reads or ignores the key `name`.
    pub fn of(name: &str) -> Option<Self> {
        Self::find(OF_ANSWERS, name)
    }

    /// Looks up `name` among the keys that Nibble refuses in rows with a prompt and an answer. Returns `None` if Nibble reads or ignores
    /// the key `name`.
    pub fn of_pair(name: &str) -> Option<Self> {
        Self::find(OF_PAIRS, name).or_else(|| Self::of(name))
    }

    /// Refuses the key's value in a row, unless the value is empty or requests what Nibble does anyway.
    ///
    /// # Errors
    /// Returns the reason why the value is refused.
    pub fn refuse_value(&self, value: &Value) -> Result<(), String> {
        let says_nothing = match value {
            Value::Null => true,
            Value::String(text) => text.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Object(object) => object.is_empty(),
            Value::Bool(_) | Value::Number(_) => false,
        };
        let is_yes = value.as_bool().or(value.as_f64().map(|number| number == 1.0));
        if says_nothing { Ok(()) } else { self.refuse(is_yes) }
    }

    /// Refuses the key in a row where the key has a value that is not empty. `is_yes` says whether a Boolean is true or a number is 1, and
    /// is `None` for other values.
    ///
    /// # Errors
    /// Returns the reason why the key is refused.
    pub fn refuse(&self, is_yes: Option<bool>) -> Result<(), String> {
        match self.advice == ALIKE && is_yes == Some(true) {
            true => Ok(()),
            false => Err(format!(
                "has \"{}\", which other trainers read and Nibble does not: {}; or take it out of the rows",
                self.name, self.advice
            )),
        }
    }
}

/// Advice for switches that, if true or 1, request the behaviour that Nibble has anyway.
const ALIKE: &str = "all rows count alike, and a message of the role assistant may say \"weight\": 0";
const FIRST: &str = "write it as a first message of the role system, or into the prompt";

/// Keys of rows with answers, and advice for each key.
const OF_ANSWERS: &[(&str, &str)] = &[
    ("system system_prompt", FIRST),
    ("functions", "write them as \"tools\""),
    ("documents", "write them into \"chat_template_kwargs\""),
    ("chat_template", "that of the tokenizer is taken"),
    ("parallel_tool_calls", "write what it says into a message"),
    ("image images audio audios video videos", "only text is learnt"),
    ("input_ids completion_mask assistant_masks", "texts are made tokens of here"),
    ("weight train", ALIKE),
];

/// Further keys of rows with a prompt and an answer.
const OF_PAIRS: &[(&str, &str)] = &[
    ("input", "write it into the prompt"),
    ("history", "write it into the prompt, or all as messages"),
    ("tools chat_template_kwargs", "chat templates get it, with data.messages_key"),
];

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
