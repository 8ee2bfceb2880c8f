//! `nibble quantize`: the matrices of a safetensors file to a block format, and back.
//!
//! For a matrix `NAME` `[rows, cols]`, or a stack of them `[stack, rows, cols]` such as the experts of a layer, one after the
//! other, the output holds `NAME.codes` and `NAME.scales`, planes that lie as Nibble keeps
//! them (codes of less than a byte one after the other from the lowest bit on; a block's scales as one record of bytes, F32 scales as F32; column
//! planes transposed and zero-extended to whole blocks), where its blocks share a scale `NAME.tensor_scale`, one F32 a matrix, and in the file's metadata under `nibble.NAME` a JSON object with format, axis, scale rule, rounding, shape and type.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use half::{bf16, f16};
use nibble_command::console::bytes;
use nibble_command::device::{self, Device, DeviceArg, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::say;
use nibble_core::allocation::phase;
use nibble_core::ops::{Counts, Dequantize, Planes, Quantize};
use nibble_core::recipe::glob;
use nibble_core::{Backend, BlockScaled, Convert, DType, Operand, Tensor};
use nibble_formats::{
    BlockAxis, Codec, Format, Purpose, Rounding, ScaleKind, ScaleLayout, ScaleRule, Stream, fnv1a32,
};
use nibble_train::config::RunConfig;
use safetensors::{Dtype, SafeTensors};
use serde_json::json;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Quantizes every matrix, and every stack of matrices, of a safetensors file (F32, BF16 or F16), or brings a quantized file back to plain numbers.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Blocks run along rows, down columns (then the planes lie transposed) or are square tiles. Of three\n\
    sizes the first is the number of matrices, each of which has blocks of its own. Tensors that are not matrices of\n\
    floats are copied. The output is written beside its place and renamed; the input is never touched.\n\n\
    Planes of a tensor NAME:\n  \
    NAME.codes         codes of less than 8 bits are packed from the lowest bit on: 2 of 4 bits a byte, 4 of 6 bits in 3 bytes\n  \
    NAME.scales        a record a block: an E8M0 byte (MX, FP8 with a power-of-two rule), an F32 (FP8 with amax), an E4M3\n                     \
    byte (nvfp4), or 4 bytes (hif4: an E6M2 byte, 8 bits for 8 values each, 16 bits for 4 values each).\n                     \
    Of e4m3-row and e5m2-row one a row; down columns one for each 128 rows, all of a column alike\n  \
    NAME.tensor_scale  an F32 a matrix that multiplies all its blocks (nvfp4 with tensor-amax, e4m3-tensor, e5m2-tensor)\n\n\
    Examples:\n  \
    nibble quantize model.safetensors model-mxfp4.safetensors --format mxfp4\n  \
    nibble quantize model.safetensors q.safetensors --format e4m3 --axis tile --scale rceil --only '*.mlp.*'\n  \
    nibble quantize model-mxfp4.safetensors plain.safetensors --back"
)]
pub struct Args {
    /// The safetensors file to read.
    input: PathBuf,
    /// The safetensors file to write.
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
    device: DeviceArg,
}

/// Reads the formats that quantize, and no plain one.
fn block_format() -> impl TypedValueParser<Value = Format> {
    let blocks = Format::ALL.map(Format::spec).into_iter().filter(|spec| spec.element.is_some());
    PossibleValuesParser::new(blocks.map(|spec| spec.name)).try_map(|name| name.parse())
}

pub fn run(args: Args) -> Result<()> {
    if !std::fs::metadata(&args.input).map_err(Error::io(&args.input))?.is_file() {
        let why = "is no file: the tensors of a device, a pipe or a directory have no known end";
        return Err(Error::usage(format!("{}: {why}", args.input.display())));
    }
    phase(format_args!("reading {}", args.input.display()));
    let input = std::fs::read(&args.input).map_err(Error::io(&args.input))?;
    let wrong = |e| Error::usage(format!("{}: not a safetensors file: {e}", args.input.display()));
    let (_, header) = SafeTensors::read_metadata(&input).map_err(wrong)?;
    let file = SafeTensors::deserialize(&input).map_err(wrong)?;
    if same_file(&args.input, &args.output) {
        let input = args.input.display();
        return Err(Error::usage(format!(
            "{input}: the output would overwrite the input; name another file"
        )));
    }
    let metadata = header.metadata().clone().unwrap_or_default();
    let run = RunConfig { device: args.device.device.unwrap_or_default(), ..RunConfig::default() };
    let (out, converted) = device::run(&run, &Conversion { args: &args, file: &file, metadata: &metadata })?;
    let size = out.write(&args.output)?;
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

/// The whole file, either way.
struct Conversion<'a, 'd> {
    args: &'a Args,
    file: &'a SafeTensors<'d>,
    metadata: &'a HashMap<String, String>,
}

impl<'d> Work for Conversion<'_, 'd> {
    /// The file to be written, and how many tensors were converted.
    type Out = (Output<'d>, usize);

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Self::Out> {
        let Self { args, file, metadata } = *self;
        let mut out = Output { metadata: metadata.clone(), ..Output::default() };
        on.announce();
        let converted = match args.back {
            true => restore(on.b, file, &mut out)?,
            false => quantize(on.b, args, file, &mut out)?,
        };
        Ok((out, converted))
    }
}

fn same_file(input: &Path, output: &Path) -> bool {
    // A file that does not exist yet is no file's other name.
    matches!((input.canonicalize(), output.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// The file to be written.
#[derive(Default)]
struct Output<'d> {
    tensors: BTreeMap<String, Plane<'d>>,
    metadata: HashMap<String, String>,
    /// How many tensors were copied, by why.
    copied: BTreeMap<&'static str, usize>,
}

struct Plane<'d> {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Cow<'d, [u8]>,
}

impl safetensors::View for &Plane<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }
    fn data_len(&self) -> usize {
        self.data.len()
    }
}

impl<'d> Output<'d> {
    fn put(
        &mut self,
        name: String,
        dtype: Dtype,
        shape: Vec<usize>,
        data: impl Into<Cow<'d, [u8]>>,
    ) -> Result<()> {
        let plane = Plane { dtype, shape, data: data.into() };
        match self.tensors.insert(name.clone(), plane) {
            None => Ok(()),
            Some(_) => Err(Error::usage(format!("the output would have two tensors called `{name}`"))),
        }
    }

    fn copy(
        &mut self,
        name: &str,
        view: &safetensors::tensor::TensorView<'d>,
        why: &'static str,
    ) -> Result<()> {
        *self.copied.entry(why).or_default() += 1;
        self.put(name.to_owned(), view.dtype(), view.shape().to_vec(), view.data())
    }

    /// Writes beside the place and renames, so that no half file ever bears the name.
    fn write(&self, path: &Path) -> Result<u64> {
        phase(format_args!("writing {}", path.display()));
        let metadata = (!self.metadata.is_empty()).then(|| self.metadata.clone());
        let content =
            safetensors::serialize(&self.tensors, metadata).map_err(|e| Error::Failed(e.to_string()))?;
        nibble_train::files::write_whole(path, &content).map_err(Error::io(path))?;
        Ok(content.len() as u64)
    }
}

fn quantize<'d, B: Convert>(
    b: &B,
    args: &Args,
    file: &SafeTensors<'d>,
    out: &mut Output<'d>,
) -> Result<usize> {
    // The parser asks for a format unless `--back` is there.
    let format = args.format.unwrap_or(Format::Mxfp4);
    let rule = args.scale.or(format.spec().default_rule()).unwrap_or(ScaleRule::Amax);
    let round = args.round.unwrap_or(format.rounding(rule));
    let codec = Codec::new(format, rule, round).map_err(Error::usage)?;
    if args.axis == BlockAxis::Tile && !format.spec().tiles {
        return Err(Error::usage(format!("--axis tile: {format} has no square tiles")));
    }
    require_matches(&args.only, file)?;
    let mut converted = 0;
    for (name, view) in file.iter() {
        phase(format_args!("quantizing `{name}`"));
        let wanted = args.only.is_empty() || args.only.iter().any(|pattern| glob(pattern, name));
        let why = match (wanted, matrices(view.shape()), floats(view.dtype(), view.data())) {
            (false, ..) => "not asked for",
            (_, None, _) => "not matrices",
            (_, _, None) => "not floats",
            (_, _, Some(values)) if values.is_empty() => "without values",
            (_, Some(sizes), Some(values)) => {
                let planes = quantize_all(b, args, codec, (name, sizes), &values)?;
                store(b, name, &view, &planes, round, out)?;
                converted += 1;
                continue;
            }
        };
        out.copy(name, &view, why)?;
    }
    Ok(converted)
}

/// Checks that each glob is some tensor's.
fn require_matches(globs: &[String], file: &SafeTensors<'_>) -> Result<()> {
    let Some(none) = globs.iter().find(|only| !file.names().into_iter().any(|name| glob(only, name))) else {
        return Ok(());
    };
    let mut names = file.names();
    names.sort_unstable();
    names.truncate(3);
    Err(Error::usage(format!("--only `{none}`: no tensor is called so; there are {}, ...", names.join(", "))))
}

/// Number, rows and columns of the matrices that a tensor of this shape holds.
fn matrices(shape: &[usize]) -> Option<[usize; 3]> {
    match *shape {
        [rows, cols] => Some([1, rows, cols]),
        [stack, rows, cols] => Some([stack, rows, cols]),
        _ => None,
    }
}

/// Each matrix of a tensor, quantized by itself.
fn quantize_all<B: Convert>(
    b: &B,
    args: &Args,
    codec: Codec,
    (name, [stack, rows, cols]): (&str, [usize; 3]),
    values: &[f32],
) -> Result<Vec<BlockScaled<B>>> {
    let mut all = Vec::with_capacity(stack);
    let mut bad = 0;
    for (i, values) in values.chunks_exact(rows * cols).enumerate() {
        let x = Tensor::from_f32(b, values, rows, cols)?;
        // Each matrix of a stack has random bits of its own.
        let site = if stack == 1 { fnv1a32(name) } else { fnv1a32(&format!("{name}.{i}")) };
        let random =
            codec.rounding().is_random().then(|| Stream::new(args.seed, Purpose::Rounding, site, 0).into());
        let op = Quantize { random, ..Quantize::new(&x, codec, planes(args.axis)) };
        let emitted = op.run(b)?;
        if let Some(counts) = &emitted.counts {
            bad += b.download(&counts.0)?[Counts::<B>::NON_FINITE];
        }
        let plane = if args.axis == BlockAxis::Col {
            emitted.take_cols("quantize")
        } else {
            emitted.take_rows("quantize")
        };
        let Operand::Block(q) = plane? else {
            return Err(Error::Failed(format!("tensor `{name}`: quantizing gave a plain tensor")));
        };
        all.push(q);
    }
    if bad > 0 {
        say!("warning: `{name}`: {bad} blocks hold a NaN or an infinity; their scales are NaN");
    }
    Ok(all)
}

fn planes(axis: BlockAxis) -> Planes {
    match axis {
        BlockAxis::Row => Planes::Rows,
        BlockAxis::Col => Planes::Cols,
        BlockAxis::Tile => Planes::Tiles,
    }
}

/// The numbers of a tensor, exactly; `None` for types that are not quantized.
fn floats(dtype: Dtype, data: &[u8]) -> Option<Vec<f32>> {
    // Not casts: the file's bytes need not be aligned in memory.
    let halves = || data.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match dtype {
        Dtype::F32 => Some(words(data)),
        Dtype::BF16 => Some(halves().map(|b| bf16::from_bits(b).to_f32()).collect()),
        Dtype::F16 => Some(halves().map(|b| f16::from_bits(b).to_f32()).collect()),
        _ => None,
    }
}

fn words(data: &[u8]) -> Vec<f32> {
    data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Rows of the code plane and of the scale plane.
fn plane_rows(axis: BlockAxis, format: Format, rows: usize, cols: usize) -> (usize, usize) {
    match axis {
        BlockAxis::Row => (rows, rows),
        BlockAxis::Col => (cols, cols),
        BlockAxis::Tile => (rows, rows.div_ceil(format.spec().block)),
    }
}

/// Puts the two planes of a quantized tensor, those of all its matrices one after the other, and what one must know to read them.
fn store<B: Backend>(
    b: &B,
    name: &str,
    view: &safetensors::tensor::TensorView<'_>,
    all: &[BlockScaled<B>],
    round: Rounding,
    out: &mut Output<'_>,
) -> Result<()> {
    // A tensor with values has a matrix.
    let Some(q) = all.first() else { return Ok(()) };
    let (code_rows, scale_rows) = plane_rows(q.axis, q.format, q.rows, q.cols);
    let shape = |rows: usize, len: usize| match view.shape().len() {
        3 => vec![all.len(), rows, len / all.len() / rows],
        _ => vec![rows, len / rows],
    };
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    let scale_type = scale_type(q.scale_kind());
    let mut tensor_scales: Vec<u8> = Vec::new();
    for q in all {
        codes.extend(b.download(&q.codes)?);
        scales.extend(b.download(&q.scales)?);
        // All rows of a matrix have the same.
        let of_rows = q.tensor_scale.as_ref().map(|scale| b.download(scale)).transpose()?;
        tensor_scales.extend(of_rows.iter().flat_map(|rows| rows.first()).flat_map(|s| s.to_le_bytes()));
    }
    out.put(format!("{name}.codes"), Dtype::U8, shape(code_rows, codes.len()), codes)?;
    let values = scales.len() * 8 / scale_type.bitsize();
    if q.scale_kind().bytes() > 0 {
        out.put(format!("{name}.scales"), scale_type, shape(scale_rows, values), scales)?;
    }
    if q.tensor_scale.is_some() {
        out.put(format!("{name}.{TENSOR_SCALE}"), Dtype::F32, vec![all.len()], tensor_scales)?;
    }
    let about = json!({
        "format": q.format.to_string(),
        "axis": q.axis.to_string(),
        "scale": q.rule.to_string(),
        "round": round.to_string(),
        "shape": view.shape(),
        "dtype": view.dtype().to_string(),
    });
    out.metadata.insert(format!("{PREFIX}{name}"), about.to_string());
    Ok(())
}

/// The type of a plane of records: singles where they are such, otherwise bytes.
fn scale_type(kind: ScaleKind) -> Dtype {
    if kind == ScaleKind::F32 { Dtype::F32 } else { Dtype::U8 }
}

/// What the name of a plane of tensors' scales ends in.
const TENSOR_SCALE: &str = "tensor_scale";

/// What the metadata keys of quantized tensors begin with.
const PREFIX: &str = "nibble.";

/// One quantized tensor as the metadata describes it.
struct About {
    format: Format,
    axis: BlockAxis,
    rule: ScaleRule,
    /// Two sizes, or three of a stack of matrices.
    shape: Vec<usize>,
    dtype: Dtype,
}

impl About {
    fn parse(name: &str, text: &str) -> Result<Self> {
        let wrong = |what: &str| Error::usage(format!("metadata `{PREFIX}{name}`: {what}"));
        let value: serde_json::Value = serde_json::from_str(text).map_err(|e| wrong(&e.to_string()))?;
        let text = |key: &str| value[key].as_str().ok_or_else(|| wrong(&format!("has no `{key}`")));
        let size = |value: &serde_json::Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        let sizes = || value["shape"].as_array()?.iter().map(size).collect::<Option<Vec<_>>>();
        let has_no_shape = || wrong("has no `shape` of two sizes, or of three for a stack of matrices");
        let dtype = match text("dtype")? {
            "F32" => Dtype::F32,
            "BF16" => Dtype::BF16,
            "F16" => Dtype::F16,
            other => return Err(wrong(&format!("has dtype `{other}`, expected F32, BF16 or F16"))),
        };
        let unknown = |e: nibble_formats::Error| wrong(&e.to_string());
        let format: Format = text("format")?.parse().map_err(unknown)?;
        let axis: BlockAxis = text("axis")?.parse().map_err(unknown)?;
        let rule: ScaleRule = text("scale")?.parse().map_err(unknown)?;
        let shape = sizes().ok_or_else(has_no_shape)?;
        let [stack, rows, cols] = matrices(&shape).ok_or_else(has_no_shape)?;
        Codec::new(format, rule, Rounding::NearestEven).map_err(unknown)?;
        // Far from overflow even in bytes, whatever a damaged file says.
        let values = rows.checked_mul(cols).and_then(|n| n.checked_mul(stack));
        if values.is_none_or(|n| n == 0 || n > isize::MAX as usize / 16) {
            return Err(wrong("has a `shape` without values, or beyond any memory"));
        }
        Ok(Self { format, axis, rule, shape, dtype })
    }
}

fn restore<'d, B: Convert>(b: &B, file: &SafeTensors<'d>, out: &mut Output<'d>) -> Result<usize> {
    let described: Vec<(String, String)> = out
        .metadata
        .iter()
        .filter_map(|(key, text)| Some((key.strip_prefix(PREFIX)?.to_owned(), text.clone())))
        .collect();
    if described.is_empty() {
        return Err(Error::usage("the input holds nothing that nibble quantized: no `nibble.` metadata"));
    }
    let mut planes = std::collections::BTreeSet::new();
    for (name, text) in &described {
        phase(format_args!("restoring `{name}`"));
        let about = About::parse(name, text)?;
        let (codes, scales) = (format!("{name}.codes"), format!("{name}.scales"));
        let kind = about.format.scale_kind(about.rule);
        let all_codes = plane(file, &codes)?;
        let all_scales = if kind.bytes() > 0 { plane(file, &scales)? } else { &[] };
        let tensor_scale = format!("{name}.{TENSOR_SCALE}");
        let of_tensors =
            if kind.has_tensor_scale() { words(plane(file, &tensor_scale)?) } else { Vec::new() };
        let stack = if about.shape.len() == 3 { about.shape[0] } else { 1 };
        if [all_codes, all_scales].iter().any(|plane| !plane.len().is_multiple_of(stack))
            || all_codes.len() < stack
            || (kind.has_tensor_scale() && of_tensors.len() != stack)
        {
            return Err(Error::usage(format!(
                "tensor `{name}`: its planes are not those of {stack} matrices"
            )));
        }
        let mut data = Vec::new();
        let one = |plane: &[u8]| plane.len() / stack;
        for (i, codes) in all_codes.chunks_exact(one(all_codes)).enumerate() {
            let scales = &all_scales[i * one(all_scales)..][..one(all_scales)];
            let plain = plain(b, &about, codes, scales, of_tensors.get(i).copied());
            data.extend(plain.map_err(|e| Error::usage(format!("tensor `{name}`: {e}")))?);
        }
        out.put(name.clone(), about.dtype, about.shape, data)?;
        out.metadata.remove(&format!("{PREFIX}{name}"));
        planes.extend([codes, scales, tensor_scale]);
    }
    for (name, view) in file.iter().filter(|(name, _)| !planes.contains(*name)) {
        out.copy(name, &view, "not quantized")?;
    }
    Ok(described.len())
}

fn plane<'d>(file: &SafeTensors<'d>, name: &str) -> Result<&'d [u8]> {
    let view = file.tensor(name).map_err(|_| Error::usage(format!("tensor `{name}` is missing")))?;
    Ok(view.data())
}

/// Decodes the two planes of a matrix to bytes of the original type.
fn plain<B: Convert>(
    b: &B,
    about: &About,
    codes: &[u8],
    scales: &[u8],
    tensor_scale: Option<f32>,
) -> nibble_core::Result<Vec<u8>> {
    // Known to be two sizes or three.
    let [_, matrix_rows, cols] = matrices(&about.shape).unwrap_or_default();
    // Column planes have whole blocks: rows past the matrix hold zeros.
    let rows = match about.axis {
        BlockAxis::Col => matrix_rows.next_multiple_of(about.format.column_step()),
        BlockAxis::Row | BlockAxis::Tile => matrix_rows,
    };
    let q = BlockScaled {
        format: about.format,
        axis: about.axis,
        rule: about.rule,
        rows,
        cols,
        stack: 1,
        codes: b.upload(codes)?,
        scales: b.upload(scales)?,
        tensor_scale: tensor_scale.map(|scale| b.upload(&vec![scale; rows])).transpose()?,
        scale_layout: ScaleLayout::RowMajor,
        shared_cols: 1,
    };
    let dtype = if about.dtype == Dtype::BF16 { DType::Bf16 } else { DType::F32 };
    let x = Dequantize { x: &q, dtype }.run(b)?;
    let values = &x.to_f32_vec(b)?[..matrix_rows * cols];
    Ok(match about.dtype {
        Dtype::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_that_makes_no_sense_is_named() {
        let of = |text| About::parse("w", text).map(drop).unwrap_err().to_string();
        assert!(of("{}").contains("`nibble.w`: has no `dtype`"));
        let text = r#"{"dtype":"F32","format":"mxfp5","axis":"row","scale":"rceil","shape":[1,32]}"#;
        assert!(of(text).contains("mxfp5") && of(text).contains("mxfp4"));
        let text = r#"{"dtype":"F32","format":"mxfp4","axis":"row","scale":"rceil","shape":[1]}"#;
        assert!(of(text).contains("two sizes"));
    }
}
