//! Runs a test in its own process if the test counts, breaks or sets something process-wide. Other tests of a test binary share one
//! process.

use std::process::Command;

/// Environment variable with the test that the child process runs. The name has no Nibble prefix, because a command started by the test
/// would report an unknown Nibble variable.
const ALONE: &str = "TEST_ALONE";

/// Runs `test` in its own process: starts this test binary again with only the test `name` of the module `module_path!()`.
///
/// ```text
/// #[test]
/// fn a_fault_strikes() {
///     alone(module_path!(), "a_fault_strikes", || ..)
/// }
/// ```
///
/// # Panics
/// Panics with the output of the child process if the test fails there, or if no test has this name.
#[track_caller]
pub fn alone(module: &str, name: &str, test: impl FnOnce()) {
    // A module path starts with the crate's name; a test's name does not.
    let name = match module.split_once("::") {
        Some((_, module)) => format!("{module}::{name}"),
        None => name.to_owned(),
    };
    if std::env::var_os(ALONE).is_some_and(|of| of == name.as_str()) {
        return test();
    }
    let binary = std::env::current_exe().expect("the system knows where a running program lies");
    let done = Command::new(binary).args(["--exact", &name, "--nocapture"]).env(ALONE, &name).output();
    let done = done.unwrap_or_else(|e| panic!("{name} in a process of its own: {e}"));
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    // The output is indented, so that a tool that counts the result lines of a run does not count the child's lines.
    let told = || said.lines().map(|line| format!("    {line}\n")).collect::<String>();
    assert!(
        done.status.success() && said.contains("1 passed"),
        "{name} in a process of its own:\n{}",
        told()
    );
    said.lines().filter(|line| line.starts_with("skipped:")).for_each(|line| println!("{line}"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn it_is_another_process() {
        static RAN: AtomicBool = AtomicBool::new(false);
        alone(module_path!(), "it_is_another_process", || RAN.store(true, Ordering::Relaxed));
        assert_eq!(RAN.load(Ordering::Relaxed), std::env::var_os(ALONE).is_some());
    }

    #[test]
    fn what_fails_there_fails_here() {
        let failed = std::panic::catch_unwind(|| {
            alone(module_path!(), "what_fails_there_fails_here", || panic!("no"))
        });
        let said = failed.unwrap_err();
        match std::env::var_os(ALONE) {
            // In the child process, the panic continues.
            Some(_) => std::panic::resume_unwind(said),
            None => {
                let said = said.downcast_ref::<String>().unwrap();
                assert!(said.contains("panicked") && said.contains("no"), "{said}");
            }
        }
    }

    #[test]
    fn a_name_of_no_test_is_told() {
        let failed = std::panic::catch_unwind(|| alone(module_path!(), "nobody", || ()));
        assert!(failed.unwrap_err().downcast_ref::<String>().unwrap().contains("0 passed"));
    }
}
