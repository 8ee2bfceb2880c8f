//! Top-k selection of a token's experts.

use nibble_core::ops::{ExpertGroups, GroupScore, RouteRule};

/// Selects experts row by row, with scratch vectors that are reused.
#[derive(Debug)]
pub(super) struct Choice<'a> {
    groups: Option<ExpertGroups>,
    bias: Option<&'a [f32]>,
    /// Selection scores of the row's experts, if they differ from the router scores.
    biased: Vec<f32>,
    /// The best groups and their scores.
    group: Vec<i32>,
    score: Vec<f32>,
}

impl<'a> Choice<'a> {
    pub fn new(rule: &RouteRule, bias: Option<&'a [f32]>) -> Self {
        let top = rule.groups.map_or(0, |groups| groups.top);
        Self { groups: rule.groups, bias, biased: Vec::new(), group: vec![0; top], score: vec![0.0; top] }
    }

    /// The experts of a row and their scores, in the order of [`nibble_core::ops::Route`].
    pub fn of(&mut self, scores: &[f32], expert: &mut [i32], score: &mut [f32]) {
        let Self { groups, bias, biased, group, score: group_score } = self;
        let choice = match bias {
            None => scores,
            Some(bias) => {
                biased.clear();
                biased.extend(scores.iter().zip(*bias).map(|(s, b)| s + b));
                &biased[..]
            }
        };
        match groups {
            None => best(choice.iter().copied().enumerate(), expert, score),
            Some(groups) => {
                let each = choice.len() / groups.count;
                let of_groups = choice.chunks_exact(each).map(|of_group| score_of(groups.score, of_group));
                best(of_groups.enumerate(), group, group_score);
                group.sort_unstable();
                let experts = group.iter().flat_map(|&g| g as usize * each..(g as usize + 1) * each);
                best(experts.map(|e| (e, choice[e])), expert, score);
            }
        }
        if bias.is_some() {
            score.iter_mut().zip(expert).for_each(|(score, e)| *score = scores[*e as usize]);
        }
    }
}

/// The score of a group whose experts have these selection scores.
fn score_of(score: GroupScore, choice: &[f32]) -> f32 {
    let (mut index, mut two) = ([0; 2], [0.0; 2]);
    match score {
        GroupScore::Max => best(choice.iter().copied().enumerate(), &mut index[..1], &mut two[..1]),
        GroupScore::Top2 => best(choice.iter().copied().enumerate(), &mut index, &mut two),
    }
    match score {
        GroupScore::Max => two[0],
        GroupScore::Top2 => two[0] + two[1],
    }
}

/// The `index.len()` best scores (or all, if there are fewer) by insertion sort: largest first, ties in input order, NaNs last.
fn best(scores: impl Iterator<Item = (usize, f32)>, index: &mut [i32], score: &mut [f32]) {
    let most = index.len();
    let ahead = |p: f32, w: f32| p > w || (w.is_nan() && !p.is_nan());
    for (seen, (j, s)) in scores.enumerate() {
        let mut place = seen;
        if seen >= most {
            place = most - 1;
            if !ahead(s, score[place]) {
                continue;
            }
        }
        while place > 0 && ahead(s, score[place - 1]) {
            (score[place], index[place]) = (score[place - 1], index[place - 1]);
            place -= 1;
        }
        (score[place], index[place]) = (s, j as i32);
    }
}
