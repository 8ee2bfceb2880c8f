//! Nibble's kernels and recipes inside PyTorch: the native part of the Python package `nibble`.
//!
//! | module | |
//! |---|---|
//! | [`dlpack`] | tensors cross by DLPack's exchange table: views without a copy and without a wait |
//! | [`place`] | the backend of a tensor's device: its current stream, and PyTorch's allocator |
//! | [`home`] | the backends, with memory that PyTorch owns |
//! | [`element`] | the types of elements that both sides know |
//! | [`convert`] | quantize, dequantize and transcode |
//! | [`recipes`] | recipes by name or path, and the plan of a layer |
//! | [`saved`] | the activations that a layer saves, as tensors |
//! | [`layer`] | what the layers share |
//! | [`ranks`] | the ranks among which experts are divided |
//! | [`copies`] | copies of weights that several passes read |
//! | [`rows`] | a call's rows as a shard, kept on each GPU |
//! | [`linear`], [`experts`] | the layers: a forward and a backward function each |
//!
//! Every function takes tensors and plain values, and returns tensors. What PyTorch must know besides (shapes of results without computing
//! them, gradients, modules) is in `python/nibble/torch`.

mod convert;
mod copies;
mod dlpack;
mod element;
mod errors;
mod experts;
mod home;
mod layer;
mod linear;
mod place;
mod ranks;
mod recipes;
mod rows;
mod saved;

use pyo3::prelude::*;

/// The native part of `nibble`.
#[pymodule]
fn _nibble(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(dlpack::use_tensors_of, module)?)?;
    module.add_function(wrap_pyfunction!(convert::formats, module)?)?;
    module.add_function(wrap_pyfunction!(convert::quantize, module)?)?;
    module.add_function(wrap_pyfunction!(convert::dequantize, module)?)?;
    module.add_function(wrap_pyfunction!(convert::transcode, module)?)?;
    module.add_function(wrap_pyfunction!(recipes::recipe_names, module)?)?;
    module.add_function(wrap_pyfunction!(recipes::explain, module)?)?;
    module.add_function(wrap_pyfunction!(recipes::depends_on_run, module)?)?;
    module.add_function(wrap_pyfunction!(recipes::recipe_changes, module)?)?;
    module.add_function(wrap_pyfunction!(recipes::layer_needs, module)?)?;
    module.add_function(wrap_pyfunction!(linear::linear_saved, module)?)?;
    module.add_function(wrap_pyfunction!(linear::linear_supported, module)?)?;
    module.add_function(wrap_pyfunction!(linear::linear_forward, module)?)?;
    module.add_function(wrap_pyfunction!(linear::linear_backward, module)?)?;
    module.add_class::<copies::WeightCopies>()?;
    module.add_class::<experts::SavedShapes>()?;
    module.add_function(wrap_pyfunction!(experts::experts_saved, module)?)?;
    module.add_function(wrap_pyfunction!(experts::experts_forward, module)?)?;
    module.add_function(wrap_pyfunction!(experts::experts_backward, module)?)
}
