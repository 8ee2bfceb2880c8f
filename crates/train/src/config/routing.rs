//! How routers choose: the keys of it, as a configuration names their values.

use nibble_core::ops;
use serde::{Deserialize, Serialize};

/// What a router makes of its logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scores {
    /// Softmax over the experts.
    #[default]
    Softmax,
    /// The sigmoid of each, as in DeepSeek-V3.
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

/// The score of a group of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupScore {
    /// That of its best expert, as in DeepSeek-V2.
    #[default]
    Max,
    /// The sum of its two best ones', as in DeepSeek-V3.
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
