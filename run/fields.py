"""The fields of a caller's JSON: read with errors that name them, written down only where every reader can follow.

What a client or a model sends is of any type and any depth. Here it becomes what it should be or a `Refusal`, which
the proxy answers as 400; nothing of it raises anything else.
"""

import json
import math
from typing import Any

LEVELS = 200  # of nesting: more than that no JSON writer promises to write down again
KINDS = {bool: "true or false", dict: "an object", list: "a list", str: "a string"}


class Refusal(ValueError):
    """A request that is not served, and why: the message names the field, or says what to do."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status  # of HTTP


def read_json(text: str) -> Any:
    """JSON that every client can read and write again. Raises ValueError for NaN, infinity, and what is too deep."""
    try:
        value = json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    write_json(value, "JSON")
    json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be sent: UnicodeEncodeError
    return value


def _number(text: str) -> float | int:
    """2.0 is 2, and what has more than 64 bits is no integer: as JavaScript and JSON libraries have it."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text}: a finite number is needed")
    if not value.is_integer() or abs(value) >= 2**63:
        return value
    return int(text) if text.removeprefix("-").isdigit() else int(value)


_encode = json.JSONEncoder(sort_keys=True).encode


def write_json(value: Any, name: str) -> str:
    """`value` of the field `name` as text. Refusal where it is nested too deeply to be written down."""
    try:
        text = _encode(value)
        if text.count("{") + text.count("[") <= LEVELS or not _is_deep(value, LEVELS):
            return text
    except RecursionError:
        pass
    raise Refusal(f"{name}: it is nested too deeply")


def _is_deep(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deep(item, levels - 1) for item in inner)


def as_object(value: Any, where: str) -> dict[str, Any]:
    """`value` where it is an object. Raises Refusal, which names it as `where` does."""
    if not isinstance(value, dict):
        raise Refusal(f"{where}: an object is needed")
    return value


def get(body: dict[str, Any], path: str, kind: type, default: Any = None, where: str = "") -> Any:
    """The field at a dotted path, or `default` where it is absent or null. Raises Refusal for another kind; `where`:
    what the body is called, if it is a part of a larger one."""
    outer, _, name = path.rpartition(".")
    value = (get(body, outer, dict, {}) if outer else body).get(name)
    if value is not None and not isinstance(value, kind):
        raise Refusal(f"{where}.{path}: {KINDS[kind]} is needed".removeprefix("."))
    return default if value is None else value
