//! How routers choose: the keys of it, as a configuration names their values.

use super::ModelConfig;
use super::validate::{fail, require};
use crate::error::Result;
use nibble_core::ops::{self, ExpertGroups};
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

/// Whether a key has its default: stored configurations leave it out then.
pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl ModelConfig {
    /// The groups that experts are chosen from, if there are any.
    #[must_use]
    pub fn expert_groups(&self) -> Option<ExpertGroups> {
        let (count, top) = (self.groups, self.top_groups);
        (count > 0).then(|| ExpertGroups { count, top, score: self.group_score.into() })
    }

    /// The keys of routing that have no default, each with its value as TOML writes it.
    pub(super) fn routing(&self) -> Vec<(&'static str, String)> {
        let word = |is: bool, word: &str| is.then(|| format!("\"{word}\""));
        let number = |n: usize| (n > 0).then(|| n.to_string());
        let all = [
            ("model.scores", word(!is_default(&self.scores), "sigmoid")),
            ("model.router_bias", self.router_bias.then(|| "true".to_owned())),
            ("model.groups", number(self.groups)),
            ("model.top_groups", number(self.top_groups)),
            ("model.group_score", word(!is_default(&self.group_score), "top2")),
            ("model.route_scale", (self.route_scale != 1.0).then(|| format!("{:?}", self.route_scale))),
        ];
        all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }

    /// Groups that experts fall into, and a factor that weights can have.
    pub(super) fn validate_routing(&self) -> Result<()> {
        let (experts, groups, top) = (self.experts, self.groups, self.top_groups);
        let scale = self.route_scale;
        require(scale.is_finite() && scale > 0.0, "model.route_scale", || {
            format!("is {scale:?}, expected a number above 0")
        })?;
        if groups == 0 {
            return match top {
                0 => Ok(()),
                _ => fail("model.top_groups", format!("is {top}, but model.groups = 0: set that too")),
            };
        }
        require(experts.is_multiple_of(groups), "model.groups", || {
            format!("is {groups}, not a divisor of model.experts = {experts}")
        })?;
        require((1..=groups).contains(&top), "model.top_groups", || {
            format!("is {top}, expected 1 to model.groups = {groups}")
        })?;
        let each = experts / groups;
        require(self.top_k <= top * each, "model.top_k", || {
            format!(
                "is {}, more than the {} experts of model.top_groups = {top} of model.groups = {groups} groups",
                self.top_k,
                top * each
            )
        })?;
        require(self.group_score == GroupScore::Max || each >= 2, "model.group_score", || {
            format!(
                "is \"top2\", and model.groups = {groups} leaves groups of {each}: take max, or fewer groups"
            )
        })
    }
}
