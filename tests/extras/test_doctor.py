"""Each rule of the doctor fires on a sick run, and is silent on a healthy run that is close to it.

Then come the doctor of a run, the command, the canary, and the search for a function that blocks
the event loop. The last tests start real runs.
"""

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT
from runs import SMALL_GUESS, command, finish
from test_engine import generated

from engine import EngineError
from extras import doctor as room
from extras.doctor import RULES, TEXTS, Canary, Doctor, Strict, Unhealthy, examine
from inference.io_struct import ModelResponse, parse_segment
from run.config import TrainConfig
from staleness import RolloutStat

KEYS = {"gconfig": {"n_samples": 20}, "rollout": {"max_head_offpolicyness": 1}}
CONFIG = TrainConfig.model_validate(KEYS)
HEALTHY: dict[str, Any] = {"success": 0.5, "reward": 0.5, "reward_std": 0.4, "rows": 120}
HEALTHY |= {"truncated": 3, "no_signal_share": 0.2, "baseline_bias": 1e-7, "staleness_mean": 0.8}
HEALTHY |= {"staleness_max": 1.0, "behave_weight_mean": 0.999, "behave_ess": 0.98, "kl": 0.01}
HEALTHY |= {"canary_mismatch": 5e-6, "canary_unchanged": 0, "logp_mismatch": 5e-6, "accepted": 6}
HEALTHY |= {"rejected": 0, "failed": 0, "failed_members": 0, "entropy": 0.6, "grad_norm": 0.3}
HEALTHY |= {"rollout_wait_s": 1.0, "train_s": 0.5, "step_s": 2.0}


def lines_of(count: int, **last: Any) -> list[dict[str, Any]]:
    """Return `count` healthy lines with changes: a list changes the last lines, a number all
    lines."""
    lines = [{"step": 1 + k, **HEALTHY} for k in range(count)]
    for name, value in last.items():
        values = value if isinstance(value, list) else [value] * count
        for line, one in zip(lines[count - len(values) :], values, strict=True):
            line[name] = one
    return lines


def rules_that_fire(lines: list[dict[str, Any]], config: Any = CONFIG) -> set[str]:
    return {finding["rule"] for finding in examine(lines, config)}


NAN, INF = float("nan"), float("inf")
EXACT = {"behave_ess": 1.0}
# A rule, a metric, its values in a sick run and in a healthy one that is close, and what both
# share.
CASES: list[tuple[str, str, Any, Any, dict[str, Any]]] = [
    ("stale_weights", "canary_mismatch", [2e-3], [0.9e-3], {}),
    ("stale_weights", "canary_mismatch", [INF], [0.0], {}),
    ("unchanged_weights", "canary_unchanged", [1, 2], [1, 0], {}),
    ("logp_mismatch", "logp_mismatch", [2e-3], [0.9e-3], {}),
    ("lag", "staleness_max", [2.0], [1.0], {}),
    ("effective_samples", "behave_ess", [0.4, 0.9, 0.3], [0.4, 0.6, 0.55], {}),
    ("effective_samples", "behave_ess", [NAN] * 3, [1.0] * 3, {}),
    ("no_correction", "behave_weight_mean", 1.0, 0.9999, EXACT),
    ("no_correction", "behave_weight_mean", [0.9, 1.0, 1.0], [0.9, 0.9, 1.0], EXACT),
    ("no_correction", "staleness_mean", 0.5, 0.0, EXACT | {"behave_weight_mean": 1.0}),
    ("baseline", "baseline_bias", [0.06], [0.04], {}),
    ("kl", "kl", [0.3, 0.0, 0.4, 0.0, 40.0], [0.0, 0.19, 3.0, 40.0, 0.05], {}),
    ("entropy", "entropy", [0.6] * 5 + [0.1] * 5, [0.6] * 5 + [0.13] * 5, {}),
    ("entropy", "success", 0.5, 0.95, {"entropy": [0.6] * 8 + [0.0] * 2}),
    ("truncated", "truncated", [95] * 5, [120, 85, 85, 85, 70], {}),
    ("no_signal", "no_signal_share", [0.9] * 5, [0.9, 0.7, 0.7, 0.7, 0.9], {}),
    ("no_signal", "success", 0.5, 0.95, {"no_signal_share": 1.0, "reward_std": 0.0}),
    ("zero_gradients", "grad_norm", [0.0] * 3, [0.0, 0.0, 1e-4], {}),
    ("zero_gradients", "reward_std", 0.4, 0.0, {"no_signal_share": [1.0] * 3}),
    ("zero_gradients", "reward_std", 0.4, 0.0, {"grad_norm": [0.0] * 3}),
    ("rejection", "rejected", [30, 30, 30], [30, 20, 10], {}),
    ("failing", "failed", [1] * 3, [1, 0, 0], {"rejected": [1] * 3}),
    ("failing", "failed_members", [13] * 3, [11] * 3, {}),
    ("constant_reward", "reward", 0.5, [0.5, 0.5, 0.51], {"reward_std": 0.0}),
    ("waiting", "rollout_wait_s", 1.9, 1.7, {}),
]


@pytest.mark.parametrize(("rule", "metric", "sick", "near", "both"), CASES)
def test_a_rule_fires_on_the_sick_run_alone(
    rule: str, metric: str, sick: Any, near: Any, both: dict[str, Any]
) -> None:
    """A rule tells a sick run from a similar healthy one, and does not fire before it has seen its
    number of steps."""
    steps = next(each.steps for each in RULES if each.name == rule)
    lines = lines_of(steps, **both | {metric: sick})
    assert rule in rules_that_fire(lines)
    assert rule not in rules_that_fire(lines_of(steps, **both | {metric: near}))
    assert rule not in rules_that_fire(lines[1:])


def test_every_rule_has_a_case_and_an_entry() -> None:
    """Every rule has a case here, a cause and a remedy, and an entry in docs/observe.md."""
    names = {rule.name for rule in RULES}
    assert {name for name, *_ in CASES} == names
    table = (ROOT / "docs" / "observe.md").read_text().split("## The doctor")[1].split("\n## ")[0]
    entries = re.findall(r"^\| ([\w, ]+) \| ", table, re.M)[1:]
    assert set(", ".join(entries).split(", ")) == names | {"blocked_loop"} == set(TEXTS)
    assert all(text.count(". ") in (1, 2) for text in TEXTS.values())


def test_the_number_format_sets_the_limit_of_rounding() -> None:
    """In bfloat16, a log-probability may differ by 0.6 nats, but not by 1.1."""
    config = TrainConfig.model_validate({"actor": {"dtype": "bfloat16"}})
    assert rules_that_fire(lines_of(2, logp_mismatch=0.6, canary_mismatch=0.6), config) == set()
    both = {"logp_mismatch", "stale_weights"}
    assert rules_that_fire(lines_of(2, logp_mismatch=1.1, canary_mismatch=1.1), config) == both


def test_missing_metrics_silence_a_rule() -> None:
    """A run of an older revision lacks metrics; its doctor is silent and does not fail."""
    assert examine([{"step": k} for k in range(1, 30)], CONFIG) == []


def test_standard_ppo_and_other_baselines_raise_nothing() -> None:
    """Standard PPO has no correction, and the batch's mean is no group's baseline."""
    lines = lines_of(3, behave_ess=1.0, behave_weight_mean=1.0, baseline_bias=0.5)
    assert rules_that_fire(lines) == {"no_correction", "baseline"}
    actor = {"use_decoupled_loss": False, "adv_norm": {"mean_level": "batch"}}
    assert rules_that_fire(lines, TrainConfig.model_validate({"actor": actor})) == set()


# ---- the doctor of a run


def start(
    fileroot: Path, kind: type[Doctor] = Doctor, rank: int = 0, last: int = 99, loop: Any = None
) -> tuple[Doctor, SimpleNamespace]:
    """Return a started doctor and its run, whose servers always have the trainer's weights. The
    thread of the doctor has nothing to do."""
    keys = {"fileroot": str(fileroot), "experiment_name": "e", "trial_name": "t"}
    config = TrainConfig.model_validate(CONFIG.model_dump() | keys)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    actor = SimpleNamespace(compute_logp=lambda rows: torch.zeros(rows["input_ids"].shape))
    engine = servers_that(lambda: [answer([7, 8])]) if rank == 0 else None
    run = SimpleNamespace(rank=rank, step=0, last_step=last, history=[], actor=actor, engine=engine)
    run.executor = SimpleNamespace(stats=RolloutStat(), dispatcher=loop or LOOP)
    doctor = kind(config)
    doctor.over.set()
    doctor.on_start(run)
    for thread in threading.enumerate():
        if thread.name == "doctor":
            thread.join()
    return doctor, run


def answer(tokens: list[int], logprob: float = 0.0) -> dict[str, Any]:
    return generated(tokens, output_token_logprobs=[[logprob, t, None] for t in tokens]).json()


def servers_that(answer_all: Callable[[], list[Any]]) -> Any:
    """An engine whose servers give these answers."""
    servers = SimpleNamespace(post_all=lambda *_: answer_all())
    return SimpleNamespace(servers=servers, request_timeout=1.0)


LOOP = SimpleNamespace(thread=threading.main_thread())
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
MASK = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
BATCH = {"input_ids": IDS, "attention_mask": IDS > 0, "temperatures": torch.full((2, 4), 0.5)}
BATCH |= {"loss_mask": MASK, "turn_ids": MASK - 1, "advantages": torch.tensor([[1.0], [-1]]) * MASK}
BATCH["group_ids"] = BATCH["task_ids"] = torch.zeros(2)


def go(doctor: Doctor, run: Any, lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Take the steps of `lines`. Return what the doctor adds to each line."""
    added = []
    for line in lines:
        added.append(doctor.on_batch(BATCH))
        run.history.append(line | added[-1])
        doctor.on_step(run.history[-1])
    return added


def test_a_finding_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rule speaks once per run, even if the run is continued."""
    for _ in range(2):
        go(*start(tmp_path), lines_of(3, staleness_max=9.0))
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("doctor: step 1, lag = 8, limit 0. ")
    [finding] = map(json.loads, (tmp_path / "e/t/doctor.jsonl").read_text().splitlines())
    assert finding == {"step": 1, "rule": "lag", "text": said}


def test_a_strict_doctor_ends_the_run(tmp_path: Path) -> None:
    """The rule's text is the run's last word. A slow run is correct, so `waiting` ends nothing."""
    go(*start(tmp_path / "slow", Strict), lines_of(10, rollout_wait_s=2.0))
    assert "waiting" in (tmp_path / "slow/e/t/doctor.jsonl").read_text()
    with pytest.raises(Unhealthy, match="the staleness gate", check=lambda error: error.is_verdict):
        go(*start(tmp_path, Strict), lines_of(1, staleness_max=9.0))


def test_the_doctors_facts_become_metrics(tmp_path: Path) -> None:
    """A line has the verdict on the update before its step. No line follows the last update, so the
    verdict on it goes only to doctor.jsonl. Ranks other than 0 only compute."""
    doctor, run = start(tmp_path, last=3)
    first = {"no_signal_share": 0.0, "baseline_bias": 0.0}
    fine = first | {"canary_mismatch": 0.0, "canary_unchanged": 0}
    lines = lines_of(2)
    for line in lines:
        del line["canary_mismatch"], line["canary_unchanged"]
    assert go(doctor, run, lines) == [first, fine]
    assert not (tmp_path / "e/t/doctor.jsonl").exists()
    run.engine.servers.post_all = lambda *_: [answer([7, 8], -1.0)]
    assert go(doctor, run, [HEALTHY | {"step": 3}]) == [fine]
    [finding] = map(json.loads, (tmp_path / "e/t/doctor.jsonl").read_text().splitlines())
    assert (finding["step"], finding["rule"]) == (3, "stale_weights")
    assert go(*start(tmp_path / "other", rank=1), lines_of(3, staleness_max=9.0)) == [first] * 3
    assert not (tmp_path / "other/e/t/doctor.jsonl").exists()


@pytest.mark.parametrize(
    ("where", "rejected", "rules"),
    [
        ("f (agent.py:3)", 0, ["blocked_loop = 5 s in f (agent.py:3)"]),
        (None, 80, ["rejection = 1, limit 0.8"]),
        (None, 79, []),
    ],
)
def test_a_step_that_never_ends_is_stopped(
    tmp_path: Path, monkeypatch, where, rejected: int, rules: list[str]
) -> None:
    """A blocked loop, or ten rejected batches of eight groups, end a strict run within its step."""
    failed: list[Exception] = []
    loop = SimpleNamespace(thread=LOOP.thread, fail=failed.append)
    doctor, run = start(tmp_path, Strict, loop=loop)
    run.executor.stats = RolloutStat(rejected=20)  # what happened before this step
    monkeypatch.setattr("extras.doctor.find_blocker", lambda *_: where)
    turns: Iterator[bool] = iter([False, False, True])

    def wait(seconds: float) -> bool:
        run.executor.stats = RolloutStat(rejected=20 + rejected)
        return next(turns)

    doctor.over = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    doctor.watch()
    said = [str(error).split(". ")[0] for error in failed]
    assert said == [f"doctor: step 1, {rule}" for rule in rules]


def test_the_doctors_thread_ends_with_the_run(tmp_path: Path) -> None:
    """Nothing of the doctor is left after on_end."""
    doctor, run = start(tmp_path)
    doctor.over.clear()
    doctor.on_start(run)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "doctor"]
    doctor.on_end(None)
    thread.join(10)
    assert not thread.is_alive()


# ---- the command


def write_run(folder: Path, lines: list[dict[str, Any]], more: str = "") -> None:
    keys = {"actor": {"dtype": "float32"}, "rollout": {"max_head_offpolicyness": 1}}
    (folder / "config.yaml").write_text(yaml.safe_dump(keys))
    text = "".join(json.dumps(line) + "\n" for line in lines) + more
    (folder / "metrics.jsonl").write_text(text)


def check_afterwards(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = room.main([str(folder)])
    said = capsys.readouterr()
    return code, (said.out + said.err).splitlines()


def test_the_command_checks_a_run_afterwards(tmp_path: Path, capsys) -> None:
    """It says which rules fired, when, and which side limits the speed. A line that a kill has cut
    does not count, and recorded text does not steer the terminal."""
    lines = lines_of(12, staleness_max=[1.0, 2.0, 3.0], rollout_wait_s=1.6)
    write_run(tmp_path, lines, '{"step": 13, "rew')
    code, said = check_afterwards(tmp_path, capsys)
    assert code == 1
    assert said[0].startswith("doctor: step 11, lag = 1")
    assert "12 steps; 1 of 17 rules fire; generation limits the speed (waiting 80%" in said[1]
    write_run(tmp_path, lines[:1])
    assert check_afterwards(tmp_path, capsys)[0] == 0
    finding = {"step": 1, "rule": "blocked_loop", "text": "\x1b[2Jin f"}
    (tmp_path / "doctor.jsonl").write_text(json.dumps(finding) + "\n")
    assert check_afterwards(tmp_path, capsys)[1][0] == "\\x1b[2Jin f"


@pytest.mark.parametrize("text", [None, '{"rew', "a pipe"])
def test_the_command_refuses_in_one_line(tmp_path: Path, capsys, text: str | None) -> None:
    """A folder without a step is no run."""
    if text == "a pipe":
        os.mkfifo(tmp_path / "metrics.jsonl")
    elif text:
        (tmp_path / "metrics.jsonl").write_text(text)
    code, [said] = check_afterwards(tmp_path, capsys)
    assert code == 2
    assert "metrics.jsonl" in said


# ---- advantages and canary


def test_no_signal_share() -> None:
    """Advantages of less than 0.01 are rounding, and teach nothing."""
    advantages = torch.tensor([[0.0, 1e-7], [0.0, 0.0], [0.0, -0.5], [0.0, 0.0]])
    batch = {"advantages": advantages, "group_ids": torch.tensor([3, 3, 4, 4])}
    assert room.no_signal_share(batch) == 0.5


def test_baseline_bias() -> None:
    """Each turn counts once, however long it is, so the group's own mean leaves no bias."""
    rows = [[0, 0, 1.0, 1, 1], [0, 0, -1, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, -0.5, 0, 2]]
    masks = [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 0]]
    turns = [[-1, -1, 0, 0, 0], [-1, -1, 0, -1, -1], [-1, -1, 0, 0, -1], [-1, -1, 0, -1, 1]]
    batch = {"loss_mask": torch.tensor(masks), "turn_ids": torch.tensor(turns)}
    batch |= {"advantages": torch.tensor(rows), "task_ids": torch.tensor([3, 3, 4, 4])}
    assert room.baseline_bias(batch) == 0
    batch["advantages"] = batch["advantages"] + torch.tensor([0, 0, -0.3, -0.3])[:, None]
    assert room.baseline_bias(batch) == pytest.approx(0.3)


def test_answers_to_the_canary() -> None:
    """If a server lacks the new weights, its log-probabilities differ from the trainer's, or have
    not changed in any bit. If the new weights have changed a token, nothing after it can be
    compared."""
    old, new = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.5])
    last = parse_segment(answer([7, 8], -1.0))

    def verdict(tokens: list[int], logprobs: list[float], score: torch.Tensor) -> Any:
        now = ModelResponse([], tokens, logprobs)
        errors, unchanged = room.compare(last, now, {(7, 8): score}, {(7, 8): old})
        return errors.tolist(), unchanged

    assert verdict([7, 8], [-1.0, -1.5], new) == ([0.0, 0.0], False)
    assert verdict([7, 8], [-1.0, -1.0], new) == ([0.0, 0.5], True)
    assert verdict([7, 8], [-1.0, -1.0], old) == ([0.0, 0.0], False), "the trainer has not moved"
    assert verdict([7, 9], [-1.0, -0.1], new) == ([0.0], False)
    assert verdict([6], [-1.0], new) == ([], False)
    assert not room.compare(last, last, {(7, 8): new}, {})[1], "the first update"


def test_the_trainer_does_not_wait_for_the_canary() -> None:
    """A busy server delays nothing but its own verdict; one that does not answer gives none. Any
    other error is a bug, and is raised."""
    answers, seen = threading.Event(), list[dict[str, torch.Tensor]]()
    answers.set()

    def compute_logp(rows: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(rows)
        return torch.zeros(rows["input_ids"].shape)

    def answer_all() -> list[Any]:
        answers.wait()
        return [answer([7, 8]), answer([9], -0.5)]

    engine = servers_that(answer_all)
    canary = Canary(SimpleNamespace(compute_logp=compute_logp), engine)
    canary.choose({k: x.repeat(1, 20) if x.dim() > 1 else x for k, x in BATCH.items()})
    assert (len(canary.prompt), canary.finish()) == (32, {})
    answers.clear()
    canary.start()
    assert canary.asked is not None
    assert not canary.asked.done()
    assert seen[0]["input_ids"].tolist() == [[*canary.prompt, 7, 8], [*canary.prompt, 9, 0]]
    assert seen[0]["loss_mask"].sum() == 34 + 33
    answers.set()
    assert canary.finish() == {"canary_mismatch": 0.5, "canary_unchanged": 0}

    def fail(error: Exception) -> Any:
        raise error

    engine.servers.post_all = lambda *_: fail(EngineError("gone", 503))
    canary.start()
    assert canary.finish() == {}
    assert [len(one.output_tokens) for one in canary.answers] == [2, 1]
    engine.servers.post_all = lambda *_: fail(AttributeError())
    canary.start()
    with pytest.raises(AttributeError):
        canary.finish()


# ---- a blocked loop


@pytest.fixture
def loop() -> Iterator[Any]:
    """An event loop in a thread, as the dispatcher has it."""
    events = asyncio.new_event_loop()
    thread = threading.Thread(target=events.run_forever, daemon=True)
    thread.start()
    yield SimpleNamespace(thread=thread, call_soon=events.call_soon_threadsafe)
    events.call_soon_threadsafe(events.stop)
    thread.join()
    events.close()


@pytest.mark.parametrize(("computed", "is_named"), [(0.0, True), (0.06, False), (0.2, True)])
def test_a_blocked_loop_is_named(
    loop: Any, monkeypatch: pytest.MonkeyPatch, computed: float, is_named: bool
) -> None:
    """A function that sleeps in the loop for 0.2 s is named, and so is one that computes for at
    least half of that time. A function in between wants a core and gets none, so the machine is
    starved and the function is innocent."""
    entered, release, over = (threading.Event() for _ in range(3))
    looks = iter([0.0, *[computed] * 9])

    def blocking_agent() -> None:
        entered.set()
        release.wait()

    def cpu_seconds(thread: threading.Thread) -> float:
        seconds = next(looks, None)
        if seconds is None:
            release.set()
        return computed if seconds is None else seconds

    monkeypatch.setattr("extras.doctor.cpu_seconds", cpu_seconds)
    loop.call_soon(blocking_agent)
    entered.wait()
    where = room.find_blocker(loop, 0.2, over)
    release.set()
    assert (where or "").startswith("blocking_agent (") == is_named
    assert (Path(__file__).name in (where or "")) == is_named


def test_a_loop_that_gets_on_is_not_blocked(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy loop answers late, but each look finds another call, so no call blocks. A loop that is
    silent because its run is over is not asked again."""
    looks, answers, over = list[object](), list[Any](), threading.Event()

    def own_frames(*_: Any) -> list[object]:
        looks.append(object())
        if len(looks) == 10:
            answers[0]()
        return looks[-1:]

    monkeypatch.setattr("extras.doctor.own_frames", own_frames)
    busy = SimpleNamespace(thread=loop.thread, call_soon=answers.append)
    assert room.find_blocker(busy, 0.1, over) is None
    assert len(looks) == 10
    assert room.find_blocker(loop, 60, over) is None
    ended = SimpleNamespace(thread=threading.Thread(), call_soon=answers.append)
    assert room.find_blocker(ended, 60, over) is None
    over.set()
    assert room.find_blocker(busy, 60, over) is None


@pytest.mark.runs
@pytest.mark.parametrize(
    ("sick", "rule"),
    [
        ("workflow=sick_agents.BlockingAgent", "blocked_loop"),
        ("should_accept_fn=sick_agents.accept_once", "rejection"),
    ],
)
def test_a_run_that_hangs_in_step_1_is_stopped(tmp_path: Path, sick: str, rule: str) -> None:
    """A strict doctor ends the run with the rule's line and code 1."""
    strict = ("callbacks=[extras.doctor.Strict]", sick)
    done = finish(command(tmp_path, *SMALL_GUESS, *strict), code=1)
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: doctor: step 1, {rule} =")
    assert "Traceback" not in done.stderr
