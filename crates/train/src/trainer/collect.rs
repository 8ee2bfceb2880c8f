//! Pieces of a checkpoint's files, brought to their owners by the ranks that keep their values. Of every value one rank is asked. In a round each
//! owner gets one piece, so that no rank holds more of the others' than that, nor sends more than all of them together.

use super::saving::{Part, Run};
use crate::error::Result;
use crate::param::{Param, Placement};
use crate::spec::Update;
use half::bf16;
use nibble_core::{Data, Kernels, Mesh, MeshShape};
use std::ops::Range;

/// The values, of a parameter of all ranks, that a rank keeps.
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

/// What of these runs a rank is asked for. Histories of scales every rank has already.
fn shares<B: Kernels>(params: &[&mut Param<B>], mesh: MeshShape, rank: usize, runs: &[Run]) -> Vec<Share> {
    let (mut shares, mut at) = (Vec::new(), 0);
    for (run, ((param, part), range)) in runs.iter().enumerate() {
        if *part == Part::Scales {
            continue;
        }
        let param = &*params[*param];
        let kept = match param.update {
            // Every rank has all of it: the first one is asked.
            Update::Load if rank > 0 => 0..0,
            _ => kept_by(param, mesh, rank),
        };
        let values = range.start.max(kept.start)..range.end.min(kept.end);
        if !values.is_empty() {
            shares.push(Share { run, at: at + values.start - range.start, values });
        }
        at += range.len();
    }
    shares
}

/// Bytes of a value of these runs, which are all of one type.
fn value_bytes<B: Kernels>(params: &[&mut Param<B>], runs: &[Run]) -> Result<usize> {
    let Some(((param, part), _)) = runs.first().filter(|((_, part), _)| *part != Part::Scales) else {
        return Ok(1);
    };
    Ok(match part.of(params[*param])?.data {
        Data::F32(_) => size_of::<f32>(),
        Data::Bf16(_) => size_of::<bf16>(),
    })
}

/// A round of pieces: rank `p` gets what the others keep of `runs[p]`. Returns what comes to this rank, for [`place`]. Every rank calls this with the
/// same runs.
///
/// # Errors
/// From the backend and other ranks.
pub(super) fn exchange<B: Kernels>(
    b: &B,
    mesh: Mesh<'_, B>,
    params: &[&mut Param<B>],
    runs: &[Vec<Run>],
) -> Result<B::Buf<u8>> {
    let (shape, all) = (mesh.shape(), mesh.all);
    let bytes = |rank, runs: &[Run]| -> Result<usize> {
        let shares = shares(params, shape, rank, runs);
        Ok(shares.iter().map(|share| share.values.len()).sum::<usize>() * value_bytes(params, runs)?)
    };
    let to = runs.iter().map(|runs| bytes(all.rank(), runs)).collect::<Result<Vec<_>>>()?;
    let from = (0..all.world()).map(|rank| bytes(rank, &runs[all.rank()])).collect::<Result<Vec<_>>>()?;
    let mut sent = b.alloc::<u8>(to.iter().sum())?;
    let mut at = 0;
    for runs in runs {
        let each = value_bytes(params, runs)?;
        for Share { run, values, .. } in shares(params, shape, all.rank(), runs) {
            let (param, part) = runs[run].0;
            let kept = kept_by(params[param], shape, all.rank());
            let kept = (values.start - kept.start) * each..(values.end - kept.start) * each;
            let (begins, len) = (at, kept.len());
            match &part.of(params[param])?.data {
                Data::F32(from) => b.copy(&b.reinterpret(from)?, kept, &mut sent, begins)?,
                Data::Bf16(from) => b.copy(&b.reinterpret(from)?, kept, &mut sent, begins)?,
            }
            at += len;
        }
    }
    let received = b.alloc(from.iter().sum())?;
    Ok(all.begin_all_to_all_v(b, sent, 1, &to, &from, received)?.wait(b)?)
}

/// Puts what came for this rank's runs where it belongs in their piece, as F32.
///
/// # Errors
/// From the backend.
pub(super) fn place<B: Kernels>(
    b: &B,
    mesh: Mesh<'_, B>,
    params: &[&mut Param<B>],
    runs: &[Run],
    received: &B::Buf<u8>,
    piece: &mut [f32],
) -> Result<()> {
    let shares = (0..mesh.all.world()).flat_map(|rank| shares(params, mesh.shape(), rank, runs));
    if value_bytes(params, runs)? == size_of::<bf16>() {
        let received: Vec<bf16> = b.download(&b.reinterpret(received)?)?;
        scatter(&received, shares, piece, bf16::to_f32);
    } else {
        let received: Vec<f32> = b.download(&b.reinterpret(received)?)?;
        scatter(&received, shares, piece, |x| x);
    }
    Ok(())
}

/// As many values were received as all shares have.
fn scatter<T: Copy>(
    mut received: &[T],
    shares: impl Iterator<Item = Share>,
    piece: &mut [f32],
    widened: fn(T) -> f32,
) {
    for Share { values, at, .. } in shares {
        let (now, later) = received.split_at(values.len());
        piece[at..][..now.len()].iter_mut().zip(now).for_each(|(to, from)| *to = widened(*from));
        received = later;
    }
}
