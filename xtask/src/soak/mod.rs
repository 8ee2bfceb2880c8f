//! `cargo xtask soak`: ranks that are processes are killed one after another, and nothing is lost, grows or is left.

#[cfg(target_os = "linux")]
mod processes;
#[cfg(target_os = "linux")]
mod run;
mod samples;

#[cfg(target_os = "linux")]
pub use run::soak;

/// How long, and what is killed.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    steps: u64,
    kills: u64,
    seed: u64,
}

/// Steps to a kill at the least: one to kill at, and some after which the run has settled.
const LEAST: u64 = 16;

impl Options {
    /// `--steps N --kills N --seed N`, in any order; 1000, 20 and 1 where they are left out.
    ///
    /// # Errors
    /// What is no option; a number that is none; more kills than there are steps for.
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

    /// The run is divided into as many parts as there are kills, and one that stays undisturbed: steps of each.
    fn part(&self) -> u64 {
        self.steps / (self.kills + 1)
    }
}

/// Processes of other systems are not found by what they are.
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
