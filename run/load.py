"""This module reads and checks the configuration of a run.

The configuration of a run has three layers, and each layer overrides the earlier layers. The first layer is the
defaults in run/keys.py, which defines every key. The second layer is one or more YAML recipes, such as `--config
configs/maze.yaml`. The third layer is the `key=value` arguments on the command line, such as `actor.eps_clip=0.1`.

A key that does not exist is an error, and the error message suggests the nearest existing key. Example: `python
train.py lr=0.1` ends with "unknown key 'lr' in the command line; did you mean 'actor.optimizer.lr'?". `load` calls
`resolve`, which checks every value before any process starts.
"""

import argparse
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import os
import re
import secrets
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    get_args,
    get_origin,
    get_type_hints,
)

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from inference.fields import is_within
from run.keys import ALIASES, NEEDS, SYNONYMS, TrainConfig

DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"


class ConfigError(ValueError):
    """The configuration is wrong, so the run cannot start. The message is one line with the problem and the remedy."""


@contextmanager
def one_line(what: str, longest: int | None = None) -> Iterator[None]:
    """If the `with` block raises an exception, raise ConfigError with a message of one line: `what`, then the text of
    the exception, cut to `longest` characters."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:longest]}"
        ) from error


class Key(NamedTuple):
    """One configuration key as `--help` prints it: full name, default, help text, allowed values and group."""

    name: str
    default: Any
    meaning: str
    interval: str | None
    choices: str  # the allowed words, if the key allows only certain words; else ""
    group: str  # heading of the key's group: the prefix of the keys' names, and what the keys configure


source_of = functools.cache(
    inspect.getsource
)  # reading the source of all dataclasses takes a second


def list_keys(cls: type = TrainConfig, prefix: str = "") -> list[Key]:
    """Return every key of the configuration, in the order of run/keys.py.

    The help text of a key is the comment behind the key in the source code of the dataclass `cls`. The type annotation
    of a numeric key contains the interval of the key's valid values.
    """
    meanings = dict(re.findall(r"^    (\w+): .*?  # (.+)$", source_of(cls), re.MULTILINE))
    keys, hints = [], get_type_hints(cls, include_extras=True)
    for name, default in vars(cls()).items():
        if dataclasses.is_dataclass(default):
            keys += list_keys(type(default), f"{prefix}{name}.")
        else:
            options = (
                hints[name],
                *get_args(hints[name]),
            )  # the type Count | None has the two options Count and None
            intervals = [
                option.__metadata__[0] for option in options if get_origin(option) is Annotated
            ]
            words = [
                ", ".join(map(str, get_args(option)))
                for option in options
                if get_origin(option) is Literal
            ]
            interval, choices = "".join(intervals) or None, "".join(words)
            keys.append(
                Key(
                    prefix + name,
                    default,
                    meanings[name],
                    interval,
                    choices,
                    f"{prefix[:-1]}: {cls.__doc__}",
                )
            )
    return keys


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries: {"actor": {"eps_clip": 0.2}} becomes {"actor.eps_clip": 0.2}.

    The value of workflow_kwargs stays a dictionary, because the user chooses its keys.
    """
    if not isinstance(tree, dict) or prefix == "workflow_kwargs.":
        return {prefix.rstrip("."): tree}
    return {
        k: v for name, child in tree.items() for k, v in flatten(child, f"{prefix}{name}.").items()
    }


def without_effect(config: Any, names: list[str]) -> dict[str, str]:
    """Return a dict that maps each key without effect to the key's unmet condition (a row of NEEDS in run/keys.py).

    The function checks only the keys in `names` whose values in `config` differ from their defaults.
    """
    default = TrainConfig()

    def is_met(condition: str) -> bool:
        name, _, values = condition.partition("=")
        value = attrgetter(name)(config)
        return str(value).lower() in values.split("|") if values else bool(value)

    changed = [name for name in names if attrgetter(name)(config) != attrgetter(name)(default)]
    unmet = [need for need in NEEDS if not any(map(is_met, need.split(" or ")))]
    return {name: need for need in unmet for name in changed if re.fullmatch(NEEDS[need], name)}


def set_keys(config: DictConfig, given: Any, source: str) -> dict[str, str]:
    """Write the given keys into `config`. Error messages contain `source`, which says where the keys come from: a
    recipe's path or the command line.

    Return a dict that maps each given key without effect to the key's unmet condition (a row of NEEDS in run/keys.py).
    An unmet condition raises no error, because a later recipe can still fulfil it. Raises ConfigError for an unknown
    key, and the message suggests the nearest known key.
    """
    if not isinstance(given, DictConfig):
        raise ConfigError(f"{source}: lines of the form `key: value` are needed")
    given.pop("revision", None)  # `revision` in a run's config.yaml is the git commit, not a key
    known, names = {key.name: key.default for key in list_keys()}, []
    for name, value in flatten(OmegaConf.to_container(given)).items():
        names.append(name := ALIASES.get(name, name))
        if name not in known:
            last = name.rpartition(".")[2]
            near = (
                [SYNONYMS[last]]
                if last in SYNONYMS
                else difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            )
            near = near or [
                key for key in known if key.startswith(f"{name}.") or key.rpartition(".")[2] == last
            ]
            near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = (
                f"did you mean {near[0]!r}?" if near else "`python train.py --help` lists the keys."
            )
            raise ConfigError(f"unknown key {name!r} in {source}; {hint}")
        if name in ("recover", "doctor") and value is False:
            value = "off"  # YAML parses the word `off` as false
        if name == "rollout.stale" and isinstance(value, bool):
            value = "drop" if value else "wait"  # `rollout.drop_stale` is another name of this key
        if isinstance(value, bool) and isinstance(known[name], str):
            raise ConfigError(
                f"{name}: YAML reads this word as {str(value).lower()}; give another word"
            )
        if (
            isinstance(value, str)
            and isinstance(known[name], list)
            and not re.search(r"[\s,]", value)
        ):
            value = [value]  # a list with one item needs no brackets
        OmegaConf.update(config, name, value)
    return without_effect(config, names)


def resolve(config: TrainConfig) -> None:
    """Check the values and set the defaults that depend on other keys. Raises ConfigError for a wrong value.

    The defaults are written into `config`, so the run's config.yaml contains every value that the run uses.
    """
    for key in list_keys():
        value = attrgetter(key.name)(config)
        if key.interval and value is not None and not is_within(value, key.interval):
            raise ConfigError(f"{key.name}={value}; it must be a number in {key.interval}")
    actor, rollout, gconfig, batch = (
        config.actor,
        config.rollout,
        config.gconfig,
        config.train_dataset.batch_size,
    )
    if config.model_revision and Path(config.model_path or "").is_dir():
        raise ConfigError(
            "model_revision has no effect on a folder: omit it, or set model_path to a name on the hub"
        )
    actor.max_new_tokens = actor.max_new_tokens or gconfig.max_new_tokens
    if (actor.overlong_tokens or 1) > actor.max_new_tokens:
        raise ConfigError(
            f"actor.overlong_tokens={actor.overlong_tokens} > max_new_tokens={actor.max_new_tokens}"
        )
    if (tracker := config.logger.tracker) and importlib.util.find_spec(
        tracker.partition(".")[0]
    ) is None:
        raise ConfigError(
            f"logger.tracker={tracker} is not installed here: pip install {tracker}, or omit the key"
        )
    if strange := set(rollout.openai.fixed_sampling) - vars(gconfig).keys():
        raise ConfigError(
            f"rollout.openai.fixed_sampling: {', '.join(sorted(strange))} is no field of gconfig"
        )
    for pattern in rollout.openai.side_conversations:
        with one_line(f"side_conversations: {pattern!r} is no regular expression"):
            re.compile(pattern)
    if rollout.group_size not in (None, gconfig.n_samples) and gconfig.n_samples != 1:
        raise ConfigError(
            "rollout.group_size and gconfig.n_samples are one number; give only one of the two keys"
        )
    if rollout.consumer_batch_size not in (None, batch):
        raise ConfigError(
            f"rollout.consumer_batch_size must be equal to train_dataset.batch_size={batch}; omit it"
        )
    rollout.group_size = gconfig.n_samples = rollout.group_size or gconfig.n_samples
    if config.mode == "train" and gconfig.n_samples == 1 and actor.adv_norm.mean_level == "group":
        raise ConfigError(
            "a group of one is its own baseline and learns nothing: raise gconfig.n_samples, or set"
            " actor.adv_norm.mean_level to batch or none"
        )
    if config.mode == "train" and not gconfig.trains_exactly:
        given = "top_p, top_k, penalties, json_schema, greedy or temperature 0"
        raise ConfigError(
            f"gconfig: training cannot reproduce samples with {given}: omit these keys, or set mode=eval"
        )
    rollout.consumer_batch_size = batch
    rollout.max_concurrent_rollouts = (
        rollout.max_concurrent_rollouts or (rollout.max_head_offpolicyness + 1) * batch
    )
    rollout.queue_size = rollout.queue_size or 16 * rollout.max_concurrent_rollouts
    gconfig.seed = config.seed if gconfig.seed is None else gconfig.seed
    new_key = "" if rollout.server_addrs else secrets.token_urlsafe(16)
    rollout.server_key = rollout.server_key or os.environ.get("POCKET_AREAL_SERVER_KEY") or new_key


def changed(path: Path, config: TrainConfig) -> list[str]:
    """Return the keys whose values differ between the config.yaml at `path` and `config`, as "key=before -> now".

    Return an empty list if there is no file at `path`, as in a new run.
    """
    before = flatten(OmegaConf.to_container(OmegaConf.load(path))) if path.exists() else {}
    now = flatten(dataclasses.asdict(config))
    return [f"{k}={before[k]} -> {now[k]}" for k in now if k in before and before[k] != now[k]]


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{message}; options are --config FILE, --dry-run, --quiet, --replay RUN, --help and key=value words"
        )


def load(argv: list[str]) -> TrainConfig:
    """Return the run's configuration from the arguments of the command line. `--help` prints the keys and exits.

    Raises ConfigError if an argument, a recipe or a value is wrong.
    """
    epilog, width = "keys, their defaults and meanings:\n", shutil.get_terminal_size().columns
    wrap = functools.partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
    for group, keys in groupby(list_keys(), key=lambda key: key.group):
        epilog += "\n" + wrap(" ".join(group.split()).removeprefix(": "), width=width) + "\n"
        for k in keys:
            values = (
                f"; in {k.interval}" if k.interval else f"; one of {k.choices}" if k.choices else ""
            )
            default = str(k.default).lower() if isinstance(k.default, bool) else k.default
            meaning = textwrap.indent(wrap(k.meaning + values, width=width - 6), " " * 6)
            epilog += f"  {k.name}={'null' if default is None else default}\n{meaning}\n"
    parser = Parser(
        "python train.py", epilog=epilog, allow_abbrev=False
    )  # run/terminal.py expects whole words
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    meaning = f"YAML recipe, or a name in configs/; may be repeated, and later recipes win; default: {DEMO.stem}"
    parser.add_argument("--config", type=Path, action="append", metavar="FILE", help=meaning)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan of the run, and start nothing"
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="print only warnings, errors and the results at the end",
    )
    parser.add_argument(
        "--gpus", type=int, help="with --dry-run: plan for a machine with this number of GPUs"
    )
    parser.add_argument(
        "--gpu-memory", type=float, help="with --gpus: memory of each GPU in GiB; default: 80"
    )
    parser.add_argument(
        "--replay", type=Path, metavar="RUN", help="repeat the run in this folder, bit by bit"
    )
    parser.add_argument(
        "--replay-until", type=int, metavar="N", help="with --replay: end after step N"
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key=value",
        help="a key and its value, which win over the recipes",
    )
    args = parser.parse_intermixed_args(argv)
    if args.replay_until and not args.replay:
        parser.error("--replay-until needs --replay")
    if bare := [word for word in args.words if "=" not in word]:
        parser.error(f"cannot read {bare[0]!r}")
    paths = ([args.replay / "config.yaml"] if args.replay else []) + (
        args.config or ([] if args.replay else [DEMO])
    )
    named = [
        DEMO.parent / (p if p.suffix else f"{p}.yaml") for p in paths
    ]  # the recipes in configs/ of these names
    recipes = [
        p if p.is_file() or (p.suffix and not own.is_file()) else own
        for p, own in zip(paths, named)
    ]
    if missing := [recipe for recipe in recipes if not recipe.is_file()]:
        raise ConfigError(f"no recipe at {missing[0]}; configs/ holds the recipes of the project")
    merged, idle, source = OmegaConf.structured(TrainConfig), dict[str, str](), ""
    try:
        for recipe in recipes:
            source = str(recipe)
            idle |= set_keys(merged, OmegaConf.load(recipe), source)
        source = "the command line"
        given = {
            name: value for name, value in vars(args).items() if name not in ("config", "words")
        }
        options = [
            f"{name}={value}"
            for name, value in given.items()
            if value is not None and value is not False
        ]
        idle |= set_keys(merged, OmegaConf.from_dotlist(args.words + options), source)
        config: Any = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeError) as error:
        where = getattr(error, "full_key", None) or source
        text = (
            str(error).splitlines()[0] if isinstance(error, OmegaConfBaseException) else str(error)
        )
        raise ConfigError(f"{where}: {' '.join(text.split())}") from error
    for name, need in without_effect(config, [] if args.replay else list(idle)).items():
        raise ConfigError(
            f"{name}={attrgetter(name)(config)} has no effect here: omit it, or set {need}"
        )
    resolve(config)
    return config
