//! Ctrl-C, SIGTERM and SIGHUP end a run after its step.
//!
//! A second signal within 3 s is the same request. A signal that is sent to the process and to its group arrives twice, and a launcher
//! forwards signals that have already arrived. A later signal, or a third signal, ends the process at once; its unfinished files are
//! removed. If the process was started with a signal ignored (`nohup`), the signal stays ignored.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The first signal received; 0 if there was none.
static RECEIVED: AtomicUsize = AtomicUsize::new(0);

/// Signal handlers that delay the effect of signals until the end of a step.
pub struct Signals {
    /// Disconnects after the first signal has been reported.
    #[cfg(unix)]
    told: std::sync::mpsc::Receiver<()>,
}

impl Signals {
    /// Installs the handlers.
    ///
    /// # Errors
    /// Returns an error if the system refuses a handler.
    pub fn wait_for_steps() -> nibble_command::error::Result<Self> {
        Ok(Self {
            #[cfg(unix)]
            told: unix::register(nibble_command::env::signal_window())
                .map_err(|e| nibble_command::error::Error::Failed(format!("signals: {e}")))?,
        })
    }

    /// The number of the first received signal; 0 if there was none.
    pub fn received(&self) -> &'static AtomicUsize {
        &RECEIVED
    }

    /// Waits until a received signal has been reported to the user. If another rank received the signal that ended the run, this process
    /// has no signal to report.
    pub fn wait_until_told(self) {
        #[cfg(unix)]
        if RECEIVED.load(Ordering::SeqCst) != 0 {
            // No message is sent: the sender is dropped after the line is written.
            let _ = self.told.recv();
        }
    }
}

#[cfg(unix)]
pub use unix::is_ignored;

#[cfg(unix)]
mod unix {
    use super::RECEIVED;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::low_level;
    use std::io::{Error, Read};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::Builder;
    use std::time::Duration;

    /// The time of the first signal, in nanoseconds since boot; 0 if there was none. The time is a single atomic number, because several
    /// threads may handle signals at the same time.
    static FIRST_AT: AtomicU64 = AtomicU64::new(0);
    /// Number of signals received from the parent process, and from other processes.
    static CAME: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
    /// Number of signals that count as requests.
    static REQUESTS: AtomicUsize = AtomicUsize::new(0);
    /// The signal that ends the process at once; 0 if there was none.
    static LAST: AtomicUsize = AtomicUsize::new(0);

    /// Registers the handlers. The returned receiver disconnects after the first signal has been reported.
    pub(super) fn register(window: Duration) -> Result<Receiver<()>, Error> {
        let (mut woken, wake) = UnixStream::pair()?;
        let launcher = std::os::unix::process::parent_id();
        for signal in [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal)) {
            let window = window.as_nanos() as u64;
            let handle = move |about: &libc::siginfo_t| {
                // SAFETY: the system fills in the sender's process id, or zero if there is no sender.
                count(signal, unsafe { about.si_pid() } as u32 == launcher, window);
            };
            // SAFETY: `count` reads the clock, changes atomics and may end the process. All of this is async-signal-safe.
            unsafe { signal_hook_registry::register_sigaction(signal, handle)? };
            // The pipe is registered after the handler above, so that the woken thread sees the effects of the handler.
            low_level::pipe::register(signal, wake.try_clone()?)?;
        }
        let (teller, told) = channel();
        let mut teller = Some(teller);
        let thread = Builder::new().name("signals".into()).spawn(move || {
            while woken.read_exact(&mut [0]).is_ok() {
                match LAST.load(Ordering::SeqCst) {
                    0 => {}
                    last => {
                        nibble_train::files::remove_unfinished();
                        low_level::exit(128 + last as i32)
                    }
                }
                // If another thread is still handling the first signal, that thread will wake this thread again.
                if RECEIVED.load(Ordering::SeqCst) != 0 {
                    teller.take().into_iter().for_each(tell);
                }
            }
        });
        thread.map(|_| told).map_err(|why| Error::other(nibble_core::Error::not_started(why)))
    }

    /// The handler. The first signal requests an end after the current step. Another signal within the window is the same request. A signal
    /// after the window, or a third signal, requests an immediate end. The launcher forwards each signal that went to all processes once
    /// more, so forwarded signals within the window are not new requests.
    fn count(signal: i32, is_of_launcher: bool, window: u64) {
        let now = now();
        let first_at = FIRST_AT.compare_exchange(0, now, Ordering::SeqCst, Ordering::SeqCst).err();
        let is_within = now.saturating_sub(first_at.unwrap_or(now)) < window;
        let came = CAME[usize::from(is_of_launcher)].fetch_add(1, Ordering::SeqCst) + 1;
        if is_within && came <= REQUESTS.load(Ordering::SeqCst) {
            return;
        }
        match REQUESTS.fetch_add(1, Ordering::SeqCst) {
            // Signal numbers are small and positive.
            0 => RECEIVED.store(signal as usize, Ordering::SeqCst),
            1 if is_within => {}
            // If the request is repeated, the thread that removes unfinished files is stuck.
            _ if LAST.swap(signal as usize, Ordering::SeqCst) != 0 => low_level::exit(128 + signal),
            _ => {}
        }
    }

    /// Reports the first signal at once from a separate thread, because a handler must not print, and printing may wait for a reader.
    fn tell(teller: Sender<()>) {
        let line = move || {
            let name = nibble_command::error::signal_name(RECEIVED.load(Ordering::SeqCst));
            let text = "the run ends after this step or batch; a second signal after 3 s, or a third, ends it at once";
            if nibble_command::joined::is_first() {
                nibble_command::warn!("\n{name}: {text}");
            }
            drop(teller);
        };
        // Without a thread, the line is not printed, but the signal still takes effect.
        let _ = Builder::new().name("signal line".into()).spawn(line);
    }

    /// Nanoseconds of the monotonic clock.
    fn now() -> u64 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the system fills in `time`; every Unix has this clock.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }

    /// Whether a signal was already ignored when the process started, because of `nohup` or `&` in a script.
    pub fn is_ignored(signal: i32) -> bool {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: a null pointer changes no action. Zeros are a valid `sigaction`, and the system overwrites all of it.
        unsafe {
            let asked = libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
            asked == 0 && action.assume_init().sa_sigaction == libc::SIG_IGN
        }
    }
}
