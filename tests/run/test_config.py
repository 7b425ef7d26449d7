"""Recipes override defaults, words override recipes, and a mistake is one line before anything
starts."""

import ast
import re
from operator import attrgetter
from pathlib import Path

import pytest
from conftest import ROOT
from test_structure import MODULES

from run.config import ALIASES, ConfigError, NormConfig, TrainConfig, list_keys, load, resolve


def config_of(*words: str) -> TrainConfig:
    return load([*words])[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["actor.eps_clp=0.1"], "did you mean 'actor.eps_clip'"),
        (["train_datset.path=x"], "did you mean 'train_dataset.path'"),
        (["qwertyuiop=1"], "did you mean one of --help-all"),
        (["saver=3"], "saver=3: Input should be a valid dictionary"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: FileNotFoundError"),
        (["train"], "unknown key 'train'"),
        (["max_steps"], "max_steps=None"),
        (["model_path="], "model_path= lacks its value"),
        (["max_steps=["], "max_steps: ParserError: while parsing"),
        (["max_steps=0"], "greater than 0"),
        (["rollout.pause_mode=now"], "'retract' or 'abort'"),
        (["rollout.group_size=2", "gconfig.n_samples=3"], "are one key"),
        (["rollout.consumer_batch_size=5", "train_dataset.batch_size=6"], "are one key"),
        (["--config", "gsm8k", "gconfig.top_p=0.9"], "cannot reproduce samples"),
        (["eval_gconfig.temprature=0"], "unknown key 'temprature'"),
        (["trial_name=../../escape"], "trial_name="),
        (["weight_update.mode=distributed"], "weight_update.mode: a small server"),
        (["workflow=task.guess.GuessAgent"], "there is no module 'task.guess'"),
        (["actor.loss=extras.losses.cisp"], "extras.losses has no cisp"),
        (["actor.loss=extras.losses.cispo("], "extras.losses has no cispo("),
        (["actor.loss=math.exp"], "there is no module 'math' in Python code"),
        (["train_dataset.path=nowhere.jsonl"], "there is no such file"),
    ],
)
def test_what_cannot_run_is_one_line(words: list[str], says: str) -> None:
    """The line says what is wrong. For a misspelt key it also says which key may be meant."""
    with pytest.raises(ConfigError, match=rf"^.*{re.escape(says)}.*\Z"):
        load(words)


def test_a_run_works_on_a_copy() -> None:
    """Objects among the workflow's arguments stay what they are."""
    config = TrainConfig(workflow_kwargs={"any": ROOT}, actor={"threads": 0})
    assert (resolve(config).workflow_kwargs["any"], config.actor.threads) == (ROOT, 0)


def test_at_most_90_keys_each_with_a_meaning() -> None:
    """Every key has a description, and some module reads it."""
    keys = list(list_keys(TrainConfig()))
    assert len(keys) <= 90
    assert [name for name, _, declared in keys if not declared.description] == []
    nodes = [node for path in MODULES for node in ast.walk(ast.parse(path.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names = {name.rpartition(".")[2] for name, _, _ in keys}
    assert names - read - NormConfig.model_fields.keys() == set()  # these are passed on whole


@pytest.mark.parametrize("value", ["nan", ".inf", "-1e300"])
def test_no_number_is_absurd(value: str) -> None:
    """Every number refuses NaN, infinity and what lies far below its range."""
    for name, _, declared in list_keys(TrainConfig()):
        kind = str(declared.annotation)
        if re.search(r"\b(int|float)\b", kind) and "list" not in kind:
            with pytest.raises(ConfigError, match=re.escape(ALIASES.get(name, name))):
                load([f"{name}={value}", "mode=eval"])


@pytest.mark.parametrize(("option", "least", "most"), [("--help", 20, 20), ("--help-all", 80, 90)])
def test_help(option: str, least: int, most: int, capsys: pytest.CaptureFixture[str]) -> None:
    """--help shows the defaults and meanings of the keys that matter, --help-all those of all."""
    with pytest.raises(SystemExit, match="0"):
        load([option])
    said, keys = capsys.readouterr().out, list(list_keys(TrainConfig()))
    shown = [key for key, x, it in keys if f"  {key}={x}\n      {it.description}" in said]
    assert least <= len(shown) <= most
    assert option == "--help" or len(shown) == len(keys)


def test_later_words_win(tmp_path: Path) -> None:
    """Words override the last recipe, which overrides the first, which overrides the defaults."""
    recipe, second, empty = (tmp_path / f"{name}.yaml" for name in ("recipe", "second", "empty"))
    empty.touch()
    recipe.write_text("max_steps: 3\nseed: 5\nsaver: 1\nactor: {eps_clip: 0.3}\n")
    second.write_text("seed: 6\nworkflow_kwargs: {any: {gpt-4.1: 1}}\n")
    words = ["max_steps=4", "workflow_kwargs.other=x", "rollout.server_addrs=[http://127.0.0.1:9]"]
    words += ["saver.interval=7", "gconfig={top_k: 3}", "mode=eval", "--config", str(empty)]
    config = config_of("seed=7", "--config", str(recipe), "--config", str(second), *words)
    assert (config.max_steps, config.seed, config.actor.eps_clip) == (4, 7, 0.3)
    assert config.workflow_kwargs == {"any": {"gpt-4.1": 1}, "other": "x"}
    assert config.rollout.server_addrs == ["http://127.0.0.1:9"]
    assert (config.saver.interval, config.gconfig.top_k) == (7, 3)


@pytest.mark.parametrize("text", ["- max_steps: 3\n", "actor: [", "\x00"])
def test_a_recipe_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    """The line names the recipe."""
    recipe = tmp_path / "own.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=r"^.*own\.yaml: .*\Z"):
        load(["--config", str(recipe)])


def test_recipes_are_found_by_name() -> None:
    """`--config gsm8k` finds configs/gsm8k.yaml, and every recipe loads."""
    assert config_of("--config", "gsm8k") == config_of("--config", "configs/gsm8k.yaml")
    for path in (ROOT / "configs").glob("*.yaml"):
        config_of("--config", "demo", "--config", path.stem)


def test_aliases_of_the_documents() -> None:
    """The documents' names set our keys. Of two names for one number, the later source wins."""
    words = ["model=m", "eval_interval=3", "rollout.fileroot=r", "actor.recompute_logprobs=false"]
    config = config_of(*words)
    names = ("model_path", "evaluator.interval", "fileroot", "actor.recompute_logprob")
    assert [attrgetter(name)(config) for name in names] == ["m", 3, "r", False]
    config = config_of("--config", "gsm8k", "--config", "throughput", "rollout.group_size=5")
    assert (config.train_dataset.batch_size, config.gconfig.n_samples) == (32, 5)
