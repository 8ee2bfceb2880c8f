//! Times of other projects' expert layers, forward and backward, measured on [`MEASURED`](crate::peers::MEASURED) with the same rules. Each
//! time is that of the faster of two runs.

use crate::peers::Who;

/// One project's layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peer {
    pub name: &'static str,
    /// The layer's name in [`super::SHAPES`].
    pub shape: &'static str,
    /// Median time of the sustained windows, in milliseconds.
    pub sustained_ms: Option<f64>,
    pub burst_ms: f64,
    /// Memory in MiB that a forward pass adds, without its output.
    pub kept_mib: f64,
}

const fn peer(
    name: &'static str,
    shape: &'static str,
    sustained_ms: Option<f64>,
    burst_ms: f64,
    kept_mib: f64,
) -> Peer {
    Peer { name, shape, sustained_ms, burst_ms, kept_mib }
}

const EXPERTS: &str = "DeepSeek-V3, 8 experts";
const MANY: &str = "128 experts, sorted rows";
const LAYER: &str = "128 experts, top-8";
const QWEN: &str = "Qwen3-30B, top-8";

/// The compared projects; the name of a layer in [`PEERS`] starts with the name of its project.
pub const WHO: [Who; 3] = [
    Who {
        name: "PyTorch",
        source: "2.11, torch._grouped_mm, eager and compiled",
        published: true,
        script: Some(("products.py", "")),
    },
    Who {
        name: "torchao",
        source: "0.18.0, its grouped FP8 products; blocks by DeepGEMM 2.6.1",
        published: true,
        script: None,
    },
    Who { name: "SonicMoE", source: "sonic-moe 0.1.2.post1, autotuned", published: true, script: None },
];

/// All measured layers of other projects.
pub const PEERS: [Peer; 11] = [
    peer("PyTorch 2.11 BF16, grouped_mm, torch.compile", EXPERTS, Some(14.0), 13.61, 384.0),
    peer("torchao 0.18 FP8, a scale a row", EXPERTS, Some(11.7), 11.66, 384.0),
    peer("torchao 0.18 FP8 blocks, DeepGEMM 2.6.1", EXPERTS, Some(12.5), 12.50, 384.0),
    peer("SonicMoE 0.1.2 BF16, top-1 over 8", EXPERTS, None, 14.90, 257.0),
    peer("PyTorch 2.11 BF16, grouped_mm", MANY, None, 34.59, 1536.0),
    peer("PyTorch 2.11 BF16, grouped_mm, torch.compile", MANY, Some(34.2), 33.89, 1536.0),
    peer("torchao 0.18 FP8, a scale a row", MANY, None, 37.13, 1536.0),
    peer("PyTorch 2.11 BF16, eager and compiled pieces", LAYER, None, 40.11, 5639.0),
    peer("PyTorch 2.11 BF16, torch.compile", LAYER, Some(42.6), 40.53, 5639.0),
    peer("SonicMoE 0.1.2 BF16", LAYER, None, 34.80, 1037.0),
    peer("PyTorch 2.11 BF16, torch.compile", QWEN, Some(17.9), 17.59, 3208.0),
];
