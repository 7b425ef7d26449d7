"""Capture the decode steps of a model as CUDA graphs, which a GPU replays.

With 1.5B parameters, one decode step starts about a thousand kernels. Most kernels are so small
that starting them takes longer than computing them. A CUDA graph avoids this delay: after one
capture, a single launch starts all kernels. A replay runs the same kernels at the same addresses,
with these consequences:

- All inputs of a step lie in one tensor, which is refilled before each replay.
- Shapes are fixed, so a step with other shapes needs another graph.
- A replay reads weights and keys at fixed addresses, so new weights and keys are written there.
- While a step is captured, it can neither wait for the GPU nor copy ordinary (pageable) CPU memory.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

# cuDNN's attention is off: it would prepare a plan for every new shape, and nearly every prefill
# has a new shape.
torch.backends.cuda.enable_cudnn_sdp(False)


class Graphs:
    """The graphs of one model, each captured when it is first needed."""

    most = 64  # beyond this number, the least recently used graph is dropped

    def __init__(self) -> None:
        self.captured: dict[Hashable, tuple[Any, Tensor, Tensor]] = {}
        self.pool: Any = torch.cuda.graph_pool_handle()  # shared, because one graph runs at a time

    def run(self, key: Hashable, function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return function(inputs). Inputs with the same key must have the same shape. The next call
        may overwrite the result."""
        if key in self.captured:
            graph, fixed, out = self.captured.pop(key)
            fixed.copy_(inputs, non_blocking=True)
        else:
            fixed = inputs.to("cuda", non_blocking=True)
            function(fixed)  # in a first call libraries initialise, which cannot be captured
            if len(self.captured) == self.most:
                del self.captured[next(iter(self.captured))]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                out = function(fixed)
        self.captured[key] = graph, fixed, out
        graph.replay()
        return out
