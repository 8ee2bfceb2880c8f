//! The contents of a checkpoint's files: the parameters whose values each file contains, and the order of these values.

use crate::checkpoint::{TensorSpec, tensor_files};
use crate::delayed::DelayedSite;
use crate::error::Result;
use crate::family::Named;
use crate::param::{Moments, Param, Placement};
use nibble_core::{Error as CoreError, Kernels, MeshShape, Tensor};
use std::ops::Range;

/// A tensor of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::trainer) enum Part {
    Master,
    ExpAvg,
    ExpAvgSq,
    /// The amax histories of delayed scaling, all together. Histories belong to no parameter.
    Scales,
}

impl Part {
    /// The suffix of the tensor's name in a checkpoint.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Master => "",
            Self::ExpAvg => ".exp_avg",
            Self::ExpAvgSq => ".exp_avg_sq",
            Self::Scales => "",
        }
    }

    /// This rank's rows of the tensor, for writing; `None` if there is no such tensor.
    pub fn of_mut<B: Kernels>(self, param: &mut Param<B>) -> Option<&mut Tensor<B>> {
        let Param { master, moments, .. } = param;
        match self {
            Self::Master => Some(master),
            Self::ExpAvg => moments.as_mut().map(|moments| &mut moments.exp_avg),
            Self::ExpAvgSq => moments.as_mut().map(|moments| &mut moments.exp_avg_sq),
            Self::Scales => None,
        }
    }

    /// This rank's rows of the tensor.
    pub fn of<B: Kernels>(self, param: &Param<B>) -> Result<&Tensor<B>> {
        match (self, &param.moments) {
            (Self::Master, _) => Ok(&param.master),
            (Self::ExpAvg, Some(Moments { exp_avg, .. })) => Ok(exp_avg),
            (Self::ExpAvgSq, Some(Moments { exp_avg_sq, .. })) => Ok(exp_avg_sq),
            (Self::ExpAvg | Self::ExpAvgSq, None) => {
                Err(CoreError::shape("save", "parameter", &param.name, "one with moments").into())
            }
            (Self::Scales, _) => {
                Err(CoreError::shape("save", "part", "scales", "that of a parameter").into())
            }
        }
    }
}

/// A tensor of a file, and the place of its values.
#[derive(Debug)]
pub(in crate::trainer) struct FileTensor {
    pub spec: TensorSpec,
    /// Consecutive runs of values. A run is a range of the values of a whole parameter (over all ranks).
    runs: Vec<Run>,
}

/// The tensors of a checkpoint.
#[derive(Debug)]
pub(in crate::trainer) struct Files {
    /// The tensors of weights, of moments, and of amax histories.
    pub kinds: [Vec<FileTensor>; 3],
    /// Largest number of bytes of values in one file; 0 means one file per kind of tensor.
    pub most_bytes: usize,
}

impl Files {
    /// The names of the files, each with its tensors, in the order in which the files are written.
    pub fn named(&self) -> Vec<(String, &[FileTensor])> {
        tensor_files(self.kinds.each_ref().map(Vec::as_slice), |source| &source.spec, self.most_bytes)
    }

    /// Number of values of each file, in the order of the files.
    pub fn values(&self) -> Vec<usize> {
        self.named()
            .iter()
            .map(|(_, file)| file.iter().map(|source| source.spec.num_values()).sum())
            .collect()
    }

    /// Whether there are amax histories.
    pub fn has_scales(&self) -> bool {
        !self.kinds[2].is_empty()
    }
}

/// The tensors of a file, sorted by name. `with_moments` says for each parameter whether it has gradients, and therefore moments.
pub(in crate::trainer) fn sources(named: &[Named], with_moments: &[bool], parts: &[Part]) -> Vec<FileTensor> {
    let has = |tensor: &Named, part: Part| {
        part == Part::Master || tensor.rows.iter().all(|rows| with_moments[rows.param])
    };
    let source = |tensor: &Named, part: Part| {
        let spec = TensorSpec::f32(format!("{}{}", tensor.name, part.suffix()), tensor.shape.clone());
        FileTensor { spec, runs: tensor.runs().map(|(param, range)| ((param, part), range)).collect() }
    };
    let all = named.iter().flat_map(|tensor| parts.iter().map(move |part| (tensor, *part)));
    let mut all: Vec<FileTensor> =
        all.filter(|(tensor, part)| has(tensor, *part)).map(|(tensor, part)| source(tensor, part)).collect();
    all.sort_by(|a, b| a.spec.name.cmp(&b.spec.name));
    all
}

/// The amax histories of all ranks, sorted by name.
pub(in crate::trainer) fn scale_sources(sites: &[DelayedSite], mesh: MeshShape) -> Vec<FileTensor> {
    let mut first = 0;
    let source = |site: &DelayedSite| {
        let spec = TensorSpec::f32(site.tensor_name(), site.shape(mesh));
        let range = first..first + spec.num_values();
        first = range.end;
        FileTensor { spec, runs: vec![((0, Part::Scales), range)] }
    };
    let mut all: Vec<FileTensor> = sites.iter().map(source).collect();
    all.sort_by(|a, b| a.spec.name.cmp(&b.spec.name));
    all
}

/// The range of a whole parameter's values that a rank holds.
pub(in crate::trainer) fn kept_by<B: Kernels>(
    param: &Param<B>,
    mesh: MeshShape,
    rank: usize,
) -> Range<usize> {
    let (rows, cols) = param.shape();
    let (dp, ep) = mesh.place(rank);
    let (first, of) = match param.placement {
        Placement::Replicated => (0, rank),
        Placement::Experts(_) => (ep * rows * cols, dp),
    };
    let kept = param.slices.rows(of);
    first + kept.start * cols..first + kept.end * cols
}

/// A range of values of one tensor of a parameter.
pub(in crate::trainer) type Run = ((usize, Part), Range<usize>);

/// Number of values of a piece.
pub(in crate::trainer) fn num_values(runs: &[Run]) -> usize {
    runs.iter().map(|(_, range)| range.len()).sum()
}

/// Cuts a file's values into pieces of `piece` values. The last piece may be shorter.
pub(in crate::trainer) fn cut(file: &[FileTensor], piece: usize) -> Vec<Vec<Run>> {
    let mut all: Vec<Vec<Run>> = Vec::new();
    let mut room = 0;
    for (of, range) in file.iter().flat_map(|tensor| &tensor.runs) {
        let (mut at, end) = (range.start, range.end);
        while at < end {
            if room == 0 {
                all.push(Vec::new());
                room = piece.max(1);
            }
            let now = room.min(end - at);
            // The last piece exists, because a piece is added whenever the previous piece is full.
            all.last_mut().into_iter().for_each(|runs| runs.push((*of, at..at + now)));
            (at, room) = (at + now, room - now);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_cut_into_whole_pieces_in_its_order() {
        let source = |of: usize, len: usize, first: usize| FileTensor {
            spec: TensorSpec::f32(of.to_string(), [len]),
            runs: vec![((of, Part::Master), first..first + len)],
        };
        let file = [source(2, 5, 10), source(0, 0, 7), source(1, 2, 0), source(2, 9, 0)];
        let runs: Vec<Vec<(usize, Range<usize>)>> = cut(&file, 6)
            .into_iter()
            .map(|runs| runs.into_iter().map(|(of, run)| (of.0, run)).collect())
            .collect();
        assert_eq!(runs, [vec![(2, 10..15), (1, 0..1)], vec![(1, 1..2), (2, 0..5)], vec![(2, 5..9)]]);
        assert!(cut(&[], 6).is_empty());
    }
}
