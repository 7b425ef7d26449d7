"""SGLang's parsers of tool calls, such as mistral or llama3, for the key `tool_call_parser`.

calls/tools.py reads the form of Qwen and Hermes itself, and asks here for every other name.
"""

import json
from typing import Any

Tools = list[dict[str, Any]]  # in the form of chat completions


def sglang(name: str) -> Any:
    """SGLang's parser `name`, such as mistral, as a function of (text, tools). Raises ImportError
    without SGLang, and ValueError for an unknown name."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    FunctionCallParser([], name)  # an unknown name raises now

    def parse(text: str, tools: Tools) -> tuple[str, list[dict[str, Any]]]:
        parser = FunctionCallParser([Tool.model_validate(tool) for tool in tools], name)
        rest, calls = parser.parse_non_stream(text)
        found = [{"name": c.name, "arguments": json.loads(c.parameters)} for c in calls]
        return rest if calls else text, found

    return parse
