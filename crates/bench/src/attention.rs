//! `nibble bench attention`: how many operations a second the GPU's attention makes, forward and backward.
//!
//! By the project's rules of timing: sustained, back-to-back calls on a chip that has reached its power limit, or, with `--quick`,
//! single calls with the L2 flushed before each; random data. Counted are the multiply-adds that a causal mask leaves, half of
//! the square: along queries' heads one product forward and three backward, along values' heads one and two. What the backward pass makes
//! twice counts once.

use super::gpu::{Bench, COOL_DOWN, put_sustained, wanted};
use nibble_command::error::Result;
use nibble_command::say;
use nibble_core::ops::{Attention, AttentionBackward, AttentionOut, Cast, InitNormal, attention_scale};
use nibble_core::{DType, Result as CoreResult, Tensor};
use nibble_cuda::Cuda;
use nibble_cuda::measure::timing::Sustained;
use nibble_formats::{Purpose, Stream};
use serde_json::{Value, json};
use std::fmt;

/// The GPU's attention in BF16, causal, forward and backward: back to back until the chip is at its power limit.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Backward counts each product once, also where P and dS are made twice. Half a minute, --quick a few seconds.\n\n\
    Examples:\n  \
    nibble bench attention --only 192\n  \
    nibble bench attention --quick --json attention.json"
)]
pub struct Args {
    /// Only those whose name contains this, in either case.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Single calls alone, on a chip that has not reached its power limit.
    #[arg(long)]
    quick: bool,
}

/// A call that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AttentionShape {
    sequences: usize,
    seq_len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
}

impl fmt::Display for AttentionShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequences, seq_len, heads, kv_heads, head_dim, value_dim } = self;
        let dims =
            if head_dim == value_dim { format!("{head_dim}") } else { format!("{head_dim}/{value_dim}") };
        write!(f, "{sequences} x {seq_len}, {heads}/{kv_heads} heads of {dims}")
    }
}

impl AttentionShape {
    /// Operations forward and backward.
    fn flops(&self) -> [f64; 2] {
        let pairs = (self.sequences * self.heads) as f64 * (self.seq_len as f64).powi(2) / 2.0;
        let (head, value) = (self.head_dim as f64, self.value_dim as f64);
        [2.0 * pairs * (head + value), 2.0 * pairs * (3.0 * head + 2.0 * value)]
    }
}

/// Heads of 128 as in the configurations of whole models, of 64, and of 192 with values of 128 as DeepSeek-V3 has them.
fn shapes() -> Vec<AttentionShape> {
    let of = |(sequences, seq_len, heads, kv_heads, head_dim, value_dim)| AttentionShape {
        sequences,
        seq_len,
        heads,
        kv_heads,
        head_dim,
        value_dim,
    };
    let sizes = [
        (8, 4096, 16, 4, 128, 128),
        (8, 4096, 32, 4, 128, 128),
        (4, 4096, 56, 8, 128, 128),
        (2, 16384, 32, 4, 128, 128),
        (8, 4096, 32, 8, 64, 64),
        (8, 4096, 32, 32, 192, 128),
        (4, 4096, 128, 128, 192, 128),
        (2, 16384, 32, 32, 192, 128),
        (1, 16384, 128, 128, 192, 128),
    ];
    sizes.into_iter().map(of).collect()
}

/// A call's time.
#[derive(Debug, Clone, Copy)]
struct Time {
    ms: f64,
    /// None where single calls alone were asked for.
    sustained: Option<Sustained>,
}

pub fn run(args: &Args) -> Result<Value> {
    let chosen = wanted(shapes(), &args.only, AttentionShape::to_string)?;
    let bench = Bench::open("`nibble bench ops` measures the CPU's attention")?;
    let header = bench.header();
    say!("");
    say!("attention, BF16, causal ({}); TFLOP/s", if args.quick { "single calls" } else { "sustained" });
    say!("{:<36} {:>9} {:>6} {:>9} {:>6} {:>6}", "", "ms", "fwd", "ms", "bwd", "both");
    let mut measured = Vec::new();
    for shape in chosen {
        let [forward, backward] = times(&bench, &shape, args.quick)?;
        let flops = shape.flops();
        let rate = |flops: f64, ms: f64| flops / ms / 1e9;
        let rates = [
            rate(flops[0], forward.ms),
            rate(flops[1], backward.ms),
            rate(flops[0] + flops[1], forward.ms + backward.ms),
        ];
        let [forward_rate, backward_rate, both] = rates;
        say!(
            "{:<36} {:>9.3} {forward_rate:>6.0} {:>9.3} {backward_rate:>6.0} {both:>6.0}",
            shape.to_string(),
            forward.ms,
            backward.ms
        );
        let mut figures = json!({
            "shape": shape.to_string(), "forward_tflops": rates[0], "backward_tflops": rates[1], "tflops": both,
            "forward_ms": forward.ms, "backward_ms": backward.ms,
        });
        for (name, time) in [("forward_sustained", forward), ("backward_sustained", backward)] {
            if let Some(sustained) = &time.sustained {
                put_sustained(&mut figures, name, sustained);
            }
        }
        measured.push(figures);
    }
    Ok(json!({ "machine": header, "attention": measured }))
}

/// Forward and backward.
fn times(bench: &Bench, shape: &AttentionShape, quick: bool) -> CoreResult<[Time; 2]> {
    let &AttentionShape { sequences, seq_len, heads, kv_heads, head_dim, value_dim } = shape;
    let (cuda, scale) = (&bench.cuda, attention_scale(head_dim));
    let tensor = |site, cols| {
        let stream = Stream::new(1, Purpose::Init, site, 0);
        let rows = sequences * seq_len;
        let x = InitNormal { stream, first: 0, rows, cols, std: 1.0 }.run(cuda)?;
        Cast { x: &x, dtype: DType::Bf16 }.run(cuda)
    };
    let (q, dout) = (&tensor(1, heads * head_dim)?, &tensor(2, heads * value_dim)?);
    let (k, v): (&Tensor<Cuda>, _) = (&tensor(3, kv_heads * head_dim)?, &tensor(4, kv_heads * value_dim)?);
    let forward = || Attention { q, k, v, head_dim, value_dim, scale, seq_len, windows: None }.run(cuda);
    let AttentionOut { out, lse } = &forward()?;
    let backward = || {
        AttentionBackward { q, k, v, out, lse, dout, head_dim, value_dim, scale, seq_len, windows: None }
            .run(cuda)
            .map(drop)
    };
    Ok([timed(bench, quick, || forward().map(drop))?, timed(bench, quick, backward)?])
}

fn timed(bench: &Bench, quick: bool, call: impl Fn() -> CoreResult<()>) -> CoreResult<Time> {
    if quick {
        return Ok(Time { ms: f64::from(bench.stopwatch.burst_ms(call)?), sustained: None });
    }
    std::thread::sleep(COOL_DOWN);
    let sustained = bench.stopwatch.sustained(call)?;
    Ok(Time { ms: f64::from(sustained.median_ms), sustained: Some(sustained) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_those_that_the_mask_leaves() {
        let shape = |head_dim, value_dim| AttentionShape {
            sequences: 2,
            seq_len: 16,
            heads: 3,
            kv_heads: 1,
            head_dim,
            value_dim,
        };
        // 2 · S² · heads · head_dim a sequence, and two and a half times that.
        let forward = f64::from(2 * 2 * 16 * 16 * 3 * 8);
        assert_eq!(shape(8, 8).flops(), [forward, 2.5 * forward]);
        // Of five products backward three are along the wider heads.
        assert_eq!(shape(12, 8).flops(), [1.25 * forward, (3.0 * 12.0 + 16.0) / 16.0 * forward]);
    }

    #[test]
    fn every_shape_has_a_name_of_its_own_and_is_taken_by_the_tensor_cores() {
        let shapes = shapes();
        let mut names: Vec<String> = shapes.iter().map(AttentionShape::to_string).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), shapes.len());
        for shape in shapes {
            assert!(nibble_cuda::ops::ATTENTION_DIMS.contains(&(shape.head_dim, shape.value_dim)), "{shape}");
        }
    }
}
