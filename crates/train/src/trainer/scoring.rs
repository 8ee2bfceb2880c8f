//! What a trainer's model makes of given texts.

use super::Trainer;
use crate::error::Result;
use crate::evaluation::{Request, pack};
use crate::rank::RankState;
use nibble_core::allocation::{part, phase};
use nibble_core::{Error as CoreError, Kernels};

impl<B: Kernels> Trainer<'_, B> {
    /// The log-likelihood in nats of what is scored of each request, behind what comes before it. Of a request that is longer than a sequence and
    /// its last target the beginning is left out. `tell` hears after every batch how many are done, of how many.
    ///
    /// # Errors
    /// If an id is no token of the vocabulary, or a log-likelihood no number; from the backend and other ranks.
    pub fn log_likelihoods(
        &mut self,
        requests: &[Request],
        tell: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<f64>> {
        self.require_settled("log_likelihoods")?;
        phase(format_args!("log-likelihoods"));
        part("evaluation");
        let RankState { context, model, activations, .. } = &mut self.rank;
        let sizes = (context.config.train.batch_size, context.config.data.seq_len);
        let batches = pack(requests, sizes);
        let mut sums = vec![0.0; requests.len()];
        let b = context.b;
        let mut work = || -> Result<()> {
            model.prepare(&context.inference_cx(1)?)?;
            for (number, packed) in batches.iter().enumerate() {
                let nats = context.nats_of_tokens(model, &packed.batch)?;
                packed.add_to(&nats, &mut sums);
                tell(number + 1, batches.len());
            }
            Ok(())
        };
        let done = b.within(activations, || Ok(work()));
        model.release();
        done??;
        if sums.iter().any(|nats| !nats.is_finite()) {
            let site = "log-likelihoods".into();
            return Err(CoreError::NonFinite { site, layer: "-".into(), step: self.step() }.into());
        }
        Ok(sums.into_iter().map(|nats: f64| -nats).collect())
    }
}
