//! placeholder
use crate::error::Result;
/// b
#[derive(Debug, clap::Args)]
pub struct Args {}
pub fn run(_: Args) -> Result<()> {
    Ok(())
}
