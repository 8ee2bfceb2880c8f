//! A signal ends every command but `train` at once, after its unfinished files are removed.

/// From now on SIGINT, SIGTERM and SIGHUP remove the unfinished files of this process, and then end it as they would have.
///
/// # Errors
/// If the system takes no handler or gives no thread.
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
            // It ends the process; where it cannot, the exit code tells as much.
            let _ = emulate_default_handler(signal);
            std::process::exit(128 + signal);
        }
    };
    std::thread::Builder::new().name("ending".into()).spawn(wait).map(drop)
}

/// Nothing: there are no such signals.
#[cfg(not(unix))]
pub fn leave_nothing_unfinished() -> std::io::Result<()> {
    Ok(())
}
