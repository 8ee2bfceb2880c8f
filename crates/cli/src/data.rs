//! `nibble data`: inspects data files.

use crate::caching::ReadingBar;
use nibble_command::console::{bytes, thousands};
use nibble_command::error::{Error, Result};
use nibble_command::{say, warn};
use nibble_train::config::Config;
use nibble_train::data::{Look, Survey};
use nibble_train::tokenizer::Tokenizer;
use std::path::Path;

/// Shows what data files contain
///
/// Prints the kind of each file, the numbers of documents and tokens, a histogram of document lengths, and sample documents. The command
/// reads the files in the same way as `nibble train`, and writes no files.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    nibble data book.txt\n  \
    nibble data corpus/ --check\n  \
    nibble data book.txt --tokenizer tokenizer.json --tokens\n  \
    nibble data rows.parquet --set data.text_key=content")]
pub struct Args {
    /// Data files, folders that contain data files, or globs that match data files.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<String>,
    /// Reports every unreadable row, instead of stopping at the first unreadable row. The exit code is 1 if a row is
    /// unreadable.
    #[arg(long)]
    check: bool,
    /// Lists the tokens of the sample documents, each with its id.
    #[arg(long)]
    tokens: bool,
    /// Tokenizer for texts (sets the configuration key data.tokenizer): a tokenizer.json, or a folder that contains a tokenizer.json. By
    /// default, each byte of a text is a token.
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<String>,
    /// Sets the configuration key KEY, such as data.text_key, to VALUE. This option may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

/// Maximum number of files that are listed individually.
const MOST_FILES: usize = 12;

pub fn run(args: Args) -> Result<()> {
    let Args { files, check, tokens, tokenizer, overrides } = args;
    let quoted = |text: &str| toml::Value::String(text.to_owned());
    let named = tokenizer.iter().map(|path| format!("data.tokenizer={}", quoted(path)));
    let source = format!("data.source={}", quoted(&files[0]));
    let set: Vec<String> = overrides.iter().cloned().chain([source]).chain(named).collect();
    let config = Config::asked("", Path::new("data.toml"), &set)?;
    // Without a vocabulary size or tokenizer, token ids have no upper bound.
    let says_ids = |set: &String| {
        ["model.vocab_size", "data.tokenizer"].iter().any(|key| set.trim_start().starts_with(key))
    };
    let is_told = set.iter().any(says_ids);
    let vocab_size = if is_told { config.model.vocab_size } else { i32::MAX as usize };
    let mut bar = ReadingBar::new("reading".into(), None);
    let tell = &mut |bad: &_| say!("{bad}");
    let survey = Survey::of(&config, &files, Look { checks: check, vocab_size }, tell, &mut bar)?;
    drop(bar);
    told(&config, &survey, tokens)?;
    config.told_of_answers()?.iter().for_each(|told| warn!("warning: {told}"));
    match survey.left_out.rows {
        rows if check && rows > 0 => Err(Error::Failed(format!("{} rows cannot be read", thousands(rows)))),
        _ => Ok(()),
    }
}

/// Prints the properties of the data.
fn told(config: &Config, survey: &Survey, tokens: bool) -> Result<()> {
    for file in survey.files.iter().take(MOST_FILES) {
        say!("{}: {}, {}", file.path.display(), file.kind, bytes(file.bytes));
    }
    if let Some(more) = survey.files.len().checked_sub(MOST_FILES).filter(|more| *more > 0) {
        let size = survey.files.iter().skip(MOST_FILES).map(|file| file.bytes).sum();
        say!("and {} more files, {}", thousands(more as u64), bytes(size));
    }
    let count =
        |count: u64, one: &str| format!("{} {one}{}", thousands(count), if count == 1 { "" } else { "s" });
    let tokenizer = config.tokenizer()?.filter(|tokenizer| tokenizer.has_text());
    let known = tokenizer.as_ref().map_or(0, |tokenizer| tokenizer.vocab_size() as u64);
    // Token ids without a named tokenizer are not bytes.
    let is_named = !survey.has_ids || config.unit() != "byte";
    let is_known = is_named && u64::from(survey.largest_id) < known;
    let unit = if is_known { config.unit() } else { "token" };
    say!(
        "{}, {}, the longest {}",
        count(survey.documents, "document"),
        count(survey.tokens, unit),
        count(survey.longest, unit)
    );
    say!("largest id: {}", survey.largest_id);
    if survey.tokens > 0 && survey.unlearnt == survey.tokens {
        say!("nothing to learn: no token is a target");
    } else if survey.unlearnt > 0 {
        say!("in prompts, excluded from the loss: {}", count(survey.unlearnt, unit));
    }
    if survey.left_out.empty > 0 {
        say!("empty: {}", count(survey.left_out.empty, "document"));
    }
    if survey.left_out.rows > 0 {
        say!("left out: {}", count(survey.left_out.rows, "row"));
    }
    histogram(survey, unit);
    let tokenizer = tokenizer.filter(|_| is_known);
    for (number, ids) in &survey.samples {
        let number = thousands(*number);
        match &tokenizer {
            _ if tokens => {
                say!("document {number}, its first tokens:");
                listed(ids, tokenizer.as_deref()).iter().for_each(|line| say!("{line}"));
            }
            Some(tokenizer) => {
                say!("document {number}: {}", shortened(&format!("{:?}", tokenizer.decode(ids))));
            }
            None => {
                let ids = ids.iter().map(i32::to_string).collect::<Vec<_>>().join(" ");
                say!("document {number}: {}", shortened(&ids));
            }
        }
    }
    Ok(())
}

/// Maximum number of tokens listed per document.
const LISTED: usize = 40;

/// One line per token: the token's id and, if the tokenizer is known, its vocabulary entry.
fn listed(ids: &[i32], tokenizer: Option<&dyn Tokenizer>) -> Vec<String> {
    let line = |id: &i32| match tokenizer.and_then(|tokenizer| tokenizer.token(*id)) {
        Some(piece) => format!("{id:>8}  {piece:?}"),
        None => format!("{id:>8}"),
    };
    ids.iter().take(LISTED).map(line).collect()
}

/// Maximum number of characters printed per document.
const SHOWN: usize = 200;

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

/// Width of the longest bar in columns.
const BAR: u64 = 40;

/// Prints a histogram of document lengths, in powers of two.
fn histogram(survey: &Survey, unit: &str) {
    let most = survey.lengths.iter().copied().max().unwrap_or(0).max(1);
    if survey.documents < 2 {
        return;
    }
    say!("documents by length, in {unit}s:");
    let first = survey.lengths.iter().position(|count| *count > 0).unwrap_or(0);
    for (digits, count) in survey.lengths.iter().enumerate().skip(first.max(1)) {
        let (low, high) = (1u64 << (digits - 1), (1u64 << (digits - 1)) * 2 - 1);
        let bar = "#".repeat((count * BAR).div_ceil(most) as usize);
        say!(
            "{:>25}  {:>12}  {bar}",
            format!("{} to {}", thousands(low), thousands(high)),
            thousands(*count)
        );
    }
}
