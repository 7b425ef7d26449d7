"""Tests of the doctor's rules. Each rule fires on the metrics of a faulty run, and does not fire on similar metrics of
a healthy run.

Further tests in this file check the command `python -m run.doctor`, the canary, and `find_blocker`, which names a
function that blocks the event loop. The canary detects servers that do not have the trainer's weights. The last tests
start real runs.
"""

import json
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from runs import SMALL_GUESS, WITH_TEST_MODULES, command

from engine import RemoteInfEngine
from inference.servers import Servers
from inference.wire import Wire
from rollout.runner import AsyncTaskRunner
from run.doctor import PAGE, RULES, TEXTS, Doctor, Unhealthy, examine, main
from run.load import load
from run.logger import Trace, baseline_bias, no_signal_share
from run.mismatch import Canary, compare_scores
from training.actor import FSDPPPOActor
from training.config import PPOActorConfig

CONFIG = load(["gconfig.n_samples=20"])  # the demo with eta 1, float32, and 20 members in a group
HEALTHY: dict[str, Any] = {
    "success": 0.5,
    "reward": 0.5,
    "reward_std": 0.4,
    "rows": 120,
    "staleness_max": 1.0,
    "truncated": 3,
    "no_signal_share": 0.2,
    "baseline_bias": 1e-7,
    "staleness_mean": 0.8,
    "behave_weight_mean": 0.999,
    "canary_mismatch": 5e-6,
    "canary_unchanged": 0,
    "logp_mismatch": 5e-6,
    "behave_ess": 0.98,
    "kl": 0.01,
    "entropy": 0.6,
    "grad_norm": 0.3,
    "accepted": 6,
    "rejected": 0,
    "failed": 0,
    "failed_members": 0,
    "rollout_wait_s": 1.0,
    "train_s": 0.5,
    "step_s": 2.0,
}


def lines_of(count: int, **last: Any) -> list[dict[str, Any]]:
    """Return `count` lines of metrics of a healthy run, in which the values in `last` replace the healthy values. A
    list in `last` replaces a metric's values in the last lines, and a number replaces a metric's value in every
    line."""
    lines = [{"step": 1 + k, **HEALTHY} for k in range(count)]
    for name, value in last.items():
        values = value if isinstance(value, list) else [value] * count
        for line, one in zip(lines[count - len(values) :], values, strict=True):
            line[name] = one
    return lines


def rules_that_fire(lines: list[dict[str, Any]], config: Any = CONFIG) -> set[str]:
    return {finding["rule"] for finding in examine(lines, config)}


NAN = float("nan")
CASES: list[
    tuple[str, dict[str, Any], dict[str, Any]]
] = [  # (rule, metrics of a faulty run, similar metrics of a healthy run)
    ("stale_weights", {"canary_mismatch": [2e-3]}, {"canary_mismatch": [0.9e-3]}),
    ("stale_weights", {"canary_mismatch": [float("inf")]}, {"canary_mismatch": [0.0]}),
    ("unchanged_weights", {"canary_unchanged": [1, 2]}, {"canary_unchanged": [1, 0]}),
    ("logp_mismatch", {"logp_mismatch": [2e-3]}, {"logp_mismatch": [0.9e-3]}),
    ("lag", {"staleness_max": [2.0]}, {"staleness_max": [1.0]}),
    ("effective_samples", {"behave_ess": [0.4, 0.9, 0.3]}, {"behave_ess": [0.4, 0.6, 0.55]}),
    ("effective_samples", {"behave_ess": [NAN, NAN, NAN]}, {"behave_ess": [1.0, 1.0, 1.0]}),
    (
        "no_correction",
        {"behave_ess": 1.0, "behave_weight_mean": 1.0},
        {"behave_ess": 1.0, "behave_weight_mean": 0.9999},
    ),
    (
        "no_correction",
        {"behave_ess": 1.0, "behave_weight_mean": [0.9, 1.0, 1.0]},
        {"behave_ess": 1.0},
    ),
    (
        "no_correction",
        {"behave_ess": 1.0, "behave_weight_mean": 1.0},
        {"behave_ess": 1.0, "staleness_mean": 0.0},
    ),
    ("baseline", {"baseline_bias": [0.06]}, {"baseline_bias": [0.04]}),
    ("kl", {"kl": [0.3, 0.0, 0.4, 0.0, 40.0]}, {"kl": [0.0, 0.19, 3.0, 40.0, 0.05]}),
    ("entropy", {"entropy": [0.6] * 5 + [0.1] * 5}, {"entropy": [0.6] * 5 + [0.13] * 5}),
    (
        "entropy",
        {"entropy": [0.6] * 8 + [0.0] * 2},
        {"entropy": [0.6] * 8 + [0.0] * 2, "success": 0.95},
    ),
    ("truncated", {"truncated": [70] * 5}, {"truncated": [100, 50, 50, 50, 40]}),
    ("no_signal", {"no_signal_share": [0.9] * 5}, {"no_signal_share": [0.9, 0.7, 0.7, 0.7, 0.9]}),
    (
        "no_signal",
        {"no_signal_share": 1.0, "reward_std": 0.0},
        {"no_signal_share": 1.0, "success": 0.95, "reward_std": 0.0},
    ),
    ("zero_gradients", {"grad_norm": [0.0] * 3}, {"grad_norm": [0.0, 0.0, 1e-4]}),
    (
        "zero_gradients",
        {"no_signal_share": [1.0] * 3},
        {"no_signal_share": [1.0] * 3, "reward_std": [0.0] * 3},
    ),
    ("rejection", {"rejected": [30, 30, 30]}, {"rejected": [30, 20, 10]}),
    (
        "failing",
        {"rejected": [1] * 3, "failed": [1] * 3},
        {"rejected": [1] * 3, "failed": [1, 0, 0]},
    ),
    ("failing", {"failed_members": [13] * 3}, {"failed_members": [11] * 3}),
    ("constant_reward", {"reward_std": 0.0}, {"reward_std": 0.0, "reward": [0.5, 0.5, 0.51]}),
    ("waiting", {"rollout_wait_s": 1.9}, {"rollout_wait_s": 1.7}),
]


@pytest.mark.parametrize(("rule", "sick", "near"), CASES)
def test_a_rule_fires_on_the_sick_run_alone(
    rule: str, sick: dict[str, Any], near: dict[str, Any]
) -> None:
    """Each rule fires on the metrics of a faulty run, and does not fire on similar metrics of a healthy run."""
    steps = next(each.steps for each in RULES if each.name == rule)
    assert rule in rules_that_fire(lines_of(steps, **sick))
    assert rule not in rules_that_fire(lines_of(steps, **near))
    assert rule not in rules_that_fire(
        lines_of(steps, **sick)[1:]
    )  # with one line fewer, the rule does not fire


def test_every_rule_has_a_case_and_an_entry() -> None:
    """Every rule has a case in this file, and an entry in docs/doctor.md that names the rule's limit."""
    names = {rule.name for rule in RULES}
    assert {name for name, _, _ in CASES} == names
    assert set(TEXTS) == names | {"blocked_loop"}
    entries = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## ")[1:])
    for rule in RULES:
        assert f"above {rule.limit:g}" in entries[rule.name], rule.name
        assert TEXTS[rule.name].count(". ") in (1, 2), "two sentences: the cause and the remedy"


def test_the_number_format_sets_the_limit_of_rounding() -> None:
    """With bfloat16, the two rules about log-probabilities fire at a difference of 0.6 nats, and do not fire at a
    difference of 0.4 nats."""
    config = load(["actor.dtype=bfloat16"])
    assert rules_that_fire(lines_of(2, logp_mismatch=0.4, canary_mismatch=0.4), config) == set()
    both = {"logp_mismatch", "stale_weights"}
    assert rules_that_fire(lines_of(2, logp_mismatch=0.6, canary_mismatch=0.6), config) == both


RANGES: dict[str, Any] = {  # the intervals in which the metrics of healthy runs lie
    "success": (0.0, 1.0),
    "reward": (-1.0, 1.0),
    "reward_std": (0.01, 1.0),
    "staleness_max": (0.0, 1.0),
    "truncated": (0, 60),
    "no_signal_share": (0.0, 0.8),
    "canary_mismatch": (0.0, 1e-4),
    "logp_mismatch": (0.0, 1e-4),
    "behave_ess": (0.55, 1.0),
    "kl": (0.0, 0.1),
    "baseline_bias": (0.0, 0.04),
    "grad_norm": (1e-4, 100.0),
    "rejected": (0, 20),
    "rollout_wait_s": (0.0, 1.7),
}


@st.composite
def healthy_runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw random metrics of a healthy run: every metric lies in its interval, and the entropy falls by at most a tenth
    per step."""
    lines: list[dict[str, Any]] = []
    for step in range(1, draw(st.integers(1, 25)) + 1):
        drawn = {
            k: draw(st.integers(*r) if isinstance(r[0], int) else st.floats(*r))
            for k, r in RANGES.items()
        }
        entropy = (lines[-1]["entropy"] if lines else 2.0) * draw(st.floats(0.9, 1.1))
        lines.append({**HEALTHY, "step": step, "entropy": entropy, **drawn})
    return lines


@given(healthy_runs())
def test_healthy_metrics_raise_nothing(lines: list[dict[str, Any]]) -> None:
    """If all metrics of a run lie in their healthy intervals, no rule fires at any step."""
    assert all(rules_that_fire(lines[:end]) == set() for end in range(1, len(lines) + 1))


def test_missing_metrics_silence_a_rule() -> None:
    """Earlier revisions of the code did not write every metric. If metrics are missing in the lines of a run, no rule
    fires and no exception is raised."""
    assert examine([{"step": k} for k in range(1, 30)], CONFIG) == []


# ---- doctor of a run


def doctor_of(tmp_path: Path, mode: str) -> Doctor:
    """Return the doctor of a run in tmp_path/e/t with doctor=`mode`."""
    config = load([f"fileroot={tmp_path}", "experiment_name=e", "trial_name=t", f"doctor={mode}"])
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return Doctor(config)


def test_a_finding_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor prints and writes each finding once, even if the run is restarted."""
    sick = lines_of(3, staleness_max=9.0)
    for _ in range(2):
        doctor = doctor_of(tmp_path, "warn")
        for end in (1, 2, 3):
            doctor.check(sick[:end])
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("doctor: step 1, lag = 8, limit 0. ")
    [finding] = map(json.loads, (tmp_path / "e" / "t" / "doctor.jsonl").read_text().splitlines())
    assert (finding["step"], finding["rule"], finding["text"]) == (1, "lag", said)


def test_strict_ends_the_run_and_off_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With doctor=strict a finding raises Unhealthy with the rule's text. The rule `waiting` fires on a slow run and
    does not raise an error, even with doctor=strict. With doctor=off the doctor prints nothing."""
    with pytest.raises(Unhealthy, match="the staleness gate"):
        doctor_of(tmp_path / "strict", "strict").check(lines_of(1, staleness_max=9.0))
    doctor_of(tmp_path / "slow", "strict").check(lines_of(10, rollout_wait_s=2.0))
    capsys.readouterr()
    doctor_of(tmp_path / "off", "off").check(lines_of(1, staleness_max=9.0))
    assert capsys.readouterr().err == ""


# ---- the command


def check_afterwards(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit code and the printed lines of `python -m run.doctor FOLDER`."""
    code = main([str(folder)])
    said = capsys.readouterr()
    return code, (said.out + said.err).splitlines()


def test_the_command_checks_a_run_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m run.doctor` says which rules fired, at which step, and whether generation or training limits the
    speed."""
    OmegaConf.save(
        {"actor": {"dtype": "float32"}, "rollout": {"max_head_offpolicyness": 1}},
        tmp_path / "config.yaml",
    )
    lines = lines_of(12, staleness_max=[1.0, 2.0, 3.0], rollout_wait_s=1.6)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = check_afterwards(tmp_path, capsys)
    assert code == 1
    assert said[0].startswith("doctor: step 11, lag = 1")
    assert "1 of 17 rules fire; generation limits the speed (waiting 80%" in said[1]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert check_afterwards(tmp_path, capsys)[0] == 0


@pytest.mark.parametrize("text", [None, "", '{"step": 1}\n{"step": 2, "rew'])
def test_the_command_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    """If there is no run or no step, or if a line is incomplete, the command prints one line and returns exit code
    2."""
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    code, said = check_afterwards(tmp_path, capsys)
    assert (code, len(said)) == (2, 1)
    assert "metrics.jsonl" in said[0]
    assert main([]) == 2


# ---- metrics and canary


def test_no_signal_share() -> None:
    """A group has no signal if no advantage of the group has an absolute value above 0.01."""
    advantages = torch.tensor([[0.0, 1e-3], [0.0, 0.0], [0.0, -0.5], [0.0, 0.0]])
    assert (
        no_signal_share({"advantages": advantages, "group_ids": torch.tensor([3, 3, 4, 4])}) == 0.5
    )


def test_baseline_bias() -> None:
    """If the baseline of every group is the group's mean, the metric `baseline_bias` is 0. Each trained turn counts
    once in `baseline_bias`, whatever the turn's length. If a group has a wrong baseline, `baseline_bias` is above 0."""
    rows = [[0, 0, 1.0, 1, 1], [0, 0, -1, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, -0.5, 0, 2]]
    batch = {
        "advantages": torch.tensor(rows),
        "loss_mask": torch.tensor(
            [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 0]]
        ),
        "turn_ids": torch.tensor(
            [[-1, -1, 0, 0, 0], [-1, -1, 0, -1, -1], [-1, -1, 0, 0, -1], [-1, -1, 0, -1, 1]]
        ),
        "task_ids": torch.tensor([3, 3, 4, 4]),
    }
    assert baseline_bias(batch) == 0
    batch["advantages"] = batch["advantages"] + torch.tensor([0, 0, -0.3, -0.3])[:, None]
    assert baseline_bias(batch) == pytest.approx(0.3)


def test_standard_ppo_and_other_baselines_raise_nothing() -> None:
    """The rule `no_correction` does not fire with standard PPO, and the rule `baseline` does not fire if the baseline
    is the batch's mean."""
    lines = lines_of(3, behave_ess=1.0, behave_weight_mean=1.0, baseline_bias=0.5)
    assert rules_that_fire(lines) == {"no_correction", "baseline"}
    other = load(["actor.use_decoupled_loss=false", "actor.adv_norm.mean_level=batch"])
    assert rules_that_fire(lines, other) == set()


def test_scores_of_the_canary() -> None:
    """compare_scores counts servers with unchanged scores, and returns the largest difference from the trainer's
    scores. If all servers have the new weights, compare_scores returns 0 for the number of unchanged servers and 0 for
    the largest difference."""
    old, new = torch.tensor([0.0, -1.0]), torch.tensor([0.0, -1.5])
    before = torch.stack(
        [old, old, old]
    )  # one row of scores from the trainer, and one row from each of two servers
    assert compare_scores(before, torch.stack([new, new, new])) == {
        "canary_mismatch": 0.0,
        "canary_unchanged": 0,
    }
    assert compare_scores(before, torch.stack([new, new, old])) == {
        "canary_mismatch": 0.5,
        "canary_unchanged": 1,
    }
    assert (
        compare_scores(before, before)["canary_unchanged"] == 0
    )  # the trainer's scores have not changed
    assert compare_scores(torch.empty(0), before)["canary_unchanged"] == 0  # the first update
    broken = torch.tensor([0.0, float("nan")])
    assert compare_scores(before, torch.stack([new, new, broken]))["canary_mismatch"] == float(
        "inf"
    )


def test_the_trainer_does_not_wait_for_the_canary(
    start_tiny_server: Any, tiny_model_dir: Path
) -> None:
    """Canary.start returns at once even if a server is paused. The canary's threads wait until the server resumes and
    answers. If a server has died, Canary.finish returns {}. If a thread fails for a reason other than a dead server,
    Canary.finish raises the thread's exception."""
    actor = FSDPPPOActor(PPOActorConfig(), tiny_model_dir)
    actor.create_process_group()
    actor.initialize(max_steps=1)
    rollout = RemoteInfEngine([start_tiny_server()])
    canary = Canary(actor, rollout, trace := Trace(None))
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    batch = {"input_ids": ids, "attention_mask": ids > 0, "temperatures": torch.ones(2, 4)}
    assert canary.finish() == {}
    rollout.pause()
    canary.start(batch)
    assert [answer.done() for answer in canary.asked] == [False, False]
    rollout.resume()
    metrics = canary.finish()
    assert metrics["canary_mismatch"] < 1e-4
    assert metrics["canary_unchanged"] == 0
    # `canary.before` has one row of scores from the trainer and one row from the server. Each row has a score for each
    # of the canary's 7 tokens.
    assert canary.before.shape == (2, 7)
    rollout.servers = Servers(["http://127.0.0.1:9"], Wire())
    canary.start(batch)
    assert canary.finish() == {}
    rollout.servers = None  # type: ignore[assignment]
    canary.start(batch)
    with pytest.raises(AttributeError):
        canary.finish()
    actor.destroy()
    trace.close()


def test_a_blocked_loop_is_named() -> None:
    """While a function blocks the event loop, find_blocker returns the function's name, file and line. If no function
    blocks the event loop, find_blocker returns None."""
    runner, entered, release = AsyncTaskRunner(2), threading.Event(), threading.Event()

    async def blocking_agent() -> None:
        entered.set()
        release.wait()

    runner.submit(blocking_agent, task_id=0)
    try:
        entered.wait()
        where = runner.find_blocker(0.1)
    finally:
        release.set()
    assert where is not None
    assert where.startswith("blocking_agent (")
    assert Path(__file__).name in where
    assert runner.find_blocker(60) is None
    runner.destroy()
    assert runner.find_blocker(60) is None


def test_the_doctors_thread_ends_with_the_run(tmp_path: Path) -> None:
    """The thread that checks a running step ends when the run's stack closes."""
    doctor, runner = doctor_of(tmp_path, "warn"), AsyncTaskRunner(1)
    executor = SimpleNamespace(dispatcher=SimpleNamespace(runner=runner), stats=None)
    with ExitStack() as stack:
        doctor.watch(executor, stack)
        assert "doctor" in [thread.name for thread in threading.enumerate()]
    assert "doctor" not in [thread.name for thread in threading.enumerate()]
    runner.destroy()


@pytest.mark.runs
@pytest.mark.parametrize(
    ("agent", "rule"), [("BlockingAgent", "blocked_loop"), ("SilentAgent", "rejection")]
)
def test_a_run_that_never_ends_its_first_step_is_stopped(
    tmp_path: Path, agent: str, rule: str
) -> None:
    """With doctor=strict, the run ends during its first step if the event loop is blocked or if all groups are
    rejected. The run prints the rule's line and exits with code 1."""
    words = command(tmp_path, *SMALL_GUESS, f"workflow=sick_agents.{agent}", "doctor=strict")
    done = subprocess.run(
        words, cwd=ROOT, env=WITH_TEST_MODULES, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr[-2000:]
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: doctor: step 1, {rule} =")
    assert "Traceback" not in done.stderr
