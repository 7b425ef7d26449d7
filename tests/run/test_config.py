"""Tests of the configuration: recipes override the defaults, and the command line overrides recipes. A mistake is
reported in one line before anything starts."""

from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from run.config import ConfigError, changed, list_keys, load


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["actor.eps_clp=0.1"], "did you mean 'actor.eps_clip'"),
        (["lr=0.1"], "did you mean 'actor.optimizer.lr'"),
        (["qwertyuiop=1"], "--help"),
        (["--config", "nowhere.yaml"], "no recipe at nowhere.yaml"),
        (["max_steps=many"], "max_steps"),
        (["max_steps=0"], "at least 1"),
        (["rollout.pause_mode=now"], "expected one of"),
        (["rollout.group_size=2", "gconfig.n_samples=3"], "are one number"),
        (["rollout.consumer_batch_size=5"], "must be equal"),
        (["rollout.max_head_offpolicyness=-1"], "at least 0"),
        (["actor.c_clip=0.5"], "above 1"),
        (["actor.overlong_tokens=0"], "at least 1"),
        (["actor.gamma=1.1"], "between 0 and 1"),
        (["rollout.openai.fixed_sampling=[top_p,top_q]"], "fixed_sampling: top_q is no field"),
        (["--fast"], "unrecognized arguments: --fast; options are"),
        (["train"], "cannot read 'train'"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(words: list[str], says: str) -> None:
    """The error for an unknown key suggests the nearest known key. The error for a bad value names the key. The error
    for a contradiction names both keys."""
    with pytest.raises(ConfigError) as error:
        load(words)
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_options_and_words_may_be_mixed() -> None:
    """Words of the form key=value may come before, between and after the options."""
    config = load(["seed=3", "--config", "configs/maze.yaml", "max_steps=7", "--dry-run", "actor.eps_clip=0.1"])
    assert (config.seed, config.max_steps, config.actor.eps_clip, config.dry_run) == (3, 7, 0.1, True)
    assert config.experiment_name == "maze"


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` prints each key with its default and its meaning."""
    with pytest.raises(SystemExit) as ended:
        load(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: python train.py")
    assert all(
        f"  {k.name}={'null' if k.default is None else k.default}\n      {k.meaning}\n" in said for k in list_keys()
    )


def test_later_words_win(tmp_path: Path) -> None:
    """Command-line words override the recipe, and the recipe overrides the defaults."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_steps: 3\nactor: {eps_clip: 0.3}\nworkflow_kwargs: {any: {thing: 1}}\n")
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
    """The documents' spellings of keys are accepted, such as recompute_logprobs and rollout.fileroot."""
    config = load(
        ["actor.recompute_logprobs=false", "rollout.fileroot=elsewhere", "rollout.group_size=4", "gconfig.n_samples=4"]
    )
    assert config.actor.recompute_logprob is False
    assert config.fileroot == "elsewhere"


def test_group_size_and_n_samples_are_one_number() -> None:
    """gconfig.n_samples and rollout.group_size have the same value: setting one key sets both."""
    config = load(["--config", "configs/maze.yaml", "gconfig.n_samples=1", "rollout.group_size=4"])
    assert (config.gconfig.n_samples, config.rollout.group_size) == (4, 4)


def test_derived_values_are_written_back() -> None:
    """`load` fills in defaults that depend on other keys, so a run's config.yaml contains every value that was
    used."""
    config = load(["rollout.max_head_offpolicyness=2", "train_dataset.batch_size=3"])
    assert (config.rollout.consumer_batch_size, config.rollout.max_concurrent_rollouts) == (3, 9)


def test_a_run_that_goes_on_says_what_is_set_otherwise(tmp_path: Path) -> None:
    """`changed` lists the keys that differ from the config.yaml of an earlier run. Without a config.yaml the list
    is empty."""
    assert changed(tmp_path / "config.yaml", load([])) == []
    OmegaConf.save(asdict(load(["actor.eps_clip=0.1"])), tmp_path / "config.yaml")
    assert changed(tmp_path / "config.yaml", load(["actor.eps_clip=0.1"])) == []
    assert changed(tmp_path / "config.yaml", load(["actor.eps_clip=0.2"])) == ["actor.eps_clip=0.1 -> 0.2"]
