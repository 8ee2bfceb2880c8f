//! Sends pieces of a checkpoint's files from the ranks that hold the values to the owners of the files. If several ranks hold a value, one
//! of these ranks sends it. In each round, each owner receives one piece; all pieces of a round together have up to 16 MiB. So no rank ever
//! holds a whole model, or sends more than the values of one round at once.

use super::files::{FileTensor, Files, Part, Run, cut, kept_by, num_values};
use super::pieces::{Pieces, Stopped};
use crate::error::Result;
use crate::fault::{Point, reach};
use crate::param::Param;
use crate::spec::Update;
use half::bf16;
use nibble_core::{Data, Kernels, Mesh, MeshShape};
use std::ops::Range;

/// Sends all values of these files to their owners in pieces of `piece` values, and passes this rank's pieces to its writer. The amax
/// histories are not sent, because every rank already has them. Every rank must call this function.
///
/// # Errors
/// Passes on errors of the backend and of other ranks. The writer reports its own errors when it ends.
pub(in crate::trainer) fn bring<B: Kernels>(
    b: &B,
    mesh: Mesh<'_, B>,
    (params, scales): (&[&mut Param<B>], &[f32]),
    (files, owners): (&Files, &[usize]),
    (piece, pieces): (usize, Pieces<B>),
) -> Result<()> {
    let of_rank = |rank| -> Vec<&[FileTensor]> {
        let files = files.named().into_iter().zip(owners);
        files.filter(|(_, owner)| **owner == rank).map(|((_, file), _)| file).collect()
    };
    let of_ranks: Vec<_> = (0..mesh.all.world()).map(of_rank).collect();
    let mut sequences: Vec<_> = of_ranks.iter().map(|files| sequence(files, piece)).collect();
    let mut pieces = Some(pieces);
    loop {
        let round = sequences.iter_mut().map(|sequence| sequence.next().unwrap_or_default());
        let (round, ends): (Vec<Vec<Run>>, Vec<bool>) = round.unzip();
        if round.iter().all(Vec::is_empty) {
            return Ok(());
        }
        let received = exchange(b, mesh, params, &round)?;
        let (mine, ends) = (&round[mesh.all.rank()], ends[mesh.all.rank()]);
        let read = |to: &mut [f32]| match mine.first() {
            Some(((_, Part::Scales), _)) => {
                let values = mine.iter().flat_map(|(_, range)| &scales[range.clone()]);
                to.iter_mut().zip(values).for_each(|(to, from)| *to = *from);
                Ok(())
            }
            _ => place(b, mesh, params, mine, &received, to),
        };
        if !mine.is_empty()
            && let Some(Err(Stopped)) =
                pieces.as_ref().map(|pieces| pieces.take_whole(num_values(mine), read))
        {
            // The writer has failed and reports its error when it ends. Until then, the other ranks still need this rank's values.
            pieces = None;
        }
        if ends {
            reach(Point::FileCopied)?;
        }
    }
}

/// The pieces of a rank's files in order. Each piece has a flag that says whether it is the last piece of its file.
fn sequence<'f>(files: &'f [&'f [FileTensor]], piece: usize) -> impl Iterator<Item = (Vec<Run>, bool)> + 'f {
    files.iter().flat_map(move |file| {
        let mut pieces = cut(file, piece).into_iter().peekable();
        std::iter::from_fn(move || {
            let runs = pieces.next()?;
            Some((runs, pieces.peek().is_none()))
        })
    })
}

/// Values of a run that one rank holds: the index of the run, the range of the values, and their offset in the piece.
struct Share {
    run: usize,
    values: Range<usize>,
    at: usize,
}

/// The values of these runs that a rank must send. The amax histories are left out, because every rank already has them.
fn shares<B: Kernels>(params: &[&mut Param<B>], mesh: MeshShape, rank: usize, runs: &[Run]) -> Vec<Share> {
    let (mut shares, mut at) = (Vec::new(), 0);
    for (run, ((param, part), range)) in runs.iter().enumerate() {
        if *part == Part::Scales {
            continue;
        }
        let param = &*params[*param];
        let kept = match param.update {
            // Every rank has all values, so the first rank sends them.
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

/// Number of bytes per value of these runs. All runs have the same type.
fn value_bytes<B: Kernels>(params: &[&mut Param<B>], runs: &[Run]) -> Result<usize> {
    let Some(((param, part), _)) = runs.first().filter(|((_, part), _)| *part != Part::Scales) else {
        return Ok(1);
    };
    Ok(match part.of(params[*param])?.data {
        Data::F32(_) => size_of::<f32>(),
        Data::Bf16(_) => size_of::<bf16>(),
    })
}

/// Exchanges a round of pieces: rank `p` receives the other ranks' values of `runs[p]`. Returns the values received by this rank, for
/// [`place`]. Every rank must call this function with the same runs.
///
/// # Errors
/// Passes on errors of the backend and of other ranks.
fn exchange<B: Kernels>(
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

/// Puts the values received for this rank's runs into the runs' piece, as F32.
///
/// # Errors
/// Passes on errors of the backend.
fn place<B: Kernels>(
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

/// The number of values in the shares equals the number of values that were received.
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
