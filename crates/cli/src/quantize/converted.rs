//! The output file of a conversion.

use nibble_command::error::{Error, Result};
use nibble_command::output::Output;
use nibble_train::checkpoint::header;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The tensors and metadata of an output file.
pub struct Converted<'d> {
    tensors: BTreeMap<String, Plane<'d>>,
    pub metadata: BTreeMap<String, String>,
    /// For each reason why tensors are copied unchanged, the number of copied tensors.
    pub copied: BTreeMap<&'static str, usize>,
}

struct Plane<'d> {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Cow<'d, [u8]>,
}

impl<'d> Converted<'d> {
    /// Creates the contents of an output file without any tensors.
    pub fn new(metadata: BTreeMap<String, String>) -> Self {
        Self { tensors: BTreeMap::new(), metadata, copied: BTreeMap::new() }
    }

    pub fn put(
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

    pub fn copy(&mut self, name: &str, view: &TensorView<'d>, why: &'static str) -> Result<()> {
        *self.copied.entry(why).or_default() += 1;
        self.put(name.to_owned(), view.dtype(), view.shape().to_vec(), view.data())
    }

    /// Writes the file, and returns its size. The order of tensors and metadata in the file depends only on their names and types.
    pub fn write(&self, output: Output) -> Result<u64> {
        let mut all: Vec<_> = self.tensors.iter().collect();
        // Larger types come first, as safetensors requires; the stable sort keeps the order of names.
        all.sort_by_key(|(_, plane)| Reverse(plane.dtype));
        let shapes = all.iter().map(|(name, plane)| (name.as_str(), plane.dtype, plane.shape.as_slice()));
        let header = header(&self.metadata, shapes).map_err(|e| Error::Failed(e.to_string()))?;
        output.write_with(|to| {
            to.write_all(&header)?;
            all.iter().try_for_each(|(_, plane)| to.write_all(&plane.data))
        })?;
        Ok((header.len() + all.iter().map(|(_, plane)| plane.data.len()).sum::<usize>()) as u64)
    }
}
