"""Position t of every tensor of a trajectory describes token t, and padding is never trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout.trajectory import (
    KEYS,
    check_trajectory_format,
    complete,
    concat_padded_tensors,
    dump,
    generated,
    head_version,
    version_span,
    without_older,
)


def ints(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def documented() -> dict[str, Tensor]:
    """The example of AReaL's page "Rollout Workflow". There the prompt has version 0, in this
    project -1."""
    return {
        "input_ids": ints([1, 2, 3, 4, 5]),
        "attention_mask": torch.ones(1, 5, dtype=torch.bool),
        "loss_mask": ints([0, 0, 1, 1, 1]),
        "logprobs": torch.tensor([[0.0, 0.0, -0.5, -0.3, -0.2]]),
        "rewards": torch.tensor([1.0]),
        "versions": ints([0, 0, 1, 1, 1]),
    }


def two_turns() -> dict[str, Tensor]:
    """A prompt, turn 0 (versions 3, 4), a tool's answer, turn 1 (version 5), and padding."""
    return {
        "input_ids": ints([10, 11, 12, 13, 14, 15, 0]),
        "attention_mask": ints([1, 1, 1, 1, 1, 1, 0]).bool(),
        "loss_mask": ints([0, 0, 1, 1, 0, 1, 0]),
        "logprobs": torch.tensor([[0.0, 0.0, -0.1, -0.2, 0.0, -0.3, 0.0]]),
        "rewards": torch.tensor([0.5]),
        "versions": ints([-1, -1, 3, 4, -1, 5, -1]),
    }


class Letters:
    """A tokenizer that shows the ids."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_the_documents_example_passes_the_check_and_is_completed() -> None:
    """The example of AReaL's page passes, and `complete` adds what it lacks."""
    check_trajectory_format(documented())
    traj = complete(documented(), task_id=7, temperature=0.5)
    assert traj.keys() == KEYS.keys()
    for key, (dims, dtype, _) in KEYS.items():
        assert (traj[key].dtype, traj[key].dim()) == (dtype, dims), key
    assert traj["turn_ids"].tolist() == [[-1, -1, 0, 0, 0]]
    assert traj["turn_rewards"].tolist() == [[0, 0, 1, 1, 1]]
    assert traj["temperatures"].tolist() == [[1, 1, 0.5, 0.5, 0.5]]
    assert traj["task_ids"].tolist() == traj["group_ids"].tolist() == [7]
    assert traj["truncated"].tolist() == [0]


def test_complete_keeps_what_the_workflow_said() -> None:
    """`complete` changes no key that the workflow set, and keeps the user's own keys. Sampled
    tokens without a version get that of the episode's start, so the age is never underestimated."""
    given = documented() | {
        "turn_ids": ints([-1, -1, 0, 1, 1]),
        "turn_rewards": torch.tensor([[0.0, 0.0, 0.9, 1.0, 1.0]]),
        "temperatures": torch.tensor([[1.0, 1.0, 0.7, 0.7, 0.7]]),
        "difficulty": torch.tensor([3]),
    }
    traj = complete(given, task_id=0)
    for key, value in given.items():
        assert torch.equal(traj[key], value), key
    del given["versions"]
    assert complete(given, task_id=0, version=4)["versions"].tolist() == [[-1, -1, 4, 4, 4]]


def test_two_required_keys_are_enough_and_train_nothing() -> None:
    """Such a trajectory has no trained token and no age."""
    traj = complete({"input_ids": ints([1, 2]), "attention_mask": ints([1, 1])}, task_id=0)
    assert traj["attention_mask"].dtype == torch.bool
    assert traj["loss_mask"].sum() == 0
    assert head_version(traj) is None
    assert version_span(traj, generated(traj)) == (None, None)


def test_the_age_of_a_group_is_that_of_its_trained_tokens() -> None:
    """Versions of the prompt do not count, and neither do those of sampled tokens that are not
    trained."""
    assert head_version(documented()) == 1
    traj = complete(two_turns(), task_id=0)
    assert head_version(traj) == 3
    traj["loss_mask"][:, 2:4] = 0
    assert head_version(traj) == 5
    assert version_span(traj, generated(traj)) == (3, 5)


def test_old_tokens_leave_the_loss_and_are_counted() -> None:
    """`without_older` changes only loss_mask and masked; it returns None if nothing is left to
    train."""
    traj = complete(two_turns(), task_id=0)
    young = without_older(traj, 5)
    assert young is not None
    assert traj["versions"].tolist() == [[-1, -1, 3, 4, -1, 5, -1]]
    assert young["loss_mask"].tolist() == [[0, 0, 0, 0, 0, 1, 0]]
    assert young["masked"].tolist() == [2]
    assert head_version(young) == 5
    changed = {key for key in traj if not torch.equal(traj[key], young[key])}
    assert changed == {"loss_mask", "masked"}
    assert without_older(traj, 6) is None, "a group without a trained token is not dropped"
    same = without_older(traj, 3)
    assert same is not None
    assert torch.equal(same["loss_mask"], traj["loss_mask"])
    untrained = traj | {"loss_mask": torch.zeros_like(traj["loss_mask"])}
    assert without_older(untrained, 6) is not None, "a group that had no trained token has no age"


def test_prompt_len_ends_at_the_first_generated_token(tmp_path: Path) -> None:
    """The completion contains what stands between the turns."""
    traj = complete(two_turns(), task_id=42)
    line: dict[str, Any] = {"task_id": 42, "sample_idx": 0, "seqlen": 6, "prompt_len": 2}
    line |= {"head_version": 3, "tail_version": 5, "reward": 0.5}
    line |= {"prompt": "10 11", "completion": "12 13 14 15"}
    dump(traj, 42, tmp_path, 7, Letters())
    assert json.loads((tmp_path / "7/42.jsonl").read_text()) == line


def test_concat_pads_to_the_longest_with_values_that_mean_nothing() -> None:
    """The padding is -1 in versions and turn ids, 1 in temperatures, and 0 in masks."""
    short, long = complete(documented(), task_id=1), complete(two_turns(), task_id=2)
    both = concat_padded_tensors([short, long])
    assert both["input_ids"].shape == (2, 7)
    for key in (key for key in KEYS if KEYS[key].dims == 2):
        assert torch.equal(both[key][0, :5], short[key][0]), key
        assert (both[key][0, 5:] == KEYS[key].fill).all(), key
        assert torch.equal(both[key][1], long[key][0]), key
        assert both[key].dtype == short[key].dtype, key
    assert both["task_ids"].tolist() == [1, 2]
    assert head_version(both) == 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 2))
def test_concat_knows_features_from_tokens(lengths: list[int], width: int, more: int) -> None:
    """A user's tensor is padded only if its width is the row length everywhere."""
    trajectories = []
    for length in lengths:
        ids = torch.ones(1, length, dtype=torch.int32)
        features = {
            "embedding": torch.ones(1, width, *[2] * more),
            "of_tokens": torch.ones(1, length, *[2] * more),
        }
        trajectories.append({"input_ids": ids, "attention_mask": ids.bool()} | features)
    both = concat_padded_tensors(trajectories)
    assert torch.equal(both["embedding"], torch.ones(len(lengths), width, *[2] * more))
    assert both["of_tokens"].shape == (len(lengths), max(lengths), *[2] * more)
    assert both["of_tokens"].sum() == sum(lengths) * 2**more


def test_concat_names_the_keys_that_differ() -> None:
    """Trajectories with different keys do not fit together."""
    odd = two_turns() | {"hint": torch.zeros(1)}
    with pytest.raises(ValueError, match="hint"):
        concat_padded_tensors([documented(), odd])
    with pytest.raises(ValueError, match="no trajectory"):
        concat_padded_tensors([])


BAD = {
    "is a dict with input_ids and attention_mask, not .'list'.": [1, 2],
    r"is a dict with input_ids and attention_mask, not .'input_ids'": {"input_ids": ints([1])},
    "'loss_mask'. is a list": documented() | {"loss_mask": [[0, 0, 1, 1, 1]]},
    r"must be \[batch, seq_len\] and not empty, not \[5\]": documented()
    | {"input_ids": torch.ones(5)},
    r"not \[1, 0\]": documented() | {"input_ids": torch.ones(1, 0)},
    r"'versions'. has shape \[1, 4\]; \[1, 5\]": documented() | {"versions": ints([0, 0, 1, 1])},
    r"'rewards'. has shape \[2\]; \[1\]": documented() | {"rewards": torch.ones(2)},
    r"'rewards'. has shape \[\]; \[1\]": documented() | {"rewards": torch.tensor(1.0)},
    r"'image'. has shape \[3, 5\]; \[1, 5\]": documented() | {"image": torch.ones(3, 5)},
    "'logprobs'. holds NaN": documented() | {"logprobs": torch.full((1, 5), float("nan"))},
}


@pytest.mark.parametrize("message", BAD)
def test_the_check_names_what_is_wrong(message: str) -> None:
    """The error says which key is wrong, and what is needed."""
    with pytest.raises(ValueError, match=message):
        check_trajectory_format(BAD[message])
