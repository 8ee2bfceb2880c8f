//! `cargo xtask soak`: kills processes of a multi-process run one after another, and checks that nothing is lost, leaked or left over.

#[cfg(target_os = "linux")]
mod processes;
#[cfg(target_os = "linux")]
mod run;
mod samples;

#[cfg(target_os = "linux")]
pub use run::soak;

/// The length of the run, and its kills.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    steps: u64,
    kills: u64,
    seed: u64,
}

/// Minimum steps per kill: one for the kill, and some in which the run settles.
const LEAST: u64 = 16;

impl Options {
    /// `--steps N --kills N --seed N`, in any order; the defaults are 1000, 20 and 1.
    ///
    /// # Errors
    /// An unknown option; a value that is no number; too few steps for the kills.
    pub fn parse(words: &[&str]) -> Result<Self, String> {
        let mut options = Self { steps: 1000, kills: 20, seed: 1 };
        for pair in words.chunks(2) {
            let [name, value] = *pair else { return Err(format!("{}: a number must follow", pair[0])) };
            let number = value.parse().map_err(|_| format!("{name} {value}: is no whole number"))?;
            match name {
                "--steps" => options.steps = number,
                "--kills" => options.kills = number,
                "--seed" => options.seed = number,
                _ => return Err(format!("{name}: expected --steps, --kills or --seed")),
            }
        }
        let Self { steps, kills, .. } = options;
        if kills == 0 || kills > 1000 || steps > 1_000_000 || steps / (kills + 1) < LEAST {
            return Err(format!(
                "--steps {steps} --kills {kills}: expected 1 to 1000 kills, and {LEAST} to {} steps for each and for the rest",
                1_000_000 / (kills.max(1) + 1)
            ));
        }
        Ok(options)
    }

    /// Steps per part of the run: one part per kill, and one without.
    fn part(&self) -> u64 {
        self.steps / (self.kills + 1)
    }
}

/// Other systems have no /proc to find processes in.
///
/// # Errors
/// Always.
#[cfg(not(target_os = "linux"))]
pub fn soak(_: &Options) -> Result<(), String> {
    Err("soak finds processes in /proc, as Linux has it: run it there".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_and_kills_need_steps() {
        assert_eq!(Options::parse(&[]).unwrap(), Options { steps: 1000, kills: 20, seed: 1 });
        let options = Options::parse(&["--kills", "2", "--seed", "7", "--steps", "60"]).unwrap();
        assert_eq!(options, Options { steps: 60, kills: 2, seed: 7 });
        assert_eq!(options.part(), 20);
        for (words, part) in [
            (&["--steps"][..], "must follow"),
            (&["--steps", "many"], "no whole number"),
            (&["--stesp", "3"], "expected --steps"),
            (&["--kills", "0"], "expected 1 to 1000 kills"),
            (&["--steps", "47", "--kills", "2"], "16 to"),
        ] {
            let error = Options::parse(words).unwrap_err();
            assert!(error.contains(part), "{words:?}: {error}");
        }
    }
}
