"""Tests of the restart of a run after `kill -9`. The restarted run makes every step once, trains on every group once,
and uses no token from weights that were lost.

The first tests check single parts: metrics.jsonl, the group files, the position in the data, and the gate. The tests in
the section `real runs` kill runs and start the killed runs again.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import mode_agents
import pytest
import torch
from conftest import ROOT, make_byte_model
from runs import signalled
from safetensors.torch import load_file
from scripted import Echo, ScriptedEngine, loader
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from trainers import gradients, make_batch, make_config, prepare

from inference.weights import write_checkpoint
from inference.wire import EngineError
from rollout.executor import ProxyAddress, WorkflowExecutor
from rollout.trajectory import complete
from run.evaluate import evaluate_endpoint, start_evaluation
from run.inputs import Inputs, load_inputs
from run.keys import RolloutConfig
from run.load import ConfigError, load
from run.logger import Trace
from run.recover import (
    GroupLog,
    Recovery,
    claim,
    cut_metrics,
    discard,
    newest_checkpoint,
    save_model,
)
from run.summary import summarise
from training.actor import FSDPPPOActor

pytestmark = pytest.mark.runs


def group(version: int, task_id: int = 0) -> dict[str, torch.Tensor]:
    """Return a finished group whose generated tokens have version `version`."""
    ids = torch.tensor([[1, 2, 3]])
    row = {"input_ids": ids, "attention_mask": ids > 0, "loss_mask": torch.tensor([[0, 1, 1]])}
    return complete(row, task_id, version)


# ---- single parts


def test_the_lines_of_lost_steps_are_cut(tmp_path: Path) -> None:
    """cut_metrics removes all lines after the line of the checkpoint's step, also an incomplete line. If metrics.jsonl
    lacks the line of a step, cut_metrics raises an error."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": i}) + "\n" for i in range(1, 5)) + '{"step": 5, "rew'
    )
    cut_metrics(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    with pytest.raises(ConfigError, match="steps 1 to 4"):
        cut_metrics(path, 4)
    cut_metrics(path, 0)
    assert path.read_text() == ""
    path.write_text('{"step": 2}\n')
    with pytest.raises(ConfigError, match="steps 1 to 1"):
        cut_metrics(path, 1)


def test_groups_of_weights_that_are_gone_are_not_put_back(tmp_path: Path) -> None:
    """GroupLog.read returns the finished groups in the order of the given ids. GroupLog.read skips groups with
    incomplete files, and groups with tokens that are newer than the checkpoint."""
    log = GroupLog(tmp_path / "groups")
    for task_id, version in ((7, 3), (5, 2), (6, 4), (9, 1)):
        log.write(task_id, group(version, task_id))
    (log.folder / "8.partial").write_bytes(b"torn")
    found = log.read([5, 6, 7, 8], version=3)
    assert list(found) == [5, 7]
    assert all(torch.equal(found[7][key], value) for key, value in group(3, 7).items())
    log.keep([6, 7], below=9)
    assert list(log.read([5, 6, 7, 9], version=9)) == [6, 7, 9]


def test_a_group_may_name_a_tensor_twice(tmp_path: Path) -> None:
    """If two tensors of a group share memory, the group's file still contains the values of both tensors."""
    both = torch.arange(6.0).view(2, 3)
    shared = group(1) | {
        "logprobs": both[:1],
        "turn_rewards": both[:1],
        "advantages": both[1:],
        "across": both.T,
    }
    log = GroupLog(tmp_path / "groups")
    log.write(0, shared)
    found = log.read([0], version=1)[0]
    assert all(torch.equal(found[key], value) for key, value in shared.items())


@pytest.fixture
def make_executor(tiny_tokenizer):
    made = []

    def make(version: int = 0, eta: int = 2, keep=None, batch: int = 2) -> WorkflowExecutor:
        engine = ScriptedEngine(tiny_tokenizer)
        engine.version = version
        config = RolloutConfig(
            max_head_offpolicyness=eta, consumer_batch_size=batch, dump_to_file=False
        )
        made.append(WorkflowExecutor(engine, config, keep=keep))
        return made[-1]

    yield make
    for executor in made:
        executor.destroy()


def test_data_order_and_gate_go_on_where_they_were(make_executor, tmp_path: Path) -> None:
    """After a restart no sample is lost or repeated. A restarted run first consumes the groups that started before the
    restart. The gate counts the groups that started before the restart, so that the restarted run does not start too
    many groups.

    AReaL's issue #1388 reports that the gate lets too many groups start after a restart.
    """
    log = GroupLog(tmp_path / "groups")
    samples = [
        {"n": n} for n in range(5)
    ]  # 16 draws take more than 3 epochs, and each epoch has its own order
    first, data = make_executor(keep=log.write), loader(samples, seed=3)
    trained, seen = [], []

    def train(executor: WorkflowExecutor, data, versions) -> None:
        for version in versions:
            batch = executor.prepare_batch(data, Echo())
            trained.extend(batch["task_ids"].tolist())
            seen.extend((batch["input_ids"][:, 0] - 1).tolist())
            executor.engine.set_version(version)

    train(first, data, (1, 2, 3))
    first.dispatcher.runner.wait_for(lambda: first.stats.running == 0, 60)
    state = first.state_dict()
    assert trained == list(range(6))
    assert sorted(state["open"]) == list(range(6, state["next_id"]))
    log.write(7, group(4, 7))  # group 7 finished with version 4, which was lost
    (log.folder / "10.safetensors").unlink()  # group 10 had not finished before the restart

    second = make_executor(version=3)
    finished = log.read(state["open"], 3)
    assert list(finished) == [6, 8, 9, 11]
    second.load_state_dict(state, finished, 3)
    assert second.staleness_manager.get_stats().accepted == 3 * 2 + 4
    assert second.staleness_manager.get_capacity() == (2 + 3 + 1) * 2 - (3 * 2 + 4)
    train(second, loader(samples, seed=3), range(4, 9))
    assert trained[6:12] == [6, 8, 9, 11, 7, 10]
    assert trained[12:] == [12, 13, 14, 15]
    replay = loader(samples, seed=3)
    order = [sample["n"] for _ in range(4) for batch in replay for sample in batch]
    assert [n for _, n in sorted(zip(trained, seen, strict=True))] == order[:16]


@pytest.mark.parametrize(
    ("eta", "batch", "kept"),
    [
        (0, 1, 1),
        (0, 2, 2),
        (0, 4, 2),
        (1, 1, 2),
        (1, 2, 4),
        (2, 1, 3),
        (2, 2, 6),
        (2, 4, 6),
        (3, 2, 6),
    ],
)
def test_a_run_goes_on_with_another_eta_or_batch(
    make_executor, tmp_path: Path, eta: int, batch: int, kept: int
) -> None:
    """A restart may change eta or the batch size. If the change makes a finished group too old, the group is generated
    again, and no step fails."""
    log, samples = GroupLog(tmp_path / "groups"), [{"n": n} for n in range(40)]
    first, data = make_executor(eta=2, batch=2, keep=log.write), loader(samples)
    for version in (1, 2, 3):
        first.prepare_batch(data, Echo())
        first.engine.set_version(version)
        first.dispatcher.runner.wait_for(lambda: first.stats.running == 0, 60)
    state = first.state_dict()
    finished = log.read(state["open"], 3)
    assert [int(group["versions"].max()) for group in finished.values()] == [1, 1, 2, 2, 3, 3]

    second, data, trained = (
        make_executor(version=3, eta=eta, batch=batch),
        loader(samples, batch),
        [],
    )
    second.load_state_dict(state, finished, 3)
    assert second.stats.accepted == 3 * batch + kept
    assert second.staleness_manager.get_capacity() >= 0
    for version in range(4, 14):
        trained += second.prepare_batch(data, Echo())["task_ids"].tolist()
        second.engine.set_version(version)
    assert sorted(trained) == list(range(6, 6 + 10 * batch))
    assert trained[:kept] == sorted(trained[:kept])
    assert trained[kept:] == sorted(trained[kept:])


def test_a_checkpoint_is_all_of_the_trainer(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A restart restores the model, the optimizer and the random number generators. The first step after a restart
    gives the same result as without the restart."""

    class Executor:
        def state_dict(self):
            return {"open": {}, "next_id": 4}

        def load_state_dict(self, *args):
            self.got = args

    def make() -> FSDPPPOActor:
        actor = FSDPPPOActor(make_config(entropy_coeff=0.1, anneal=True), tiny_model_dir)
        actor.create_process_group()
        actor.initialize(max_steps=4)
        return actor

    def step(actor: FSDPPPOActor) -> tuple:
        stats = actor.ppo_update(prepare(actor, make_batch()))
        actor.step_lr_scheduler()
        return (
            stats,
            {name: g.clone() for name, g in gradients(actor.model).items()},
            random.random(),
            torch.rand(2),
        )

    actor = make()
    recovery = Recovery(tmp_path, "auto")
    step(actor)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    recovery.save(1, actor, Executor())
    recovery.wait()
    shutil.copytree(tmp_path / "recover" / "step00001", tmp_path / "recover" / "step00002")
    (tmp_path / "recover" / "step00002" / "state.pickle").unlink()  # state.pickle is written last
    (
        tmp_path / "recover" / "step00002" / "__9_0.distcp"
    ).touch()  # a file of rank 9, as in a checkpoint of ten ranks
    own = {
        "stepping",
        "step00001-before-I-changed-lr",
        "step00000",
    }  # two folders of a user, and an older checkpoint
    for name in own:
        (tmp_path / "recover" / name).mkdir()
    expected = step(actor)
    actor.destroy()

    again = make()
    executor, recovery = Executor(), Recovery(tmp_path, "auto")
    assert recovery.load(again, executor) == 1
    assert executor.got == ({"open": {}, "next_id": 4}, {}, 1)
    stats, grads, *numbers = step(again)
    assert stats == pytest.approx(expected[0], rel=1e-6)
    assert all(torch.equal(grads[name], expected[1][name]) for name in grads)
    assert numbers[0] == expected[2]
    assert torch.equal(numbers[1], expected[3])
    recovery.save(2, again, executor)
    recovery.close()
    assert {path.name for path in (tmp_path / "recover").glob("step*")} == own - {"step00000"} | {
        "step00002"
    }
    assert not (tmp_path / "recover" / "step00002" / "__9_0.distcp").exists()
    again.destroy()


class NoRollouts:
    """A stand-in for the executor, whose state has no open groups."""

    def state_dict(self):
        return {"open": {}, "next_id": 0}


def flat(state: Any) -> list[torch.Tensor]:
    """Return copies of all tensors of a nested dictionary, sorted by key."""
    if isinstance(state, dict):
        return [tensor for key in sorted(state) for tensor in flat(state[key])]
    return (
        [getattr(state, "full_tensor", lambda: state)().clone()]
        if isinstance(state, torch.Tensor)
        else []
    )


def test_training_goes_on_while_a_checkpoint_is_written(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    """A checkpoint has the weights, the moments and the random state of its own step, even if the checkpoint's files
    are written after the next step.

    Until all files of a checkpoint are written, the previous checkpoint counts as the newest one. If the write of a
    checkpoint fails, Recovery.close raises the error, and the previous checkpoint stays valid.
    """
    actor = FSDPPPOActor(make_config(), tiny_model_dir)
    actor.create_process_group()
    actor.initialize(max_steps=4)
    recovery, written, may_write = (
        Recovery(tmp_path, "auto"),
        FileSystemWriter.write_data,
        threading.Event(),
    )

    def step() -> None:
        actor.ppo_update(prepare(actor, make_batch()))
        actor.step_lr_scheduler()

    def write_late(*args: Any) -> Any:
        assert may_write.wait(60)
        return written(*args)

    step()
    recovery.save(1, actor, NoRollouts())
    recovery.wait()
    monkeypatch.setattr(FileSystemWriter, "write_data", write_late)
    step()
    expected = (
        flat(dict(enumerate(get_state_dict(actor.model, actor.optimizer)))),
        torch.get_rng_state(),
    )
    recovery.save(2, actor, NoRollouts())
    step()
    torch.rand(1)
    assert newest_checkpoint(tmp_path) == 1
    may_write.set()
    recovery.wait()
    assert newest_checkpoint(tmp_path) == 2
    assert not recovery.checkpoint(1).exists()

    monkeypatch.setattr(FileSystemWriter, "write_data", lambda *_: 1 / 0)
    recovery.save(3, actor, NoRollouts())
    with pytest.raises(RuntimeError, match="was not written") as raised:
        recovery.close()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert newest_checkpoint(tmp_path) == 2
    recovery.step = 2
    recovery.load(actor, SimpleNamespace(load_state_dict=lambda *_: None))
    found = (
        flat(dict(enumerate(get_state_dict(actor.model, actor.optimizer)))),
        torch.get_rng_state(),
    )
    assert actor.steps == 2
    assert len(found[0]) > 20
    for one, two in zip((*expected[0], expected[1]), (*found[0], found[1]), strict=True):
        assert torch.equal(one, two)
    actor.destroy()


def test_the_saver_keeps_the_newest_of_its_own(tmp_path: Path) -> None:
    """save_model keeps the newest `keep` checkpoints and deletes checkpoints of lost steps. Only folders that are named
    like checkpoints are deleted."""

    class Actor:
        rank = 0

        def save(self, path: Path) -> None:
            path.mkdir()

    for name in ("step00001", "step00002", "step00009", "step00001-best", "stepping"):
        (tmp_path / name).mkdir()
    save_model(Actor(), tmp_path, 3, keep=2)
    left = ["step00001-best", "step00002", "step00003", "stepping"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_the_best_model_by_evaluation_stays(tmp_path: Path) -> None:
    """In addition to the newest model, save_model keeps the saved model with the best evaluation. A step without a
    saved model cannot be the best step. If two saved models have equal evaluations, the newer model counts as the
    best."""

    class Actor:
        rank = 0

        def save(self, path: Path) -> None:
            path.mkdir()

    rewards = {2: 0.5, 3: 0.99, 4: 0.9, 6: 0.9, 8: 0.7, 10: None, 12: 0.1}
    lines = [
        {"step": step} | ({"eval_reward": rewards[step]} if step in rewards else {})
        for step in range(1, 13)
    ]
    for step in range(2, 13, 2):
        save_model(Actor(), tmp_path, step, keep=1, lines=lines[:step])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step00006", "step00012"]


def test_only_the_files_of_the_newest_steps_stay(tmp_path: Path) -> None:
    """`discard` deletes the token files of old steps, and the conversations on which no later step can train. For
    example, with eta = 1, step 4 can train on the conversations of the versions 2 and 3. When `discard` deletes the
    files of the steps up to 3, it keeps the conversations of the versions 2 and 3."""
    for step in range(1, 6):
        folder = tmp_path / "rollout" / str(step - 1)
        folder.mkdir(parents=True)
        (folder / "7.jsonl").write_text("{}")
        (tmp_path / "tokens").mkdir(exist_ok=True)
        (tmp_path / "tokens" / f"{step:05d}.safetensors").write_text("")
    discard(tmp_path, 3, max_age=1)
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [
        "00004.safetensors",
        "00005.safetensors",
    ]
    assert sorted(path.name for path in (tmp_path / "rollout").iterdir()) == ["2", "3", "4"]
    discard(tmp_path / "no run yet", -4, max_age=1)


def test_a_checkpoint_of_another_model_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    """If a run's checkpoint belongs to a different model, the run ends before training with an error that suggests what
    to do."""

    class Executor:
        def state_dict(self):
            return {"open": {}, "next_id": 0}

    other = make_byte_model(tmp_path / "other", layers=1, width=32)
    for path in (tiny_model_dir, other):
        actor = FSDPPPOActor(make_config(), path)
        actor.create_process_group()
        actor.initialize(max_steps=1)
        recovery = Recovery(tmp_path, "auto")
        if path == tiny_model_dir:
            recovery.save(1, actor, Executor())
            recovery.close()
            (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        else:
            with pytest.raises(ConfigError, match=r"does not fit .*another trial_name"):
                recovery.load(actor, Executor())
        actor.destroy()


@pytest.mark.parametrize(
    ("counted", "says"),
    [
        ([[4, 6], [0, 6]], "; 16 trained tokens by version lag: lag 0 25%, lag 1 75%\n"),
        ([[], [0, 0, 6]], "; 6 trained tokens by version lag: lag 2 100%\n"),
        ([[], []], "\n"),
    ],
)
def test_a_summary_says_what_it_has_counted(capsys, counted: list[list[int]], says: str) -> None:
    """The summary counts the trained tokens of all steps by lag, including the steps before a restart."""
    line = {"success": 0.5, "staleness_max": 1.0, "staleness_mean": 0.75, "wall_s": 2.0}
    history = [
        line | {"step": step, "lag_counts": counts} for step, counts in enumerate(counted, 1)
    ]
    run = SimpleNamespace(history=history, config=SimpleNamespace(run_dir=Path("here"), task="a"))
    summarise(run, None)  # type: ignore[arg-type]
    assert f"staleness mean 0.75, max 1{says}" in capsys.readouterr().out


def test_a_summary_does_not_wait_for_a_lost_server(capsys) -> None:
    """After the last step, no weights are pushed, so a restarted server gets no weights. The summary does not wait for
    this server, and leaves out the task's drawing."""
    line = {
        "success": 0.5,
        "staleness_max": 1.0,
        "staleness_mean": 0.75,
        "wall_s": 2.0,
        "step": 1,
        "lag_counts": [],
    }
    engine = SimpleNamespace(wait_for_servers=True)

    class Task:
        @staticmethod
        def summary(ask: Any, console: Any) -> None:
            assert not engine.wait_for_servers
            raise EngineError("every server is lost", 503)

    executor = SimpleNamespace(engine=engine, tokenizer=None, gconfig=None)
    config = SimpleNamespace(run_dir=Path("here"), task="a")
    summarise(SimpleNamespace(history=[line], config=config, executor=executor), Task)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert "what the policy does is not drawn: every server is lost" in out
    assert "talk to the model" in out


def test_only_files_of_the_run_are_deleted(tmp_path: Path) -> None:
    """With logger.keep_steps, old files of a run are deleted. A file with another kind of name stays."""
    for name in (
        "rollout/.DS_Store",
        "tokens/notes.safetensors",
        "tokens/00001.safetensors",
        "rollout/0/1.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    discard(tmp_path, last=3, max_age=1)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"rollout/.DS_Store", "tokens/notes.safetensors"}


# ---- real runs


def command(folder: Path, *words: str) -> list[str]:
    """Return the command of a small run that writes a checkpoint after every step."""
    small = [
        "gconfig.n_samples=4",
        "actor.ppo_n_minibatches=2",
        "actor.ppo_epochs=1",
        "logger.live=false",
    ]
    fixed = [f"fileroot={folder}", "experiment_name=e", "trial_name=t"]
    interval = [] if "recover=off" in words else ["recover_interval=1"]
    return [sys.executable, "-u", "train.py", *small, *fixed, *interval, *words]


def run_until(folder: Path, line: str, *words: str) -> None:
    """Start a run that kills itself with SIGKILL as soon as it prints `line`, and wait for the run's end."""
    dies = signalled(command(folder, *words), line, signal.SIGKILL)
    done = subprocess.run(
        dies, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == -signal.SIGKILL, done.stdout


def finish(folder: Path, *words: str) -> tuple[str, list[dict]]:
    """Start a run, wait for its end, and return its output and the lines of its metrics.jsonl."""
    done = subprocess.run(
        command(folder, *words), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (folder / "e" / "t" / "metrics.jsonl").read_text().splitlines()
    return done.stdout, [json.loads(line) for line in lines]


def check_lineage(run_dir: Path, metrics: list[dict], batch: int, eta: int) -> None:
    """Check that each step is listed once, each group is used in exactly one step, and no group is too old."""
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert max(line["staleness_max"] for line in metrics) <= eta
    trained: list[int] = []
    for line in metrics:
        ledger = load_file(run_dir / "tokens" / f"{line['step']:05d}.safetensors")
        trained += sorted(set(ledger["task_ids"].tolist()))
        assert int(ledger["versions"].max()) <= line["version"]
    assert len(trained) == len(set(trained)) == batch * len(metrics)
    assert max(trained) < (len(metrics) + eta + 1) * batch


def test_a_synchronous_run_repeats_through_kills(tmp_path: Path) -> None:
    """A synchronous run that is killed twice and restarted has the same metrics as a run that is not killed."""
    words = ("max_steps=5", "rollout.max_head_offpolicyness=0")
    _, expected = finish(tmp_path / "whole", *words)
    run_until(tmp_path / "killed", "step 3 ", *words)
    run_until(tmp_path / "killed", "continuing after step", *words)
    said, metrics = finish(tmp_path / "killed", *words)
    assert re.search(
        "continuing after step [12]", said
    )  # at the first kill, checkpoint 2 may be incomplete
    check_lineage(tmp_path / "killed/e/t", metrics, batch=6, eta=0)
    for one, two in zip(expected, metrics, strict=True):
        for key in ("reward", "tokens", "staleness_max", "version"):
            assert one[key] == two[key], (one["step"], key)
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)


def test_an_asynchronous_run_survives_kills_anywhere(tmp_path: Path) -> None:
    """If an asynchronous run is killed four times and restarted, it makes each step once and trains on each group
    once."""
    for line in ("step 1 ", "starting server-0", "step 3 ", "step 5 "):
        run_until(tmp_path, line, "max_steps=8", "rollout.max_head_offpolicyness=2")
    said, metrics = finish(tmp_path, "max_steps=8", "rollout.max_head_offpolicyness=2")
    assert re.search("continuing after step [34]", said)
    check_lineage(tmp_path / "e/t", metrics, batch=6, eta=2)
    said, again = finish(tmp_path, "max_steps=8", "rollout.max_head_offpolicyness=2")
    assert again == metrics, "a finished run that is started again has nothing to do"


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_run_that_is_alive_is_left_alone(tmp_path: Path, mode: str) -> None:
    """While a run's process is alive, a second process with the same run folder ends with a one-line error and writes
    nothing."""
    again = command(tmp_path, f"mode={mode}", "max_steps=1")
    with claim(tmp_path / "e/t"):
        done = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stdout[-2000:]
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}/e/t is being written by another process")
    assert [path.name for path in (tmp_path / "e/t").iterdir()] == ["lock"]
    claim(tmp_path / "e/t").close()


def test_a_run_that_was_killed_is_not_alive_in_what_it_forked(tmp_path: Path) -> None:
    """A forked child closes its copy of the lock at once, so a killed run can be started again while the child is
    alive."""
    code = """
import os, sys
from pathlib import Path
from run.recover import claim
lock, (told, tell) = claim(Path(sys.argv[1])), os.pipe()
if os.fork():
    os.read(told, 1)
else:
    os.write(tell, b".")
    sys.stdin.read()
os._exit(0)
"""
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE
    )
    assert run.wait(timeout=60) == 0
    claim(tmp_path).close()
    run.communicate()  # communicate() closes stdin, which ends the forked child


def test_half_an_update_stays_half_where_a_run_fails_before_its_first_step(
    tmp_path: Path, start_tiny_server, tiny_model_dir: Path
) -> None:
    """In this test, a run uses a server whose last weight update is incomplete, and fails before its first step. After
    the failure, the server still has a version label that no engine accepts."""
    url = start_tiny_server("--model-path", str(tiny_model_dir), "--weight-version", "3")
    httpx.post(f"{url}/update_weight_version", json={"new_version": "4-incomplete"})
    words = command(tmp_path, f"model_path={tiny_model_dir}", f"rollout.server_addrs=[{url}]")
    words += ["rollout.openai.reasoning_parser=unheard-of"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "reasoning_parser" in done.stderr
    assert httpx.get(f"{url}/model_info").json()["weight_version"] == "0-incomplete"


@pytest.mark.parametrize("left", ["ready", "in the middle of an update"])
def test_servers_that_outlive_their_run_get_the_weights_of_the_next(
    tmp_path: Path, start_tiny_server, left: str
) -> None:
    """A new run first sends its own weights to its servers, even if the servers are paused or have the weights of an
    earlier run.

    Every token of the first step has version 0, and the server and the trainer compute the same log-probabilities.
    """
    base = load_inputs(load(["seed=1"])).tokenizer.name_or_path
    of_another_run = {
        name: 1.1 * tensor for name, tensor in load_file(f"{base}/model.safetensors").items()
    }
    other = write_checkpoint(of_another_run, base, tmp_path / "other")
    url = start_tiny_server("--model-path", str(other), "--weight-version", "3")
    if left != "ready":
        httpx.post(f"{url}/pause_generation", json={"mode": "retract"})
        httpx.post(f"{url}/update_weight_version", json={"new_version": "4-incomplete"})
    _, [line] = finish(tmp_path, "max_steps=1", f"rollout.server_addrs=[{url}]")
    assert line["staleness_mean"] == line["staleness_max"] == 0
    assert line["logp_mismatch"] < 1e-4


def test_recover_off_does_not_touch_a_run(tmp_path: Path) -> None:
    """With recover=off a run writes no checkpoint for recovery, and cannot be started again with the same name."""
    finish(tmp_path, "max_steps=1", "recover=off")
    assert not (tmp_path / "e/t/recover").exists()
    for mode in ("off", "auto"):  # even recover=auto does not overwrite the run
        again = command(tmp_path, "max_steps=1", f"recover={mode}")
        done = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2
        assert "give another trial_name" in done.stderr
    assert (tmp_path / "e/t/metrics.jsonl").read_text().count("\n") == 1


def test_evaluation_by_itself(tmp_path: Path) -> None:
    """mode=eval runs one episode per validation prompt without training, prints the statistics and writes eval.json."""
    words = command(tmp_path, "mode=eval")
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "e/t/eval.json").read_text())
    assert found["eval_episodes"] == 6
    assert found["eval_rejected"] == 0
    assert 0 <= found["eval_reward"] <= 1
    assert f"eval_reward {found['eval_reward']:.4g}" in done.stdout
    assert list((tmp_path / "e/t").glob("eval-rollout/0/*.jsonl"))


@pytest.mark.parametrize("cut", [0, 2, 9, 40])
def test_a_trace_goes_on(tmp_path: Path, cut: int) -> None:
    """A continued run appends to its trace. The restart removes an incomplete last line from the trace, so the trace
    file is valid JSON."""
    path = tmp_path / "trace.json"
    for _ in range(2):
        trace = Trace(path)
        trace.event("start", 7)
        trace.close()
        whole = path.read_bytes()
        events = json.loads(whole)
        path.write_bytes(whole[: len(whole) - cut])
    assert (
        len(events) >= 5
    )  # the second process wrote 3 records, and at least 2 records of the first process are left


def test_agents_are_evaluated_on_any_endpoint(tmp_path: Path, proxy: ProxyAddress) -> None:
    """With evaluator.base_url, agents can be evaluated on any OpenAI-compatible endpoint. In this test,
    evaluator.base_url is the URL of a session in a proxy."""
    key = {"Authorization": f"Bearer {proxy.admin_key}"}
    httpx.post(f"{proxy.proxy_addr}/grant_capacity", headers=key)
    started = httpx.post(
        f"{proxy.proxy_addr}/rl/start_session", headers=key, json={"task_id": "t"}
    ).json()
    words = command(
        tmp_path, "mode=eval", f"evaluator.base_url={proxy.proxy_addr}/{started['session_id']}/v1"
    )
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "e/t/eval.json").read_text())
    assert (found["eval_episodes"], found["eval_rejected"]) == (6, 0)


def test_evaluation_has_a_workflow_of_its_own(tiny_model_dir: Path) -> None:
    """Evaluation and training run in different event loops. Evaluation uses a second instance of the agent, because an
    instance may depend on its event loop."""
    inputs = load_inputs(load([f"model_path={tiny_model_dir}"]))
    assert type(inputs.workflow) is type(inputs.evaluated)
    assert inputs.workflow is not inputs.evaluated


def test_a_workflow_that_sends_its_own_requests_is_evaluated_with_other_sampling(
    tiny_model_dir: Path,
) -> None:
    """A RolloutWorkflow sends its own requests to the server. In an evaluation, a RolloutWorkflow uses the sampling
    parameters that are set in eval_gconfig, and takes all other parameters from gconfig."""
    words = [
        "--config",
        "configs/maze.yaml",
        f"model_path={tiny_model_dir}",
        "evaluator.interval=1",
    ]
    inputs = load_inputs(
        load(
            [*words, "gconfig.temperature=0.9", "eval_gconfig.greedy=true", "eval_gconfig.top_k=3"]
        )
    )
    trained, evaluated = inputs.workflow.gconfig, inputs.evaluated.gconfig
    assert (trained.greedy, trained.top_k) == (False, -1)
    assert evaluated == trained.new(greedy=True, top_k=3)


def test_statistics_of_an_evaluation() -> None:
    """If an agent returns several rewards, the evaluation counts the last reward. An episode whose agent raises an
    exception or returns no reward counts as rejected."""

    class Agent:
        async def run(self, data, **where):
            if data["returns"] in ("raises", "panics"):
                raise (ValueError if data["returns"] == "raises" else BaseException)("of an agent")
            return data["returns"]

    samples = [
        {"returns": value}
        for value in (1.0, {"first": 1.0, "last": 0.0}, {}, "raises", "panics", None)
    ]
    found = evaluate_endpoint(
        load(["mode=eval", "evaluator.base_url=http://nowhere/v1"]),
        Inputs(None, [], samples, None, Agent()),
    )
    assert found == {
        "eval_reward": 0.5,
        "eval_reward_sem": 0.5,
        "eval_success": 1 / 6,
        "eval_episodes": 6,
        "eval_rejected": 4,
    }


def test_success_has_a_threshold() -> None:
    """If the task has no function `success`, rewards above success_above count as successes."""
    assert Inputs(None, [], [], None, None).success([0.0, 0.1, 1.0, 1.0]) == 0.75
    assert Inputs(None, [], [], None, None, success_above=0.5).success([0.0, 0.1, 1.0, 1.0]) == 0.5


@pytest.mark.parametrize("rewards", [[1.0], [0.5, 1.0], [0.0, 1.0], [1.0, 0.0]])
def test_an_episode_of_several_rows_has_the_reward_of_the_last(
    make_executor, rewards: list[float]
) -> None:
    """The reward of an episode with several rows is the last row's reward, because earlier rows have discounted
    rewards."""

    class Turns(Echo):
        async def arun_episode(self, engine, data):
            ids = torch.ones(len(rewards), 3, dtype=torch.int32)
            return {
                "input_ids": ids,
                "attention_mask": ids.bool(),
                "rewards": torch.tensor(rewards),
            }

    executor = make_executor().for_evaluation()
    found = start_evaluation(
        executor, Inputs(None, [], [{"n": 0}, {"n": 1}], None, None, Turns())
    )()
    executor.destroy()
    assert found["eval_reward"] == rewards[-1]


@pytest.mark.parametrize("mode", ["inline", "subproc"])
def test_an_agent_is_evaluated_where_it_is_trained(mode: str) -> None:
    """With rollout.openai.mode=subproc, each agent is evaluated in a worker process. If a worker process dies, only the
    episode that it runs fails."""
    words = ["mode=eval", "evaluator.base_url=http://nowhere/v1", f"rollout.openai.mode={mode}"]
    samples = [
        {"then": "tells"},
        {"then": "exits"},
        {"then": "leaves_at_once" if mode == "subproc" else "raises"},
    ]
    found = evaluate_endpoint(load(words), Inputs(None, [], samples, None, mode_agents.Endpoint()))
    assert found["eval_reward"] == float(mode == "subproc")
    assert (found["eval_episodes"], found["eval_rejected"]) == (3, 2)


def test_an_evaluation_that_nobody_answered_has_failed(tmp_path: Path) -> None:
    """If no episode of an evaluation has a reward, train.py fails, and eval.json counts all episodes as rejected."""
    words = command(tmp_path, "mode=eval", "evaluator.base_url=http://127.0.0.1:9/v1")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "no episode of the evaluation has a reward" in done.stderr
    assert json.loads((tmp_path / "e/t/eval.json").read_text())["eval_rejected"] == 6
