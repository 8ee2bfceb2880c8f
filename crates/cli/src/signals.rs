//! Ctrl-C, SIGTERM and SIGHUP end a run after its step.
//!
//! A second signal within 3 s is the same request: a signal that is sent to the process and to its group arrives twice, and a launcher
//! passes on signals that have come already. A later signal, or a third, ends the process at once; its unfinished files are removed. A
//! signal that the process was started to ignore (`nohup`) is left alone.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The first signal that came; 0 before.
static RECEIVED: AtomicUsize = AtomicUsize::new(0);

/// Signals that wait for the end of a step.
pub struct Signals {
    /// Tells of the first signal, and ends once it has.
    #[cfg(unix)]
    told: std::sync::mpsc::Receiver<()>,
}

impl Signals {
    /// From now on signals wait for the end of a step.
    ///
    /// # Errors
    /// If the system takes no handler.
    pub fn wait_for_steps() -> nibble_command::error::Result<Self> {
        Ok(Self {
            #[cfg(unix)]
            told: unix::register(nibble_command::env::signal_window())
                .map_err(|e| nibble_command::error::Error::Failed(format!("signals: {e}")))?,
        })
    }

    /// Where the first one's number will stand; 0 before.
    pub fn received(&self) -> &'static AtomicUsize {
        &RECEIVED
    }

    /// Waits until what has come is told of. Where another rank's signal ended the run nothing has.
    pub fn wait_until_told(self) {
        #[cfg(unix)]
        if RECEIVED.load(Ordering::SeqCst) != 0 {
            // Nothing is sent: the other end goes when the line is written.
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

    /// When the first one came, in nanoseconds since the system was started; 0 before. One number, as several threads may be handling
    /// signals.
    static FIRST_AT: AtomicU64 = AtomicU64::new(0);
    /// Signals that have come from the process that started this one, and from others.
    static CAME: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
    /// How many of them are requests.
    static REQUESTS: AtomicUsize = AtomicUsize::new(0);
    /// The signal that ends the process at once; 0 before.
    static LAST: AtomicUsize = AtomicUsize::new(0);

    /// Registers the handlers. What is returned says that the first signal has been told of, by its other end's going.
    pub(super) fn register(window: Duration) -> Result<Receiver<()>, Error> {
        let (mut woken, wake) = UnixStream::pair()?;
        let launcher = std::os::unix::process::parent_id();
        for signal in [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal)) {
            let window = window.as_nanos() as u64;
            let handle = move |about: &libc::siginfo_t| {
                // SAFETY: the system fills in a sender's number, and zero where there is none.
                count(signal, unsafe { about.si_pid() } as u32 == launcher, window);
            };
            // SAFETY: `count` reads the clock, changes atomic numbers and may end the process, all of which a handler may do.
            unsafe { signal_hook_registry::register_sigaction(signal, handle)? };
            // After it: who is woken finds what it has left.
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
                // Another thread may still be handling the first one, and wakes this one then.
                if RECEIVED.load(Ordering::SeqCst) != 0 {
                    teller.take().into_iter().for_each(tell);
                }
            }
        });
        thread.map(|_| told).map_err(|why| Error::other(nibble_core::Error::not_started(why)))
    }

    /// The handler: the first signal asks for an end after the step, another one within the window is the same request, and one after it,
    /// or a third, asks for an end at once. Of signals that came to all processes of a run the launcher passes each on once more: within the
    /// window these ask for nothing new.
    fn count(signal: i32, is_of_launcher: bool, window: u64) {
        let now = now();
        let first_at = FIRST_AT.compare_exchange(0, now, Ordering::SeqCst, Ordering::SeqCst).err();
        let is_within = now.saturating_sub(first_at.unwrap_or(now)) < window;
        let came = CAME[usize::from(is_of_launcher)].fetch_add(1, Ordering::SeqCst) + 1;
        if is_within && came <= REQUESTS.load(Ordering::SeqCst) {
            return;
        }
        match REQUESTS.fetch_add(1, Ordering::SeqCst) {
            // The number of a signal is small and positive.
            0 => RECEIVED.store(signal as usize, Ordering::SeqCst),
            1 if is_within => {}
            // Asked for again: the thread that would remove unfinished files is held up.
            _ if LAST.swap(signal as usize, Ordering::SeqCst) != 0 => low_level::exit(128 + signal),
            _ => {}
        }
    }

    /// A handler must not print, and who prints may have to wait for a reader. Whoever waits for a long step is told at once all the same.
    fn tell(teller: Sender<()>) {
        let line = move || {
            let name = nibble_command::error::signal_name(RECEIVED.load(Ordering::SeqCst));
            let text =
                "the run ends after this step or batch; a second one after 3 s, or a third, ends it at once";
            if nibble_command::joined::is_first() {
                nibble_command::warn!("\n{name}: {text}");
            }
            drop(teller);
        };
        // Without a thread the line is not told, and the signal is heeded.
        let _ = Builder::new().name("signal line".into()).spawn(line);
    }

    /// Nanoseconds of a clock that nobody sets.
    fn now() -> u64 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the system fills in what it is given; every Unix has this clock.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
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
