"""Several ranks compute the same numbers as one rank, and if one rank dies, all ranks end.

The tests start torchrun with gloo on this machine. With 1, 2 and 4 ranks, the same batch gives the same gradients,
parameters and metrics. If a rank dies, all ranks end within seconds, and the output contains the error of the rank that
died.
"""

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, free_port, make_byte_model, rest_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from trainers import gradients, make_batch, make_config, prepare

from run.recover import Recovery, newest_checkpoint
from training import ranks
from training.actor import FSDPPPOActor
from training.ranks import share

SGD_STEPS = 5
LENGTHS = (9, 14, 5, 21, 12, 17, 7)  # seven rows, so that the ranks get different numbers of rows


def torchrun(n: int, *words: str) -> list[str]:
    """Return the torchrun command that runs `words`, a script with its arguments, on n ranks."""
    options = [f"--nproc-per-node={n}", "--standalone"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *words]


def environment() -> dict[str, str]:
    """Return the environment of a rank: its PYTHONPATH contains the repository and the test helpers."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }


def start(n: int, *words: str) -> subprocess.Popen[str]:
    """Start torchrun with n ranks. The whole output of all ranks goes into one pipe."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(torchrun(n, *words), cwd=ROOT, env=environment(), **pipes)


# ---- the programs that the ranks run


def work_numbers(model_dir: Path, out: Path, **changes: Any) -> None:
    """Write the gradients of one update, and the parameters after SGD_STEPS more updates, to numbers.safetensors."""
    actor = FSDPPPOActor(make_config(mb_tokens=40, ppo_n_minibatches=2, **changes), model_dir)
    actor.create_process_group()
    actor.initialize(max_steps=10)
    actor.optimizer = torch.optim.SGD(actor.model.parameters(), lr=0.05)
    actor.config.optimizer.lr = 0.05

    batch = prepare(actor, make_batch(LENGTHS))
    result: dict[str, Tensor] = {"prox_logp": batch["prox_logp"]}
    actor.config.ppo_n_minibatches = 1
    stats = actor.ppo_update(batch)
    result |= {f"grad.{name}": g for name, g in gradients(actor.model).items()} | {
        "theta_logp": batch["theta_logp"]
    }
    actor.config.ppo_n_minibatches = 2
    for _ in range(SGD_STEPS):
        actor.ppo_update(batch)
    result |= {f"param.{name}": p for name, p in actor.full_state().items()}
    if actor.rank == 0:
        save_file({name: t.contiguous() for name, t in result.items()}, out / "numbers.safetensors")
        (out / "stats.json").write_text(json.dumps(stats))
    actor.destroy()


def work_compiled(model_dir: Path, out: Path) -> None:
    """Run `work_numbers` with compiled layers."""
    work_numbers(model_dir, out, compile=True)


def work_memory(model_dir: Path, out: Path) -> None:
    """Let each rank write how many parameters it holds after loading, and how often it has read the model's files."""
    from transformers import AutoModelForCausalLM

    reads = []
    original = AutoModelForCausalLM.from_pretrained
    AutoModelForCausalLM.from_pretrained = lambda *a, **k: reads.append(a) or original(*a, **k)  # type: ignore[func-returns-value,method-assign]
    actor = FSDPPPOActor(make_config(offload=True), model_dir)
    actor.create_process_group()
    actor.initialize(max_steps=1)
    held = sum(p.to_local().numel() for p in actor.model.parameters())
    (out / f"rank{actor.rank}.json").write_text(json.dumps({"held": held, "reads": len(reads)}))
    prepare(actor, make_batch())
    actor.destroy()


def work_wait(model_dir: Path, out: Path) -> None:
    """Let rank 0 wait outside of any collective operation, and rank 1 in a collective operation. If the environment
    variable RAISE is set, rank 2 raises an error. If RAISE is not set, rank 2 waits outside of any collective
    operation."""
    actor = FSDPPPOActor(make_config(), model_dir)
    actor.create_process_group()
    actor.initialize(max_steps=1)
    print(f"ready {actor.rank} {os.getpid()}", flush=True)
    if actor.rank == 0:
        signal.pause()  # in a run, rank 0 is outside of collective operations while it waits for rollouts
    if actor.rank == 2:
        if os.environ.get("RAISE"):
            raise ValueError("the rank's own error")
        signal.pause()
    share(None)


def work_checkpoint(model_dir: Path, out: Path) -> None:
    """Let rank 1 write its part of a checkpoint only after the next training step. Each rank writes three results into
    a file: the newest checkpoint before and after rank 1 writes, and whether the loaded weights equal the saved
    weights."""
    actor = FSDPPPOActor(make_config(), model_dir)
    actor.create_process_group()
    actor.initialize(max_steps=4)
    recovery, write, may_write = (
        Recovery(out, "auto"),
        FileSystemWriter.write_data,
        threading.Event(),
    )
    FileSystemWriter.write_data = lambda *args: may_write.wait(100) and write(*args)  # type: ignore[assignment,method-assign]
    if actor.rank == 0:
        may_write.set()
    actor.ppo_update(prepare(actor, make_batch(LENGTHS)))
    expected = {name: p.full_tensor().clone() for name, p in actor.model.named_parameters()}
    recovery.save(1, actor, SimpleNamespace(state_dict=lambda: {"open": {}, "next_id": 0}))
    actor.ppo_update(prepare(actor, make_batch(LENGTHS)))
    early = newest_checkpoint(out)
    torch.distributed.barrier()  # both ranks look for the checkpoint before rank 1 writes
    may_write.set()
    recovery.close()
    torch.distributed.barrier()  # rank 0 makes the checkpoint valid in recovery.close()
    late = newest_checkpoint(out)
    actor.load_state(recovery.checkpoint(1))
    same = all(
        torch.equal(p.full_tensor(), expected[name]) for name, p in actor.model.named_parameters()
    )
    (out / f"rank{actor.rank}.json").write_text(json.dumps([early, late, same]))
    actor.destroy()


# ---- the tests


@pytest.mark.parametrize(("torchrun_rank", "gpu"), [(None, 0), ("3", 3), ("5", 3)])
@pytest.mark.parametrize(("given", "cumem"), [(None, "0"), ("1", "1")])
def test_a_rank_chooses_its_gpu_before_it_joins(
    monkeypatch: pytest.MonkeyPatch,
    torchrun_rank: str | None,
    gpu: int,
    given: str | None,
    cumem: str,
) -> None:
    """A rank sets its GPU before it makes the process group, so that init_device_mesh does not warn about a guessed
    GPU. Without torchrun the rank uses the first GPU. A rank without a GPU of its own also joins the process group, so
    that rank 0 can report that there are too few GPUs. If the user has not set NCCL_CUMEM_ENABLE, a rank sets
    NCCL_CUMEM_ENABLE to SGLang's value, 0 (test_sglang_run.py)."""
    calls: list[Any] = []
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ranks.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(ranks.torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: False)
    join = lambda backend, **_: calls.extend([backend, os.environ["NCCL_CUMEM_ENABLE"]])  # noqa: E731
    monkeypatch.setattr(ranks.dist, "init_process_group", join)
    monkeypatch.setattr(ranks, "_await_farewells", lambda: None)
    variables = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK"), torchrun_rank) | {
        "NCCL_CUMEM_ENABLE": given
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    assert ranks.join_ranks()
    assert calls == [gpu, "cpu:gloo,cuda:nccl", cumem]


@pytest.fixture(scope="module")
def numbers(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[dict, dict]]:
    """Return a function numbers(n, program) that runs a program on n ranks and returns the tensors and metrics that the
    program writes."""

    @functools.cache
    def run(n: int, program: str = "work_numbers") -> tuple[dict, dict]:
        out = tmp_path_factory.mktemp(f"world{n}")
        done = start(n, __file__, program, str(tiny_model_dir), str(out))
        output, _ = done.communicate(timeout=300)
        assert done.returncode == 0, output
        return load_file(out / "numbers.safetensors"), json.loads((out / "stats.json").read_text())

    return run


@pytest.mark.runs
@pytest.mark.parametrize("case", [(2,), (4,), (2, "work_compiled")], ids=str)
def test_gradients_and_parameters_are_those_of_one_rank(numbers, case: tuple) -> None:
    """Several ranks compute the same gradients, log-probabilities and metrics as one rank, and the same parameters
    after 5 SGD steps. Two ranks with compiled layers compute the same numbers as one rank."""
    if "work_compiled" in case and shutil.which("c++") is None:
        pytest.skip("layers are compiled with a C compiler")
    (one, one_stats), (many, many_stats) = numbers(1), numbers(*case)
    assert one.keys() == many.keys()
    for name in one:
        if name.startswith("grad."):
            distance = (one[name] - many[name]).norm() / one[name].norm()
            assert distance < 1e-5, f"{name}: {distance}"
        else:
            torch.testing.assert_close(many[name], one[name], atol=1e-5, rtol=0, msg=name)
    assert any(name.startswith("grad.") and one[name].norm() > 1e-3 for name in one)
    assert many_stats == pytest.approx(one_stats, rel=1e-4, abs=1e-6)


@pytest.mark.runs
@pytest.mark.parametrize("tied", [False, True])
def test_no_rank_but_the_first_reads_the_model(tmp_path: Path, tied: bool) -> None:
    """Only rank 0 reads the model's files. Each element of a parameter is held by exactly one rank."""
    model_dir = make_byte_model(tmp_path / "model", tied=tied)
    total = sum(t.numel() for t in load_file(model_dir / "model.safetensors").values())
    done = start(2, __file__, "work_memory", str(model_dir), str(tmp_path))
    output, _ = done.communicate(timeout=200)
    assert done.returncode == 0, output
    ranks = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2)]
    assert [rank["reads"] for rank in ranks] == [1, 0]
    assert sum(rank["held"] for rank in ranks) == total
    assert max(rank["held"] for rank in ranks) < 0.6 * total


@pytest.mark.runs
def test_two_ranks_train_while_one_writes_its_part_of_a_checkpoint(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Both ranks make the next training step before rank 1 has written its part of the checkpoint. The checkpoint is
    not valid until rank 1 has written its part.

    The thread that writes the checkpoint has a process group of its own, so the collective operations of the checkpoint
    are not mixed up with the collective operations of the training step.
    """
    process = start(2, __file__, "work_checkpoint", str(tiny_model_dir), str(tmp_path))
    output = rest_of(process, 200)
    assert process.returncode == 0, output
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == [0, 1, True]


LEAVING = """
import os, torch, torch.distributed as dist
from training import ranks
before = set(os.listdir("/proc/self/task"))
ranks.join_ranks()
dist.all_reduce(torch.ones(1))
ranks.leave_ranks()
left = len(set(os.listdir("/proc/self/task")) - before)
os.write(1, f"left over: {left}\\n".encode())  # one write, because both ranks print into one pipe
"""


@pytest.mark.runs
@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="only Linux lists the threads of a process"
)
def test_no_thread_outlives_the_process_group(tmp_path: Path) -> None:
    """After leave_ranks, no gloo thread runs in the process of a rank. A gloo thread could abort the process while the
    Python interpreter shuts down."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    process = start(2, str(tmp_path / "leaving.py"))
    output = rest_of(process, 120)
    assert process.returncode == 0, output
    assert re.findall(r"left over: (\d+)", output) == ["0", "0"], output


@pytest.mark.runs
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_one_rank_ends_all(tiny_model_dir: Path, tmp_path: Path, how: str) -> None:
    """If rank 2 of 3 dies while rank 0 waits outside of any collective operation, all processes end and the cause is
    printed."""
    if how == "raises":
        os.environ["RAISE"] = "1"
    try:
        process = start(3, __file__, "work_wait", str(tiny_model_dir), str(tmp_path))
    finally:
        os.environ.pop("RAISE", None)
    assert process.stdout is not None
    pids: dict[int, int] = {}
    lines = []
    while len(pids) < 3:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
        found = re.findall(
            r"ready (\d+) (\d+)(?=\D)", "".join(lines)
        )  # one line can hold the output of two ranks
        pids = {int(rank): int(pid) for rank, pid in found}
    if how == "killed":
        os.kill(pids[2], signal.SIGKILL)
    output = "".join(lines) + rest_of(process, 60)
    assert process.returncode != 0
    assert ("the rank's own error" if how == "raises" else "SIGKILL") in output, output
    for left in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(left, 0)


# ---- two nodes on this machine


def start_node(folder: Path, port: int, log: Path, host: bool, held: bool) -> subprocess.Popen:
    """Start torchrun as one of two nodes. If `host` is set, this node runs the rendezvous. If `held` is set, this
    node's rank suspends itself (SIGSTOP) after step 3."""
    launch = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
    ]
    launch += [f"--rdzv-conf=is_host={int(host)}"]
    small = [
        "gconfig.n_samples=4",
        "actor.ppo_n_minibatches=2",
        "logger.live=false",
        "recover_interval=1",
    ]
    hold = ["tests/signalled.py", "step 3 ", str(int(signal.SIGSTOP))] if held else []
    run = [
        *hold,
        "train.py",
        *small,
        "max_steps=6",
        f"fileroot={folder}",
        "experiment_name=e",
        "trial_name=t",
    ]
    command = [sys.executable, "-u", "-m", "torch.distributed.run", *launch, *run]
    with log.open("ab") as out:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT
        )


def ranks_of(node: subprocess.Popen) -> dict[int, str]:
    """Return the process states, as ps prints them, of the ranks that a torchrun has started. The keys are the pids of
    the ranks."""
    table = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    rows = [row.split() for row in table.splitlines()]
    return {int(pid): state for pid, parent, state in rows if int(parent) == node.pid}


def kill_node(node: subprocess.Popen) -> None:
    """Kill torchrun and its ranks. Each rank has its own process session, so a rank would keep running if only torchrun
    were killed."""
    for pid in ranks_of(node):
        os.kill(pid, signal.SIGKILL)
    node.kill()
    node.wait()


def wait_until_held(nodes: list[subprocess.Popen]) -> None:
    """Poll the process states of the ranks until a rank has suspended itself."""
    while not any(state.startswith("T") for node in nodes for state in ranks_of(node).values()):
        assert all(node.poll() is None for node in nodes), "a node has ended"
        time.sleep(0.05)


@pytest.mark.runs
def test_two_nodes_train_and_come_back(tmp_path: Path) -> None:
    """If one of two nodes is killed, the other node ends. When both nodes start again, the run resumes from the
    checkpoint."""
    metrics, logs = tmp_path / "e/t/metrics.jsonl", [tmp_path / "a.log", tmp_path / "b.log"]
    port = free_port()
    nodes = [start_node(tmp_path, port, log, log is logs[0], held=True) for log in logs]
    try:
        wait_until_held(nodes)
        assert metrics.read_text().count("\n") == 3
        kill_node(nodes[1])
        for rank in ranks_of(nodes[0]):
            os.kill(rank, signal.SIGCONT)
        assert nodes[0].wait(timeout=120) != 0
        said = logs[0].read_text()
        assert "has ended before it" in said, said
        assert wait_no_process(f"fileroot={tmp_path}")
        port = free_port()
        nodes = [start_node(tmp_path, port, log, log is logs[0], held=False) for log in logs]
        assert [node.wait(timeout=300) for node in nodes] == [0, 0], logs[0].read_text()[-4000:]
    finally:
        for node in nodes:
            kill_node(node)
    # After step 3 the checkpoint of step 1 is complete, but the checkpoint of step 2 may be half written.
    assert re.search("continuing after step [12]", "".join(log.read_text() for log in logs))
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(
        range(1, 7)
    )


def wait_no_process(word: str, seconds: float = 30) -> bool:
    """Return whether all processes with `word` among their arguments end within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        table = subprocess.run(
            ["ps", "-A", "-o", "stat=,args="], capture_output=True, text=True, check=True
        ).stdout
        if not any(word in row and not row.startswith("Z") for row in table.splitlines()):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.runs
def test_a_mistake_is_said_once_and_ends_all_ranks(tmp_path: Path) -> None:
    """If the configuration has a mistake, rank 0 prints the error once and no other rank prints it. All ranks end
    without a crash."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"]
    done = subprocess.run(
        [*torchrun, "seeed=2"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stderr.count("error: unknown key 'seeed'") == 1
    assert "SIGABRT" not in done.stderr
    assert 'train.py", line' not in done.stderr
    asked = subprocess.run(
        [*torchrun, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert asked.returncode == 0
    assert asked.stdout.count("usage: python train.py") == 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    programs = (work_numbers, work_compiled, work_memory, work_wait, work_checkpoint)
    {work.__name__: work for work in programs}[sys.argv[1]](*map(Path, sys.argv[2:]))


LISTENING = """
import os
from pathlib import Path
from training.ranks import join_ranks
join_ranks()
mine = {os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()}
rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
print(sorted({row[1][:-5] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}))
"""


@pytest.mark.runs
def test_a_single_rank_listens_on_the_loopback_address(tmp_path: Path) -> None:
    """The process group of a single rank listens on 127.0.0.1, and not at the address of the hostname."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.0.2 another-name\n")
    setup = f"hostname another-name && mount --bind {shlex.quote(str(hosts))} /etc/hosts"
    inside = [
        "unshare",
        "--map-root-user",
        "--uts",
        "--mount",
        "sh",
        "-c",
    ]  # unshare gives a command its own hostname
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, setup], capture_output=True).returncode
    ):
        pytest.skip("this machine cannot give a process a hostname of its own")
    command = f"{setup} && exec {shlex.quote(sys.executable)} -c {shlex.quote(LISTENING)}"
    out = subprocess.run(
        [*inside, command], env=environment(), capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "['0100007F']"
