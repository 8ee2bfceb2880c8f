//! Images with labels from IDX files, the format of MNIST: a big-endian header (two zero bytes, the type 8 for bytes, the number of
//! dimensions, and each dimension as 32 bits), then the values. Files may be compressed with gzip or zstd.
//!
//! An image is a sequence of a class token and the image's patches, row by row. The tokens' ids are rows of a table of pixels
//! ([`Images::pixels`]): row 0 is the class token's and has zeros, and each image has the rows of its patches. Only the class token has a
//! target, the image's label.

use super::cursor::Permutation;
use super::source::{Asked, DataFile};
use super::{Batch, NO_TARGET};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::files::sha256_hex;
use nibble_formats::philox::{Purpose, Stream, fnv1a32};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Third and fourth byte of an IDX file of images, and of a file of labels: bytes in three dimensions, and in one.
const IMAGES: [u8; 2] = [8, 3];
const LABELS: [u8; 2] = [8, 1];

/// Largest number of images in a file.
const MOST_IMAGES: usize = 1 << 20;

/// Training images and held-out images, with their labels.
#[derive(Debug, Clone)]
pub(crate) struct Images {
    /// Pixels of the training images, followed by those of the held-out images.
    pixels: Arc<Vec<u8>>,
    /// Labels in the same order.
    labels: Arc<Vec<u8>>,
    /// Number of training images.
    train: usize,
    /// Side of an image, and of a patch, in pixels.
    sides: (usize, usize),
    classes: usize,
    sha256: String,
}

/// Numbers of training images and of held-out images.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageCounts {
    train: usize,
    held_out: usize,
}

impl ImageCounts {
    /// Reads the numbers of training images and held-out images from the headers of the configured files.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if a file of images cannot be read, or if the size of the images in the file differs from the configuration.
    pub fn of(config: &Config) -> Result<Self> {
        let count =
            |path: &str| -> Result<usize> { Ok(opened(Path::new(path), IMAGES, config.model.image_size)?.1) };
        Ok(Self { train: count(&config.data.source)?, held_out: count(&config.data.valid_source)? })
    }

    /// Number of rows of the table of pixels: one row of zeros, and one row per patch of each image.
    pub fn rows(self, config: &Config) -> usize {
        1 + (self.train + self.held_out) * config.model.num_patches()
    }
}

impl Images {
    /// Reads all images and labels that the configuration names.
    ///
    /// # Errors
    /// Returns [`Error::Data`], which names the file, if a file cannot be read, is no IDX file of the expected kind, or has the wrong
    /// length. Also returns [`Error::Data`] if images and labels differ in number, or if a label is not a class.
    pub fn open(config: &Config) -> Result<Self> {
        let (d, m) = (&config.data, &config.model);
        let (mut pixels, mut labels, mut counts) = (Vec::new(), Vec::new(), Vec::new());
        for (images, of_images) in [(&d.source, &d.labels), (&d.valid_source, &d.valid_labels)] {
            let count = read(Path::new(images), IMAGES, m.image_size, &mut pixels)?;
            let (path, first) = (Path::new(of_images), labels.len());
            let given = read(path, LABELS, m.image_size, &mut labels)?;
            if given != count {
                return Err(Error::data(
                    path,
                    format!("has {given} labels, but {images} has {count} images"),
                ));
            }
            if let Some(at) = labels[first..].iter().position(|label| usize::from(*label) >= m.vocab_size) {
                let (label, classes) = (labels[first + at], m.vocab_size);
                let why = format!(
                    "gives image {at} the label {label}, expected one below model.vocab_size = {classes}"
                );
                return Err(Error::data(path, why));
            }
            counts.push(count);
        }
        let rows = 1 + labels.len() as u64 * m.num_patches() as u64;
        if rows > i32::MAX as u64 {
            let why = format!("{} images have {rows} patches, more than 32-bit ids can name", labels.len());
            return Err(Error::data(Path::new(&d.source), why));
        }
        let sha256 = sha256_hex(&[pixels.as_slice(), &labels].concat());
        let (pixels, labels) = (Arc::new(pixels), Arc::new(labels));
        Ok(Self {
            pixels,
            labels,
            train: counts[0],
            sides: (m.image_size, m.patch_size),
            classes: m.vocab_size,
            sha256,
        })
    }

    /// SHA-256 of all pixels and labels.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Number of classes.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// Number of patches of an image.
    fn patches(&self) -> usize {
        (self.sides.0 / self.sides.1).pow(2)
    }

    /// Number of held-out images.
    pub fn held_out(&self) -> usize {
        self.labels.len() - self.train
    }

    /// Writes training image number `cursor` of the run into sequence `index` of a batch. Each pass over the training images has another
    /// order, and visits every image once. A batch may contain the end of one pass over the images and the beginning of the next pass.
    pub fn train(&self, seed: u64, cursor: u64, batch: &mut Batch, index: usize) {
        self.fill(self.image(seed, cursor), batch, index);
    }

    /// The index in the file of training image number `cursor` of the run.
    pub fn image(&self, seed: u64, cursor: u64) -> usize {
        let (pass, at) = (cursor / self.train as u64, cursor % self.train as u64);
        let draw = Stream::new(seed, Purpose::Data, fnv1a32("data.images"), pass as u32);
        Permutation::of(self.train as u64).at(&draw, at) as usize
    }

    /// Writes the held-out image with index `image` into sequence `index` of a batch.
    pub fn valid(&self, image: usize, batch: &mut Batch, index: usize) {
        self.fill(self.train + image, batch, index);
    }

    fn fill(&self, image: usize, batch: &mut Batch, index: usize) {
        let of_sequence = index * batch.seq_len..(index + 1) * batch.seq_len;
        let first = 1 + image * self.patches();
        let ids = std::iter::once(0).chain(first..first + self.patches());
        batch.inputs[of_sequence.clone()].iter_mut().zip(ids).for_each(|(id, row)| *id = row as i32);
        let targets = &mut batch.targets[of_sequence];
        targets.fill(NO_TARGET);
        targets[0] = i32::from(self.labels[image]);
    }

    /// The table of pixels `[rows, patch²]`. The first row is zero. Each other row is one patch, in the order of images and, within an
    /// image, from left to right and top to bottom. Pixels are standardized with the mean and the standard deviation of all training
    /// pixels.
    pub fn pixels(&self) -> (Vec<f32>, usize) {
        let (side, patch) = self.sides;
        let (mut count, mut sum, mut squares) = (0u64, 0u64, 0u64);
        for &pixel in &self.pixels[..self.train * side * side] {
            let pixel = u64::from(pixel);
            (count, sum, squares) = (count + 1, sum + pixel, squares + pixel * pixel);
        }
        let mean = sum as f64 / count.max(1) as f64;
        let variance = squares as f64 / count.max(1) as f64 - mean * mean;
        let scale = if variance > 0.0 { 1.0 / variance.sqrt() } else { 1.0 };
        let values: Vec<f32> = (0..256).map(|pixel| ((f64::from(pixel) - mean) * scale) as f32).collect();
        let mut table = vec![0.0; patch * patch];
        table.reserve(self.pixels.len());
        for image in self.pixels.chunks_exact(side * side) {
            for (top, left) in
                (0..side / patch).flat_map(|y| (0..side / patch).map(move |x| (y * patch, x * patch)))
            {
                let rows = (top..top + patch).map(|y| &image[y * side + left..][..patch]);
                table.extend(rows.flatten().map(|pixel| values[usize::from(*pixel)]));
            }
        }
        (table, patch * patch)
    }
}

/// Opens an IDX file. Returns a reader of its values, and the number of images or labels.
fn opened(path: &Path, kind: [u8; 2], side: usize) -> Result<(impl Read, usize)> {
    let file = DataFile::open(path, &Asked::default(), &Arc::new(AtomicU64::new(0)))?;
    let mut reader = file.reader()?;
    let what = if kind == IMAGES { "images" } else { "labels" };
    let mut header = [0; 16];
    let header = &mut header[..if kind == IMAGES { 16 } else { 8 }];
    reader.read_exact(header).map_err(|e| file.broken(&e))?;
    if header[..2] != [0, 0] || header[2..4] != kind {
        let magic = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
        let expected = u32::from_be_bytes([0, 0, kind[0], kind[1]]);
        let why =
            format!("is no IDX file of {what}: it begins with {magic:#010x}, expected {expected:#010x}");
        return Err(Error::data(path, why));
    }
    let mut sizes = header[4..].as_chunks::<4>().0.iter().map(|bytes| u32::from_be_bytes(*bytes) as usize);
    let count = sizes.next().unwrap_or(0);
    if count == 0 || count > MOST_IMAGES {
        return Err(Error::data(
            path,
            format!("says that it has {count} {what}, expected 1 to {MOST_IMAGES}"),
        ));
    }
    if let Some(other) = sizes.find(|size| *size != side) {
        let why = format!("has images with a side of {other} pixels, expected model.image_size = {side}");
        return Err(Error::data(path, why));
    }
    Ok((reader, count))
}

/// Appends the values of an IDX file. Returns the number of images or labels.
fn read(path: &Path, kind: [u8; 2], side: usize, into: &mut Vec<u8>) -> Result<usize> {
    let (reader, count) = opened(path, kind, side)?;
    let (first, expected) = (into.len(), if kind == IMAGES { count * side * side } else { count });
    // One more byte would be found.
    let most = expected as u64 + 1;
    reader.take(most).read_to_end(into).map_err(|e| Error::data(path, format!("cannot be read: {e}")))?;
    let got = into.len() - first;
    if got != expected {
        let than = if got < expected { format!("only {got}") } else { "more".into() };
        let why = format!("has {than} bytes after its header, which says {expected}");
        return Err(Error::data(path, why));
    }
    Ok(count)
}
