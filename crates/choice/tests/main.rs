//! What kernels an operation takes on a GPU, asked of the same functions that the GPU and the prediction ask.

mod product_paths;
mod quantize_temporaries;
