"""AdamW on sharded tensors.

FSDP2 shards each weight, gradient and moment over the ranks. A sharded tensor is a DTensor, and every rank holds one
shard of it. AdamW updates each element of a weight independently, so each rank can update its own shard without the
other ranks. PyTorch checks and unpacks the DTensors in every operation. For small tensors, checking and unpacking a
DTensor takes longer than the arithmetic, so the optimizer computes with the shards as plain tensors. The optimizer's
state consists of DTensors, so that a checkpoint can be loaded with a different number of ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def own_shard(x: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor as a plain tensor. A tensor that is not sharded is returned
    unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x


class ShardAdamW(torch.optim.AdamW):
    """AdamW in which each rank updates its own shards."""

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:  # the weights, their gradients and the moments
            tensors[:] = map(own_shard, tensors)
        return has_complex
