"""Several ranks compute what one rank computes, and send a model that no rank holds as a whole. If
one rank dies, all ranks end.

torchrun starts them with gloo on this machine.
"""

import gc
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, make_byte_model, rest_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainers import gradients, make_batch, parameters, prepare, start_actor

from engine import RemoteInfEngine
from inference import weights
from inference.weights import WeightUpdateMeta, join_group
from training.ranks import share

SGD_STEPS = 5
LENGTHS = (9, 14, 5, 21, 12, 17, 7)  # seven rows, so the ranks get different numbers of them


def torchrun(n: int, *words: str) -> list[str]:
    options = [f"--nproc-per-node={n}", "--standalone"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *words]


@pytest.mark.runs
def test_two_ranks_run_the_demo_with_its_callbacks(tmp_path: Path) -> None:
    """All ranks give a step's metrics to their callbacks; the report reads them at step 10. If rank
    1 fails, rank 0 still calls on_end."""
    words = ["train.py", "gconfig.n_samples=2", f"fileroot={tmp_path}", "trial_name=t"]
    options: Any = {"cwd": ROOT, "timeout": 600, "env": environment()}
    subprocess.run(torchrun(2, *words, "max_steps=10"), check=True, **options)
    assert (tmp_path / "guess/t/metrics.jsonl").read_text().count("\n") == 10
    words += ["max_steps=12", "callbacks=[extras.report.Report,sick_agents.FailsOnRank1]"]
    assert subprocess.run(torchrun(2, *words), **options).returncode == 1
    assert '"error"' in (tmp_path / "guess/t/trace.json").read_text()


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    # With the threshold, glibc returns the memory of freed tensors to the system.
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return os.environ | own


def start(n: int, *words: str) -> subprocess.Popen[str]:
    """Start torchrun. The output of all ranks goes into one pipe."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(torchrun(n, *words), cwd=ROOT, env=environment(), **pipes)


# ---- the programs of the ranks


def count_held(parameter: Any) -> int:
    return getattr(parameter, "to_local", lambda: parameter)().numel()


def work_numbers(model_dir: Path, out: Path, **changes: Any) -> None:
    """Write the gradients of one update and the parameters after SGD_STEPS more updates. Also write
    how many numbers of the parameters each rank holds."""
    changes = {"enable_tree_training": False, "mb_tokens": 40} | changes
    actor = start_actor(model_dir, **changes)
    actor.optimizer = torch.optim.SGD(actor.model.parameters(), lr=0.05)
    actor.config.optimizer.lr = 0.05
    batch = prepare(actor, make_batch(LENGTHS))
    stats = actor.ppo_update(batch)
    result: dict[str, Tensor] = {key: batch[key] for key in ("prox_logp", "theta_logp")}
    result |= {f"grad.{name}": g for name, g in gradients(actor).items()}
    actor.config.ppo_n_minibatches = 2
    for _ in range(SGD_STEPS):
        actor.ppo_update(batch)
    result |= {f"param.{name}": p for name, p in parameters(actor).items()}
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, sum(count_held(p) for p in actor.model.parameters()))
    if actor.rank == 0:
        (out / "held.json").write_text(json.dumps(held))
        save_file({name: t.contiguous() for name, t in result.items()}, out / "numbers.safetensors")
        (out / "stats.json").write_text(json.dumps(stats))
    actor.destroy()


def work_frozen(model_dir: Path, out: Path) -> None:
    work_numbers(model_dir, out, frozen_layers=1, enable_tree_training=True)


def work_wait(model_dir: Path, out: Path) -> None:
    """Rank 0 waits outside of any collective operation, as it waits for rollouts, and rank 1 waits
    in one."""
    actor = start_actor(model_dir)
    print(f"ready {actor.rank} {os.getpid()}", flush=True)
    if actor.rank != 1:
        signal.pause()
    share(lambda: None)


def work_checkpoint(model_dir: Path, out: Path) -> None:
    """Write a checkpoint after a step, or read the one that is there; then make a step."""
    actor = start_actor(model_dir, frozen_layers=1)
    if (out / "state").exists():
        actor.load_state(out / "state")
    else:
        actor.ppo_update(prepare(actor, make_batch(LENGTHS)))
        actor.step_lr_scheduler()
        actor.save_state(out / "state")
    actor.ppo_update(prepare(actor, make_batch(LENGTHS, seed=1)))
    found = parameters(actor) | {"steps": torch.tensor(actor.steps)}
    if actor.rank == 0:
        save_file(found, out / f"after{torch.distributed.get_world_size()}.safetensors")
    actor.destroy()


def memory(key: str) -> float:
    """A line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def work_send(model_dir: Path, out: Path) -> None:
    """Send the halved model twice to the server whose URL is in `out`. Write how much memory the
    second time needs: the first also loads libraries and starts threads."""
    weights.named_buckets.__defaults__ = (8.0,)
    actor, meta = start_actor(model_dir), WeightUpdateMeta(mode="distributed")
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.mul_(0.5)
    url = (out / "url").read_text()
    actor.connect_engine(RemoteInfEngine([url]) if actor.rank == 0 else None, meta)
    for version in (1, 2):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak of memory use
        before = memory("VmRSS")
        actor.update_weights(meta.with_version(version))
    (out / f"growth-{actor.rank}").write_text(str(memory("VmHWM") - before))
    actor.destroy()


class Receiver(BaseHTTPRequestHandler):
    """A server that joins the trainer's group and keeps what is broadcast, as SGLang does."""

    group: Any = None
    received: ClassVar[dict[str, torch.Tensor]] = {}
    labels: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.reply({"tp_size": 1, "device": "cpu"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/init_weights_update_group":
            where = [body[key] for key in ("master_address", "master_port", "rank_offset")]
            names = [body[key] for key in ("world_size", "group_name", "backend")]
            type(self).group = join_group(*where, *names)
        elif self.path == "/update_weights_from_distributed":
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"]):
                self.received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast(self.received[name], 0).wait()
        elif self.path == "/update_weight_version":
            self.labels.append(body["new_version"])
        self.reply({"success": True})

    def reply(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None: ...


# ---- the tests


def run_ranks(n: int, program: str, model_dir: Path, out: Path) -> None:
    done = start(n, __file__, program, str(model_dir), str(out))
    output, _ = done.communicate(timeout=300)
    assert done.returncode == 0, output


CASES = [(4, "work_numbers", False), (2, "work_frozen", True)]


@pytest.mark.runs
@pytest.mark.parametrize(("n", "program", "tied"), CASES)
def test_ranks_share_a_model_and_compute_what_one_computes(
    tmp_path: Path, n: int, program: str, tied: bool
) -> None:
    """Log-probabilities, gradients, parameters and metrics are those of one rank, even with trees
    and frozen layers. Each number of a parameter is held by exactly one rank."""
    model_dir, found = make_byte_model(tmp_path / "model", tied=tied), []
    for world in (1, n):
        (out := tmp_path / str(world)).mkdir()
        run_ranks(world, program, model_dir, out)
        files = ((out / f"{name}.json").read_text() for name in ("stats", "held"))
        found.append((load_file(out / "numbers.safetensors"), *map(json.loads, files)))
    (one, stats, [total]), (many, many_stats, held) = found
    assert sum(held) == total
    assert max(held) < 1.2 * total / n
    assert many_stats == pytest.approx(stats, rel=1e-4, abs=1e-6)
    assert one.keys() == many.keys()
    for name in one:
        if name.startswith("grad."):
            distance = (one[name] - many[name]).norm() / one[name].norm()
            assert distance < 1e-5, f"{name}: {distance}"
        else:
            torch.testing.assert_close(many[name], one[name], atol=1e-5, rtol=0, msg=name)
    assert any(name.startswith("grad.") and one[name].norm() > 1e-3 for name in one)


@pytest.mark.runs
def test_a_checkpoint_of_two_ranks_goes_on_with_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The next step gives the same weights."""
    for n in (2, 1):
        run_ranks(n, "work_checkpoint", tiny_model_dir, tmp_path)
    two, one = (load_file(tmp_path / f"after{n}.safetensors") for n in (2, 1))
    assert two["steps"] == 1
    for name, tensor in two.items():
        torch.testing.assert_close(one[name], tensor, atol=1e-5, rtol=0, msg=name)


@pytest.mark.runs
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_two_ranks_send_a_model_that_neither_holds(tmp_path: Path) -> None:
    """Sending 50 MiB in buckets of 8 MiB costs no rank more than two buckets."""
    path = make_byte_model(tmp_path / "model", layers=8, width=512)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    (tmp_path / "url").write_text(f"http://127.0.0.1:{server.server_port}")
    try:
        run_ranks(2, "work_send", path, tmp_path)
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    growth = [float((tmp_path / f"growth-{rank}").read_text()) for rank in range(2)]
    assert max(growth) < 2 * 8, growth
    source = load_file(path / "model.safetensors")
    assert sum(tensor.numel() * 4 for tensor in source.values()) / 2**20 > 45
    assert Receiver.received.keys() == source.keys()
    assert all(torch.equal(Receiver.received[name], source[name] * 0.5) for name in source)
    assert Receiver.labels == ["1-incomplete", "1", "2-incomplete", "2"]


@pytest.mark.runs
def test_one_rank_ends_all(tiny_model_dir: Path, tmp_path: Path) -> None:
    """torchrun ends ranks that wait, in a collective operation or not, and the cause is printed."""
    process: Any = start(3, __file__, "work_wait", str(tiny_model_dir), str(tmp_path))
    pids: dict[int, int] = {}
    lines = []
    while len(pids) < 3:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
        # One line can hold the output of two ranks.
        found = re.findall(r"ready (\d+) (\d+)(?=\D)", "".join(lines))
        pids = {int(rank): int(pid) for rank, pid in found}
    os.kill(pids[2], signal.SIGKILL)
    output = "".join(lines) + rest_of(process, 100)
    assert process.returncode != 0
    assert "SIGKILL" in output, output
    for left in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(left, 0)


@pytest.mark.runs
def test_a_mistake_is_said_once_and_ends_all_ranks(tmp_path: Path) -> None:
    """Only rank 0 prints the error, even if rank 0 is the last to find it. The other ranks wait for
    rank 0, because torchrun ends all ranks when one has ended."""
    late = "import os, time; time.sleep(3 * (os.environ.get('RANK') == '0'))"
    (tmp_path / "sitecustomize.py").write_text(late)
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600}
    options["env"] = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(torchrun(2, "--local-ranks-filter=0", "train.py", "seeed=2"), **options)
    assert done.stderr.count("error: unknown key 'seeed'") == 1
    assert "SIGABRT" not in done.stderr
    assert 'train.py", line' not in done.stderr


LISTENING = """
import os
from pathlib import Path
from training.ranks import join_ranks
join_ranks()
mine = {os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()}
tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
rows = [line.split() for table in tables for line in table.splitlines()[1:]]
own = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
print(sorted({row[1][:-5] for row in own}))
"""


@pytest.mark.runs
def test_a_single_rank_listens_on_the_loopback_address(tmp_path: Path) -> None:
    """The hostname's address is not used. unshare gives the command its own hostname."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.0.2 another-name\n")
    setup = f"hostname another-name && mount --bind {shlex.quote(str(hosts))} /etc/hosts"
    inside = ["unshare", "--map-root-user", "--uts", "--mount", "sh", "-c"]
    has_unshare = shutil.which("unshare") is not None
    if not has_unshare or subprocess.run([*inside, setup], capture_output=True).returncode:
        pytest.skip("this machine cannot give a process a hostname of its own")
    command = f"{setup} && exec {shlex.quote(sys.executable)} -c {shlex.quote(LISTENING)}"
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    out = subprocess.run([*inside, command], env=environment(), **options)
    assert out.stdout.strip() == "['0100007F']"


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*map(Path, sys.argv[2:]))
    os._exit(0)  # if a thread of gloo held a tensor while Python ended, the rank would abort
