//! Uses of a trainer's model with given tokens: held-out losses, log-likelihoods of texts, and logits.

use super::Trainer;
use crate::data::{Encoded, LeftOut, Watch, read_source};
use crate::error::{Error, Result};
use crate::evaluation::{Beginning, HeldOut, Perplexity, Request, Windows, pack};
use crate::ledger::Ledger;
use crate::rank::RankState;
use crate::tokenizer::Tokenizer;
use nibble_core::allocation::{part, phase};
use nibble_core::ops::verify_ids;
use nibble_core::{Error as CoreError, Kernels};
use std::path::Path;

impl<B: Kernels> Trainer<'_, B> {
    /// Mean cross-entropy in nats over the targets of held-out sequences, over all ranks. The sequences are `batches` batches of
    /// [`HeldOut::BATCH`] sequences spread over the data; 0 means all held-out data, including the shorter tail.
    ///
    /// # Errors
    /// Returns [`nibble_core::Error::NonFinite`] if the loss is not finite, and [`Error::Data`] if there is no target, and passes on errors
    /// of the backend and of other ranks.
    pub fn evaluate(&mut self, batches: usize) -> Result<f64> {
        let found = self.evaluate_while(batches, &mut |_, _| Ok(true))?;
        found.and_then(|found| found.loss()).ok_or_else(|| {
            Error::data(Path::new(&self.config().data.described()), "has no target among its held-out tokens")
        })
    }

    /// Computes the sums from which [`Trainer::evaluate`] computes the mean loss. `go_on(done, of)` is called after every batch; if `go_on`
    /// returns false, the result is `None`. Every rank calls `go_on` after the same batches, and must return the same answer.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::evaluate`], except the error for data without a target, and passes on the errors of `go_on`.
    pub fn evaluate_while(
        &mut self,
        batches: usize,
        go_on: &mut dyn FnMut(usize, usize) -> Result<bool>,
    ) -> Result<Option<HeldOut>> {
        self.require_settled("evaluate")?;
        phase(format_args!("the held-out loss"));
        part("evaluation");
        let RankState { context, model, activations, .. } = &mut self.rank;
        let evaluated = context.b.within(activations, || Ok(context.evaluate(model, batches, go_on)))?;
        evaluated.map_err(|error| self.without_room(error, "the held-out loss"))
    }

    /// Computes the logits after the last of these tokens, which form one sequence. The logits are the same on every rank.
    ///
    /// # Errors
    /// Returns an error if an id is not in the vocabulary, and passes on errors of the backend.
    pub fn next_logits(&mut self, ids: &[i32]) -> Result<Vec<f32>> {
        self.require_settled("next_logits")?;
        let RankState { context, model, activations, .. } = &mut self.rank;
        let cx = context.inference_cx(ids.len())?;
        let last = context.b.within(activations, || {
            model.prepare(&cx)?;
            let (logits, bad_ids) = model.last_logits(&cx, &cx.b.upload(ids)?)?;
            model.release();
            verify_ids(cx.b, "next_logits", "ids", &bad_ids, logits.cols)?;
            logits.to_f32_vec(cx.b)
        });
        Ok(last?)
    }

    /// Runs a forward pass of this run, and returns the list of its saved activations and the number of bytes that the allocator holds for
    /// these activations.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::train_step`].
    pub fn ledger(&mut self) -> Result<(Ledger, usize)> {
        self.require_settled("ledger")?;
        let batch = self.rank.context.plan()?.batch(self.rank.context.step, 0)?;
        self.rank.ledger_of(&batch)
    }

    /// The log-likelihood in nats of each request's scored tokens, given the preceding tokens. If a request is longer than a sequence plus
    /// its last target, the beginning of the request is cut off. `tell(done, of)` is called after every batch.
    ///
    /// # Errors
    /// Returns an error if an id is not in the vocabulary, or if a log-likelihood is not finite, and passes on errors of the backend and of
    /// other ranks.
    pub fn log_likelihoods(
        &mut self,
        requests: &[Request],
        tell: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<f64>> {
        let mut go_on = |done, of| {
            tell(done, of);
            Ok(true)
        };
        // `go_on` never returns false here, so there is a result.
        Ok(self.log_likelihoods_while(requests, &mut go_on)?.unwrap_or_default())
    }

    /// Like [`Trainer::log_likelihoods`], but calls `go_on(done, of)` after every batch; if `go_on` returns false, the result is `None`.
    /// Every rank calls `go_on` after the same batches, and must return the same answer.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::log_likelihoods`] and of `go_on`.
    pub fn log_likelihoods_while(
        &mut self,
        requests: &[Request],
        go_on: &mut dyn FnMut(usize, usize) -> Result<bool>,
    ) -> Result<Option<Vec<f64>>> {
        self.require_settled("log_likelihoods")?;
        phase(format_args!("log-likelihoods"));
        part("evaluation");
        let RankState { context, model, activations, .. } = &mut self.rank;
        let sizes = (context.config.train.batch_size, context.config.data.seq_len);
        let batches = pack(requests, sizes);
        let mut sums = vec![0.0; requests.len()];
        let b = context.b;
        let mut work = || -> Result<bool> {
            model.prepare(&context.inference_cx(1)?)?;
            for (number, packed) in batches.iter().enumerate() {
                let nats = context.nats_of_tokens(model, &packed.batch)?;
                packed.add_to(&nats, &mut sums);
                if !go_on(number + 1, batches.len())? {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        let done = b.within(activations, || Ok(work()));
        model.release();
        if !done?? {
            return Ok(None);
        }
        if sums.iter().any(|nats| !nats.is_finite()) {
            let site = "log-likelihoods".into();
            return Err(CoreError::NonFinite { site, layer: "-".into(), step: self.step() }.into());
        }
        Ok(Some(sums.into_iter().map(|nats: f64| -nats).collect()))
    }

    /// The perplexity of all documents of a source, and the source's rows that are left out. The source is read with the settings of the
    /// run's data. Tokens attend only to their own document. `stride` tokens of a document are predicted at a time ([`Windows`]). BOS
    /// precedes a document. EOS follows a document only if the document's file contains EOS.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if files cannot be read, or if there is no token to predict, and [`Error::Config`] for token ids of an
    /// unknown tokenizer, and passes on errors of [`Windows::new`] and [`Trainer::log_likelihoods`].
    pub fn perplexity(
        &mut self,
        source: &str,
        (beginning, stride): (Beginning, usize),
        watch: &mut dyn Watch,
    ) -> Result<(Perplexity, LeftOut)> {
        /// Approximate number of tokens of windows that are in memory at once.
        const HELD: usize = 1 << 20;
        let config = self.config().clone();
        let tokenizer = self.tokenizer()?;
        let seq_len = config.data.seq_len;
        let mut windows = Windows::new(beginning, seq_len, stride)?;
        let framing = config.framing()?;
        let around = [framing.bos, framing.eos, tokenizer.bos(), tokenizer.eos()];
        let (mut held, mut tokens_held) = (Vec::new(), 0);
        let (mut tokens, mut nats) = (0, 0.0);
        let mut give = |request: Request| {
            tokens += request.scored.iter().map(|run| run.len() as u64).sum::<u64>();
            tokens_held += request.ids.len();
            held.push(request);
            if tokens_held >= HELD {
                tokens_held = 0;
                nats -= self.log_likelihoods(&held, &mut |_, _| {})?.iter().sum::<f64>();
                held.clear();
            }
            Ok(())
        };
        let (mut documents, mut bytes) = (0, 0);
        let take = &mut |piece: Encoded| {
            let is_of_others = |id: &u32| *id as usize >= tokenizer.vocab_size();
            let is_known = tokenizer.unit() != "byte" || piece.bytes.is_some();
            if let Some(id) = piece.ids.iter().find(|id| !is_known && is_of_others(id)) {
                let why = format!(
                    "is not named, and {source} has the token id {id}, which is none of {}: name the tokenizer that made its ids",
                    tokenizer.tokens()
                );
                return Err(Error::config("data.tokenizer", why));
            }
            documents += u64::from(piece.begins && !piece.ids.is_empty());
            if !tokenizer.has_text() && piece.bytes.is_some() {
                let why = format!(
                    "is not named, and {source} has text: the run's tokens are ids, whose tokenizer is not known"
                );
                return Err(Error::config("data.tokenizer", why));
            }
            if !tokenizer.has_text() {
                // The ids of an unnamed tokenizer have no known text, so their bytes cannot be counted.
                return windows.add(&piece, &mut give);
            }
            bytes += piece.bytes.unwrap_or_else(|| bytes_of(&*tokenizer, &piece.ids, around)) as u64;
            windows.add(&piece, &mut give)
        };
        let left_out = read_source(&config, source, take, watch)?;
        windows.end(&mut give)?;
        nats -= self.log_likelihoods(&held, &mut |_, _| {})?.iter().sum::<f64>();
        if tokens == 0 {
            return Err(Error::data(Path::new(source), "has no token that could be predicted"));
        }
        Ok((Perplexity { documents, tokens, bytes, nats }, left_out))
    }
}

/// Number of bytes of the text of ids, without the tokens that frame a text.
fn bytes_of(tokenizer: &dyn Tokenizer, ids: &[u32], around: [Option<i32>; 4]) -> usize {
    let ids: Vec<i32> = ids.iter().map(|id| *id as i32).filter(|id| !around.contains(&Some(*id))).collect();
    tokenizer.decode_bytes(&ids).len()
}
