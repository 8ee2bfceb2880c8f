//! Timed training steps.

use nibble_command::device::Device;
use nibble_command::error::Result;
use nibble_train::trainer::Trainer;
use std::time::Instant;

/// Runs training steps; each step is issued before the record of the previous step has been read. Returns the total seconds.
pub fn pass<B: Device>(trainer: &mut Trainer<'_, B>, steps: usize) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..steps {
        trainer.issue_step()?;
        if trainer.unread() > 1 {
            trainer.settle()?;
        }
    }
    while trainer.settle()?.is_some() {}
    Ok(start.elapsed().as_secs_f64())
}
