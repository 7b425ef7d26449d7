"""The lowest seam under a workflow: an engine that says what a script says, at the version it is told."""

from collections.abc import Callable
from typing import Any

from io_struct import ModelRequest, ModelResponse


class ScriptedEngine:
    """`script(request)` gives the completion's text, whole or (if `cut`) without an end-of-turn token."""

    def __init__(self, tokenizer: Any, script: Callable[[ModelRequest], str] = lambda request: "ok") -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.cut = False
        self.version = 0
        self.requests: list[ModelRequest] = []
        self.executor: Any = None

    def get_version(self) -> int:
        return self.version

    def set_version(self, version: int) -> None:
        self.version = version
        if self.executor is not None:
            self.executor.on_new_version()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        output = self.tokenizer.encode(self.script(request), add_special_tokens=False)
        output += [] if self.cut else [self.tokenizer.eos_token_id]
        g = request.gconfig
        return ModelResponse(
            list(request.input_ids),
            output,
            [-0.5] * len(output),
            [self.version] * len(output),
            "length" if self.cut else "stop",
            temperature=g.temperature,
            trains_exactly=g.trains_exactly,
        )
