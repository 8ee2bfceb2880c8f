//! Changes exported tokenizer files so that other tools begin a text with the same tokens as the run's documents.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};
use tokenizers::PostProcessorWrapper;

use super::hugging_face::{HuggingFace, read};
use super::{SETTINGS_FILE, TOKENIZER_FILE, Tokenizer};
use crate::error::{Error, Result};
use crate::files;

/// Changes the files of the tokenizer in this folder so that the tokenizer puts `bos` before a text, or nothing if `bos` is `None`. The
/// function changes `add_bos_token` and `bos_token` in `tokenizer_config.json`, and the post-processor in `tokenizer.json`. `transformers`
/// from version 5 on uses only the post-processor. A tokenizer stays unchanged if `bos` is `None` and the tokenizer neither adds nor names
/// such a token.
///
/// # Errors
/// Returns [`Error::Io`], and [`Error::Tokenizer`] for invalid tokenizer files.
pub(crate) fn begin_texts_with(dir: &Path, bos: Option<i32>) -> Result<()> {
    let file = dir.join(TOKENIZER_FILE);
    if !file.exists() {
        return Ok(());
    }
    let text = read(&file)?;
    let tokenizer = HuggingFace::of(&file, text.clone())?;
    let [before, behind] = tokenizer.around();
    if bos.is_none() && tokenizer.named_bos().is_none() && before.is_empty() {
        return Ok(());
    }
    if *before != Vec::from_iter(bos) {
        let fail = |why: String| Error::Tokenizer { path: file.clone(), why };
        let mut whole = tokenizers::Tokenizer::from_bytes(&text).map_err(|e| fail(e.to_string()))?;
        let old = serde_json::to_value(whole.get_post_processor()).map_err(|e| fail(e.to_string()))?;
        let new = post_processor(&tokenizer, &old, [&Vec::from_iter(bos), behind]);
        let new: Option<PostProcessorWrapper> =
            serde_json::from_value(new).map_err(|e| fail(e.to_string()))?;
        whole.with_post_processor(new);
        let text = whole.to_string(true).map_err(|e| fail(e.to_string()))?;
        fs::write(&file, text).map_err(Error::io(&file))?;
    }
    let settings = dir.join(SETTINGS_FILE);
    let text = files::read_text(&settings, files::MOST_TEXT).map_err(Error::io(&settings))?;
    let fail = |why: String| Error::Tokenizer { path: settings.clone(), why };
    let mut keys: Map<String, Value> = serde_json::from_str(&text).map_err(|e| fail(e.to_string()))?;
    keys.insert("add_bos_token".into(), bos.is_some().into());
    let name = keys.get("bos_token").and_then(|name| name.as_str().or_else(|| name["content"].as_str()));
    let is_named = name.and_then(|name| tokenizer.token_id(name)) == bos;
    if let Some(token) = bos.filter(|_| !is_named).and_then(|bos| tokenizer.token(bos)) {
        keys.insert("bos_token".into(), token.into());
    }
    let text = format!("{:#}\n", Value::Object(keys));
    fs::write(&settings, text).map_err(Error::io(&settings))
}

/// A post-processor that puts these ids before and after a text. The post-processor replaces the old template; other processors are kept.
fn post_processor(tokenizer: &dyn Tokenizer, old: &Value, [before, behind]: [&Vec<i32>; 2]) -> Value {
    let is_of_ids = |of: &Value| {
        let kind = of["type"].as_str().unwrap_or_default();
        ["TemplateProcessing", "BertProcessing", "RobertaProcessing"].contains(&kind)
    };
    let mut parts: Vec<Value> = match old {
        Value::Null => Vec::new(),
        of if of["type"] == "Sequence" => of["processors"].as_array().cloned().unwrap_or_default(),
        one => vec![one.clone()],
    };
    parts.retain(|part| !is_of_ids(part));
    if !before.is_empty() || !behind.is_empty() {
        let token = |id: &i32| tokenizer.token(*id).unwrap_or_default();
        let special = |ids: &[i32], kind: u32| {
            ids.iter()
                .map(|id| json!({"SpecialToken": {"id": token(id), "type_id": kind}}))
                .collect::<Vec<_>>()
        };
        let text = |name: &str, kind: u32| {
            let sequence = vec![json!({"Sequence": {"id": name, "type_id": kind}})];
            [special(before, kind), sequence, special(behind, kind)].concat()
        };
        let tokens: Map<String, Value> = before
            .iter()
            .chain(behind)
            .map(|id| (token(id), json!({"id": token(id), "ids": [id], "tokens": [token(id)]})))
            .collect();
        let (single, pair) = (text("A", 0), [text("A", 0), text("B", 1)].concat());
        parts.push(
            json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}),
        );
    }
    match parts.len() {
        0 => Value::Null,
        1 => parts.remove(0),
        _ => json!({"type": "Sequence", "processors": parts}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{Bytes, open, transformers_tokenizer};

    /// A folder with the byte tokenizer, this post-processor and these settings. The first letters of this tokenizer are control tokens.
    fn folder(post_processor: &Value, settings: &Value) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let mut whole: Value = serde_json::from_str(&Bytes.to_json()).unwrap();
        let special = |id: i32| {
            json!({"id": id, "content": Bytes.token(id), "special": true, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false})
        };
        whole["added_tokens"] = json!([special(65), special(66), special(67)]);
        whole["post_processor"] = post_processor.clone();
        std::fs::write(dir.path().join(TOKENIZER_FILE), whole.to_string()).unwrap();
        let mut all: Value = serde_json::from_str(&transformers_tokenizer()).unwrap();
        all.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        std::fs::write(dir.path().join(SETTINGS_FILE), all.to_string()).unwrap();
        dir
    }

    fn template(before: &[i32], behind: &[i32]) -> Value {
        post_processor(&Bytes, &Value::Null, [&before.to_vec(), &behind.to_vec()])
    }

    /// Regardless of the tokens that the files added before: a text encoded by `tokenizers` begins with the requested token and ends as
    /// before, and the settings agree.
    #[test]
    fn others_begin_a_text_as_the_run_did() {
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let several = |of: Value| json!({"type": "Sequence", "processors": [bytes.clone(), of]});
        let olds = [
            (Value::Null, vec![], vec![]),
            (bytes.clone(), vec![], vec![]),
            (template(&[65], &[]), vec![65], vec![]),
            (template(&[66], &[67]), vec![66], vec![67]),
            (template(&[], &[67]), vec![], vec![67]),
            (several(template(&[65], &[])), vec![65], vec![]),
        ];
        for (old, before, behind) in olds {
            for bos in [None, Some(65), Some(66)] {
                for settings in [
                    json!({}),
                    json!({"bos_token": "A"}),
                    json!({"bos_token": {"content": "A"}, "add_bos_token": false}),
                ] {
                    let dir = folder(&old, &settings);
                    let what = format!("{old} and {settings}, with {bos:?}");
                    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
                    let was = [TOKENIZER_FILE, SETTINGS_FILE].map(read);
                    begin_texts_with(dir.path(), bos).unwrap();
                    let is = [TOKENIZER_FILE, SETTINGS_FILE].map(read);
                    let theirs = tokenizers::Tokenizer::from_bytes(&is[0]).unwrap();
                    let ids = theirs.encode_fast("xy", true).unwrap();
                    let ids: Vec<i32> = ids.get_ids().iter().map(|id| *id as i32).collect();
                    let wanted = [Vec::from_iter(bos), vec![120, 121], behind.clone()].concat();
                    assert_eq!(ids, wanted, "{what}");
                    assert_eq!(open(dir.path()).unwrap().bos(), bos, "{what}");
                    let said: Value = serde_json::from_str(&is[1]).unwrap();
                    let name = said["bos_token"].as_str().or(said["bos_token"]["content"].as_str());
                    if let Some(bos) = bos {
                        assert_eq!(
                            (name, &said["add_bos_token"]),
                            (Bytes.token(bos).as_deref(), &json!(true)),
                            "{what}"
                        );
                    }
                    // A tokenizer that neither adds nor names a token stays unchanged.
                    let is_nothing = bos.is_none() && before.is_empty() && settings == json!({});
                    assert_eq!(is == was, is_nothing, "{what}");
                }
            }
        }
    }

    #[test]
    fn a_folder_without_a_tokenizer_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        begin_texts_with(dir.path(), Some(1)).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
