//! The device of a run, as written in a configuration.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The value of `run.device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// A Hopper GPU for each rank if there are enough GPUs, otherwise the CPU.
    #[default]
    Auto,
    /// All ranks on the CPU.
    Cpu,
    /// One GPU per rank, in the driver's order.
    Gpus,
    /// The GPU with this driver index.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = |text: &str| text.strip_prefix("cuda:")?.parse().ok();
        match (text, ordinal(text)) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Gpus),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err(format!(
                "got \"{text}\", expected auto, cpu, cuda (a GPU for each rank), or a GPU by its number, as in cuda:0"
            )),
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Gpus => f.write_str("cuda"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        choice.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_and_others_are_refused() {
        for name in ["auto", "cpu", "cuda", "cuda:0", "cuda:13"] {
            assert_eq!(name.parse::<DeviceChoice>().unwrap().to_string(), name);
        }
        for name in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            let why = name.parse::<DeviceChoice>().unwrap_err();
            assert!(why.contains("expected auto, cpu") && why.contains(name), "{why}");
        }
    }
}
