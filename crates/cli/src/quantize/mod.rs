//! `nibble quantize`: quantizes the matrices of a safetensors file to a block format, and dequantizes them.
//!
//! A matrix `NAME` `[rows, cols]`, or a stack `[stack, rows, cols]` such as the experts of a layer, becomes the buffers `NAME.codes` and
//! `NAME.scales` in Nibble's layout, concatenated over the stack. Codes below 8 bits are packed, starting at the lowest bit. A block's
//! scales are one record of bytes; F32 scales are stored as F32. Buffers of column blocks are transposed and zero-padded to whole blocks.
//! If the blocks of a matrix share a tensor scale, `NAME.tensor_scale` holds one F32 per matrix. The metadata key `nibble.NAME` is a JSON
//! object with format, axis, scale rule, rounding, shape and type.

mod about;
mod back;
mod converted;
mod forward;
mod loss;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use converted::Converted;
use loss::Losses;
use nibble_command::console::bytes;
use nibble_command::device::{self, Device, DeviceArg, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::output::{Force, Mark, Outputs};
use nibble_command::say;
use nibble_core::allocation::{may_be_refused, phase};
use nibble_formats::{
    BlockAxis, Candidates, Format, Headroom, Outer, Rounding, ScaleRule, Scaling, Thresholds,
};
use nibble_train::config::RunConfig;
use nibble_train::files::open_to_read;
use safetensors::SafeTensors;
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Quantizes or dequantizes the tensors of a safetensors file
///
/// Converts every F32, BF16 or F16 matrix of the file, and every stack of such matrices, to a block format. With --back, dequantizes the
/// tensors of a file that `nibble quantize` wrote.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A block is a part of a row, a part of a column (the code and scale buffers are then transposed), or a square part of a \
    matrix. A tensor with three dimensions is a stack of matrices; each matrix is quantized separately. Tensors that are not matrices of \
    floats, and tensors that are already quantized, are copied unchanged. The input file is never modified. Equal input files and equal \
    options give equal output bytes. The command prints the largest quantization error, and warns of errors that rounding does not \
    explain: values that become infinite, values larger than the format's largest number, and values in blocks that are too small for any scale.\n\n\
    Nibble stores a quantized tensor NAME as these buffers:\n  \
    NAME.codes         codes, packed from the lowest bit on: two 4-bit codes per byte, four 6-bit\n                     \
    codes per 3 bytes\n  \
    NAME.scales        the scales of each block:\n                     \
    MX, and FP8 with a power-of-two rule: an E8M0 byte\n                     \
    FP8 with amax: an F32\n                     \
    nvfp4: an E4M3 byte\n                     \
    nvfp4-128: 8 bytes, an E8M0 byte and then 7 bits per 16 values\n                     \
    hif4: 4 bytes, an E6M2 byte, then one bit per 8 values, then one bit per\n                     \
    4 values\n                     \
    e4m3-row and e5m2-row have one scale per row. With --axis col, each column has\n                     \
    one scale per 128 rows, and all scales of a column are equal\n  \
    NAME.tensor_scale  one F32 per matrix, which multiplies all blocks of the matrix (nvfp4 with\n                     \
    tensor-amax, e4m3-tensor, e5m2-tensor)\n\n\
    Examples:\n  \
    nibble quantize model.safetensors model-mxfp4.safetensors --format mxfp4\n  \
    nibble quantize model.safetensors q.safetensors --format e4m3 --axis tile --scale rceil --only '*.mlp.*'\n  \
    nibble quantize model-mxfp4.safetensors plain.safetensors --back"
)]
pub struct Args {
    /// Safetensors file to read.
    input: PathBuf,
    /// Safetensors file to write.
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Block format to quantize to.
    #[arg(long, required_unless_present = "back", conflicts_with = "back", value_parser = block_format())]
    format: Option<Format>,
    /// Shape of the blocks: parts of rows (row), parts of columns (col), or squares (tile). Only e4m3, e5m2, e4m3-tensor, e5m2-tensor and
    /// nvfp4 support square blocks.
    #[arg(long, default_value = "row", conflicts_with = "back")]
    axis: BlockAxis,
    /// Rule that computes the scales: floor, rceil, ceil or even (which give power-of-two scales), amax, tensor-amax or cann. The default
    /// depends on the format; `nibble doctor --all` lists the rules of each format, the default rule first.
    #[arg(long, value_name = "RULE", conflicts_with = "back")]
    scale: Option<ScaleRule>,
    #[command(flatten)]
    scaling: ScalingArgs,
    /// How values are rounded to codes: nearest-even, nearest-away, stochastic, or dither:DELTA.
    /// Default: nearest-away for hif4, nearest-even for all other formats.
    #[arg(long, value_name = "ROUNDING", conflicts_with = "back")]
    round: Option<Rounding>,
    /// Seed of the random bits for stochastic and dither rounding. The random bits depend on the seed and on the tensor's name.
    #[arg(long, default_value_t = 0, conflicts_with = "back")]
    seed: u64,
    /// Quantizes only tensors whose names match GLOB, which may contain `*` and `?`. This option may be repeated.
    #[arg(long, value_name = "GLOB", conflicts_with = "back")]
    only: Vec<String>,
    /// Dequantizes the quantized tensors of INPUT to their original types.
    #[arg(long)]
    back: bool,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    device: DeviceArg,
}

/// Scaling options besides the scale rule. An option is refused if the format does not have this choice.
#[derive(Debug, clap::Args)]
struct ScalingArgs {
    /// Computes each scale as if the largest magnitude of the block or tensor were FACTOR times as large. FACTOR is a multiple of 1/16 from
    /// 1 to 2.
    #[arg(long, value_name = "FACTOR", conflicts_with = "back", value_parser = headroom)]
    headroom: Option<Headroom>,
    /// Two thresholds for magnitudes, in units of the block's scale: 4,2 or 3.5,1.75 (hif4 only). For an eighth of a block, the scale is
    /// doubled if a magnitude in the eighth reaches the first threshold. For a sixteenth of a block, the scale is doubled additionally if a
    /// magnitude in the sixteenth reaches the first threshold (in an eighth with a doubled scale) or the second threshold (in any other
    /// eighth).
    #[arg(long, value_name = "TWO", conflicts_with = "back")]
    thresholds: Option<Thresholds>,
    /// E2M1 number to which the scale maps a block's largest magnitude (nvfp4 only): 6 = always 6; 4/6-mse = 4 or 6, whichever gives the
    /// block the smaller squared error; 4/6-mae = 4 or 6, whichever gives the block the smaller absolute error.
    #[arg(long, conflicts_with = "back")]
    candidates: Option<Candidates>,
    /// Type of the per-tensor scale (nvfp4 with tensor-amax only): tensor (any F32 number), or power (that number rounded up to a power of
    /// two).
    #[arg(long, conflicts_with = "back")]
    outer: Option<Outer>,
}

impl ScalingArgs {
    fn get(&self) -> Scaling {
        Scaling {
            headroom: self.headroom.unwrap_or_default(),
            thresholds: self.thresholds.unwrap_or_default(),
            candidates: self.candidates.unwrap_or_default(),
            outer: self.outer.unwrap_or_default(),
            ..Scaling::default()
        }
    }
}

fn headroom(text: &str) -> std::result::Result<Headroom, String> {
    let factor = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    Headroom::new(factor).map_err(|e| e.to_string())
}

/// Parses the name of a block format; plain formats are refused.
fn block_format() -> impl TypedValueParser<Value = Format> {
    let blocks = Format::ALL.map(Format::spec).into_iter().filter(|spec| spec.element.is_some());
    PossibleValuesParser::new(blocks.map(|spec| spec.name)).try_map(|name| name.parse())
}

/// The mark in an output's metadata, by which a later run recognises its own output.
const MARK: Mark = Mark::Tensors("nibble quantize");

pub fn run(args: Args) -> Result<()> {
    let mut outputs = Outputs::new(args.force, [args.input.clone()]);
    let output = outputs.named(&args.output, &MARK)?;
    phase(format_args!("reading {}", args.input.display()));
    let input = read(&args.input)?;
    let wrong = |e| Error::usage(format!("{}: not a safetensors file: {e}", args.input.display()));
    let (_, header) = SafeTensors::read_metadata(&input).map_err(wrong)?;
    let file = SafeTensors::deserialize(&input).map_err(wrong)?;
    let metadata = header.metadata().clone().unwrap_or_default();
    let run = RunConfig { device: args.device.device.unwrap_or_default(), ..RunConfig::default() };
    let work = Conversion { args: &args, file: &file, metadata: &metadata };
    let (mut out, converted, losses) = device::run(&run, &work)?;
    MARK.tensors(&mut out.metadata);
    phase(format_args!("writing {}", args.output.display()));
    let size = out.write(output)?;
    losses.tell();
    let what = if args.back { "restored" } else { "quantized" };
    let copied: usize = out.copied.values().sum();
    let reasons: Vec<String> = out.copied.iter().map(|(why, number)| format!("{number} {why}")).collect();
    let reasons = if copied > 0 { format!(" ({})", reasons.join(", ")) } else { String::new() };
    say!("{converted} tensors {what}, {copied} copied{reasons}");
    say!(
        "{}: {} → {}: {}",
        args.input.display(),
        bytes(input.len() as u64),
        args.output.display(),
        bytes(size)
    );
    Ok(())
}

/// Reads a whole file. If the file is larger than memory, the result is an error, and the process is not killed.
fn read(path: &Path) -> Result<Vec<u8>> {
    let mut file = open_to_read(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::InvalidInput => Error::usage(format!("{} {e}", path.display())),
        _ => Error::io(path)(e),
    })?;
    let len = file.metadata().map_err(Error::io(path))?.len();
    let mut content = Vec::new();
    let room = usize::try_from(len).ok();
    let room = room.and_then(|len| may_be_refused(|| content.try_reserve_exact(len)).ok());
    room.ok_or_else(|| {
        let path = path.display();
        Error::Failed(format!("out of memory: reading {path}: the system refused this process {len} bytes"))
    })?;
    // The read is limited to this length, in case the file grows meanwhile.
    file.by_ref().take(len).read_to_end(&mut content).map_err(Error::io(path))?;
    Ok(content)
}

/// The conversion of a file, in either direction.
struct Conversion<'a, 'd> {
    args: &'a Args,
    file: &'a SafeTensors<'d>,
    metadata: &'a HashMap<String, String>,
}

impl<'d> Work for Conversion<'_, 'd> {
    /// The output file, the number of converted tensors, and their losses.
    type Out = (Converted<'d>, usize, Losses);

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Self::Out> {
        let Self { args, file, metadata } = *self;
        let metadata: BTreeMap<_, _> = metadata.clone().into_iter().collect();
        let mut out = Converted::new(metadata);
        let mut losses = Losses::default();
        on.announce();
        // clap guarantees that either a format or `--back` is given.
        let converted = match args.format {
            None => back::restore(on.b, file, &mut out)?,
            Some(format) => forward::quantize(on.b, (args, format), file, &mut out, &mut losses)?,
        };
        Ok((out, converted, losses))
    }
}
