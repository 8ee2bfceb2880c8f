//! `nibble generate`: samples text from a checkpoint; the same seed gives the same text.

mod output;
mod prompts;
mod sampling;
mod stopping;

use crate::checkpoint::Trained;
use nibble_command::console::thousands;
use nibble_command::device::{self, Device, DeviceArg, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::warn;
use nibble_core::{Kernels, Recipe};
use nibble_formats::{Purpose, Stream, fnv1a32};
use nibble_train::config::{Config, UNENDED};
use nibble_train::pretrained::{companions_of, ends_of_texts};
use nibble_train::tokenizer::{Bytes, Framing, SharedTokenizer, TextStream, Tokenizer};
use nibble_train::trainer::Decoding;
use output::Output;
use prompts::{Prompt, Prompts};
use sampling::Sampling;
use std::path::PathBuf;
use std::sync::Arc;
use stopping::StopTexts;

/// Generates text with the model of a checkpoint
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The generated text depends only on the checkpoint, the options and the kind of device (CPU or GPU); the same seed gives \
    the same text. With --prompts, the completion of a prompt does not depend on the other prompts of the file.\n\n\
    Examples:\n  \
    nibble generate runs/shakespeare --prompt 'ROMEO:' --tokens 400 --temperature 0.8 --top-p 0.95\n  \
    nibble generate my-model --chat --prompt 'What is a nibble?'\n  \
    nibble generate runs/tiny --recipe bf16\n  \
    nibble generate my-model --prompts questions.jsonl --stop 'Q:' > answers.jsonl\n  \
    nibble generate runs/tiny --temperature 0 --tokens 64"
)]
pub struct Args {
    /// Directory of a run, of one checkpoint, or of a Hugging Face model. For a run, Nibble uses the newest undamaged checkpoint.
    #[arg(value_name = "RUN_OR_MODEL")]
    path: PathBuf,
    #[command(flatten)]
    prompts: Prompts,
    /// Maximum number of tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 256)]
    tokens: usize,
    #[command(flatten)]
    sampling: Sampling,
    /// Seed of the random numbers for sampling.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Stops generating before TEXT would appear in the output. This option may be repeated.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Continues after an EOS token, instead of stopping there. The EOS tokens come from the key `data.eos_token`, the tokenizer, the
    /// model's `generation_config.json` or `config.json`, and, with --chat, the chat template.
    #[arg(long)]
    ignore_eos: bool,
    /// Recipe, which sets the number formats: the name of a built-in recipe or the path of a TOML file. Default: the recipe of the run, or
    /// bf16 for a Hugging Face model. Nibble prints the recipe's name to standard error.
    #[arg(long, value_name = "RECIPE")]
    recipe: Option<String>,
    #[command(flatten)]
    device: DeviceArg,
}

pub fn run(args: Args) -> Result<()> {
    args.sampling.check()?;
    if args.stop.iter().any(String::is_empty) {
        return Err(Error::usage("--stop: got an empty text, expected the text to stop before"));
    }
    let prompts = args.prompts.read()?;
    let trained = Trained::open(&args.path)?;
    let named = args.recipe.iter().map(|name| format!("recipe={name}"));
    let overrides = args.device.after(trained.tokens()?.into_iter().chain(named).collect());
    let mut config = trained.config(&overrides)?;
    let recipe = trained.recipe(&config, &overrides)?;
    let tokenizer = config.tokenizer()?.unwrap_or_else(|| Arc::new(Bytes));
    let framing = config.framing()?;
    let ids = args.prompts.ids(&prompts, &*tokenizer, framing)?;
    // The context has one position per token, rounded up to whole blocks of any recipe, and at most the model's positions.
    let longest = ids.iter().map(Vec::len).max().unwrap_or(0);
    let tokens = longest.saturating_add(args.tokens);
    let wanted = tokens.checked_next_multiple_of(128).unwrap_or(tokens).min(config.positions());
    config.data.seq_len = wanted.max(config.data.seq_len);
    if longest > config.data.seq_len {
        warn!(
            "warning: a prompt has {} tokens, more than the {} positions of the model: it sees only the last ones",
            thousands(longest as u64),
            thousands(config.data.seq_len as u64)
        );
    }
    let chats = args.prompts.has_chat(&prompts);
    let ends = if args.ignore_eos {
        Vec::new()
    } else {
        ends(&trained, &*tokenizer, framing, chats || !config.data.messages_key.is_empty())?
    };
    let work = Generation {
        args: &args,
        trained: &trained,
        config: &config,
        recipe: &recipe,
        tokenizer,
        prompts: prompts.into_iter().zip(ids).collect(),
        ends,
    };
    device::run(&config.run, &work)
}

/// The tokens that end a text; with `chats`, also the tokens that end an answer.
fn ends(trained: &Trained, tokenizer: &dyn Tokenizer, framing: Framing, chats: bool) -> Result<Vec<i32>> {
    let path = match trained {
        Trained::Checkpoint(checkpoint) => checkpoint.path(),
        Trained::Folder(folder) => folder.path(),
    };
    let mut ends = ends_of_texts(&companions_of(path))?;
    ends.extend(framing.eos);
    ends.extend(tokenizer.eos());
    if chats && let Some(template) = tokenizer.chat_template("")? {
        match template.ends_of_answers(tokenizer)? {
            Some(of_answers) if of_answers.is_empty() => warn!("warning: {UNENDED}"),
            of_answers => ends.extend(of_answers.unwrap_or_default()),
        }
    }
    Ok(ends)
}

/// The reason why a text ended.
#[derive(Debug, Clone, Copy)]
enum Ended {
    /// The text has the requested number of tokens.
    Length,
    /// The next text is a `--stop` text.
    Stop,
    /// An end token was sampled.
    Eos,
}

impl Ended {
    fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Stop => "stop",
            Self::Eos => "eos",
        }
    }
}

struct Generation<'a> {
    args: &'a Args,
    trained: &'a Trained,
    config: &'a Config,
    recipe: &'a Recipe,
    tokenizer: SharedTokenizer,
    /// The prompts and their token ids.
    prompts: Vec<(Prompt, Vec<i32>)>,
    /// The end tokens.
    ends: Vec<i32>,
}

impl Work for Generation<'_> {
    type Out = ();

    /// Prints only the texts to standard output; the names of recipe and device go to standard error.
    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<()> {
        let mut trainer = self.trained.load(on, self.config, self.recipe)?;
        let Recipe { name, description, .. } = self.recipe;
        warn!("computed under recipe {name} ({description}), on {}", on.describe());
        let mut decoding = trainer.decoding()?;
        let mut output = Output::new();
        match self.args.prompts.are_of_a_file() {
            true => self.print_lines(&mut decoding, &mut output),
            false => self.print_text(&mut decoding, &mut output),
        }
    }
}

impl Generation<'_> {
    /// Prints the single prompt, and its continuation as the tokens are generated.
    fn print_text<B: Kernels>(&self, decoding: &mut Decoding<'_, '_, B>, output: &mut Output) -> Result<()> {
        let told = self.args.prompts.told_first();
        if !told.is_empty() && !output.emit(told.as_bytes())? {
            return Ok(());
        }
        let Some((_, ids)) = self.prompts.first() else { return Ok(()) };
        if self.go_on(decoding, 0, ids, &mut |bytes| output.emit(bytes))?.is_some() {
            output.emit(b"\n")?;
        }
        Ok(())
    }

    /// Prints one line of JSON per prompt.
    fn print_lines<B: Kernels>(&self, decoding: &mut Decoding<'_, '_, B>, output: &mut Output) -> Result<()> {
        for (number, (prompt, ids)) in (0..).zip(&self.prompts) {
            let mut completion = Vec::new();
            let ended = self.go_on(decoding, number, ids, &mut |bytes| {
                completion.extend_from_slice(bytes);
                Ok(true)
            })?;
            let Some(ended) = ended else { return Ok(()) };
            if !output.emit(prompt.told_with(&completion, ended.name()).as_bytes())? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Generates the continuation of these tokens, and passes it to `emit` piece by piece until `emit` returns false. Returns the reason
    /// why the text ended, if it ended. The prompt's number selects the random numbers.
    fn go_on<B: Kernels>(
        &self,
        decoding: &mut Decoding<'_, '_, B>,
        number: u32,
        prompt: &[i32],
        emit: &mut dyn FnMut(&[u8]) -> Result<bool>,
    ) -> Result<Option<Ended>> {
        let args = self.args;
        let mut ids = prompt.to_vec();
        let mut text = TextStream::after(&*self.tokenizer, &ids);
        let mut stop = StopTexts::new(&args.stop);
        let stream = Stream::new(args.seed, Purpose::Sample, fnv1a32("generate"), number);
        let mut ended = Ended::Length;
        decoding.forget();
        for position in 0..args.tokens {
            let id = self.next_token(decoding, &ids, stream.u32_at(position as u64))?;
            let Some(id) = id else {
                return Err(Error::Failed(format!("token {position}: the model's logits are not finite")));
            };
            if self.ends.contains(&id) {
                ended = Ended::Eos;
                break;
            }
            ids.push(id);
            let (new, is_end) = stop.push(&text.push(id));
            if !emit(&new)? {
                return Ok(None);
            }
            if is_end {
                return Ok(Some(Ended::Stop));
            }
        }
        let (mut rest, is_end) = stop.push(&text.finish());
        if is_end {
            ended = Ended::Stop;
        } else {
            rest.extend(stop.finish());
        }
        Ok(emit(&rest)?.then_some(ended))
    }

    /// Samples the next token; `None` if the logits are not finite.
    fn next_token<B: Kernels>(
        &self,
        decoding: &mut Decoding<'_, '_, B>,
        ids: &[i32],
        random: u32,
    ) -> Result<Option<i32>> {
        let window = &ids[ids.len().saturating_sub(self.config.data.seq_len)..];
        let mut logits = decoding.next_logits(window)?;
        // The model's vocabulary may be larger than the tokenizer's.
        logits.truncate(self.tokenizer.vocab_size());
        Ok(self.args.sampling.token(&logits, random).map(|id| id as i32))
    }
}
