"""The recipe for GSM8K works from start to end on a CPU. The tests run the commands for a GPU machine, but with a tiny
model and only twelve problems.

A random model solves no problem, so most tests check only properties that hold for any model. One test uses a reward
that a random model can earn, and checks that training uses the configured reward function.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from runs import command

from run.inputs import load_dataset, load_inputs, read_jsonl
from run.load import ConfigError, load
from tasks import gsm8k

pytestmark = pytest.mark.runs

DATA = "tests/data/gsm8k.jsonl"
SMALL = [
    *(
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=12",
        "train_dataset.batch_size=3",
        "actor.dtype=float32",
    ),
    *(
        "server.max_total_tokens=16384",
        "evaluator.interval=2",
        "max_steps=3",
        "server.backend=tiny",
    ),
]


@pytest.fixture(autouse=True)
def without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn math-verify off, so that the tests use this project's own comparison of answers."""
    monkeypatch.setattr(gsm8k, "math_verify", None)


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("48 - 30 = 18, so \\boxed{18}<|im_end|>", "18", True),
        ("\\boxed{17} no, wait: \\boxed{18}", "18", True),
        ("\\boxed{18} of 48", "18", True),
        ("the answer is $1,250.", "1250", True),
        ("It is 18.0", "18", True),
        ("#### 2,750", "2750", True),
        ("It was 5, now it is -4", "-4", True),
        ("\\boxed{-4}", "4", False),
        ("\\boxed{}", "18", False),
        ("I do not know", "18", False),
        ("", "18", False),
        ("18 and then 19", "18", False),
        ("\\boxed{1e9}", "18", False),
        ("," * 50 + "." * 50, "18", False),
    ],
)
def test_only_the_final_answer_counts(completion: str, answer: str, right: bool) -> None:
    """The reward depends only on the final answer of a completion. A right number before the final answer earns
    nothing."""
    assert gsm8k.reward("", completion, [], [], answer=answer, messages=[]) == float(right)


def test_the_solutions_in_the_data_are_right() -> None:
    """A problem's own solution earns the reward. A solution of a different problem earns the reward only if both
    problems have the same answer."""
    rows = read_jsonl(ROOT / DATA)
    samples = load_dataset(str(ROOT / DATA), gsm8k, "train")
    assert len(samples) == 12
    for k, (row, sample) in enumerate(zip(rows, samples)):
        assert gsm8k.is_right(row["answer"], sample["answer"])
        assert row["question"] in sample["messages"][0]["content"]
        other = rows[k - 1]["answer"]
        assert gsm8k.is_right(other, sample["answer"]) == (
            samples[k - 1]["answer"] == sample["answer"]
        )


def train(tmp_path: Path, model: Path, *words: str) -> tuple[list[dict], Path]:
    """Run the small recipe to its end, and return the run's metrics and folder."""
    recipe = ["--config", "configs/gsm8k.yaml", f"model={model}", f"data={DATA}", *SMALL]
    done = subprocess.run(
        command(tmp_path, *recipe, *words), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    folder = tmp_path / "e" / "t"
    return [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ], folder


def test_the_recipe(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The recipe trains on twelve problems, with 3 groups of 2 answers in each step. In step 2 the recipe evaluates the
    model on all twelve problems."""
    metrics, folder = train(tmp_path, tiny_model_dir)
    assert sum(line["accepted"] for line in metrics) >= 9
    assert all(line["failed"] == 0 and 0 <= line["staleness_max"] <= 2 for line in metrics)
    assert "eval_reward" in metrics[1]
    assert (
        sum(len(path.read_text().splitlines()) for path in folder.glob("eval-rollout/*/*.jsonl"))
        == 12
    )
    [line, *_] = (p.read_text().splitlines()[0] for p in sorted(folder.glob("rollout/*/*.jsonl")))
    assert "boxed" in json.loads(line)["prompt"]


def test_the_agent_with_a_second_try(tmp_path: Path, tiny_model_dir: Path) -> None:
    """If the first answer is wrong, the agent asks for a second answer, and both turns are in one row."""
    _, folder = train(
        tmp_path, tiny_model_dir, "workflow=tasks.gsm8k.MathAgent", "evaluator.interval=0"
    )
    dumps = [
        json.loads(line)
        for path in folder.glob("rollout/*/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert dumps
    assert all("That is not right" in dump["prompt"] + dump["completion"] for dump in dumps)


def test_data_and_reward_of_ones_own_by_configuration(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Users can train on their own data with a JSONL file, a reward function, and configuration keys that name the
    file and the function."""
    (tmp_path / "mine.jsonl").write_text(
        "\n".join(
            json.dumps({"messages": [{"role": "user", "content": f"say {c}"}], "wanted": c})
            for c in "abcdef"
        )
    )
    (tmp_path / "my_reward.py").write_text(
        "def length(prompt, completion, prompt_ids, completion_ids, wanted, **_):\n"
        "    assert f'say {wanted}' in prompt\n"
        "    return len(completion_ids) / 100\n"
    )
    words = [
        "workflow=workflow.RLVRWorkflow",
        "workflow_kwargs.reward_fn=my_reward.length",
        "max_steps=2",
    ]
    fixed = [
        f"model_path={tiny_model_dir}",
        f"train_dataset.path={tmp_path}/mine.jsonl",
        "actor.dtype=float32",
    ]
    small = ["gconfig.n_samples=2", "gconfig.max_new_tokens=8", "train_dataset.batch_size=2"]
    whole = command(tmp_path, "--config", "configs/own.yaml", *fixed, *words, *small)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        whole, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "e/t/metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["reward"] <= 0.08 for line in lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "q", "answer": "1"}\n{"question": \n', "line 2: not JSON"),
        ('\n\n["a list"]\n', "line 3: an object is needed"),
        ("", "the dataset is empty"),
        (
            '{"question": "q", "answer": "1"}\n{"answer": "1"}\n',
            "sample 2, as tasks.gsm8k reads it: KeyError: 'question'",
        ),
        (b"\xff\xfe{", "cannot decode|codec"),
    ],
)
def test_broken_data_is_one_line(
    tmp_path: Path, tiny_model_dir: Path, text: str | bytes, says: str
) -> None:
    """A broken dataset raises a one-line error that names the file and the line in the file."""
    file = tmp_path / "broken.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    config = load(
        [
            "--config",
            str(ROOT / "configs/gsm8k.yaml"),
            f"model_path={tiny_model_dir}",
            f"data={file}",
        ]
    )
    with pytest.raises(ConfigError, match=says) as caught:
        load_inputs(config)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["workflow_kwargs.reward_fn=nowhere.reward"],
            "workflow=workflow.RLVRWorkflow, .*ImportError: 'nowhere.reward'",
        ),
        (["workflow_kwargs.reward_fn=tasks.gsm8k.rewrad"], "has no 'rewrad'"),
        (["workflow_kwargs.reward_fn=tasks.gsm8k.WRONG"], "is not a function"),
        (["should_accept_fn=tasks.gsm8k.nothing"], "should_accept_fn=tasks.gsm8k.nothing"),
        (["should_accept_fn=raises_at_import.f"], "ZeroDivisionError"),
        (["workflow=tasks.gsm8k.is_right"], "neither a RolloutWorkflow nor an agent"),
        (["model_path=/nowhere"], "no model at model_path=/nowhere"),
    ],
)
def test_what_cannot_be_imported_is_said_early(
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    says: str,
) -> None:
    """If a function, workflow or model cannot be loaded, an error names the configuration key before any process
    starts."""
    (tmp_path / "raises_at_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = [f"model_path={tiny_model_dir}", f"data={ROOT / DATA}", *words]
    with pytest.raises(ConfigError, match=says):
        load_inputs(load(["--config", str(ROOT / "configs/gsm8k.yaml"), *given]))


def test_a_model_without_weights_is_said_early(tmp_path: Path) -> None:
    """A model folder without weights is refused before a server starts."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no model at .*safetensors"):
        load_inputs(
            load(
                [
                    "--config",
                    str(ROOT / "configs/gsm8k.yaml"),
                    f"model_path={tmp_path}",
                    f"data={ROOT / DATA}",
                ]
            )
        )


@pytest.mark.parametrize("preset", ["debug", "throughput", "stability"])
def test_presets_lie_over_a_recipe(preset: str) -> None:
    """A preset (write-up, section 8) changes only the keys that it contains. Keys outside the preset keep the values of
    the recipe."""
    config = load(
        [
            "--config",
            str(ROOT / "configs/gsm8k.yaml"),
            "--config",
            str(ROOT / f"configs/{preset}.yaml"),
        ]
    )
    want = {
        "debug": (0, 1, False, "recompute"),
        "throughput": (6, 128, True, "loglinear"),
        "stability": (2, 32, True, "recompute"),
    }
    rollout, actor = config.rollout, config.actor
    found = (
        rollout.max_head_offpolicyness,
        rollout.max_concurrent_rollouts,
        actor.use_decoupled_loss,
        actor.prox_logp_method,
    )
    assert found == want[preset]
    assert config.task == "tasks.gsm8k"
    assert config.gconfig.max_new_tokens == 1024
