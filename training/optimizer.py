"""AdamW and the shards of tensors.

FSDP2 divides each weight, gradient and moment over the ranks. A divided tensor is a DTensor, and every rank holds one
shard of it. AdamW changes each number of a weight on its own, so each rank can change its own shard without the other
ranks. torch checks and unpacks the DTensors in every operation, which takes longer than the arithmetic if the tensors
are small. The optimizer therefore computes with the shards as plain tensors. Its state consists of DTensors, so that a
checkpoint can be loaded with another number of ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def own_shard(x: Tensor) -> Tensor:
    """Return this rank's shard of a divided tensor as a plain tensor. A tensor that is not divided stays as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


class ShardAdamW(torch.optim.AdamW):
    """AdamW that computes with each rank's own shards."""

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:  # the weights, their gradients and the moments
            tensors[:] = map(own_shard, tensors)
        return has_complex
