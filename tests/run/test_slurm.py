"""Tests of the sbatch file. Fake commands `srun` and `scontrol` run everything on this machine.

The two nodes are 127.0.0.1 and localhost. The server is inference/tiny/server.py, and the trainer trains a tiny model.
"""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, free_port
from runs import children

pytestmark = pytest.mark.runs

SCRIPT = ROOT / "examples/slurm/train.sbatch"
SRUN = """#!/bin/bash
# Write the arguments into $CALLS, drop the options of srun, and run the command on this machine.
echo "$@" >> "$CALLS"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
[[ $1 == show && $2 == hostnames ]] || exit 1
tr , '\\n' <<< "$3"
"""


@pytest.fixture
def cluster(tmp_path: Path, tiny_model_dir: Path) -> dict[str, str]:
    """Return the environment of a job with two nodes, one for the server and one for training."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    here = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{here}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "127.0.0.1,localhost",
        "SLURM_GPUS_ON_NODE": "1",
        "MODEL": str(tiny_model_dir),
        "RUNS": str(tmp_path / "runs"),
        "SERVE": f"{sys.executable} -m inference.tiny.server",
        "PORT": str(free_port()),
        "RENDEZVOUS_PORT": str(free_port()),
        "WAIT_SECONDS": "200",
    }


RECIPE = [
    *("--config", "configs/gsm8k.yaml", "data=tests/data/gsm8k.jsonl", "max_steps=2", "trial_name=t"),
    *("gconfig.n_samples=2", "gconfig.max_new_tokens=8", "train_dataset.batch_size=2", "actor.dtype=float32"),
    *("evaluator.interval=0", "server.max_total_tokens=4096"),
]


def test_two_nodes_train(cluster: dict[str, str], tmp_path: Path) -> None:
    """In a job with two nodes, one node generates and the second node trains. The server ends when the training is
    done."""
    done = subprocess.run([str(SCRIPT), *RECIPE], cwd=ROOT, env=cluster, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (tmp_path / "runs/gsm8k/t/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    serve, train = (tmp_path / "calls").read_text().splitlines()
    assert "--nodelist=127.0.0.1 " in serve
    assert "--weight-version 0" in serve
    assert "--nodelist=localhost " in train
    assert f"rollout.server_addrs=[http://127.0.0.1:{cluster['PORT']}]" in train
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(cluster["PORT"])), 5)


def test_no_node_left_to_train(cluster: dict[str, str], tmp_path: Path) -> None:
    """A job that gives all its nodes to the servers ends with an error, because no node is left for training."""
    done = subprocess.run([str(SCRIPT)], cwd=ROOT, env=cluster | {"GEN_NODES": "2"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "none is left to train" in done.stderr
    assert not (tmp_path / "calls").exists()


def test_a_server_that_cannot_start_ends_the_job(cluster: dict[str, str]) -> None:
    """If a server ends before it is ready, the job ends with an error."""
    broken = cluster | {"SERVE": f"{sys.executable} -m inference.tiny.server --weights wrong"}
    done = subprocess.run([str(SCRIPT), *RECIPE], cwd=ROOT, env=broken, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "a server ended before it came up" in done.stderr


def test_a_cancelled_job_leaves_nothing(cluster: dict[str, str], tmp_path: Path) -> None:
    """If a job is cancelled while a server starts, the script ends the server and exits."""
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\nexec sleep 1000\n")
    job = subprocess.Popen([str(SCRIPT), *RECIPE], cwd=ROOT, env=cluster, stderr=subprocess.DEVNULL)
    while "sleep 1000" not in (found := children(job.pid)):
        assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(found["sleep 1000"], 0)
