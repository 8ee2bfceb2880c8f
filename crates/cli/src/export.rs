//! `nibble export`: writes a checkpoint, or converts a published model, as a Hugging Face folder.

use crate::checkpoint::Trained;
use nibble_command::console::bytes;
use nibble_command::error::Result;
use nibble_command::say;
use nibble_cpu::Cpu;
use nibble_train::export::{ExportType, Exported, Original, export};
use std::path::PathBuf;

/// Writes a checkpoint as a Hugging Face model folder
///
/// The folder contains config.json, the weights as safetensors files with an index, and the tokenizer's files.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The weights are streamed from file to file, so the memory use of the export does not grow with the size of the model. \
    The folder gets the name FOLDER only after all files are written. With --dtype fp8-block, the weights of linear layers and experts \
    are E4M3 codes with one scale per block of 128 x 128 weights, as in the published files of DeepSeek-V3.\n\n\
    Examples:\n  \
    nibble export runs/tiny my-model\n  \
    nibble export runs/tiny/checkpoints/step-00000200 my-model --dtype f32\n  \
    nibble export DeepSeek-V3 in-bf16"
)]
pub struct Args {
    /// Directory of a run, of one checkpoint, or of a Hugging Face model whose weights are to be converted to another type. For a run,
    /// Nibble exports the newest undamaged checkpoint.
    #[arg(value_name = "RUN_OR_MODEL")]
    path: PathBuf,
    /// Folder to write the model to. If the folder exists, it must be empty.
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Number type of the exported weights.
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    dtype: Type,
    /// Maximum size of each weight file, in MiB; with 0, all weights are written to one file.
    #[arg(long, value_name = "MIB", default_value_t = 5120)]
    file_mib: usize,
}

/// The values of the option `--dtype`.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Type {
    /// F32; the weights are not rounded.
    F32,
    /// BF16; each weight is rounded to the nearest BF16 number.
    Bf16,
    /// E4M3 codes with one scale per block of 128 x 128 weights.
    Fp8Block,
}

impl From<Type> for ExportType {
    fn from(name: Type) -> Self {
        match name {
            Type::F32 => Self::F32,
            Type::Bf16 => Self::Bf16,
            Type::Fp8Block => Self::Fp8Block,
        }
    }
}

pub fn run(args: Args) -> Result<()> {
    let (cpu, trained) = (Cpu::new(0)?, Trained::open(&args.path)?);
    let write = |original| {
        export(&cpu, original, args.dtype.into(), args.file_mib.saturating_mul(1 << 20), &args.folder)
    };
    let Exported { tensors, bytes: size, files } = match &trained {
        Trained::Checkpoint(checkpoint) => write(Original::Checkpoint(checkpoint))?,
        Trained::Folder(folder) => write(Original::Folder(folder))?,
    };
    let files = if files == 1 { "one file".to_owned() } else { format!("{files} files") };
    say!("{}: {tensors} tensors, {} in {files}", args.folder.display(), bytes(size as u64));
    Ok(())
}
