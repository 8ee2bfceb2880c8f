"""The ranks among which experts are divided: what the native part asks of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks:
    """A process group. Rows travel as bytes, in the formats of the recipe."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's values, in rank order. All ranks have the same number of them."""
        together = x.new_empty(self.world * x.numel())
        dist.all_gather_into_tensor(together, x, group=self.group)
        return together

    def exchange(
        self, send: Tensor, into: Tensor, row_bytes: int, send_rows: Sequence[int], recv_rows: Sequence[int]
    ) -> Callable[[], object]:
        """Starts an all-to-all of rows: ``send_rows[p]`` go to rank ``p``, ``recv_rows[p]`` come from it. Returns what waits for them."""
        sent, received = ([row_bytes * n for n in rows] for rows in (send_rows, recv_rows))
        work = dist.all_to_all_single(
            into[: sum(received)], send[: sum(sent)], received, sent, group=self.group, async_op=True
        )
        return work.wait
