//! Exports a checkpoint, or a published folder, to a folder for Hugging Face tools. The folder contains the weights in files with an index
//! (F32, BF16 or E4M3 with block scales), `config.json`, the tokenizer, and the generation settings.
//!
//! Tensors are read, converted and written piece by piece: only a few MiB of the model are in memory. The export writes the folder under a
//! temporary name in the same directory, and renames it when all files are on disk.

use crate::checkpoint::{
    BLOCK, Checkpoint, SCALE_SUFFIX, TensorAt, TensorSpec, Tensors, divided, header, little_endian, metadata,
    scale_shape,
};
use crate::checks::for_run;
use crate::config::{Config, ModelConfig};
use crate::error::{Error, Result};
use crate::family::{self, Family, Named};
use crate::fault::{Point, reach};
use crate::files::WholeFolder;
use crate::pretrained::{
    COMPANIONS, GENERATION_FILE, Pretrained, companions_of, copy_companions, ends_of, generation_of,
};
use crate::spec::{ModelSpec, PartKind};
use crate::tokenizer::{SETTINGS_FILE, begin_texts_with, transformers_tokenizer};
use half::bf16;
use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::{Planes, Quantize};
use nibble_core::recipe::{LayerKind, Site};
use nibble_core::{Kernels, Operand, Recipe, Tensor};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

/// The data type of exported weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportType {
    /// F32, as in the run.
    F32,
    /// BF16, rounded to nearest. Router biases stay F32.
    Bf16,
    /// Linear layers and experts in E4M3 with one scale per 128 × 128 block, as DeepSeek-V3 is published; all other tensors as under
    /// [`ExportType::Bf16`]. The codes are those that the forward pass multiplies, if the recipe has such weights and a tensor is aligned
    /// with its parameter's blocks.
    Fp8Block,
}

/// The numbers of tensors, bytes and files that an export wrote.
#[derive(Debug, Clone, Copy)]
pub struct Exported {
    /// Number of tensors, including tensors of scales.
    pub tensors: usize,
    /// Number of bytes of the tensors' values.
    pub bytes: usize,
    /// Number of files.
    pub files: usize,
}

/// The model to export.
#[derive(Debug, Clone, Copy)]
pub enum Original<'a> {
    /// A checkpoint of a run.
    Checkpoint(&'a Checkpoint),
    /// A published folder, to be converted to another type or split into other files.
    Folder(&'a Pretrained),
}

impl Original<'_> {
    /// The model's configuration, including the number of positions.
    fn model(&self) -> Result<ModelConfig> {
        match self {
            Self::Checkpoint(checkpoint) => {
                let config = Config::of_checkpoint(checkpoint, &[])?;
                Ok(ModelConfig { max_positions: config.positions(), ..config.model })
            }
            Self::Folder(folder) => Ok(folder.model.clone()),
        }
    }

    fn family(&self, model: &ModelConfig) -> &'static dyn Family {
        match self {
            Self::Checkpoint(_) => family::of(model),
            Self::Folder(folder) => folder.family,
        }
    }

    /// The recipe with which the model was trained; `None` for a folder, whose recipe is unknown.
    fn recipe(&self) -> Result<Option<Recipe>> {
        match self {
            Self::Checkpoint(checkpoint) => {
                let config = Config::of_checkpoint(checkpoint, &[])?;
                Ok(Some(for_run(&config, checkpoint.position().resolved_recipe()?)))
            }
            Self::Folder(_) => Ok(None),
        }
    }

    fn tensors(&self) -> Result<Tensors> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.model(),
            Self::Folder(folder) => folder.tensors(),
        }
    }

    /// The end-of-text token: for a run the token of the run's data, otherwise the token of the tokenizer. `None` if the tokenizer is only
    /// copied and cannot be read by Nibble.
    fn end_of_texts(&self) -> Result<Option<i32>> {
        let found = match self {
            Self::Checkpoint(checkpoint) => {
                let config = Config::of_checkpoint(checkpoint, &[])?;
                let of_tokenizer = || Ok(config.tokenizer()?.and_then(|tokenizer| tokenizer.eos()));
                config
                    .framing()
                    .and_then(|framing| framing.eos.map_or_else(of_tokenizer, |eos| Ok(Some(eos))))
            }
            Self::Folder(folder) => {
                folder.tokenizer().map(|tokenizer| tokenizer.and_then(|tokenizer| tokenizer.eos()))
            }
        };
        match found {
            Err(Error::Tokenizer { .. }) => Ok(None),
            found => found,
        }
    }

    /// The tokens that end the model's answers. Empty if the model was not trained on conversations.
    fn ends_of_answers(&self) -> Result<Vec<i32>> {
        let found = match self {
            Self::Checkpoint(checkpoint) => Config::of_checkpoint(checkpoint, &[])?.ends_of_answers(),
            Self::Folder(_) => Ok(None),
        };
        match found {
            Err(Error::Tokenizer { .. }) => Ok(Vec::new()),
            found => Ok(found?.unwrap_or_default()),
        }
    }

    /// Checks that every tensor was taken.
    fn finish(&self, tensors: Tensors) -> Result<()> {
        match self {
            Self::Checkpoint(_) => tensors.finish(),
            Self::Folder(folder) => tensors.finish_but(|name| folder.passes_over(name)),
        }
    }
}

/// Number of values read and written at once.
const PIECE: usize = 1 << 20;

/// Writes a model into a new folder. Each file contains at most `file_bytes` bytes of tensors; 0 means one file for all tensors.
///
/// # Errors
/// Returns [`Error::Config`] if the folder exists and is not empty, [`Error::Checkpoint`] for a damaged checkpoint, and [`Error::Io`] if a
/// file operation fails.
pub fn export<B: Kernels>(
    b: &B,
    original: Original<'_>,
    dtype: ExportType,
    file_bytes: usize,
    to: &Path,
) -> Result<Exported> {
    if to.exists() && fs::read_dir(to).map_or(true, |mut inside| inside.next().is_some()) {
        return Err(Error::config(
            "FOLDER",
            format!("{} is there already, and is not replaced", to.display()),
        ));
    }
    if to.file_name().is_none() {
        return Err(Error::config("FOLDER", format!("{} names no folder", to.display())));
    }
    // The tokenizer is opened before anything is written, because opening a tokenizer may exhaust memory.
    let end = original.end_of_texts()?;
    let folder = WholeFolder::create(to).map_err(Error::io(to))?;
    let exported = write_model(b, original, dtype, file_bytes, folder.unfinished())?;
    write_companions(original, end, folder.unfinished())?;
    folder.finish().map_err(Error::io(to))?;
    Ok(exported)
}

/// A tensor to write.
struct Job {
    name: String,
    shape: Vec<usize>,
    /// The scale rule of the tensor's blocks, if the tensor has block scales.
    blocks: Option<ScaleRule>,
}

/// Writes the weights and `config.json`.
fn write_model<B: Kernels>(
    b: &B,
    original: Original<'_>,
    dtype: ExportType,
    file_bytes: usize,
    dir: &Path,
) -> Result<Exported> {
    let (model, recipe) = (original.model()?, original.recipe()?);
    let family = original.family(&model);
    let spec = ModelSpec::new(&model);
    let jobs = jobs(&spec, family.tensors(&spec), dtype, recipe.as_ref());
    let specs: Vec<(TensorSpec, usize)> = specs(&jobs, dtype);
    let files = divided::divided(&specs, |(spec, _)| spec, file_bytes);
    let mut tensors = original.tensors()?;
    for (number, file) in files.iter().enumerate() {
        let path = dir.join(divided::name_of("model", number, files.len()));
        write_file(b, &mut tensors, &jobs, file, &path)?;
        reach(Point::FileWritten)?;
    }
    original.finish(tensors)?;
    if files.len() > 1 {
        let plain: Vec<Vec<TensorSpec>> =
            files.iter().map(|file| file.iter().map(|(spec, _)| spec.clone()).collect()).collect();
        let plain: Vec<&[TensorSpec]> = plain.iter().map(Vec::as_slice).collect();
        write_text(&dir.join(divided::index_name("model")), &divided::index("model", &plain))?;
    }
    let mut json = family::config_json(family, &model, model.max_positions);
    say_type(&mut json, dtype);
    write_text(&dir.join("config.json"), &format!("{json:#}\n"))?;
    let bytes = specs.iter().map(|(spec, _)| spec.num_bytes()).sum();
    Ok(Exported { tensors: specs.len(), bytes, files: files.len() })
}

/// The jobs for every tensor of the model, sorted by name.
fn jobs(model: &ModelSpec, named: Vec<Named>, dtype: ExportType, recipe: Option<&Recipe>) -> Vec<Job> {
    let parts: Vec<_> = model.parts().flat_map(|part| vec![part.clone(); part.params().len()]).collect();
    let blocks = |tensor: &Named| {
        let part = &parts[tensor.rows.first()?.param];
        let kind = match part.kind {
            PartKind::Linear { .. } => LayerKind::Linear,
            PartKind::Experts { .. } => LayerKind::Expert,
            _ => return None,
        };
        if dtype != ExportType::Fp8Block || tensor.shape.len() < 2 {
            return None;
        }
        let weight = recipe.map(|recipe| recipe.section(kind, &part.id, 1.0).at(Site::FpropW));
        let own = weight.filter(|weight| weight.format == Format::E4m3);
        Some(own.map_or(ScaleRule::Amax, |weight| weight.scale))
    };
    let mut jobs: Vec<Job> = named
        .into_iter()
        .map(|tensor| Job { blocks: blocks(&tensor), name: tensor.name, shape: tensor.shape })
        .collect();
    jobs.sort_by(|a, b| a.name.cmp(&b.name));
    jobs
}

/// The tensors of the files, each with the index of its job.
fn specs(jobs: &[Job], dtype: ExportType) -> Vec<(TensorSpec, usize)> {
    let mut specs = Vec::new();
    for (number, Job { name, shape, blocks }) in jobs.iter().enumerate() {
        let dtype = match (dtype, blocks) {
            (_, Some(_)) => Dtype::F8_E4M3,
            (ExportType::F32, _) => Dtype::F32,
            // The router's bias stays F32, because the selection of experts depends on the bias's last bits.
            _ if name.ends_with(".e_score_correction_bias") => Dtype::F32,
            _ => Dtype::BF16,
        };
        specs.push((TensorSpec { name: name.clone(), shape: shape.clone(), dtype }, number));
        if blocks.is_some() {
            specs.push((TensorSpec::f32(format!("{name}{SCALE_SUFFIX}"), scale_shape(shape)), number));
        }
    }
    specs
}

/// Writes and syncs one file: first the header, then each tensor at its offset.
fn write_file<B: Kernels>(
    b: &B,
    tensors: &mut Tensors,
    jobs: &[Job],
    specs: &[(TensorSpec, usize)],
    path: &Path,
) -> Result<()> {
    let mut order: Vec<&(TensorSpec, usize)> = specs.iter().collect();
    // Readers need each tensor aligned to the size of its type.
    order.sort_by_key(|(spec, _)| (Reverse(spec.dtype.bitsize()), spec.name.clone()));
    let named = order.iter().map(|(spec, _)| (spec.name.as_str(), spec.dtype, spec.shape.as_slice()));
    let header = header(&metadata(), named).map_err(|e| Error::checkpoint(path, e.to_string()))?;
    let mut places = BTreeMap::new();
    let mut at = header.len() as u64;
    for (spec, _) in &order {
        places.insert(spec.name.as_str(), at);
        at += spec.num_bytes() as u64;
    }
    let mut file = Placed { file: File::create_new(path).map_err(Error::io(path))?, path };
    file.write(0, &header)?;
    reach(Point::FileBegun)?;
    for (spec, number) in specs {
        let job = &jobs[*number];
        let place = |name: &str| places.get(name).copied().unwrap_or_default();
        match job.blocks {
            // Scales are written together with their codes.
            Some(_) if spec.name != job.name => {}
            Some(rule) => {
                let scales = place(&format!("{}{SCALE_SUFFIX}", job.name));
                let stored = tensors.find(&job.name, &job.shape)?;
                let places = [place(&job.name), scales];
                write_blocks(b, (tensors, &job.name, &stored), &job.shape, rule, &mut file, places)?;
            }
            None => {
                let stored = tensors.find(&job.name, &job.shape)?;
                write_plain((tensors, &stored), spec, &mut file, place(&job.name))?;
            }
        }
    }
    file.file.sync_all().map_err(Error::io(path))
}

/// A file with random-access writes.
struct Placed<'a> {
    file: File,
    path: &'a Path,
}

impl Placed<'_> {
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let io = Error::io(self.path);
        self.file.seek(SeekFrom::Start(at)).and_then(|_| self.file.write_all(bytes)).map_err(io)
    }
}

fn write_plain(
    (tensors, stored): (&mut Tensors, &TensorAt),
    spec: &TensorSpec,
    file: &mut Placed<'_>,
    place: u64,
) -> Result<()> {
    let (values, each) = (spec.num_values(), spec.dtype.bitsize() / 8);
    let mut piece = vec![0.0; values.min(PIECE)];
    for at in (0..values).step_by(PIECE) {
        let piece = &mut piece[..(values - at).min(PIECE)];
        tensors.read_weights((&spec.name, stored), at, piece)?;
        let place = place + (at * each) as u64;
        match spec.dtype {
            Dtype::BF16 => {
                let rounded: Vec<bf16> = piece.iter().map(|x| bf16::from_f32(*x)).collect();
                if let Some(over) = rounded.iter().position(|x| !x.is_finite()) {
                    let why = format!(
                        "tensor `{}` holds {:e} at index {}, which is beyond BF16: export it with --dtype f32",
                        spec.name,
                        piece[over],
                        at + over
                    );
                    return Err(Error::checkpoint(tensors.path(), why));
                }
                let halves: Vec<u16> = rounded.iter().map(|x| x.to_bits().to_le()).collect();
                file.write(place, bytemuck::cast_slice(&halves))?;
            }
            _ => file.write(place, &little_endian(piece))?,
        }
    }
    Ok(())
}

/// Writes codes and their scales, one row of blocks at a time.
fn write_blocks<B: Kernels>(
    b: &B,
    (tensors, name, stored): (&mut Tensors, &str, &TensorAt),
    shape: &[usize],
    rule: ScaleRule,
    file: &mut Placed<'_>,
    [codes_at, scales_at]: [u64; 2],
) -> Result<()> {
    let codec = Codec::new(Format::E4m3, rule, Rounding::NearestEven).map_err(nibble_core::Error::from)?;
    let cols = shape.last().copied().unwrap_or(1);
    let rows = shape.iter().product::<usize>() / cols.max(1);
    let mut scales: Vec<f32> = Vec::new();
    let mut values = Vec::new();
    for first in (0..rows).step_by(BLOCK) {
        let band = (rows - first).min(BLOCK);
        values.resize(band * cols, 0.0);
        tensors.read_weights((name, stored), first * cols, &mut values)?;
        let x = Tensor::from_f32(b, &values, band, cols)?;
        let made = Quantize::new(&x, codec, Planes::Tiles).run(b)?;
        let Some(Operand::Block(plane)) = made.rows else {
            return Err(nibble_core::Error::Defect { place: "export", what: "no tiles were made" }.into());
        };
        let kind = plane.scale_kind();
        scales.extend(plane.records(b)?.into_iter().map(|scale| kind.multiplier(scale, 0, BLOCK)));
        file.write(codes_at + (first * cols) as u64, &b.download(&plane.codes)?)?;
    }
    file.write(scales_at, &little_endian(&scales))
}

/// Writes the type of the weights into `config.json`, for programs that load the model.
fn say_type(json: &mut Value, dtype: ExportType) {
    let name = if dtype == ExportType::F32 { "float32" } else { "bfloat16" };
    json["dtype"] = name.into();
    json["torch_dtype"] = name.into();
    if dtype == ExportType::Fp8Block {
        json["quantization_config"] = json!({
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"
        });
    }
}

/// Writes the tokenizer and other companion files. The source is the run's initial model or the checkpoint.
fn write_companions(original: Original<'_>, end: Option<i32>, dir: &Path) -> Result<()> {
    match original {
        Original::Folder(folder) => copy_companions(folder.path(), dir)?,
        Original::Checkpoint(checkpoint) => {
            let kept = companions_of(checkpoint.path());
            copy_companions(&kept, dir)?;
            // The checkpoint may have been copied without its run's folder. The checkpoint itself also has the tokenizer, except in
            // checkpoints of earlier versions.
            for name in COMPANIONS.into_iter().filter(|name| !dir.join(name).exists() && checkpoint.has(name))
            {
                fs::write(dir.join(name), checkpoint.file(name)?).map_err(Error::io(dir))?;
            }
            if !dir.join(SETTINGS_FILE).exists() {
                write_text(&dir.join(SETTINGS_FILE), &transformers_tokenizer())?;
            }
            // Other tools must begin a text with the same tokens as the run's documents.
            let config = Config::of_checkpoint(checkpoint, &[])?;
            if config.is_text() {
                begin_texts_with(dir, config.framing()?.bos)?;
            }
        }
    }
    let generation = dir.join(GENERATION_FILE);
    let is_there = generation.exists();
    let mut says = match is_there {
        true => generation_of(dir)?,
        false => json!({ "_from_model_config": true, "do_sample": true }),
    };
    // Without these tokens `transformers` would generate beyond the end of a text.
    let mut ends = ends_of(&says).map_err(|why| Error::checkpoint(&generation, why))?;
    let said = ends.len();
    ends.extend(end.filter(|_| !is_there));
    for end in original.ends_of_answers()? {
        if !ends.contains(&end) {
            ends.push(end);
        }
    }
    if is_there && ends.len() == said {
        return Ok(());
    }
    match ends.as_slice() {
        [] => {}
        [one] => says["eos_token_id"] = (*one).into(),
        all => says["eos_token_id"] = all.into(),
    }
    write_text(&generation, &format!("{says:#}\n"))
}

fn write_text(path: &Path, text: &str) -> Result<()> {
    let mut file = File::create(path).map_err(Error::io(path))?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(Error::io(path))
}
