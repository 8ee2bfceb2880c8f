//! A signal ends every command except `train` at once, after the command's unfinished files are removed.

/// Installs handlers: from now on, SIGINT, SIGTERM and SIGHUP first remove this process's unfinished files, and then have their default
/// effect.
///
/// # Errors
/// Returns an error if the system refuses a handler or a thread.
#[cfg(unix)]
pub fn leave_nothing_unfinished() -> std::io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::iterator::Signals;
    use signal_hook::low_level::emulate_default_handler;

    let heeded = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !crate::signals::is_ignored(*signal));
    let mut signals = Signals::new(heeded)?;
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            nibble_train::files::remove_unfinished();
            // The default handler ends the process; if that fails, the exit code names the signal.
            let _ = emulate_default_handler(signal);
            std::process::exit(128 + signal);
        }
    };
    std::thread::Builder::new().name("ending".into()).spawn(wait).map(drop)
}

/// This system has no such signals, so this function does nothing.
#[cfg(not(unix))]
pub fn leave_nothing_unfinished() -> std::io::Result<()> {
    Ok(())
}
