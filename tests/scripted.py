"""A scripted engine for tests of workflows, and a scripted workflow for tests of the executor."""

from collections.abc import Callable
from typing import Any

import torch
from harness import response_to
from torch.utils.data import DataLoader

from inference.io_struct import ModelRequest, ModelResponse
from workflow import RolloutWorkflow, workflow_context


class ScriptedEngine:
    """Answers each request with the text `script(request)`; with `cut`, without the end token."""

    def __init__(
        self, tokenizer: Any, script: Callable[[ModelRequest], str] = lambda request: "ok"
    ) -> None:
        self.tokenizer, self.script, self.cut, self.version = tokenizer, script, False, 0
        self.requests: list[ModelRequest] = []
        self.proxy: Any = None  # agents have none

    def get_version(self) -> int:
        return self.version

    def set_version(self, version: int) -> None:
        self.version = version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        output = self.tokenizer.encode(self.script(request), add_special_tokens=False)
        output += [] if self.cut else [self.tokenizer.eos_token_id]
        return response_to(request, output, self.version, self.cut)


def loader(samples: list[dict], batch_size: int = 2, seed: int | None = None) -> DataLoader:
    """A dataloader whose batches are lists of samples, shuffled with `seed`."""
    order: Any = {"shuffle": seed is not None}
    order["generator"] = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(samples, batch_size, collate_fn=list, **order)  # type: ignore[arg-type]


class Echo(RolloutWorkflow):
    """Returns one row of three tokens: the sample's number + 1, the member's index, and `name`."""

    def __init__(
        self, name: int = 0, fails: tuple[int, ...] = (), rejects: tuple[int, ...] = ()
    ) -> None:
        self.name, self.fails, self.rejects = name, fails, rejects

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        if data["n"] in self.fails:
            raise ValueError(f"sample {data['n']} is broken")
        if data["n"] in self.rejects:
            return None
        ids = [data["n"] + 1, workflow_context.get().sample_idx, self.name]
        return {
            "input_ids": torch.tensor([ids], dtype=torch.int32),
            "attention_mask": torch.ones(1, 3, dtype=torch.bool),
            "loss_mask": torch.tensor([[0, 0, 1]], dtype=torch.int32),
            "logprobs": torch.zeros(1, 3),
            "versions": torch.full((1, 3), engine.get_version(), dtype=torch.int32),
            "rewards": torch.tensor([float(data["n"])]),
        }
