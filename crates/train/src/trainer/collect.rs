//! Pieces of a checkpoint's files, brought together on the first rank from those that keep their values. Of every value one rank is asked, and no rank
//! holds more of the others' than a piece.

use super::saving::Run;
use crate::error::Result;
use crate::param::{Param, Placement};
use half::bf16;
use nibble_core::{Data, Error, Kernels, Mesh, MeshShape, Plain};
use std::ops::Range;

/// The values, of a parameter of all ranks, that a rank is asked for.
pub(super) fn kept_by<B: Kernels>(param: &Param<B>, mesh: MeshShape, rank: usize) -> Range<usize> {
    let (rows, cols) = param.shape();
    let (dp, ep) = mesh.place(rank);
    let (first, of) = match param.placement {
        Placement::Replicated => (0, rank),
        Placement::Experts(_) => (ep * rows * cols, dp),
    };
    let kept = param.slices.rows(of);
    first + kept.start * cols..first + kept.end * cols
}

/// Values of runs that one rank keeps: of which run, which of its values, and where in the piece they go.
struct Share {
    run: usize,
    values: Range<usize>,
    at: usize,
}

/// What of these runs a rank is asked for.
fn shares<B: Kernels>(params: &[&mut Param<B>], mesh: MeshShape, rank: usize, runs: &[Run]) -> Vec<Share> {
    let (mut shares, mut at) = (Vec::new(), 0);
    for (run, ((param, _), range)) in runs.iter().enumerate() {
        let kept = kept_by(params[*param], mesh, rank);
        let values = range.start.max(kept.start)..range.end.min(kept.end);
        if !values.is_empty() {
            shares.push(Share { run, at: at + values.start - range.start, values });
        }
        at += range.len();
    }
    shares
}

fn count(shares: &[Share]) -> usize {
    shares.iter().map(|share| share.values.len()).sum()
}

/// The values of a piece of a file, which are all of one type, F32; on ranks but the first nothing. Every rank calls this with the same runs.
///
/// # Errors
/// From the backend and other ranks.
pub(super) fn collect<B: Kernels>(
    b: &B,
    mesh: Mesh<'_, B>,
    params: &[&mut Param<B>],
    runs: &[Run],
) -> Result<Vec<f32>> {
    let Some(((param, part), _)) = runs.first() else { return Ok(Vec::new()) };
    Ok(match part.of(params[*param])?.data {
        Data::F32(_) => collect_as(b, mesh, params, runs, f32_values, |x| x)?,
        Data::Bf16(_) => collect_as(b, mesh, params, runs, bf16_values, bf16::to_f32)?,
    })
}

fn f32_values<B: Kernels>(data: &Data<B>) -> Option<&B::Buf<f32>> {
    if let Data::F32(values) = data { Some(values) } else { None }
}

fn bf16_values<B: Kernels>(data: &Data<B>) -> Option<&B::Buf<bf16>> {
    if let Data::Bf16(values) = data { Some(values) } else { None }
}

/// [`collect`] of one type.
fn collect_as<B: Kernels, T: Plain>(
    b: &B,
    mesh: Mesh<'_, B>,
    params: &[&mut Param<B>],
    runs: &[Run],
    of_type: for<'d> fn(&'d Data<B>) -> Option<&'d B::Buf<T>>,
    widened: fn(T) -> f32,
) -> Result<Vec<f32>> {
    let (shape, all) = (mesh.shape(), mesh.all);
    let of_rank = |rank| shares(params, shape, rank, runs);
    let mine = of_rank(all.rank());
    let mut sent = b.alloc::<T>(count(&mine))?;
    let mut at = 0;
    for Share { run, values, .. } in &mine {
        let (param, part) = runs[*run].0;
        let kept = kept_by(params[param], shape, all.rank());
        let from = of_type(&part.of(params[param])?.data)
            .ok_or_else(|| Error::shape("save", "tensors of a file", "of two types", "of one"))?;
        b.copy(from, values.start - kept.start..values.end - kept.start, &mut sent, at)?;
        at += values.len();
    }
    let first = all.rank() == 0;
    let to = |rank: usize| if rank == 0 { at } else { 0 };
    let from = |rank| if first { count(&of_rank(rank)) } else { 0 };
    let [to, from] =
        [&to as &dyn Fn(usize) -> usize, &from].map(|rows| (0..all.world()).map(rows).collect::<Vec<_>>());
    let mut received = b.alloc(size_of::<T>() * from.iter().sum::<usize>())?;
    all.all_to_all_v(b, &b.reinterpret(&sent)?, size_of::<T>(), &to, &from, &mut received)?;
    if !first {
        return Ok(Vec::new());
    }
    let received: Vec<T> = b.download(&b.reinterpret(&received)?)?;
    let mut piece = vec![0.0; runs.iter().map(|(_, range)| range.len()).sum()];
    let mut rest = received.as_slice();
    for Share { values, at, .. } in (0..all.world()).flat_map(of_rank) {
        // As many came as all shares have.
        let (now, later) = rest.split_at(values.len());
        piece[at..][..now.len()].iter_mut().zip(now).for_each(|(to, from)| *to = widened(*from));
        rest = later;
    }
    Ok(piece)
}
