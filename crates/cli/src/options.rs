//! The command line as it is written, and what to write instead of options that there are elsewhere.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error, Parser};
use nibble_train::config::of_option;
use std::path::Path;

/// The command line.
///
/// # Errors
/// What is wrong with it; also where it is help that was asked for.
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

/// `--dry-run gpu`, where `gpu` would be taken for the configuration.
fn separated(words: &[String]) -> Option<String> {
    let value = words.windows(2).find_map(|pair| (pair[0] == "--dry-run").then_some(&pair[1]))?;
    let is_meant = ["gpu", "device"].contains(&value.as_str()) && !Path::new(value).exists();
    is_meant.then(|| format!("--dry-run {value}: write --dry-run={value}"))
}

/// What to write instead of an unknown option of a command that takes keys of the configuration.
fn instead(error: &Error, words: &[String], all: &Command) -> Option<String> {
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

/// What was given with an option, after `=` or as the next word.
fn value_of<'w>(option: &str, words: &'w [String]) -> Option<&'w str> {
    let at = words.iter().position(|word| word.split('=').next() == Some(option))?;
    match words[at].split_once('=') {
        Some((_, value)) => Some(value),
        None => words.get(at + 1).map(String::as_str).filter(|word| !word.starts_with("--")),
    }
}
