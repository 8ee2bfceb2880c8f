//! `nibble bench attention`: flops per second of the GPU's attention, forward and backward.
//!
//! The project's timing rules apply. Either calls run back to back on a GPU at its power limit (sustained), or, with `--quick`, single
//! calls run with the L2 flushed before each. Data are random. Flops count the unmasked half of the causal scores. Forward, one product is
//! along the head dim of queries and one along that of values; backward, three and two. Products that the backward pass computes twice
//! count once. `--documents` compares packed documents with a single document per sequence; its flops count every tile of 128 queries × 128
//! keys that contains an unmasked pair.

use super::gpu::{Bench, COOL_DOWN, put_sustained, wanted};
use nibble_command::error::Result;
use nibble_command::say;
use nibble_core::ops::{Attention, AttentionBackward, AttentionOut, Cast, FindWindows, InitNormal, Windows};
use nibble_core::{Backend, DType, Result as CoreResult, Tensor};
use nibble_cuda::Cuda;
use nibble_cuda::measure::timing::Sustained;
use nibble_formats::{Purpose, Stream};
use serde_json::{Value, json};
use std::fmt;

/// Measures causal BF16 attention on the GPU, forward and backward, in back-to-back calls at the GPU's power limit.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The backward flop rate counts each matrix product once, even if P and dS are computed twice. The benchmark takes half a \
    minute; with --quick, it takes a few seconds.\n\n\
    Examples:\n  \
    nibble bench attention --only 192\n  \
    nibble bench attention --documents 1024\n  \
    nibble bench attention --quick --json attention.json"
)]
pub struct Args {
    /// Measures only cases whose name contains NAME, ignoring case. This option may be repeated.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Measures only single calls, during which the GPU stays below its power limit.
    #[arg(long)]
    quick: bool,
    /// Also measures sequences of 8192 tokens in two variants and compares the variants: packed documents of TOKENS tokens each, and one
    /// document. The flop count includes each tile of 128 queries x 128 keys that is not fully masked.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    documents: Option<u32>,
}

/// The sizes of a timed call.
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
    /// Flops of the forward and the backward pass, over the unmasked pairs.
    fn flops(&self) -> [f64; 2] {
        self.flops_of((self.seq_len as f64).powi(2) / 2.0)
    }

    /// Flops of the forward and the backward pass over whole tiles, for documents of `document` tokens.
    fn flops_of_tiles(&self, document: usize) -> [f64; 2] {
        let tiles = self.seq_len.div_ceil(TILE);
        let visited = (0..tiles).map(|tile| tile + 1 - start(tile * TILE, document) / TILE).sum::<usize>();
        self.flops_of((visited * TILE * TILE) as f64)
    }

    /// Flops of the forward and the backward pass for `pairs` pairs per head of a sequence.
    fn flops_of(&self, pairs: f64) -> [f64; 2] {
        let pairs = (self.sequences * self.heads) as f64 * pairs;
        let (head, value) = (self.head_dim as f64, self.value_dim as f64);
        [2.0 * pairs * (head + value), 2.0 * pairs * (3.0 * head + 2.0 * value)]
    }

    /// The attention windows of documents of `document` tokens.
    fn windows(&self, cuda: &Cuda, document: usize) -> CoreResult<Windows<Cuda>> {
        let starts: Vec<i32> =
            (0..self.sequences * self.seq_len).map(|i| start(i % self.seq_len, document) as i32).collect();
        let document = &cuda.upload(&starts)?;
        FindWindows { document, seq_len: self.seq_len, window: None }.run(cuda)
    }
}

/// Number of queries, and of keys, in a counted tile.
const TILE: usize = 128;

/// The first token of a token's document.
fn start(token: usize, document: usize) -> usize {
    token / document * document
}

/// Shapes with heads of 128 as in the configurations of whole models, with heads of 64, and with heads of 192 and values of 128 as in
/// DeepSeek-V3. With `packed`, there is one shape per path of the backward pass.
fn shapes(packed: bool) -> Vec<AttentionShape> {
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
    let packed_sizes = [
        (4, 8192, 32, 4, 128, 128),
        (2, 8192, 32, 32, 128, 128),
        (4, 8192, 32, 8, 64, 64),
        (2, 8192, 32, 32, 192, 128),
        (2, 8192, 32, 8, 192, 128),
    ];
    let sizes = if packed { &packed_sizes[..] } else { &sizes[..] };
    sizes.iter().copied().map(of).collect()
}

/// The times of a call.
#[derive(Debug, Clone, Copy)]
struct Time {
    ms: f64,
    /// The sustained time; `None` with `--quick`.
    sustained: Option<Sustained>,
}

pub fn run(args: &Args) -> Result<Value> {
    let chosen = wanted(shapes(args.documents.is_some()), &args.only, AttentionShape::to_string)?;
    let bench = Bench::open("`nibble bench ops` measures the CPU's attention")?;
    let header = bench.header();
    let how = if args.quick { "single calls" } else { "sustained" };
    say!("");
    if let Some(document) = args.documents {
        let measured = packed(&bench, &chosen, document as usize, args.quick, how)?;
        return Ok(json!({ "machine": header, "attention": measured }));
    }
    say!("attention, BF16, causal ({how}); TFLOP/s");
    say!("{:<36} {:>9} {:>6} {:>9} {:>6} {:>6}", "", "ms", "fwd", "ms", "bwd", "both");
    let mut measured = Vec::new();
    for shape in chosen {
        let [forward, backward] = times(&bench, &shape, None, args.quick)?;
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

/// Compares documents of `document` tokens with one document per sequence.
fn packed(
    bench: &Bench,
    shapes: &[AttentionShape],
    document: usize,
    quick: bool,
    how: &str,
) -> Result<Vec<Value>> {
    say!(
        "attention, BF16, documents of {document} tokens against one per sequence ({how}); TFLOP/s of whole tiles"
    );
    say!("{:<36} {:>25} {:>34}", "", "forward: ms, and of one", "backward: ms, and of one");
    let mut measured = Vec::new();
    for shape in shapes {
        let windows = shape.windows(&bench.cuda, document)?;
        let one = times(bench, shape, None, quick)?;
        let many = times(bench, shape, Some(&windows), quick)?;
        let flops = [shape.flops_of_tiles(shape.seq_len), shape.flops_of_tiles(document)];
        let rate = |i: usize, time: [Time; 2], of: usize| flops[of][i] / time[i].ms / 1e9;
        let mut row = format!("{:<36}", shape.to_string());
        let mut figures = json!({ "shape": shape.to_string(), "document": document });
        for (i, pass) in ["forward", "backward"].into_iter().enumerate() {
            let (rate_one, rate_many) = (rate(i, one, 0), rate(i, many, 1));
            let ratio = rate_many / rate_one;
            row += &format!(
                " {:>8.3} {rate_many:>5.0}  {:>8.3} {rate_one:>5.0} {ratio:>5.2}",
                many[i].ms, one[i].ms
            );
            for (name, value) in [
                ("ms", many[i].ms),
                ("tile_tflops", rate_many),
                ("ms_of_one", one[i].ms),
                ("tile_tflops_of_one", rate_one),
                ("ratio", ratio),
            ] {
                figures[format!("{pass}_{name}")] = json!(value);
            }
        }
        say!("{row}");
        measured.push(figures);
    }
    Ok(measured)
}

/// Times of the forward and the backward pass.
fn times(
    bench: &Bench,
    shape: &AttentionShape,
    windows: Option<&Windows<Cuda>>,
    quick: bool,
) -> CoreResult<[Time; 2]> {
    let &AttentionShape { sequences, seq_len, heads, kv_heads, head_dim, value_dim } = shape;
    let (cuda, dims) = (&bench.cuda, (head_dim, value_dim));
    let tensor = |site, cols| {
        let stream = Stream::new(1, Purpose::Init, site, 0);
        let rows = sequences * seq_len;
        let x = InitNormal { stream, first: 0, rows, cols, std: 1.0 }.run(cuda)?;
        Cast { x: &x, dtype: DType::Bf16 }.run(cuda)
    };
    let (q, dout) = (&tensor(1, heads * head_dim)?, &tensor(2, heads * value_dim)?);
    let (k, v): (&Tensor<Cuda>, _) = (&tensor(3, kv_heads * head_dim)?, &tensor(4, kv_heads * value_dim)?);
    let qkv = [q, k, v];
    let forward = || Attention { windows, ..Attention::new(qkv, dims, seq_len) }.run(cuda);
    let AttentionOut { out, lse } = &forward()?;
    let backward = || {
        AttentionBackward { windows, ..AttentionBackward::new(qkv, (out, lse), dout, dims, seq_len) }
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
        // A sequence takes 2 · S² · heads · head_dim flops forward, and two and a half times as many backward.
        let forward = f64::from(2 * 2 * 16 * 16 * 3 * 8);
        assert_eq!(shape(8, 8).flops(), [forward, 2.5 * forward]);
        // Three of the five backward products are along the wider heads.
        assert_eq!(shape(12, 8).flops(), [1.25 * forward, (3.0 * 12.0 + 16.0) / 16.0 * forward]);
    }

    #[test]
    fn tiles_count_whole_from_that_of_a_document_s_first_key_on() {
        let shape =
            AttentionShape { sequences: 1, seq_len: 1024, heads: 1, kv_heads: 1, head_dim: 1, value_dim: 1 };
        let tiles = |document| shape.flops_of_tiles(document)[0] / 4.0 / (128.0 * 128.0);
        assert_eq!([1024, 2000, 512, 128, 1].map(tiles), [36.0, 36.0, 20.0, 8.0, 8.0]);
        // Tiles 0 to 2 start within the document at token 0. Tiles 3 and 4 start within the document at token 300, which starts in tile 2.
        // The other tiles start within the document at token 600, which starts in tile 4.
        assert_eq!(tiles(300), f64::from(1 + 2 + 3 + 2 + 3 + 2 + 3 + 4));
    }

    #[test]
    fn every_shape_has_a_name_of_its_own_and_is_taken_by_the_tensor_cores() {
        let shapes = [shapes(false), shapes(true)].concat();
        let mut names: Vec<String> = shapes.iter().map(AttentionShape::to_string).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), shapes.len());
        for shape in shapes {
            assert!(nibble_cuda::ops::ATTENTION_DIMS.contains(&(shape.head_dim, shape.value_dim)), "{shape}");
        }
    }
}
