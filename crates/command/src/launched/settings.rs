//! Settings of launched processes: the secret that authenticates them, and their timeouts.

use super::{Launched, Vars};
use crate::env;
use crate::error::{Error, Result};
use std::path::Path;
use std::time::Duration;

/// Minimum length of the secret in bytes.
const SHORTEST: usize = 16;
/// The command that creates a secret, for messages.
const MAKE: &str = "export NIBBLE_SECRET=$(head -c 32 /dev/urandom | base64)";
/// The command that creates a secret in a file, for messages.
const MAKE_FILE: &str = "(umask 077; head -c 32 /dev/urandom | base64 > secret)";

/// The secret that authenticates the processes of a run, if the user has given a secret. The secret is the variable `NIBBLE_SECRET`, or
/// otherwise the trimmed content of the file that `NIBBLE_SECRET_FILE` names. `read_file` reads that file; programs pass [`read_secret`].
///
/// # Errors
/// Returns [`Error::Usage`] for a secret of less than 16 bytes, and the error of `read_file`.
pub fn secret(
    var: impl Fn(&str) -> Option<String>,
    read_file: impl Fn(&Path) -> Result<String>,
) -> Result<Option<String>> {
    let vars = Vars(&var);
    let (whose, text) = match (vars.get(env::SECRET), vars.get(env::SECRET_FILE)) {
        (Some(text), _) => (env::SECRET.to_owned(), text),
        (None, Some(path)) => (format!("{}: {path}", env::SECRET_FILE), read_file(Path::new(&path))?),
        (None, None) => return Ok(None),
    };
    let secret = text.trim();
    // A message may reveal only the length of the secret.
    match secret.len() {
        SHORTEST.. => Ok(Some(secret.to_owned())),
        length => Err(Error::usage(format!(
            "{whose}: got {length} characters, expected a secret of {SHORTEST} or more; make one with `{MAKE}`"
        ))),
    }
}

/// Reads the file that contains a secret.
///
/// # Errors
/// Returns [`Error::Usage`] if the file cannot be read or is not a text file. On Unix, the same error is returned if users other than the
/// file's owner can read or write the file.
pub fn read_secret(path: &Path) -> Result<String> {
    let told = path.display();
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let about = std::fs::metadata(path).map_err(|e| refused(path, &e))?;
        let others = about.mode() & 0o077;
        if others != 0 {
            return Err(Error::usage(format!(
                "{}: {told}: others can read or change it (mode {:03o}), expected access for its owner alone: `chmod 600 {told}`",
                env::SECRET_FILE,
                about.mode() & 0o777
            )));
        }
    }
    nibble_train::files::read_text(path, nibble_train::files::MOST_TEXT).map_err(|e| refused(path, &e))
}

fn refused(path: &Path, why: &dyn std::fmt::Display) -> Error {
    Error::usage(format!("{}: {}: {why}", env::SECRET_FILE, path.display()))
}

/// The error for processes that were launched without a secret.
#[must_use]
pub fn missing_secret(launched: &Launched) -> Error {
    let Launched { launcher, world, .. } = launched;
    Error::usage(format!(
        "{launcher} started {world} ranks without a secret, which authenticates them; before it, run `{MAKE}`; where hosts do not share the \
         environment, run `{MAKE_FILE}` in a folder that all of them see, and set {} to the file's path",
        env::SECRET_FILE
    ))
}

/// Two timeouts: the time within which all ranks end after a failure (30 s or `NIBBLE_DEADLINE`), and the time within which all ranks must
/// join at the start (300 s or `NIBBLE_JOIN_DEADLINE`).
///
/// # Errors
/// Returns [`Error::Usage`] for a variable that is not an integer number of seconds from 2 to 86400.
pub fn deadlines(var: impl Fn(&str) -> Option<String>) -> Result<(Duration, Duration)> {
    Ok((seconds(&var, env::DEADLINE, 30)?, seconds(&var, env::JOIN_DEADLINE, 300)?))
}

/// The time within which rows from other GPUs must arrive.
///
/// # Errors
/// Returns the errors of [`deadlines`].
pub fn exchange_deadline(var: impl Fn(&str) -> Option<String>) -> Result<Duration> {
    seconds(&var, env::EXCHANGE_DEADLINE, 600)
}

fn seconds(var: &dyn Fn(&str) -> Option<String>, name: &str, default: u64) -> Result<Duration> {
    let Some(text) = Vars(&var).get(name) else { return Ok(Duration::from_secs(default)) };
    let seconds = text.parse().ok().filter(|seconds| (2..=86_400).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| {
        Error::usage(format!("{name}: got `{text}`, expected a whole number of seconds from 2 to 86400"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(set: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }

    const GOOD: &str = "0123456789abcdef";

    #[test]
    fn a_secret_is_the_variable_or_the_file() {
        let file = |path: &Path| {
            assert_eq!(path, Path::new("/run/secret"));
            Ok(format!(" {GOOD}-of-file\n"))
        };
        let named = (env::SECRET_FILE, "/run/secret");
        assert_eq!(secret(of(&[]), file).unwrap(), None);
        assert_eq!(secret(of(&[named]), file).unwrap().unwrap(), format!("{GOOD}-of-file"));
        assert_eq!(secret(of(&[(env::SECRET, GOOD), named]), file).unwrap().unwrap(), GOOD);
    }

    #[test]
    fn a_short_secret_is_refused_and_not_shown() {
        for set in [(env::SECRET, "hunter2"), (env::SECRET_FILE, "f")] {
            let error = secret(of(&[set]), |_| Ok("hunter2\n".into())).unwrap_err().to_string();
            assert!(error.contains("got 7 characters") && error.contains(set.0), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_others_can_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, GOOD).unwrap();
        let with = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            read_secret(&path)
        };
        assert_eq!(with(0o600).unwrap(), GOOD);
        for mode in [0o640, 0o604, 0o602] {
            let error = with(mode).unwrap_err().to_string();
            assert!(error.contains(&format!("chmod 600 {}", path.display())), "{error}");
            assert!(error.contains(&format!("mode {mode:o}")), "{error}");
        }
        let error = read_secret(&dir.path().join("none")).unwrap_err().to_string();
        assert!(error.starts_with("NIBBLE_SECRET_FILE: ") && error.contains("none"), "{error}");
    }

    #[test]
    fn without_a_secret_the_lines_to_write_are_told() {
        let meeting = crate::launched::Meeting::At("127.0.0.1:1".into());
        let launcher = crate::launched::Launcher::Slurm;
        let launched = Launched { launcher, rank: 0, world: 4, local_rank: 0, local_world: 2, meeting };
        let error = missing_secret(&launched).to_string();
        assert!(error.starts_with("srun started 4 ranks without a secret"), "{error}");
        assert!(
            error.contains(MAKE) && error.contains(MAKE_FILE) && error.contains("NIBBLE_SECRET_FILE"),
            "{error}"
        );
    }

    #[test]
    fn deadlines_have_defaults_and_bounds() {
        let seconds = |set: &[(&str, &str)]| deadlines(of(set)).map(|(a, b)| (a.as_secs(), b.as_secs()));
        assert_eq!(seconds(&[]).unwrap(), (30, 300));
        assert_eq!(seconds(&[(env::DEADLINE, "2"), (env::JOIN_DEADLINE, "86400")]).unwrap(), (2, 86_400));
        assert_eq!(exchange_deadline(of(&[])).unwrap().as_secs(), 600);
        for name in [env::DEADLINE, env::JOIN_DEADLINE, env::EXCHANGE_DEADLINE] {
            for wrong in ["1", "86401", "-3", "2.5", "ten"] {
                let set = [(name, wrong)];
                let error = seconds(&set).err().or_else(|| exchange_deadline(of(&set)).err());
                let error = error.unwrap().to_string();
                assert_eq!(
                    error,
                    format!("{name}: got `{wrong}`, expected a whole number of seconds from 2 to 86400")
                );
            }
        }
    }
}
