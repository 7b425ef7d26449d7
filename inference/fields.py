"""Read the fields of the JSON body of a request. The error message for a wrong field contains the field's name.

A client or a model may send any type of JSON value, nested to any depth. The functions of this module return a value of
the expected type, or raise `Refusal`. If a function raises `Refusal`, the proxy replies with status 400.

    get({"tools": 7}, "tools", list)                    -> Refusal "tools: a list is needed"
    get({"text": {"format": {}}}, "text.format", dict)  -> {}
    get({}, "stream", bool, False)                      -> False

The type of a number in the configuration, such as Count or Share, is annotated with the interval of the allowed values.

Some clients cannot read or write NaN, lone surrogates (halves of UTF-16 pairs), or more than `LEVELS` levels of
nesting. `read_json` refuses JSON text that contains NaN, a lone surrogate or too many levels of nesting.
"""

import json
import math
from typing import Annotated, Any

LEVELS = 200  # number of levels of nesting that every JSON library can write
NOUN = {
    bool: "true or false",
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
}

# Types of numbers, each with the interval of the allowed values. A round bracket excludes the bound next to it.
Count = Annotated[int, "[1, inf)"]
CountOrZero = Annotated[int, "[0, inf)"]
Seed = Annotated[int, "[0, 4294967295]"]
Share = Annotated[float, "[0, 1]"]
Positive = Annotated[float, "(0, inf)"]
NonNegative = Annotated[float, "[0, inf)"]


class Refusal(ValueError):
    """An error in a client's request. The message names the wrong field or says what the client must do."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status  # HTTP status of the reply


def is_within(value: float, interval: str) -> bool:
    """Return whether a number lies in an interval such as "(0, 1]" or "[-1, -1] or [1, inf)". NaN lies in no
    interval."""
    if " or " in interval:
        return any(is_within(value, part) for part in interval.split(" or "))
    low, high = map(float, interval[1:-1].split(","))
    above = value > low or (value == low and interval[0] == "[")
    return above and (value < high or (value == high and interval[-1] == "]"))


def read_json(text: str, levels: int = LEVELS) -> Any:
    """Parse a JSON text and return its value.

    Raises ValueError for malformed JSON, NaN, an infinite number, a lone surrogate, or more than `levels` levels of
    nesting.
    """
    try:
        value = json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    write_json(
        value, "JSON", levels
    ).encode()  # `encode` raises UnicodeEncodeError, a ValueError, for a lone surrogate
    return value


def _number(text: str) -> float | int:
    """Convert a JSON number as JavaScript does: 2.0 becomes 2, and an integer of more than 64 bits becomes a float."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text}: a finite number is needed")
    if not value.is_integer() or abs(value) >= 2**63:
        return value
    # A float cannot hold all digits of a long integer, so the integer is made from `text` and not from `value`.
    return int(text) if text.removeprefix("-").isdigit() else int(value)


_encode = json.JSONEncoder(
    sort_keys=True, ensure_ascii=False
).encode  # one encoder object, used for every message


def write_json(value: Any, name: str, levels: int = LEVELS) -> str:
    """Return `value` as JSON text with sorted keys.

    If `value` has more than `levels` levels of nesting, raise Refusal with the field's `name`.
    """
    try:
        text = _encode(value)
        # Counting brackets is faster than calling `_is_deep`. A JSON text has at least one opening bracket for each
        # level of nesting.
        if text.count("{") + text.count("[") <= levels or not _is_deep(value, levels):
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
    """Return `value` if it is a JSON object, else raise Refusal with a message that begins with `where`."""
    if not isinstance(value, dict):
        raise Refusal(f"{where}: an object is needed")
    return value


def get(body: dict[str, Any], path: str, kind: type, default: Any = None, where: str = "") -> Any:
    """Return the field at a dotted path such as "text.format", or `default` if the field is absent or null.

    Error messages begin with `where`, the path of `body` within a larger body. Raises Refusal if the field's value is
    not of the type `kind`.
    """
    outer, _, name = path.rpartition(".")
    value = (get(body, outer, dict, {}) if outer else body).get(name)
    if value is not None and not isinstance(value, kind):
        raise Refusal(f"{where}.{path}: {NOUN[kind]} is needed".removeprefix("."))
    return default if value is None else value
