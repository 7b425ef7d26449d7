"""Use SGLang's tool-call parsers: `rollout.openai.tool_call_parser=extras.parsers.mistral`.

calls/tools.py already parses the format of Qwen and Hermes. This module has all parsers of SGLang.
"""

import json
from typing import Any

Tools = list[dict[str, Any]]  # in the form of chat completions


def __getattr__(name: str) -> Any:
    """Return SGLang's parser `name` as a function of (text, tools). Raises ImportError without
    SGLang and ValueError for an unknown name."""
    if name.startswith("__"):  # Python looks these up itself
        raise AttributeError(name)
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    FunctionCallParser([], name)  # an unknown name raises now

    def parse(text: str, tools: Tools) -> tuple[str, list[dict[str, Any]]]:
        parser = FunctionCallParser([Tool.model_validate(tool) for tool in tools], name)
        rest, calls = parser.parse_non_stream(text)
        found = [{"name": c.name, "arguments": json.loads(c.parameters)} for c in calls]
        return rest if calls else text, found

    return parse
