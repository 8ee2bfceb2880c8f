//! `nibble quantize`: the matrices of a safetensors file to a block format, and back.
//!
//! For a matrix `NAME` `[rows, cols]`, or a stack of them `[stack, rows, cols]` such as the experts of a layer, one after the
//! other, the output holds `NAME.codes` and `NAME.scales`, planes that lie as Nibble keeps
//! them (codes of less than a byte one after the other from the lowest bit on; a block's scales as one record of bytes, F32 scales as F32; column
//! planes transposed and zero-extended to whole blocks), where its blocks share a scale `NAME.tensor_scale`, one F32 a matrix, and in the file's metadata under `nibble.NAME` a JSON object with format, axis, scale rule, rounding, shape and type.

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

/// Quantizes a safetensors file, or brings it back
///
/// Every matrix, and every stack of matrices, of F32, BF16 or F16 to a block format; with --back a quantized file to plain numbers.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Blocks run along rows, down columns (then the planes lie transposed) or are square tiles. Of three \
    sizes the first is the number of matrices, each of which has blocks of its own. Tensors that are not matrices of \
    floats are copied, and so is what is quantized already. The input is never touched, and equal input gives equal bytes. \
    A line tells of the largest error, and warnings of values that no rounding explains: those that come back infinite, that \
    are larger than what the format holds, or so small that their whole block comes back as zeros or otherwise.\n\n\
    Planes of a tensor NAME:\n  \
    NAME.codes         codes of less than 8 bits are packed from the lowest bit on: 2 of 4 bits a byte,\n                     \
    4 of 6 bits in 3 bytes\n  \
    NAME.scales        a record a block: an E8M0 byte (MX, FP8 with a power-of-two rule), an F32 (FP8 with\n                     \
    amax), an E4M3 byte (nvfp4), 8 bytes (nvfp4-128: an E8M0 byte, 7 bits for 16 values\n                     \
    each), or 4 bytes (hif4: an E6M2 byte, 8 bits for 8 values each, 16 bits for\n                     \
    4 values each). Of e4m3-row and e5m2-row one a row; down columns\n                     \
    one for each 128 rows, all of a column alike\n  \
    NAME.tensor_scale  an F32 a matrix that multiplies all its blocks (nvfp4 with tensor-amax,\n                     \
    e4m3-tensor, e5m2-tensor)\n\n\
    Examples:\n  \
    nibble quantize model.safetensors model-mxfp4.safetensors --format mxfp4\n  \
    nibble quantize model.safetensors q.safetensors --format e4m3 --axis tile --scale rceil --only '*.mlp.*'\n  \
    nibble quantize model-mxfp4.safetensors plain.safetensors --back"
)]
pub struct Args {
    /// The safetensors file to read.
    input: PathBuf,
    /// The safetensors file to write.
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Block format.
    #[arg(long, required_unless_present = "back", conflicts_with = "back", value_parser = block_format())]
    format: Option<Format>,
    /// Along what blocks run: row, col or tile (squares; e4m3, e5m2, their -tensor forms and nvfp4 only).
    #[arg(long, default_value = "row", conflicts_with = "back")]
    axis: BlockAxis,
    /// Scale rule: floor, rceil, ceil or even (powers of two), amax, tensor-amax or cann. The format's default where left out; `nibble doctor`
    /// lists those of each format.
    #[arg(long, value_name = "RULE", conflicts_with = "back")]
    scale: Option<ScaleRule>,
    #[command(flatten)]
    scaling: ScalingArgs,
    /// Rounding: nearest-even, nearest-away, stochastic, or dither:DELTA.
    /// The format's own where left out: nearest-away for hif4, nearest-even for the others.
    #[arg(long, value_name = "ROUNDING", conflicts_with = "back")]
    round: Option<Rounding>,
    /// Seed of random roundings; the bits depend on it and on the tensor's name.
    #[arg(long, default_value_t = 0, conflicts_with = "back")]
    seed: u64,
    /// Quantizes only tensors whose name matches one of these globs (`*` and `?`).
    #[arg(long, value_name = "GLOB", conflicts_with = "back")]
    only: Vec<String>,
    /// Brings quantized tensors back to plain numbers of their original type.
    #[arg(long)]
    back: bool,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    device: DeviceArg,
}

/// What may be asked of a format's scales beside its rule; refused where the format has no such choice.
#[derive(Debug, clap::Args)]
struct ScalingArgs {
    /// Chooses scales, a tensor's too, as if the largest magnitude were so much larger: 1 to 2 in steps of 1/16.
    #[arg(long, value_name = "FACTOR", conflicts_with = "back", value_parser = headroom)]
    headroom: Option<Headroom>,
    /// From where on a share of a block gets another octave: 4,2 or 3.5,1.75 (hif4 only).
    #[arg(long, value_name = "TWO", conflicts_with = "back")]
    thresholds: Option<Thresholds>,
    /// What a block's largest magnitude may become: 6, 4/6-mse or 4/6-mae (nvfp4 only).
    #[arg(long, conflicts_with = "back")]
    candidates: Option<Candidates>,
    /// What the scale of a tensor is rounded to: tensor (an F32) or power (nvfp4 with tensor-amax only).
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

/// Reads the formats that quantize, and no plain one.
fn block_format() -> impl TypedValueParser<Value = Format> {
    let blocks = Format::ALL.map(Format::spec).into_iter().filter(|spec| spec.element.is_some());
    PossibleValuesParser::new(blocks.map(|spec| spec.name)).try_map(|name| name.parse())
}

/// What the metadata of an output tell of who wrote it.
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

/// All of a file. More than memory holds is an error, not the process's end.
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
        Error::Failed(format!(
            "out of memory: reading {path}: {len} bytes were asked for, and the system gives this process no more"
        ))
    })?;
    // No more than that: a file that grows has another end by then.
    file.by_ref().take(len).read_to_end(&mut content).map_err(Error::io(path))?;
    Ok(content)
}

/// The whole file, either way.
struct Conversion<'a, 'd> {
    args: &'a Args,
    file: &'a SafeTensors<'d>,
    metadata: &'a HashMap<String, String>,
}

impl<'d> Work for Conversion<'_, 'd> {
    /// The file to be written, how many tensors were converted, and what that changed.
    type Out = (Converted<'d>, usize, Losses);

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Self::Out> {
        let Self { args, file, metadata } = *self;
        let metadata: BTreeMap<_, _> = metadata.clone().into_iter().collect();
        let mut out = Converted::new(metadata);
        let mut losses = Losses::default();
        on.announce();
        // There is a format, or `--back`.
        let converted = match args.format {
            None => back::restore(on.b, file, &mut out)?,
            Some(format) => forward::quantize(on.b, (args, format), file, &mut out, &mut losses)?,
        };
        Ok((out, converted, losses))
    }
}
