//! Generates text token by token, with cached keys and values.

use super::Trainer;
use crate::error::Result;
use crate::model::{AttentionCache, Decoder};
use crate::rank::{RankContext, RankState};
use nibble_core::ops::verify_ids;
use nibble_core::{Error as CoreError, Kernels};

/// A model that generates text token by token. The prepared weights and the KV caches exist as long as this value.
#[derive(Debug)]
pub struct Decoding<'t, 'a, B: Kernels> {
    context: &'t RankContext<'a, B>,
    model: &'t mut Decoder<B>,
    activations: &'t B::Arena,
    caches: Vec<AttentionCache<B>>,
    /// The tokens whose keys and values are in the caches.
    cached: Vec<i32>,
}

impl<'a, B: Kernels> Trainer<'a, B> {
    /// Prepares the model to continue texts.
    ///
    /// # Errors
    /// Returns an error if a step's record has not been read, and passes on errors of the backend.
    pub fn decoding(&mut self) -> Result<Decoding<'_, 'a, B>> {
        self.require_settled("decoding")?;
        let RankState { context, model, activations, .. } = &mut self.rank;
        let cx = context.inference_cx(1)?;
        let caches = context.b.within(activations, || {
            model.prepare(&cx)?;
            model.caches(&cx)
        });
        drop(cx);
        let caches = caches.inspect_err(|_| model.release())?;
        Ok(Decoding { context, model, activations, caches, cached: Vec::new() })
    }
}

impl<B: Kernels> Decoding<'_, '_, B> {
    /// Starts another text. The caches are emptied even if the next text begins like the previous text. Otherwise a text could depend on
    /// the previous text. If one scale covers all tokens of a computation, logits computed with caches differ from the logits of a whole
    /// sequence.
    pub fn forget(&mut self) {
        self.cached.clear();
    }

    /// Computes the logits after the last of these tokens, which form one sequence, like [`Trainer::next_logits`]. If `ids` consists of the
    /// ids of the last call plus one token, only this token is computed. Otherwise all tokens are computed, so ids that move as a sliding
    /// window cost the whole window at each call.
    ///
    /// # Errors
    /// Returns an error if an id is not in the vocabulary, or if there are more ids than the model has positions, and passes on errors of
    /// the backend.
    pub fn next_logits(&mut self, ids: &[i32]) -> Result<Vec<f32>> {
        let positions = self.context.config.data.seq_len;
        if ids.is_empty() || ids.len() > positions {
            let expected = format!("1 to the model's {positions} positions");
            return Err(CoreError::shape("next_logits", "ids", ids.len(), expected).into());
        }
        let goes_on = ids.len() > 1 && ids[..ids.len() - 1] == self.cached;
        let new = if goes_on { &ids[ids.len() - 1..] } else { ids };
        // The caches count as empty until the computation has succeeded.
        self.cached.clear();
        if !goes_on {
            self.caches.iter_mut().for_each(AttentionCache::clear);
        }
        let Self { context, model, activations, caches, .. } = self;
        let cx = context.inference_cx(new.len())?;
        let logits = context.b.within(activations, || {
            let (logits, bad_ids) = model.cached_logits(&cx, &cx.b.upload(new)?, caches)?;
            verify_ids(cx.b, "next_logits", "ids", &bad_ids, logits.cols)?;
            logits.to_f32_vec(cx.b)
        })?;
        self.cached.extend(ids);
        Ok(logits)
    }
}

impl<B: Kernels> Drop for Decoding<'_, '_, B> {
    fn drop(&mut self) {
        self.model.release();
    }
}
