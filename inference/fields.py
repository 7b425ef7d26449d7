"""Check JSON from agents and models, and say which field is wrong.

An agent or a model may send JSON of any type and depth. `get` returns a value of the expected type
or raises Refusal, which the proxy answers with status 400:

    get({"tools": 7}, "tools", list)                    -> Refusal "tools: a list is needed"
    get({"text": {"format": {}}}, "text.format", dict)  -> {}
    get({}, "stream", bool, False)                      -> False

Some clients cannot read NaN, half a surrogate pair or hundreds of nested levels, so `read_json`
refuses such values. The last functions of this file find the Python objects that a configuration
names.
"""

import importlib
import importlib.util
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

LARGEST_REWARD = 1e30  # a sum of many such rewards fits into a float32
ROOM = 50  # of the 254 nested levels that orjson writes, those kept for objects around a value


class Refusal(ValueError):
    """The caller made a mistake. The message names the field."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def read_json(text: str) -> Any:
    """Read a JSON text. As in JavaScript, 2.0 becomes 2."""
    value = orjson.loads(text)
    write_json(value, "JSON")  # refuses a value that is nested too deeply
    return _whole(value)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**63
    return int(value) if is_whole else value


def write_json(value: Any, name: str) -> bytes:
    """Return the value as JSON. Raises Refusal for a value that some clients could not read."""
    for _ in range(ROOM):
        value = [value]
    try:
        return orjson.dumps(value)[ROOM:-ROOM]
    except TypeError as error:
        raise Refusal(f"{name}: it is nested too deeply, or no text: {error}") from error


def as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(f"{where}: an object is needed")
    return value


def get(body: dict[str, Any], path: str, kind: type, default: Any = None, where: str = "") -> Any:
    """Return the field at a dotted path, or `default` if the field is absent or null. Raises
    Refusal if the value is not a `kind`."""
    outer, _, name = path.rpartition(".")
    value = (get(body, outer, dict, {}) if outer else body).get(name)
    if value is not None and not isinstance(value, kind):
        raise Refusal(f"{where}.{path}: a {kind.__name__} is needed".removeprefix("."))
    return default if value is None else value


def finite(reward: Any, what: str = "reward") -> float:
    """Return a Python, numpy or torch number as a float. Raises Refusal for NaN, for a number above
    LARGEST_REWARD and for any other object."""
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of two
        number = math.nan
    if abs(number) <= LARGEST_REWARD:
        return number
    raise Refusal(
        f"{what}: a finite number of at most {LARGEST_REWARD:g} is needed, not {reward!r:.80}"
    )


def import_name(path: Any) -> Any:
    """Import the object at the path module.name. Return anything but a string as it is.

    We do not use pkgutil.resolve_name, because it would hide an ImportError inside the module.
    """
    if not isinstance(path, str):
        return path
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def find_source(module: str) -> Path:
    """Return the source file of a module. We do not import the module, because that could load
    torch, which takes seconds."""
    with suppress(ModuleNotFoundError):  # raised if there is no such package
        spec = importlib.util.find_spec(module)
        if spec and spec.origin and spec.origin.endswith(".py"):
            return Path(spec.origin)
    raise ValueError(f"there is no module {module!r} in Python code; a name is module.name")


def check_name(path: str) -> str:
    module, _, name = path.rpartition(".")
    if name == "jsonl":
        if not Path(path).is_file():
            raise ValueError("there is no such file")
    elif not re.search(rf"\b{re.escape(name)}\b", find_source(module).read_text()):
        raise ValueError(f"{module} has no {name}")
    return path


def make_named(named: dict[str, dict[str, Any]]) -> Any:
    """Return the object that `named` describes as {path of class: arguments}, or None for {}."""
    if len(named) > 1:
        raise ValueError(f"only one callback may have engine hooks, not {' and '.join(named)}")
    return next((import_name(path)(**arguments) for path, arguments in named.items()), None)
