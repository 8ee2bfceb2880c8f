//! Sliding windows in `config.json`.

use super::ConfigJson;
use crate::config::{LayerAttention, ModelConfig};
use crate::error::Result;
use nibble_core::shortened;
use serde_json::{Map, Value};

/// How a family's `config.json` says which layers have sliding-window attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windowed {
    /// Those in `layer_types`, otherwise those from `max_window_layers` on; none without `use_sliding_window`.
    Named,
    /// All, if `use_sliding_window` is set.
    All,
    /// All, whatever `use_sliding_window` says.
    Always,
    /// Those in `layer_types`, or all if that is missing; none if `use_sliding_window` is false.
    Listed,
    /// Those in `layer_types`; none if that is missing, or `use_sliding_window` is not true.
    OnlyListed,
}

const WINDOW: &str = "sliding_window";
/// The key that enables the window.
const USE_WINDOW: &str = "use_sliding_window";
const LAYERS: &str = "layer_types";
const MAX_WINDOW_LAYERS: &str = "max_window_layers";
/// The kinds of `layer_types`.
const KINDS: [(&str, LayerAttention); 2] =
    [("full_attention", LayerAttention::Full), ("sliding_attention", LayerAttention::Sliding)];

/// Reads sliding windows. The key `sliding_window` has the same meaning in `transformers` and in Nibble: query i attends to key j if i - j
/// is less than the window.
///
/// # Errors
/// Returns [`crate::Error::Config`] for sliding layers without a window size, and for kinds of layers that the decoder does not have. Also
/// returns [`crate::Error::Config`] if `layer_types` contradicts a family whose layers are all of one kind.
pub fn read_windows(json: &ConfigJson, model: &mut ModelConfig, of: Windowed) -> Result<()> {
    use LayerAttention::{Full, Sliding};
    // The configuration classes' default of `max_window_layers`.
    const FIRST: usize = 28;
    let is_used = of == Windowed::Always || json.switch(USE_WINDOW)?.unwrap_or(of == Windowed::Listed);
    let window = json.count(WINDOW)?.filter(|_| is_used);
    let listed = listed_layers(json, model.layers)?;
    let first = json.count(MAX_WINDOW_LAYERS)?.unwrap_or(FIRST);
    let usual = |layer: usize| match (window, of) {
        (None, _) | (_, Windowed::OnlyListed) => Full,
        (_, Windowed::Named) if layer < first => Full,
        _ => Sliding,
    };
    let usual: Vec<LayerAttention> = (0..model.layers).map(usual).collect();
    let layers = match (listed, of) {
        // Models of these families do not read the list.
        (Some(listed), Windowed::All | Windowed::Always) if listed != usual => {
            let all = window.map_or("full".to_owned(), |window| format!("sliding, over {window}"));
            let why = format!("has other layers than {WINDOW} says: all layers of this model are {all}");
            return Err(json.error(LAYERS, why));
        }
        (listed, _) => listed.unwrap_or(usual),
    };
    match window {
        None if layers.contains(&Sliding) => {
            let why = format!("has layers that slide, and there is no window: see {WINDOW} and {USE_WINDOW}");
            Err(json.error(LAYERS, why))
        }
        Some(0) if layers.contains(&Sliding) => Err(json.error(WINDOW, "is 0, expected at least 1")),
        window => {
            model.set_windows(window.unwrap_or(0), &layers);
            Ok(())
        }
    }
}

/// What `layer_types` says, if it is there.
fn listed_layers(json: &ConfigJson, layers: usize) -> Result<Option<Vec<LayerAttention>>> {
    let kinds = match json.get(LAYERS) {
        None => return Ok(None),
        Some(Value::Array(kinds)) if kinds.len() == layers => kinds,
        Some(kinds) => {
            let kinds = shortened(&kinds.to_string()).into_owned();
            let why = format!("is {kinds}, expected a list of num_hidden_layers = {layers} kinds");
            return Err(json.error(LAYERS, why));
        }
    };
    let kind = |kind: &Value| {
        let known = KINDS.into_iter().find(|(name, _)| kind == name);
        known.map(|(_, of)| of).ok_or_else(|| {
            let (kind, [(full, _), (sliding, _)]) = (kind.to_string(), KINDS);
            let why = format!("has {}: the decoder has {full} and {sliding} alone", shortened(&kind));
            json.error(LAYERS, why)
        })
    };
    kinds.iter().map(kind).collect::<Result<_>>().map(Some)
}

/// Writes sliding windows in the form that [`read_windows`] reads. Also writes the keys of earlier versions of `transformers`, which do not
/// know `layer_types`. A setting that the family cannot express is not written. After such an export, a model that is read from the written
/// keys differs from the original model.
pub fn write_windows(model: &ModelConfig, keys: &mut Map<String, Value>, of: Windowed) {
    let window = if model.sliding_window > 0 { model.sliding_window.into() } else { Value::Null };
    let slides = !window.is_null();
    if of != Windowed::Always && of != Windowed::Listed {
        keys.insert(USE_WINDOW.into(), slides.into());
    }
    if slides || of == Windowed::Always || of == Windowed::Listed {
        keys.insert(WINDOW.into(), window);
    }
    if slides && (of == Windowed::Named || of == Windowed::Listed) {
        let layers = model.layer_attentions();
        let name =
            |layer: &LayerAttention| KINDS.into_iter().find(|(_, of)| of == layer).map(|(name, _)| name);
        keys.insert(LAYERS.into(), layers.iter().filter_map(name).collect());
        let (first, rest) =
            layers.split_at(layers.iter().position(|of| *of == LayerAttention::Sliding).unwrap_or(0));
        if of == Windowed::Named && !rest.contains(&LayerAttention::Full) {
            keys.insert(MAX_WINDOW_LAYERS.into(), first.len().into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Family, Ministral, Mistral, Qwen2, config_json, read};
    use super::*;
    use serde_json::json;

    /// Two dense layers without windows.
    fn dense() -> ModelConfig {
        let (experts, top_k, expert_ffn) = (0, 0, 0);
        ModelConfig { vocab_size: 64, experts, top_k, expert_ffn, ffn: 96, ..ModelConfig::default() }
    }

    #[test]
    fn windows_that_cannot_be_said_are_refused_by_name() {
        let of = |family: &dyn Family, changes: &[(&str, Value)]| {
            let Value::Object(mut keys) = config_json(family, &dense(), 128) else { panic!() };
            keys.extend(changes.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
            read(&mut ConfigJson::of(keys)).map(|(_, model)| model).map_err(|error| error.to_string())
        };
        let (slides, full) = ("sliding_attention", "full_attention");
        let window = ("sliding_window", json!(24));
        let layers = |kinds: [&str; 2]| ("layer_types", json!(kinds));
        let named = ("use_sliding_window", json!(true));
        for (family, changes, why) in [
            (
                &Mistral as &dyn Family,
                vec![window.clone(), layers([slides, full])],
                "`layer_types`: has other layers than sliding_window says: all layers of this model are sliding, over 24",
            ),
            (&Mistral, vec![layers([slides, slides])], "all layers of this model are full"),
            (&Mistral, vec![("sliding_window", json!(0))], "`sliding_window`: is 0, expected at least 1"),
            (
                &Mistral,
                vec![window.clone(), layers(["chunked_attention", full])],
                "`layer_types`: has \"chunked_attention\": the decoder has full_attention and sliding_attention alone",
            ),
            (
                &Ministral,
                vec![layers([slides, full])],
                "`layer_types`: has layers that slide, and there is no window",
            ),
            (
                &Qwen2,
                vec![window.clone(), layers([slides, full])],
                "see sliding_window and use_sliding_window",
            ),
            (
                &Qwen2,
                vec![named.clone(), window.clone(), ("layer_types", json!([slides]))],
                "expected a list of num_hidden_layers = 2 kinds",
            ),
        ] {
            let error = of(family, &changes).unwrap_err();
            assert!(error.contains(why), "{changes:?}: {error}");
        }
        let windows = |family: &dyn Family, changes: &[(&str, Value)]| {
            let model = of(family, changes).unwrap();
            [0, 1].map(|layer| model.window_of(layer))
        };
        let (yes, no) = (Some(24), None);
        assert_eq!(windows(&Mistral, std::slice::from_ref(&window)), [yes; 2]);
        assert_eq!(windows(&Mistral, &[("sliding_window", Value::Null)]), [no; 2]);
        assert_eq!(windows(&Ministral, &[window.clone(), layers([full, slides])]), [no, yes]);
        assert_eq!(windows(&Qwen2, std::slice::from_ref(&window)), [no; 2], "use_sliding_window is false");
        let first = |layers: usize| ("max_window_layers", json!(layers));
        for (layers, found) in [(0, [yes, yes]), (1, [no, yes]), (2, [no, no]), (28, [no, no])] {
            assert_eq!(windows(&Qwen2, &[named.clone(), window.clone(), first(layers)]), found);
        }
        assert_eq!(windows(&Qwen2, &[named, window, first(0), layers([slides, full])]), [yes, no]);
    }
}
