//! Ctrl-C, SIGTERM and SIGHUP end a run after its step; a second one ends the process.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The first signal that came; 0 before.
static RECEIVED: AtomicUsize = AtomicUsize::new(0);

/// Signals that wait for the end of a step.
pub struct Signals {
    /// Tells of the first signal, and ends.
    #[cfg(unix)]
    teller: std::thread::JoinHandle<()>,
}

impl Signals {
    /// From now on signals wait for the end of a step.
    ///
    /// # Errors
    /// If the system takes no handler.
    pub fn wait_for_steps() -> nibble_command::error::Result<Self> {
        Ok(Self {
            #[cfg(unix)]
            teller: unix::register()
                .map_err(|e| nibble_command::error::Error::Failed(format!("signals: {e}")))?,
        })
    }

    /// Where the first one's number will stand; 0 before.
    pub fn received(&self) -> &'static AtomicUsize {
        &RECEIVED
    }

    /// The number of the signal that has come, once it has been told of.
    pub fn told(self) -> usize {
        #[cfg(unix)]
        // It has nothing to return, and no panic to pass on.
        let _ = self.teller.join();
        RECEIVED.load(Ordering::Relaxed)
    }
}

#[cfg(unix)]
pub use unix::is_ignored;

#[cfg(unix)]
mod unix {
    use super::RECEIVED;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::flag;
    use signal_hook::iterator::Signals;
    use std::io::{Error, Write};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread::JoinHandle;

    pub(super) fn register() -> Result<JoinHandle<()>, Error> {
        let heard: Vec<i32> =
            [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal)).collect();
        // Actions run in this order: what the first signal sets, the second one finds.
        let again = Arc::new(AtomicBool::new(false));
        for &signal in &heard {
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&again))?;
            flag::register(signal, Arc::clone(&again))?;
            // The number of a signal is small and positive.
            flag::register_usize(signal, &RECEIVED, signal as usize)?;
        }
        // A handler must not print. Whoever waits for a long step is told at once all the same.
        let mut signals = Signals::new(&heard)?;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            if let Some(signal) = signals.forever().next() {
                let name = nibble_command::error::signal_name(signal as usize);
                let text = "the run ends after this step or batch; a second signal ends it at once";
                // A terminal that hangs up takes no line.
                let _ = writeln!(std::io::stderr(), "\n{name}: {text}");
            }
        })
    }

    /// Whether whoever started the process wants it to ignore a signal: `nohup`, or `&` in a script.
    pub fn is_ignored(signal: i32) -> bool {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: a null pointer changes nothing, and the system writes a whole `sigaction`, which zeros are too.
        unsafe {
            let asked = libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
            asked == 0 && action.assume_init().sa_sigaction == libc::SIG_IGN
        }
    }
}
