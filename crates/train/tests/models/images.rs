//! Image classifiers on made-up IDX files.

use crate::rig;

use nibble_cpu::Cpu;
use nibble_train::config::Config;
use nibble_train::evaluation::HeldOut;
use nibble_train::trainer::Trainer;
use rig::SOLO;
use std::fs;
use std::path::Path;

/// Sides of the images and of the patches, and the number of classes.
const SIDE: usize = 8;
const CLASSES: usize = 4;

/// An IDX file: its dimensions, and its values.
fn idx(dims: &[usize], values: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, dims.len() as u8];
    dims.iter().for_each(|dim| bytes.extend((*dim as u32).to_be_bytes()));
    bytes.extend(values);
    bytes
}

/// Writes images, of which a quarter is bright, and labels, which say which quarter.
fn write(dir: &Path, name: &str, count: usize) {
    let noise = rig::normals(name, count * SIDE * SIDE);
    let label = |image: usize| image * 7 / 3 % CLASSES;
    let pixel = |(at, noise): (usize, &f32)| {
        let (image, y, x) = (at / (SIDE * SIDE), at / SIDE % SIDE, at % SIDE);
        let quarter = 2 * (2 * y / SIDE) + 2 * x / SIDE;
        let bright = if quarter == label(image) { 160.0 } else { 60.0 };
        (bright + 15.0 * noise).clamp(0.0, 255.0) as u8
    };
    let pixels: Vec<u8> = noise.iter().enumerate().map(pixel).collect();
    let labels: Vec<u8> = (0..count).map(|image| label(image) as u8).collect();
    fs::write(dir.join(format!("{name}-images")), idx(&[count, SIDE, SIDE], &pixels)).unwrap();
    fs::write(dir.join(format!("{name}-labels")), idx(&[count], &labels)).unwrap();
}

/// Training images, whose number does not divide the batch size, and held-out images.
pub fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "train", 300);
    write(dir.path(), "valid", 37);
    dir
}

fn overrides(dir: &Path, recipe: &str, changes: &[&str]) -> Vec<String> {
    let file = |key: &str, name: &str| format!("data.{key}={}", dir.join(name).display());
    let files = [
        file("source", "train-images"),
        file("labels", "train-labels"),
        file("valid_source", "valid-images"),
        file("valid_labels", "valid-labels"),
        format!("recipe={recipe}"),
        format!("model.image_size={SIDE}"),
        format!("model.vocab_size={CLASSES}"),
    ];
    let sizes = ["model.patch_size=4", "data.seq_len=5", "train.batch_size=128"];
    let steps =
        ["train.steps=60", "train.lr=4e-3", "train.min_lr=1e-3", "train.warmup_steps=0", "train.clip_norm=0"];
    let changes = sizes.iter().chain(&steps).chain(changes).map(|change| (*change).to_owned());
    files.into_iter().chain(changes).collect()
}

/// A small classifier of the images in this folder.
pub fn config(dir: &Path, recipe: &str, changes: &[&str]) -> Config {
    Config::load("tiny-vit", &overrides(dir, recipe, changes)).unwrap()
}

fn evaluated(trainer: &mut Trainer<'_, Cpu>) -> HeldOut {
    trainer.evaluate_while(0, &mut |_, _| Ok(true)).unwrap().unwrap()
}

#[test]
fn a_classifier_learns_under_every_kind_of_recipe() {
    let dir = folder();
    for recipe in ["f32", "bf16", "fp8-tensor", "mxfp8", "mxfp4", "hif4", "nvfp4", "nvfp4-mxfp8"] {
        let config = config(dir.path(), recipe, &[]);
        let cpu = Cpu::new(2).unwrap();
        let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
        let before = evaluated(&mut trainer);
        assert_eq!(before.targets, 37, "one target for each held-out image");
        (0..60).for_each(|_| drop(trainer.train_step().unwrap()));
        let after = evaluated(&mut trainer);
        let accuracy = after.accuracy().unwrap();
        assert!(accuracy > 0.9 && after.loss() < before.loss(), "{recipe}: {accuracy}, {after:?}");
    }
}

/// A batch of two shards on two ranks gives the bits of one rank.
#[test]
fn ranks_divide_images() {
    let dir = folder();
    let losses = |ranks: usize| {
        let ranks = format!("run.ranks={ranks}");
        let config =
            config(dir.path(), "mxfp8", &["train.batch_size=256", "train.shards=2", "train.steps=3", &ranks]);
        rig::on_mesh(config.run.mesh(), |mesh| {
            let cpu = Cpu::new(1).unwrap();
            let mut trainer = Trainer::new(&cpu, mesh, &config).unwrap();
            (0..3).for_each(|_| drop(trainer.train_step().unwrap()));
            let found = evaluated(&mut trainer);
            (found.nats.to_bits(), found.right)
        })
    };
    assert_eq!(losses(1)[0], losses(2)[0]);
}

#[test]
fn files_that_are_wrong_are_named() {
    let dir = folder();
    let error = |changes: &[&str]| {
        let config = match Config::load("tiny-vit", &overrides(dir.path(), "bf16", changes)) {
            Ok(config) => config,
            Err(e) => return e.to_string(),
        };
        let cpu = Cpu::new(1).unwrap();
        Trainer::new(&cpu, &SOLO, &config).unwrap_err().to_string()
    };
    let path = |name: &str| dir.path().join(name).display().to_string();
    let labels = format!("data.labels={}", path("valid-labels"));
    let e = error(&[&labels]);
    assert!(e.contains("valid-labels") && e.contains("has 37 labels") && e.contains("300 images"), "{e}");
    let images = format!("data.labels={}", path("train-images"));
    let e = error(&[&images]);
    assert!(e.contains("is no IDX file of labels: it begins with 0x00000803, expected 0x00000801"), "{e}");
    let e = error(&["model.vocab_size=3"]);
    assert!(e.contains("expected one below model.vocab_size = 3"), "{e}");
    let e = error(&["model.image_size=12", "data.seq_len=10"]);
    assert!(e.contains("has images with a side of 8 pixels, expected model.image_size = 12"), "{e}");
    let e = error(&["data.seq_len=6"]);
    assert!(e.contains("`data.seq_len`: is 6, expected 5: a class token and 4 patches"), "{e}");
    let e = error(&["model.patch_size=3"]);
    assert!(e.contains("`model.patch_size`: is 3, which does not divide model.image_size = 8"), "{e}");
    let e = error(&["model.causal=true"]);
    assert!(e.contains("`model.causal`: is true, but model.image_size is set"), "{e}");
    for (cut, expected) in
        [(-1, "has only 19199 bytes after its header, which says 19200"), (1, "has more bytes")]
    {
        let mut bytes = fs::read(path("train-images")).unwrap();
        bytes.resize((bytes.len() as i64 + cut) as usize, 0);
        fs::write(path("cut"), bytes).unwrap();
        let e = error(&[&format!("data.source={}", path("cut"))]);
        assert!(e.contains("cut") && e.contains(expected), "{e}");
    }
}
