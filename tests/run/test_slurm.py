"""Tests of examples/slurm/train.sbatch. Fake `srun` and `scontrol` commands run the whole job on
this machine.

The two nodes of the job are 127.0.0.1 and localhost. The inference server is
inference/tiny/server.py, and the trainer trains a tiny model.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, free_port, two_free_ports
from runs import children, finish

from rollout.launch import plan_servers
from run.config import load

pytestmark = pytest.mark.runs

SCRIPT = ROOT / "examples/slurm/train.sbatch"
# Writes its arguments into $CALLS, drops the options of srun, and runs the command on this machine.
# As slurm does, it shows all GPUs, and gives one core unless --cpus-per-task says otherwise.
SRUN = """#!/bin/bash
echo "$@" >> "$CALLS"
export CUDA_VISIBLE_DEVICES=0,1 CORES=1
while [[ $1 == --* ]]; do
    [[ $1 == --cpus-per-task=* ]] && CORES=${1#*=}
    shift
done
exec "$@"
"""
SCONTROL = """#!/bin/bash
[[ $1 == requeue ]] && { echo "requeue $2" >> "$CALLS"; exit; }
[[ $1 == show && $2 == hostnames ]] || exit 1
tr , '\\n' <<< "$3"
"""


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path: Path, tiny_model_dir: Path) -> dict[str, str]:
    """Return the environment of a job with two nodes, one for the server and one for training."""
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin/srun", SRUN)
    script(tmp_path / "bin/scontrol", SCONTROL)
    return {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
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
        "POCKET_AREAL_SERVER_KEY": "-key",  # a random key may begin with "-"
    }


RECIPE = [
    *("--config", "gsm8k", "data=tests/data/gsm8k.jsonl", "max_steps=2", "trial_name=t"),
    *("gconfig.n_samples=2", "gconfig.max_new_tokens=8", "train_dataset.batch_size=2"),
    *("actor.dtype=float32", "evaluator.interval=0", "callbacks=[]"),
]


def test_two_nodes_train(cluster: dict[str, str], tmp_path: Path) -> None:
    """In a job with two nodes, the first node generates and the second node trains. When the
    training ends, the job also ends its inference server."""
    finish([str(SCRIPT), *RECIPE], env=cluster)
    lines = (tmp_path / "runs/gsm8k/t/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    serve, train = (tmp_path / "calls").read_text().splitlines()
    assert "--nodelist=127.0.0.1 " in serve
    assert "--weight-version 0" in serve
    assert "--nodelist=localhost " in train
    assert f"rollout.server_addrs=[http://127.0.0.1:{cluster['PORT']}]" in train
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(cluster["PORT"])), 5)


SERVER = f"""echo "server with cores $CORES and GPUs $CUDA_VISIBLE_DEVICES"
while [ "$1" != --port ]; do shift; done
exec {sys.executable} -m http.server $2 --directory $(dirname $0)
"""


def test_steps_get_their_gpus_and_cores_and_a_job_near_its_end_is_requeued(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    """Each server can use only its own GPU and its share of the cores, although srun makes all GPUs
    of the node visible.

    When Slurm sends the signal USR1 before the job's time limit, the job script ends the run and
    requeues the job. The requeued job uses the run name of the first job.
    """
    scripts = {"server": SERVER, "torchrun": 'echo "trainer with cores $CORES: $*"\nexec sleep 999'}
    scripts["health"] = ""  # what the server answers
    for name, text in scripts.items():
        script(tmp_path / name, f"#!/bin/sh\n{text}")
    job = cluster | {"SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "8"}
    job |= {"SERVE": f"{tmp_path}/server", "PORT": str(two_free_ports())}
    job |= {"TORCHRUN": f"{tmp_path}/torchrun"}
    with subprocess.Popen(
        [str(SCRIPT), "seed=2"], cwd=ROOT, env=job, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("trainer"):
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        process.send_signal(signal.SIGUSR1)
        rest = process.stdout.read()
    assert process.returncode == 0
    servers = sorted(line for line in lines if line.startswith("server"))
    assert servers == [f"server with cores 4 and GPUs {gpu}\n" for gpu in "01"]
    assert "trainer with cores 8: " in lines[-1]
    assert "train.py trial_name=slurm-7 seed=2 " in lines[-1]
    assert "requeued" in rest
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "requeue 7"
    text = SCRIPT.read_text()
    assert "#SBATCH --requeue\n" in text
    assert "#SBATCH --signal=B:USR1@" in text


def test_servers_of_a_cluster_get_the_options_of_train_py(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers get no --max-total-tokens, because their cache may fill GPUs that they do not
    share."""
    monkeypatch.setenv("POCKET_AREAL_SGLANG", "python -m sglang.launch_server")
    config, _ = load(["--config", "gsm8k", "server.backend=sglang", "callbacks=[]"])
    [server] = plan_servers(config, ["0", "1"], "")
    text = SCRIPT.read_text().replace("$SLOTS", "256")
    [command] = re.findall(r"SERVE:-python.*", text)
    wanted = {"--enable-fp32-lm-head", "--max-running-requests 256", "--mem-fraction-static 0.85"}
    for words in (" ".join(server.command), command):
        assert {option for option in wanted if option in words} == wanted


@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        ({"GEN_NODES": "2"}, 2, "none is left to train"),
        ({"SERVE": f"{sys.executable} -m proxy --wrong"}, 1, "a server ended before it came up"),
    ],
)
def test_a_job_that_cannot_start_ends(
    cluster: dict[str, str], wrong: dict[str, str], code: int, says: str
) -> None:
    """The job ends at once, and its last words give the reason."""
    assert says in finish([str(SCRIPT), *RECIPE], code, cluster | wrong).stderr


def test_a_cancelled_job_leaves_nothing(cluster: dict[str, str], tmp_path: Path) -> None:
    """If a job is cancelled during the start of a server, the job script ends the server and
    exits."""
    script(tmp_path / "bin/srun", "#!/bin/bash\nexec sleep 1000\n")
    job = subprocess.Popen([str(SCRIPT), *RECIPE], cwd=ROOT, env=cluster, stderr=subprocess.DEVNULL)
    while "sleep 1000" not in (found := children(job.pid)):
        assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(found["sleep 1000"], 0)
