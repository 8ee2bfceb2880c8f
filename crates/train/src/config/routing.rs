//! How routers select experts: the values of the corresponding configuration keys.

use nibble_core::ops;
use serde::{Deserialize, Serialize};

/// A router's score function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scores {
    /// Softmax over the experts.
    #[default]
    Softmax,
    /// Sigmoid of each logit, as in DeepSeek-V3.
    Sigmoid,
}

impl From<Scores> for ops::Scores {
    fn from(scores: Scores) -> Self {
        match scores {
            Scores::Softmax => Self::Softmax,
            Scores::Sigmoid => Self::Sigmoid,
        }
    }
}

/// How a group of experts is scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupScore {
    /// The score of the group's best expert, as in DeepSeek-V2.
    #[default]
    Max,
    /// The sum of the scores of the group's two best experts, as in DeepSeek-V3.
    Top2,
}

impl From<GroupScore> for ops::GroupScore {
    fn from(score: GroupScore) -> Self {
        match score {
            GroupScore::Max => Self::Max,
            GroupScore::Top2 => Self::Top2,
        }
    }
}
