//! Parses the command line, and suggests replacements for commands and options of other tools.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error, Parser};
use nibble_train::config::of_option;
use std::path::Path;

/// Parses the command line.
///
/// # Errors
/// Returns an error for an invalid command line, or a request for help or version.
pub fn parse<C: Parser>() -> Result<C, Error> {
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(why) = separated(&words) {
        return Err(Error::raw(ErrorKind::InvalidValue, why));
    }
    C::try_parse().map_err(|error| match instead(&error, &words, &C::command()) {
        Some(why) => Error::raw(ErrorKind::UnknownArgument, why),
        None => error,
    })
}

/// Detects `--dry-run gpu`, in which `gpu` would be parsed as the configuration.
fn separated(words: &[String]) -> Option<String> {
    let value = words.windows(2).find_map(|pair| (pair[0] == "--dry-run").then_some(&pair[1]))?;
    let is_meant = ["gpu", "device"].contains(&value.as_str()) && !Path::new(value).exists();
    is_meant.then(|| format!("--dry-run {value}: write --dry-run={value}"))
}

/// Commands of other tools, with the replacements in Nibble.
const COMMANDS: &[(&str, &[&str])] = &[
    (
        "Hugging Face models are read directly (nibble train CONFIG --from FOLDER); nibble export RUN FOLDER writes such a folder, and \
         nibble quantize IN OUT --format FORMAT a file in a block format. GGUF and other checkpoint formats are not supported",
        &["convert", "merge", "save", "push", "gguf", "to-hf"],
    ),
    (
        "write nibble train CONFIG --from FOLDER: every weight is trained; there are no adapters (LoRA), and no training by preferences or rewards",
        &["finetune", "fine-tune", "tune", "sft", "lora", "qlora", "dpo", "grpo", "rlhf", "pretrain", "fit"],
    ),
    ("write nibble train RUN --resume", &["resume", "continue", "restart"]),
    (
        "write nibble generate RUN_OR_MODEL, with --chat for answers; there is no server",
        &["chat", "sample", "infer", "inference", "predict", "serve", "run", "complete"],
    ),
    (
        "write nibble eval RUN_OR_MODEL, with --task or --perplexity",
        &["evaluate", "test", "validate", "perplexity", "score", "lm-eval", "lm_eval"],
    ),
    (
        "write nibble data FILE to look at data; training tokenizes by itself, into a cache",
        &["tokenize", "preprocess", "prepare", "dataset", "datasets", "tokenizer"],
    ),
    ("write nibble quantize IN OUT --format FORMAT", &["quant", "compress", "dequantize", "pack"]),
    (
        "nibble models lists published models; nothing is downloaded: get one by huggingface-cli download NAME --local-dir FOLDER, and pass the folder to --from",
        &["download", "pull", "fetch", "list", "ls"],
    ),
    ("write nibble bench", &["benchmark", "profile", "perf", "speed"]),
    ("write nibble inspect", &["info", "show", "describe", "summary", "stats"]),
    ("write nibble recipe", &["recipes", "formats", "precision", "precisions"]),
    ("write nibble doctor", &["check", "env", "diagnose", "devices", "gpu", "gpus", "system"]),
    ("write nibble train CONFIG --dry-run", &["init", "config", "new", "estimate", "memory"]),
    (
        "write nibble plot RUN, or nibble report RUN for a page",
        &["graph", "chart", "curves", "dashboard", "tensorboard", "ui"],
    ),
];

/// The replacement for an unknown command, or for an unknown option of a command that takes `--set`.
fn instead(error: &Error, words: &[String], all: &Command) -> Option<String> {
    if let (ErrorKind::InvalidSubcommand, Some(ContextValue::String(command))) =
        (error.kind(), error.get(ContextKind::InvalidSubcommand))
    {
        let name = command.to_ascii_lowercase();
        let (advice, _) = COMMANDS.iter().find(|(_, names)| names.contains(&name.as_str()))?;
        return Some(format!("there is no command '{command}': {advice}"));
    }
    let (ErrorKind::UnknownArgument, Some(ContextValue::String(option))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    else {
        return None;
    };
    let command = words.iter().skip(1).find_map(|word| all.find_subcommand(word))?;
    let takes_keys = command.get_arguments().any(|argument| argument.get_long() == Some("set"));
    let name = option.strip_prefix("--").filter(|_| takes_keys)?;
    let advice = of_option(name)?.of_option(value_of(option, words));
    Some(format!("unexpected argument '{option}': {advice}"))
}

/// The value of an option, either after `=` or as the next word.
fn value_of<'w>(option: &str, words: &'w [String]) -> Option<&'w str> {
    let at = words.iter().position(|word| word.split('=').next() == Some(option))?;
    match words[at].split_once('=') {
        Some((_, value)) => Some(value),
        None => words.get(at + 1).map(String::as_str).filter(|word| !word.starts_with("--")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Each name occurs once and is not a command of Nibble; the suggested replacements are commands.
    #[test]
    fn commands_of_elsewhere_are_told_commands() {
        let all = <crate::Cli as clap::CommandFactory>::command();
        let mut seen = BTreeSet::new();
        for (advice, names) in COMMANDS {
            let told =
                advice.split("nibble ").skip(1).map(|rest| rest.split([' ', ',', ':', ';']).next().unwrap());
            for command in told {
                assert!(all.find_subcommand(command).is_some(), "{advice}: {command}");
            }
            for name in *names {
                assert!(seen.insert(*name), "{name} stands twice");
                assert!(all.find_subcommand(name).is_none(), "{name} is a command");
            }
        }
    }
}
