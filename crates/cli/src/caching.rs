//! Shows the progress of building token caches, and the share of each source in a run.

use indicatif::{ProgressBar, ProgressStyle};
use nibble_command::console::thousands;
use nibble_command::error::Result;
use nibble_command::{joined, say, warn};
use nibble_train::config::Config;
use nibble_train::data::{Dataset, Given, Watch};
use std::io::IsTerminal;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A progress bar that is drawn if the output is a terminal. Without a terminal, the bar only notes that this process waits for another
/// process, or that a cache was damaged.
pub struct ReadingBar {
    bar: Option<ProgressBar>,
    what: String,
    /// Number of the received signal; 0 if there was none.
    stop: Option<&'static AtomicUsize>,
    /// Whether the wait for another process has already been reported.
    has_told: bool,
}

impl ReadingBar {
    /// A bar with the title `what`; reading stops as soon as `stop` holds a signal's number.
    pub fn new(what: String, stop: Option<&'static AtomicUsize>) -> Self {
        Self { bar: None, what, stop, has_told: false }
    }

    fn goes_on(&self) -> bool {
        self.stop.is_none_or(|stop| stop.load(Ordering::Relaxed) == 0)
    }
}

impl Watch for ReadingBar {
    fn read(&mut self, done: u64, of: u64) -> bool {
        let goes_on = self.goes_on();
        if !joined::is_first() || !std::io::stderr().is_terminal() {
            return goes_on;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let style =
                ProgressStyle::with_template("{bar:20} {bytes}/{total_bytes} [{elapsed}<{eta}] {wide_msg}");
            // The template is a constant; if it were invalid, the default bar would be used.
            ProgressBar::new(of)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                .with_message(self.what.clone())
        });
        bar.set_position(done);
        goes_on
    }

    fn waits(&mut self) -> bool {
        if !std::mem::replace(&mut self.has_told, true) {
            warn!("another process is building the same token cache; waiting for it");
        }
        self.goes_on()
    }

    fn damaged(&mut self, file: &Path, why: &str) {
        warn!("{}: {why}; rebuilding the token cache", file.display());
    }
}

impl Drop for ReadingBar {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Builds the token caches that a configuration's data need; a signal stops the work.
///
/// # Errors
/// Returns an error if data cannot be read.
pub fn make(config: &Config, stop: Option<&'static AtomicUsize>) -> Result<Vec<Given>> {
    let what = format!("reading {}", config.data.described());
    Ok(Dataset::prepare(config, &mut ReadingBar::new(what, stop))?)
}

/// Builds the token caches for a run, with [`make`]. This function also prints the share of each source, unless there is only one source.
///
/// # Errors
/// Returns the errors of [`make`].
pub fn prepare(config: &Config, stop: Option<&'static AtomicUsize>) -> Result<()> {
    let given = make(config, stop)?;
    if joined::is_first() {
        config.told_of_answers()?.iter().for_each(|told| warn!("warning: {told}"));
        let is_mixed = given.len() > 1;
        for one in given.iter().filter(|one| is_mixed || one.documents > 1 || one.left_out.rows > 0) {
            say!("{}", described(one));
            if let Some(bad) = one.left_out.first.first() {
                match one.left_out.rows {
                    1 => say!("source {}: 1 row cannot be read and is left out: {bad}", one.source),
                    rows => {
                        let (source, rows) = (&one.source, thousands(rows));
                        say!(
                            "source {source}: {rows} rows cannot be read and are left out, the first of them: {bad}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

fn described(given: &Given) -> String {
    let [documents, tokens, held_out] =
        [given.documents, given.tokens, given.held_out].map(|count| thousands(count as u64));
    format!(
        "source {}: {documents} documents, {tokens} tokens, {held_out} of them held out; the run reads the others {:.2} times",
        given.source, given.epochs
    )
}
