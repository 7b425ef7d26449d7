"""A GPU for tests on a machine without one.

Inside `with FakeGPU(monkeypatch):` a tensor made for "cuda" says that it is on the GPU, though it
lies in the machine's memory. As on a GPU, an operation mixes no tensors of both places, except CPU
scalars. FakeGPU counts how often something is sent to the GPU, and how often the CPU waits for it.

torch.cuda.CUDAGraph records the operations of a capture. A replay repeats them with the same
tensors, so a Python number keeps the value that it had during the capture.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# Functions that return values to the CPU, or whose result has a size that depends on values.
AWAITED = {"tolist", "item", "cpu", "__bool__", "__int__", "__float__", "nonzero", "bincount"}
PLACE = {"device": torch.device("cuda", 0), "is_cuda": True, "is_cpu": False}


class Resident(Tensor):
    """A tensor on the GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def names_gpu(x: Any) -> bool:
    return isinstance(x, str | torch.device) and str(x).startswith("cuda")


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        # each operation, and the new tensors that it returned; none if they were views
        self.tape: list[tuple[Callable[[], Any], list[Tensor]]] = []

    def replay(self) -> None:
        with torch._C.DisableTorchFunction():
            for call, outs in self.tape:
                for out, again in zip(outs, pytree.tree_leaves(call())):
                    out.copy_(again)


class FakeGPU(TorchFunctionMode):
    def __init__(self, monkeypatch: Any) -> None:
        super().__init__()
        self.sent = self.waits = 0
        self.graph: Graph | None = None  # the one that is being captured
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)

    def count(self) -> tuple[int, int]:
        """How often, since the last call, something was sent, and how often the CPU waited."""
        counts, self.sent, self.waits = (self.sent, self.waits), 0, 0
        return counts

    @contextmanager
    def capture(self, graph: Graph, pool: Any) -> Iterator[None]:
        self.graph = graph
        try:
            yield
        finally:
            self.graph = None
        for out in (out for _, outs in graph.tape for out in outs):
            out.zero_()  # a capture computes nothing

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        here = [x for x in tensors if x.ndim and not isinstance(x, Resident)]
        is_there = any(isinstance(x, Resident) for x in tensors)
        if name == "__get__" and is_there and func.__self__.__name__ in PLACE:
            return PLACE[func.__self__.__name__]
        if name == "__iter__":
            return iter(self.__torch_function__(Tensor.unbind, (), args))
        if func is torch.device or not (is_there or any(map(names_gpu, leaves))):
            return func(*args, **kwargs)
        if is_there and here and name not in ("copy_", "view_as"):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")

        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        parts = index if isinstance(index, tuple) else (index,)
        is_sent = name == "tensor" or any(isinstance(part, list | range) for part in parts)
        is_sent |= name in ("to", "copy_") and bool(here)
        is_awaited = any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)
        is_awaited |= name in AWAITED or (is_sent and not kwargs.get("non_blocking"))
        if self.graph and (is_sent or is_awaited):
            raise RuntimeError(f"{name}: not permitted while a graph is captured")
        self.sent, self.waits = self.sent + is_sent, self.waits + is_awaited

        args, kwargs = pytree.tree_unflatten(["cpu" if names_gpu(x) else x for x in leaves], tree)
        if kwargs.pop("out_dtype", None):  # torch.mm has it only on GPUs
            args = [x.float() for x in args]
        call = partial(func, *args, **kwargs)
        out = call()
        if name == "cpu":
            return out.as_subclass(Tensor).clone()
        out = out.clone() if is_sent and name == "to" else out
        out = pytree.tree_map_only(Tensor, lambda x: x.as_subclass(Resident), out)
        if self.graph:
            known = {x.untyped_storage().data_ptr() for x in tensors}
            outs = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
            new = [x for x in outs if x.untyped_storage().data_ptr() not in known]
            self.graph.tape.append((call, new))
        return out
