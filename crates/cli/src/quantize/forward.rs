//! Quantizes tensors to code and scale buffers.

use super::Args;
use super::about::{PREFIX, described, matrices, planes};
use super::back::{decode, words};
use super::converted::Converted;
use super::loss::{Blocks, Expected, Loss, Losses};
use half::{bf16, f16};
use nibble_command::error::{Error, Result};
use nibble_core::allocation::phase;
use nibble_core::ops::{Planes, Quantize};
use nibble_core::recipe::glob;
use nibble_core::{Backend, BlockScaled, Kernels, Operand, Tensor};
use nibble_formats::{BlockAxis, Codec, Format, Purpose, ScaleKind, ScaleRule, Scaling, Stream, fnv1a32};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// Quantizes the selected tensors, and copies all other tensors.
pub fn quantize<'d, B: Kernels>(
    b: &B,
    (args, format): (&Args, Format),
    file: &SafeTensors<'d>,
    out: &mut Converted<'d>,
    losses: &mut Losses,
) -> Result<usize> {
    let rule = args.scale.or(format.spec().default_rule()).unwrap_or(ScaleRule::Amax);
    let round = args.round.unwrap_or(format.rounding(rule));
    let codec = Codec::new(format, rule, round).and_then(|codec| codec.with(args.scaling.get()));
    let codec = codec.map_err(Error::usage)?;
    if args.axis == BlockAxis::Tile && !format.spec().tiles {
        return Err(Error::usage(format!("--axis tile: {format} has no square tiles")));
    }
    require_matches(&args.only, file)?;
    let kept = kept(&args.only, file, &out.metadata);
    let expected = Expected::of(b, codec)?;
    let mut converted = 0;
    for (name, view) in file.iter() {
        if let Some(why) = kept.get(name) {
            out.copy(name, &view, why)?;
            continue;
        }
        phase(format_args!("quantizing `{name}`"));
        // All tensors that are not copied are float matrices.
        let (Some(sizes), Some(values)) = (matrices(view.shape()), floats(view.dtype(), view.data())) else {
            continue;
        };
        let mut loss = Loss::default();
        let planes =
            quantize_all(b, args, codec, (name, sizes, view.dtype()), &values, (expected, &mut loss))?;
        losses.add(name, loss, expected);
        store(b, name, &view, &planes, codec, out)?;
        converted += 1;
    }
    Ok(converted)
}

/// The tensors that are copied unchanged, each with the reason.
fn kept<'a>(
    only: &[String],
    file: &'a SafeTensors<'_>,
    metadata: &BTreeMap<String, String>,
) -> BTreeMap<&'a str, &'static str> {
    let (mut described_names, mut described_planes) = (BTreeSet::new(), BTreeSet::new());
    for (name, _) in described(metadata) {
        described_names.insert(name);
        described_planes.extend(planes(name));
    }
    let why = |name: &str, view: &TensorView<'_>| {
        let is_wanted = only.is_empty() || only.iter().any(|pattern| glob(pattern, name));
        let reasons = [
            (described_planes.contains(name), "planes of tensors that are quantized already"),
            (!is_wanted, "not asked for"),
            (matrices(view.shape()).is_none(), "not matrices"),
            (!is_float(view.dtype()), "not floats"),
            (view.data().is_empty(), "without values"),
            (described_names.contains(name), TAKEN),
        ];
        reasons.into_iter().find_map(|(is_so, why)| is_so.then_some(why))
    };
    let mut names = file.names();
    names.sort_unstable();
    let mut kept = BTreeMap::new();
    let mut rest = Vec::new();
    for (name, view) in names.into_iter().filter_map(|name| Some((name, file.tensor(name).ok()?))) {
        match why(name, &view) {
            Some(why) => drop(kept.insert(name, why)),
            None => rest.push(name),
        }
    }
    // A copied tensor may have the name of another tensor's buffer. The other tensor must then be copied too, which may affect further
    // tensors.
    loop {
        let (stay, go): (Vec<_>, Vec<_>) =
            rest.iter().partition(|name| planes(name).iter().any(|plane| kept.contains_key(plane.as_str())));
        if stay.is_empty() {
            return kept;
        }
        kept.extend(stay.into_iter().map(|name| (name, TAKEN)));
        rest = go;
    }
}

/// The reason for copying a tensor that could be quantized.
const TAKEN: &str = "whose planes' names are taken";

/// Whether tensors of this type are quantized.
fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

/// Checks that each glob matches at least one tensor.
fn require_matches(globs: &[String], file: &SafeTensors<'_>) -> Result<()> {
    let Some(none) = globs.iter().find(|only| !file.names().into_iter().any(|name| glob(only, name))) else {
        return Ok(());
    };
    let mut names = file.names();
    names.sort_unstable();
    names.truncate(3);
    Err(Error::usage(format!("--only `{none}`: no tensor name matches; there are {}, ...", names.join(", "))))
}

/// Quantizes each matrix of a tensor separately.
fn quantize_all<B: Kernels>(
    b: &B,
    args: &Args,
    codec: Codec,
    (name, [stack, rows, cols], dtype): (&str, [usize; 3], Dtype),
    values: &[f32],
    (expected, loss): (Expected, &mut Loss),
) -> Result<Vec<BlockScaled<B>>> {
    let mut all = Vec::with_capacity(stack);
    for (i, values) in values.chunks_exact(rows * cols).enumerate() {
        let x = Tensor::from_f32(b, values, rows, cols)?;
        // Each matrix of a stack has separate random bits.
        let site = if stack == 1 { fnv1a32(name) } else { fnv1a32(&format!("{name}.{i}")) };
        let random = codec.draws().then(|| Stream::new(args.seed, Purpose::Rounding, site, 0).into());
        let op = Quantize { random, ..Quantize::new(&x, codec, axis_planes(args.axis)) };
        let emitted = op.run(b)?;
        let plane = if args.axis == BlockAxis::Col {
            emitted.take_cols("quantize")
        } else {
            emitted.take_rows("quantize")
        };
        let Operand::Block(q) = plane? else {
            return Err(Error::Failed(format!("tensor `{name}`: quantizing gave a plain tensor")));
        };
        loss.compare(values, &decode(b, &q, dtype, rows)?, Blocks::of(&q, rows), expected);
        all.push(q);
    }
    Ok(all)
}

fn axis_planes(axis: BlockAxis) -> Planes {
    match axis {
        BlockAxis::Row => Planes::Rows,
        BlockAxis::Col => Planes::Cols,
        BlockAxis::Tile => Planes::Tiles,
    }
}

/// The exact values of a tensor; `None` for types that are not quantized.
fn floats(dtype: Dtype, data: &[u8]) -> Option<Vec<f32>> {
    // The values are copied, because the file's bytes may be unaligned in memory.
    let halves = || data.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match dtype {
        Dtype::F32 => Some(words(data)),
        Dtype::BF16 => Some(halves().map(|b| bf16::from_bits(b).to_f32()).collect()),
        Dtype::F16 => Some(halves().map(|b| f16::from_bits(b).to_f32()).collect()),
        _ => None,
    }
}

/// Number of rows of the code buffer and of the scale buffer.
fn plane_rows(axis: BlockAxis, format: Format, rows: usize, cols: usize) -> (usize, usize) {
    match axis {
        BlockAxis::Row => (rows, rows),
        BlockAxis::Col => (cols, cols),
        BlockAxis::Tile => (rows, rows.div_ceil(format.spec().block)),
    }
}

/// Adds the code and scale buffers of a quantized tensor, concatenated over its matrices, and the metadata needed to read them.
fn store<B: Backend>(
    b: &B,
    name: &str,
    view: &TensorView<'_>,
    all: &[BlockScaled<B>],
    codec: Codec,
    out: &mut Converted<'_>,
) -> Result<()> {
    // A tensor with values has at least one matrix.
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
        scales.extend(q.scales_by_line(b)?);
        // All rows of a matrix have the same tensor scale.
        let of_rows = q.tensor_scale.as_ref().map(|scale| b.download(scale)).transpose()?;
        tensor_scales.extend(of_rows.iter().flat_map(|rows| rows.first()).flat_map(|s| s.to_le_bytes()));
    }
    let [name_of_codes, name_of_scales, name_of_tensor_scale] = planes(name);
    out.put(name_of_codes, Dtype::U8, shape(code_rows, codes.len()), codes)?;
    let values = scales.len() * 8 / scale_type.bitsize();
    if q.scale_kind().bytes() > 0 {
        out.put(name_of_scales, scale_type, shape(scale_rows, values), scales)?;
    }
    if q.tensor_scale.is_some() {
        out.put(name_of_tensor_scale, Dtype::F32, vec![all.len()], tensor_scales)?;
    }
    let mut about = json!({
        "format": q.format.to_string(),
        "axis": q.axis.to_string(),
        "scale": q.rule.to_string(),
        "round": codec.rounding().to_string(),
        "shape": view.shape(),
        "dtype": view.dtype().to_string(),
    });
    for (key, value) in chosen(codec.scaling()) {
        about[key] = value.into();
    }
    out.metadata.insert(format!("{PREFIX}{name}"), about.to_string());
    Ok(())
}

/// The scaling options that differ from their defaults.
fn chosen(scaling: Scaling) -> impl Iterator<Item = (&'static str, String)> {
    let default = Scaling::default();
    let all = [
        ("headroom", scaling.headroom.to_string(), scaling.headroom != default.headroom),
        ("thresholds", scaling.thresholds.to_string(), scaling.thresholds != default.thresholds),
        ("candidates", scaling.candidates.to_string(), scaling.candidates != default.candidates),
        ("outer", scaling.outer.to_string(), scaling.outer != default.outer),
    ];
    all.into_iter().filter_map(|(key, value, is_chosen)| is_chosen.then_some((key, value)))
}

/// The type of a scale buffer: F32 for F32 scales, otherwise bytes.
fn scale_type(kind: ScaleKind) -> Dtype {
    if kind == ScaleKind::F32 { Dtype::F32 } else { Dtype::U8 }
}
