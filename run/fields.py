"""Read the fields of a JSON body, with errors that name the field.

A client or a model may send JSON of any type and any depth. The functions here return a value of the expected type or
raise `Refusal`, which the proxy answers with status 400:

    get({"tools": "f"}, "tools", list)                  -> Refusal "tools: a list is needed"
    get({"text": {"format": {}}}, "text.format", dict)  -> {}
    get({}, "stream", bool, False)                      -> False

JSON is accepted only if every client can read and write it again: no NaN, no lone surrogates, at most `LEVELS` levels.
"""

import json
import math
from typing import Any

LEVELS = 200  # levels of nesting that every JSON library can write
NOUN = {bool: "true or false", dict: "an object", list: "a list", str: "a string", int: "an integer", float: "a number"}


class Refusal(ValueError):
    """A request that cannot be served. Its message names the field or says what to do."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status  # HTTP status of the reply


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError unless every client can read and write it again."""
    try:
        value = json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    write_json(value, "JSON").encode()  # UnicodeEncodeError, a ValueError, for half a surrogate pair
    return value


def _number(text: str) -> float | int:
    """Return a JSON number as JavaScript reads it: 2.0 is 2, and an integer of more than 64 bits is a float."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text}: a finite number is needed")
    if not value.is_integer() or abs(value) >= 2**63:
        return value
    return int(text) if text.removeprefix("-").isdigit() else int(value)  # a float drops digits of a long integer


def write_json(value: Any, name: str) -> str:
    """Return `value` as JSON text with sorted keys. Raises Refusal, naming the field, if it is nested too deeply."""
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False)
        # The number of brackets is quick to count and never less than the number of levels.
        if text.count("{") + text.count("[") <= LEVELS or not _is_deep(value, LEVELS):
            return text
    except RecursionError:
        pass
    raise Refusal(f"{name}: it is nested too deeply")


def _is_deep(value: Any, levels: int) -> bool:
    """Return whether `value` is nested at least `levels` levels deep."""
    if levels == 0:
        return True
    inner = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and any(_is_deep(item, levels - 1) for item in inner)


def as_object(value: Any, where: str) -> dict[str, Any]:
    """Return `value` if it is an object. Raises Refusal, which begins with `where`, if it is not."""
    if not isinstance(value, dict):
        raise Refusal(f"{where}: an object is needed")
    return value


def get(body: dict[str, Any], path: str, kind: type, default: Any = None, where: str = "") -> Any:
    """Return the field at a dotted path such as "text.format", or `default` if it is absent or null.

    `where` is the path of `body` itself in a larger body. Raises Refusal if the field has another type than `kind`.
    """
    outer, _, name = path.rpartition(".")
    value = (get(body, outer, dict, {}) if outer else body).get(name)
    if value is not None and not isinstance(value, kind):
        raise Refusal(f"{where}.{path}: {NOUN[kind]} is needed".removeprefix("."))
    return default if value is None else value
