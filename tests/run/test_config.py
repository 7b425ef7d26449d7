"""Tests of the configuration: recipes override the defaults, and the command line overrides recipes. A mistake in the
configuration is reported in one line before any process starts."""

import ast
import copy
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from omegaconf import OmegaConf
from test_structure import MODULES

import tasks.guess
import tasks.maze
from calls.sessions import Limits
from inference.fields import is_within
from inference.io_struct import GenerationHyperparameters
from inference.weights import WeightUpdateMeta
from run.inputs import load_inputs, load_workflow
from run.keys import NEEDS, TrainConfig
from run.load import ConfigError, changed, list_keys, load


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["actor.eps_clp=0.1"], "did you mean 'actor.eps_clip'"),
        (["train_datset.path=x"], "did you mean 'train_dataset.path'"),
        (["saver=3"], "did you mean 'saver.interval'"),
        (["--replay-until", "3"], "--replay-until needs --replay"),
        (["trial_name=off"], "trial_name: YAML reads this word as false; give another word"),
        (["lr=0.1"], "did you mean 'actor.optimizer.lr'"),
        (["actor.learning_rate=0.1"], "did you mean 'actor.optimizer.lr'"),
        (["evaluator.base_url=http://localhost/v1"], "no effect here: omit it, or set mode=eval"),
        (["actor.recompute_logprob=false"], "or set actor.use_decoupled_loss=false"),
        (["model_path=configs", "model_revision=v1"], "model_revision has no effect on a folder"),
        (["qwertyuiop=1"], "--help"),
        (["--config", "nowhere.yaml"], "no recipe at nowhere.yaml"),
        (["--dry"], "unrecognized arguments: --dry"),
        (["--he"], "unrecognized arguments: --he"),
        (["max_steps=many"], "max_steps"),
        (["max_steps=0"], "[1, inf)"),
        (["rollout.pause_mode=now"], "expected one of"),
        (["rollout.group_size=2", "gconfig.n_samples=3"], "are one number"),
        (["rollout.consumer_batch_size=5"], "must be equal"),
        (["rollout.max_head_offpolicyness=-1"], "[0, inf)"),
        (["actor.c_clip=0.5"], "(1, inf)"),
        (["actor.overlong_tokens=0"], "[1, inf)"),
        (["actor.gamma=1.1"], "(0, 1]"),
        (["rollout.openai.fixed_sampling=[top_p,top_q]"], "fixed_sampling: top_q is no field"),
        (["actor.behave_imp_weight_cap=0.9"], "[1, inf)"),
        (["actor.eps_clip_higher=-.5"], "[0, inf)"),
        (["gconfig.n_samples=1"], "raise gconfig.n_samples"),
        (
            ["--config", "gsm8k", "gconfig.top_p=0.9"],
            "training cannot reproduce samples with top_p",
        ),
        (["gconfig.top_k=5"], "or set mode=eval"),
        (["gconfig.frequency_penalty=0.5"], "or set mode=eval"),
        (["gconfig.presence_penalty=0.5"], "or set mode=eval"),
        (["gconfig.greedy=true"], "or set mode=eval"),
        (["gconfig.temperature=0"], "or set mode=eval"),
        (
            ["logger.tracker=wandbee"],
            "logger.tracker=wandbee is not installed here: pip install wandbee, or omit",
        ),
        (["--dry-run", "--gpus", "0"], "gpus=0; it must be a number in [1, inf)"),
        (["--fast"], "unrecognized arguments: --fast; options are"),
        (["train"], "cannot read 'train'"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(words: list[str], says: str) -> None:
    """The error for an unknown key suggests the nearest known key. The error for a bad value names the key. If the
    values of two keys contradict each other, the error names both keys."""
    with pytest.raises(ConfigError) as error:
        load(words)
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


# Tests of the effect of each key


def names_read(source: str) -> set[str]:
    """Return the names of all attributes that a module reads, and all words of its string constants."""
    nodes = [*ast.walk(ast.parse(source))]
    read = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    texts = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return read.union(*map(str.split, texts))


def test_every_key_is_read() -> None:
    """Each configuration key is read somewhere in the code. The test skips the keys of weight_update, because the code
    reads these values from a WeightUpdateMeta with the same field names."""
    assert names_read("a.b = c.d\nNAMES = 'e f'") == {"d", "e", "f"}
    read = set.union(*(names_read(path.read_text()) for path in MODULES))
    read |= {f"weight_update.{field.name}" for field in fields(WeightUpdateMeta)}
    assert [
        key.name for key in list_keys() if not {key.name, key.name.rpartition(".")[2]} & read
    ] == []


def hint_of(name: str) -> Any:
    """Return the type of a key, without the interval that the annotation adds to the type."""
    section, _, field = name.rpartition(".")
    return get_type_hints(type(attrgetter(section)(TrainConfig())) if section else TrainConfig)[
        field
    ]


def other_word(name: str) -> str:
    """Return a word of the command line that sets a key to a value other than its default."""
    (key,) = [key for key in list_keys() if key.name == name]
    hint, default = hint_of(name), key.default
    if key.interval:
        values = (0.5, 2, 3) if float in (hint, *get_args(hint)) else (2, 3)
        return f"{name}={next(value for value in values if value != default and is_within(value, key.interval))}"
    if bool in (hint, *get_args(hint)):
        return f"{name}={str(not default).lower()}"
    if get_origin(hint) is Literal:
        return f"{name}={next(option for option in get_args(hint) if option != default)}"
    return f"{name}=[x]" if isinstance(default, list) else f"{name}=x"


def words_for(condition: str, wanted: bool) -> list[str]:
    """Return the words of the command line that make one condition of NEEDS true or false."""
    name, _, values = condition.partition("=")
    if not values:
        return [f"{name}={'1' if wanted else 'null' if name == 'actor.overlong_tokens' else '0'}"]
    options = values.split("|")
    others = {"[]": "[http://127.0.0.1:9]", "true": "false", "false": "true"}
    other = others.get(values) or next(
        option for option in get_args(hint_of(name)) if option not in options
    )
    return [f"{name}={options[0] if wanted else other}"]


NEEDY = [
    (key.name, need)
    for need, pattern in NEEDS.items()
    for key in list_keys()
    if re.fullmatch(pattern, key.name)
]


@pytest.mark.parametrize(("name", "need"), NEEDY)
def test_a_key_without_effect_is_refused(name: str, need: str, tmp_path: Path) -> None:
    """If a key has no effect because of another key's value, the error is one line that names both keys. A key whose
    effect depends on a second key is accepted if the second key has a suitable value. If a key on the command line
    removes the effect of a key in the recipe, no error is raised."""
    (tmp_path / "empty.yaml").write_text("gconfig: {n_samples: 2}")
    base, conditions = ["--config", str(tmp_path / "empty.yaml")], need.split(" or ")
    base += ["mode=eval"] * ("gconfig." in name)  # in mode=train most keys of gconfig are refused
    useless = [word for condition in conditions for word in words_for(condition, wanted=False)]
    word = other_word(name)
    with pytest.raises(ConfigError) as error:
        load([*base, *useless, word])
    assert str(error.value).startswith(f"{name}=")
    assert str(error.value).endswith(f" has no effect here: omit it, or set {need}")
    assert len(str(error.value).splitlines()) == 1
    useful = words_for(conditions[0], wanted=True)
    load([*base, *useful, word])
    (tmp_path / "recipe.yaml").write_text(
        OmegaConf.to_yaml(OmegaConf.from_dotlist(["gconfig.n_samples=2", *useful, word]))
    )
    load(["--config", str(tmp_path / "recipe.yaml"), *base[2:], *useless])
    load([*base, *useless])


def test_the_patterns_name_keys() -> None:
    """Each condition of NEEDS names an existing key, and each pattern matches at least one key."""
    assert {need for _, need in NEEDY} == NEEDS.keys()
    for condition in (c for need in NEEDS for c in need.split(" or ")):
        assert hasattr(attrgetter(condition.partition("=")[0])(TrainConfig()), "__class__")
    assert len({name for name, _ in NEEDY}) > 40


def test_keys_that_need_an_agent_or_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of rollout.openai are refused if the workflow is a RolloutWorkflow. The key success_above is refused if
    the task has its own function `success`."""
    words = ["--config", "configs/maze.yaml"]
    defaults = {"gconfig": GenerationHyperparameters(), "tokenizer": None}
    load_workflow(load(words), tasks.maze, defaults, None, {})
    with pytest.raises(
        ConfigError, match=r"rollout.openai has no effect: the workflow is a RolloutWorkflow"
    ):
        load_workflow(
            load([*words, "rollout.openai.turn_discount=0.5"]), tasks.maze, defaults, None, {}
        )
    monkeypatch.setattr(tasks.guess, "success", bool, raising=False)
    with pytest.raises(
        ConfigError, match=r"success_above has no effect: the task tasks.guess says"
    ):
        load_inputs(load(["success_above=0.5"]))


def test_options_and_words_may_be_mixed() -> None:
    """Words of the form key=value may come before, between and after the options."""
    config = load(
        [
            "seed=3",
            "--config",
            "configs/maze.yaml",
            "max_steps=7",
            "--dry-run",
            "actor.eps_clip=0.1",
        ]
    )
    assert (config.seed, config.max_steps, config.actor.eps_clip, config.dry_run) == (
        3,
        7,
        0.1,
        True,
    )
    assert config.experiment_name == "maze"


def test_a_recipe_is_found_by_its_name() -> None:
    """`--config gsm8k` finds configs/gsm8k.yaml from any folder. The option `--config` also accepts the path of a
    recipe."""
    by_name, by_path = load(["--config", "gsm8k"]), load(["--config", "configs/gsm8k.yaml"])
    assert (by_name.task, by_name.actor, by_name.server) == (
        by_path.task,
        by_path.actor,
        by_path.server,
    )
    assert load(["--config", "gsm8k.yaml"]).task == by_name.task
    assert load(["--config", "gsm8k", "--config", "debug"]).rollout.max_head_offpolicyness == 0
    with pytest.raises(ConfigError, match=r"no recipe at .*configs/gsm9k.yaml"):
        load(["--config", "gsm9k"])


def test_a_list_with_one_item_needs_no_brackets() -> None:
    """On the command line, a key whose value is a list also accepts a single item."""
    assert load(["rollout.server_addrs=http://127.0.0.1:9"]).rollout.server_addrs == [
        "http://127.0.0.1:9"
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- max_steps: 3\n", "lines of the form `key: value` are needed"),
        ("seed: 1\nseed: 2\n", "line 2, column 1"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    """If a recipe is no list of keys and values, or if it sets a key twice, the error is one line with the recipe's
    path."""
    recipe = tmp_path / "own.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(["--config", str(recipe)])
    assert str(error.value).startswith(f"{recipe}: ")
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_help_lists_every_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--help` prints the keys in groups with headings, and each key with its default, its meaning and its allowed
    values. No line of text is wider than the terminal."""
    pages = {}
    for width in (80, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit) as ended:
            load(["--help"])
        assert ended.value.code == 0
        pages[width] = capsys.readouterr().out
    said = pages[1000]
    assert pages[80].split() == said.split()
    assert [line for line in pages[80].splitlines() if len(line) > 80 and "=" not in line] == []
    assert said.startswith("usage: python train.py")
    for k in list_keys():
        values = (
            f"; in {k.interval}" if k.interval else f"; one of {k.choices}" if k.choices else ""
        )
        default = "null" if k.default is None else k.default
        default = (
            str(default).lower() if isinstance(default, bool) else default
        )  # a boolean of YAML is true or false
        assert f"  {k.name}={default}\n      {k.meaning}{values}\n" in said
    assert "  logger.live=true\n" in said
    assert " ".join((Limits.__doc__ or "").split()) + "\n" in said
    assert "(staleness.py); one of wait, mask, drop\n" in said
    assert "\n\nevaluator: The evaluation: one episode per validation prompt" in said
    assert (
        said.index("\nevaluator: ") < said.index("  evaluator.interval=") < said.index("\nsaver: ")
    )
    assert (
        "  actor.eps_clip=0.2\n      clip ratios pi_theta / pi_prox below 1 - eps_clip; 0: below 1; in [0, 1]\n"
        in said
    )


def is_number(hint: Any) -> bool:
    """Return whether a value of this type can be a number."""
    return get_origin(hint) is not list and bool({int, float} & {hint, *get_args(hint)})


def numeric_keys(cls: type = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Yield every key whose type in the dataclasses is a number."""
    hints = get_type_hints(cls)
    for name, default in vars(cls()).items():
        if is_dataclass(default):
            yield from numeric_keys(type(default), f"{prefix}{name}.")
        elif is_number(hints[name]):
            yield prefix + name


NUMBERS = list(numeric_keys())
MAY_BE_NEGATIVE = {
    "actor.reward_bias": {"-1", "-0.5", "-1e300"},
    "success_above": {"-1", "-0.5", "-1e300"},
    "gconfig.frequency_penalty": {"-1", "-0.5"},
    "gconfig.presence_penalty": {"-1", "-0.5"},
    "gconfig.top_k": {"-1"},
    "eval_gconfig.top_k": {"-1"},
}


def test_every_number_has_an_interval() -> None:
    """Each numeric key has an interval that contains its default, and no other key has an interval."""
    intervals = {key.name: key.interval for key in list_keys() if key.interval}
    assert intervals.keys() == set(NUMBERS)
    assert len(NUMBERS) > 60
    defaults = {key.name: key.default for key in list_keys()}
    assert [
        name
        for name in NUMBERS
        if defaults[name] is not None and not is_within(defaults[name], intervals[name])
    ] == []


DEFAULTS = {
    TrainConfig: OmegaConf.structured(TrainConfig)
}  # a copy is made faster than a new object


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "-0.5", "-1e300", "0"])
def test_a_number_outside_its_interval_is_refused(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every numeric key refuses NaN and infinity. Only the keys in MAY_BE_NEGATIVE accept negative numbers. Each error
    is one line that names the key. The help text of a key that accepts 0 says what 0 does."""
    monkeypatch.setattr(OmegaConf, "structured", lambda cls: copy.deepcopy(DEFAULTS[cls]))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("gconfig: {n_samples: 2}")
    words = ["mode=eval"] * ("gconfig." in name)  # in mode=train most keys of gconfig are refused
    try:
        config = load(["--config", str(recipe), f"{name}={value}", *words])
    except ConfigError as error:
        said = str(error)
        assert name in said
        assert len(said.splitlines()) == 1
        assert value == "0" or value not in MAY_BE_NEGATIVE.get(name, ())
        return
    assert attrgetter(name)(config) == float(value)
    if value == "0":
        [meaning] = [key.meaning for key in list_keys() if key.name == name]
        assert "0: " in meaning or "0 is " in meaning or ZERO_IS_PLAIN.get(name, "?") in meaning, (
            meaning
        )
    else:
        assert value in MAY_BE_NEGATIVE[name]


ZERO_IS_PLAIN = {  # some keys, and words of each key's help text that say what the value 0 does
    "gconfig.frequency_penalty": "subtracted from",
    "gconfig.presence_penalty": "subtracted from",
    "gconfig.seed": "seed of the sampling",
    "success_above": "above this number",
}


@pytest.mark.parametrize(("value", "interval", "inside"), [
    (0, "[0, 1]", True), (1, "[0, 1)", False), (0, "(0, 1)", False), (1, "(0, 1]", True), (-0.1, "[0, 1]", False),
    (1.1, "[0, 1]", False), (math.inf, "[0, inf)", False), (math.nan, "(-inf, inf)", False), (-math.inf, "(-inf, inf)", False),
    (0, "[-1, -1] or [1, inf)", False), (-1, "[-1, -1] or [1, inf)", True), (7, "[-1, -1] or [1, inf)", True),
])  # fmt: skip
def test_an_interval_contains_its_square_ends(value: float, interval: str, inside: bool) -> None:
    """A square bracket includes the end of an interval and a round bracket excludes it. The number NaN lies in no
    interval."""
    assert is_within(value, interval) is inside


def test_a_group_of_one_learns_without_a_groups_baseline() -> None:
    """Groups of one sample are accepted in three cases: the baseline is the batch's mean, there is no baseline, or the
    run only evaluates."""
    for words in (
        ["actor.adv_norm.mean_level=batch"],
        ["actor.adv_norm.mean_level=none"],
        ["mode=eval"],
    ):
        assert load(["gconfig.n_samples=1", *words]).gconfig.n_samples == 1


def test_later_words_win(tmp_path: Path) -> None:
    """Command-line words override the recipe, and the recipe overrides the defaults."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "max_steps: 3\ngconfig: {n_samples: 2}\nactor: {eps_clip: 0.3}\nworkflow_kwargs: {any: {thing: 1}}\n"
    )
    config = load(["--config", str(recipe), "max_steps=4"])
    assert (config.max_steps, config.actor.eps_clip, config.actor.eps_clip_higher) == (4, 0.3, None)
    assert config.workflow_kwargs == {"any": {"thing": 1}}


def test_a_broken_recipe_is_an_error_too(tmp_path: Path) -> None:
    """If a recipe is not valid YAML, the error names the file."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("actor: [")
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        load(["--config", str(recipe)])


def test_spellings_of_the_documents() -> None:
    """Keys may also be spelt as in AReaL's documents, for example recompute_logprobs and rollout.fileroot."""
    config = load(
        [
            "actor.recompute_logprobs=false",
            "actor.use_decoupled_loss=false",
            "rollout.fileroot=elsewhere",
            "rollout.group_size=4",
            "gconfig.n_samples=4",
        ]
    )
    assert config.actor.recompute_logprob is False
    assert config.fileroot == "elsewhere"


@pytest.mark.parametrize(("word", "stale"), [("true", "drop"), ("false", "wait")])
def test_drop_stale_is_another_name_of_stale(word: str, stale: str) -> None:
    """rollout.drop_stale=true sets rollout.stale=drop, and rollout.drop_stale=false sets rollout.stale=wait. An unknown
    value of rollout.stale is refused."""
    assert load([f"rollout.drop_stale={word}"]).rollout.stale == stale
    assert load([f"rollout.stale={stale}"]).rollout.stale == stale
    with pytest.raises(ConfigError, match=r"rollout\.stale"):
        load(["rollout.stale=forget"])


def test_group_size_and_n_samples_are_one_number() -> None:
    """gconfig.n_samples and rollout.group_size have the same value: setting one key sets both."""
    config = load(["--config", "configs/maze.yaml", "gconfig.n_samples=1", "rollout.group_size=4"])
    assert (config.gconfig.n_samples, config.rollout.group_size) == (4, 4)


def test_derived_values_are_written_back() -> None:
    """`load` fills in the defaults that depend on other keys, so a run's config.yaml contains every value that the run
    uses."""
    config = load(["rollout.max_head_offpolicyness=2", "train_dataset.batch_size=3"])
    assert (config.rollout.consumer_batch_size, config.rollout.max_concurrent_rollouts) == (3, 9)


def test_the_servers_key_is_made_and_never_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If a run starts its own servers, it generates a new server key, unless the user gives one. `changed` does not
    report a new server key, because config.yaml contains no server key."""
    monkeypatch.delenv("POCKET_AREAL_SERVER_KEY", raising=False)
    new, other = load([]), load([])
    assert len(new.rollout.server_key) > 16
    assert new.rollout.server_key != other.rollout.server_key
    assert load(["rollout.server_addrs=[http://127.0.0.1:1]"]).rollout.server_key == ""
    monkeypatch.setenv("POCKET_AREAL_SERVER_KEY", "mine")
    assert load(["rollout.server_addrs=[http://gpu:1]"]).rollout.server_key == "mine"
    written = asdict(new)
    del written["rollout"]["server_key"]  # run/command.py does not write the server key
    OmegaConf.save(written, tmp_path / "config.yaml")
    assert changed(tmp_path / "config.yaml", other) == []


def test_a_run_that_goes_on_says_what_is_set_otherwise(tmp_path: Path) -> None:
    """`changed` lists the keys that differ from the config.yaml of an earlier run. Without a config.yaml the list of
    changed keys is empty."""
    assert changed(tmp_path / "config.yaml", load([])) == []
    OmegaConf.save(
        asdict(load(["actor.eps_clip=0.1", "rollout.server_key=k"])), tmp_path / "config.yaml"
    )
    assert (
        changed(tmp_path / "config.yaml", load(["actor.eps_clip=0.1", "rollout.server_key=k"]))
        == []
    )
    assert changed(
        tmp_path / "config.yaml", load(["actor.eps_clip=0.2", "rollout.server_key=k"])
    ) == ["actor.eps_clip=0.1 -> 0.2"]
