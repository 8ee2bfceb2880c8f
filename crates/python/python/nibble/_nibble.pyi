"""The native part: functions of tensors and plain values. Use ``nibble.torch``, which checks, documents and differentiates them."""

from collections.abc import Sequence

from nibble.torch.ranks import Ranks
from torch import Tensor

__version__: str

#: Codes, scales, tensor scale, name of the scale rule, counts of blocks.
_Parts = tuple[Tensor, Tensor, Tensor | None, str, Tensor]
#: Name, element type and shape of a saved tensor.
_Saved = list[tuple[str, str, list[int]]]

class WeightCopies:
    """The copies of a layer's weights that its first pass makes, and that later passes read."""

class SavedShapes:
    """Shapes of what a forward pass saved, where the routing decides them."""

def use_tensors_of(tensor: type[Tensor]) -> None: ...
def formats() -> list[str]: ...
def quantize(
    x: Tensor,
    format: str,
    axis: str = "row",
    scale: str | None = None,
    rounding: str | None = None,
    seed: int = 0,
    step: int = 0,
    name: str = "x",
) -> _Parts: ...
def dequantize(
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None,
    shape: Sequence[int],
    format: str,
    axis: str = "row",
    scale: str | None = None,
    dtype: str = "float32",
) -> Tensor: ...
def transcode(
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None,
    shape: Sequence[int],
    format: str,
    to: str,
    axis: str = "row",
    scale: str | None = None,
    to_scale: str | None = None,
) -> _Parts: ...
def recipe_names() -> list[tuple[str, str]]: ...
def explain(recipe: str, kind: str, name: str) -> list[tuple[str, str]]: ...
def depends_on_run(recipe: str) -> bool: ...
def recipe_changes(recipe: str, layers: int, steps: int) -> list[float]: ...
def layer_needs(recipe: str, kind: str, name: str) -> tuple[int, bool]: ...
def linear_saved(recipe: str, name: str, sizes: tuple[int, int, int], dtype: str, gpu: bool) -> _Saved: ...
def linear_supported(recipe: str, name: str, sizes: tuple[int, int, int]) -> None: ...
def linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    time: Tensor | None,
    recipe: str,
    name: str,
    seed: int,
    copies: WeightCopies | None = None,
) -> tuple[Tensor, list[Tensor]]: ...
def linear_backward(
    saved: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    time: Tensor | None,
    recipe: str,
    name: str,
    seed: int,
    needed: Sequence[bool],
    copies: WeightCopies | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
def experts_saved(
    recipe: str, name: str, sizes: tuple[int, int, int, int, int], dtype: str, gpu: bool
) -> _Saved: ...
def experts_forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert: Tensor,
    gate: Tensor,
    time: Tensor | None,
    recipe: str,
    name: str,
    seed: int,
    ranks: Ranks | None = None,
    copies: WeightCopies | None = None,
) -> tuple[Tensor, list[Tensor], SavedShapes | None]: ...
def experts_backward(
    saved: Sequence[Tensor],
    gate_up: Tensor,
    down: Tensor,
    expert: Tensor,
    gate: Tensor,
    dy: Tensor,
    time: Tensor | None,
    recipe: str,
    name: str,
    seed: int,
    needed: Sequence[bool],
    ranks: Ranks | None = None,
    shapes: SavedShapes | None = None,
    copies: WeightCopies | None = None,
) -> list[Tensor | None]: ...
