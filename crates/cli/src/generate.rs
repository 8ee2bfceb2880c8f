//! `nibble generate`: text from a checkpoint, the same text for the same seed.

use crate::checkpoint::Trained;
use nibble_command::console::Shown;
use nibble_command::device::{self, Device, DeviceArg, On, Work};
use nibble_command::error::{Error, Result};
use nibble_core::Recipe;
use nibble_formats::math::exp;
use nibble_formats::{Purpose, Stream, fnv1a32};
use nibble_train::config::Config;
use nibble_train::tokenizer::{Bytes, SharedTokenizer, TextStream};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;

/// Writes text from a checkpoint
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The text is a function of the checkpoint and the options alone: the same seed, the same text, on one kind of device.\n\n\
    Examples:\n  \
    nibble generate runs/shakespeare --prompt 'ROMEO:' --tokens 400 --temperature 0.8\n  \
    nibble generate runs/tiny --temperature 0 --tokens 64"
)]
pub struct Args {
    /// Directory of a run (its newest whole checkpoint is taken), of one checkpoint, or of a model as the Hugging Face family of tools writes it.
    #[arg(value_name = "RUN_OR_MODEL")]
    path: PathBuf,
    /// Text to go on from; printed first. Without one: the token that texts begin or end with, a line break of bytes, or `(` of the built-in language.
    #[arg(long, value_name = "TEXT", default_value = "")]
    prompt: String,
    /// Tokens to generate, at most: the text ends with the token that ends documents (`data.eos_token`).
    #[arg(long, value_name = "N", default_value_t = 256)]
    tokens: usize,
    /// Divides the logits; 0 always takes the likeliest token.
    #[arg(long, value_name = "T", default_value_t = 1.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Samples from the K likeliest tokens only; 0 = from all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Seed of the samples.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    device: DeviceArg,
}

pub fn run(args: Args) -> Result<()> {
    if !(args.temperature.is_finite() && args.temperature >= 0.0) {
        let got = args.temperature;
        return Err(Error::usage(format!("--temperature: got {got}, expected a number of at least 0")));
    }
    let trained = Trained::open(&args.path)?;
    let overrides = args.device.after(trained.tokens()?);
    let mut config = trained.config(&overrides)?;
    let recipe = trained.recipe(&config, &[])?;
    // As many positions as there will be tokens, in whole blocks of any recipe, or as the model has.
    let tokenizer = config.tokenizer()?.unwrap_or_else(|| Arc::new(Bytes));
    let framing = config.framing()?;
    let mut ids = match args.prompt.as_str() {
        "" => tokenizer.opening()?,
        prompt => tokenizer.encode_with_control(prompt)?,
    };
    if let Some(bos) = framing.bos.filter(|bos| ids.first() != Some(bos)) {
        ids.insert(0, bos);
    }
    let tokens = ids.len().saturating_add(args.tokens);
    let wanted = tokens.checked_next_multiple_of(128).unwrap_or(tokens).min(config.positions());
    config.data.seq_len = wanted.max(config.data.seq_len);
    let work = Generation {
        args: &args,
        trained: &trained,
        config: &config,
        recipe: &recipe,
        tokenizer,
        ids,
        eos: framing.eos,
    };
    device::run(&config.run, &work)
}

struct Generation<'a> {
    args: &'a Args,
    trained: &'a Trained,
    config: &'a Config,
    recipe: &'a Recipe,
    tokenizer: SharedTokenizer,
    /// What the text goes on from.
    ids: Vec<i32>,
    /// The token that ends it.
    eos: Option<i32>,
}

impl Work for Generation<'_> {
    type Out = ();

    /// Prints the text and nothing else.
    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<()> {
        let Self { args, trained, config, recipe, tokenizer, .. } = self;
        let mut ids = self.ids.clone();
        let mut trainer = trained.load(on, config, recipe)?;
        let mut text = Text::new();
        if !args.prompt.is_empty() && !text.emit(args.prompt.as_bytes())? {
            return Ok(());
        }
        let mut new = TextStream::after(&**tokenizer, &ids);
        let stream = Stream::new(args.seed, Purpose::Sample, fnv1a32("generate"), 0);
        let mut decoding = trainer.decoding()?;
        for position in 0..args.tokens {
            let window = &ids[ids.len().saturating_sub(config.data.seq_len)..];
            let mut logits = decoding.next_logits(window)?;
            // A model may have rows to spare.
            logits.truncate(tokenizer.vocab_size());
            let random = stream.u32_at(position as u64);
            let Some(id) = sample(&logits, args.temperature, args.top_k, random) else {
                return Err(Error::Failed(format!("token {position}: the model's logits are not finite")));
            };
            ids.push(id as i32);
            if self.eos == Some(id as i32) {
                break;
            }
            if !text.emit(&new.push(id as i32))? {
                return Ok(());
            }
        }
        text.emit(&new.finish())?;
        text.emit(b"\n")?;
        Ok(())
    }
}

/// Where the text goes: to a terminal with what that would obey shown instead, elsewhere byte by byte.
struct Text {
    shown: Option<Shown>,
}

impl Text {
    fn new() -> Self {
        Self { shown: std::io::stdout().is_terminal().then(Shown::default) }
    }

    /// Writes at once; false where nobody reads any more. Bytes, because a character may take several tokens.
    fn emit(&mut self, bytes: &[u8]) -> Result<bool> {
        let shown = self.shown.as_mut().map(|shown| shown.next(bytes));
        let bytes = shown.as_deref().map_or(bytes, str::as_bytes);
        let mut out = std::io::stdout();
        match out.write_all(bytes).and_then(|()| out.flush()) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
            Err(e) => Err(Error::Failed(format!("standard output: {e}"))),
        }
    }
}

/// A token drawn from softmax(logits / temperature) over the `top_k` likeliest (0: all; ties: the lower id first) by 32
/// random bits; `None` if a logit is not finite. The exponential is Nibble's own: the same token on every machine.
fn sample(logits: &[f32], temperature: f32, top_k: usize, random: u32) -> Option<usize> {
    if logits.iter().any(|l| !l.is_finite()) {
        return None;
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let best = *order.first()?;
    if temperature == 0.0 {
        return Some(best);
    }
    if top_k > 0 {
        order.truncate(top_k);
    }
    let weight = |id: usize| f64::from(exp((logits[id] - logits[best]) / temperature));
    let total: f64 = order.iter().map(|&id| weight(id)).sum();
    let mut left = f64::from(random) / 2f64.powi(32) * total;
    for &id in &order {
        left -= weight(id);
        if left < 0.0 {
            return Some(id);
        }
    }
    order.last().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_follow_the_softmax() {
        let logits = [0.0, 2f32.ln(), f32::MIN, 5f32.ln()]; // 1 : 2 : 0 : 5
        let mut seen = [0u32; 4];
        let stream = Stream::new(3, Purpose::Sample, 0, 0);
        for i in 0..8000 {
            seen[sample(&logits, 1.0, 0, stream.u32_at(i)).unwrap()] += 1;
        }
        for (count, expected) in seen.iter().zip([1000u32, 2000, 0, 5000]) {
            assert!(count.abs_diff(expected) < 150, "{seen:?}");
        }
    }

    #[test]
    fn the_extremes() {
        let logits = [1.0, 3.0, 3.0, 2.0];
        assert_eq!(sample(&logits, 0.0, 0, u32::MAX), Some(1), "ties: the lower id");
        assert_eq!(sample(&logits, 1.0, 1, u32::MAX), Some(1));
        assert_eq!(sample(&logits, 100.0, 2, u32::MAX), Some(2));
        assert_eq!(sample(&logits, 1.0, 0, u32::MAX), Some(0));
        assert_eq!(sample(&[0.0, f32::NAN], 1.0, 0, 0), None);
        assert_eq!(sample(&[], 1.0, 0, 0), None);
    }
}
