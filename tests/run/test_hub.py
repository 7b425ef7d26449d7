"""`model_path` may be a model's name on the Hugging Face hub. In these tests, a small hub on this machine serves the
tiny model.

The small hub answers three kinds of requests of the package huggingface_hub: for the commit of a revision, for the list
of the revision's files, and for a file.
"""

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from runs import SMALL_GUESS, command

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/tiny-model"


class Hub(ThreadingHTTPServer):
    """A small hub that serves one model. If `token` is set, only requests with this token get the model. `asked`
    records the paths of all requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.folder, self.token, self.asked = folder, "", list[str]()

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses this hub and caches models in `home`."""
        url = f"http://127.0.0.1:{self.server_port}"
        kept = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
        return {**kept, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **more}


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        files = {file.name: file.read_bytes() for file in self.server.folder.iterdir()}
        name, file = path.rpartition("/")[::2]
        if NAME not in path:
            self.answer(
                404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found"
            )
        elif self.server.token and self.headers["authorization"] != f"Bearer {self.server.token}":
            self.answer(
                401,
                b"{}",
                X_Error_Code="GatedRepo",
                X_Error_Message="Access to this model is restricted",
            )
        elif path in (f"/api/models/{NAME}/revision/main", f"/api/models/{NAME}/revision/v1"):
            self.answer(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            rows = [
                {"type": "file", "path": f, "size": len(b), "oid": tag(b)} for f, b in files.items()
            ]
            self.answer(200, json.dumps(rows).encode())
        elif name == f"/{NAME}/resolve/{COMMIT}" and file in files:
            self.answer(200, files[file], X_Repo_Commit=COMMIT, ETag=f'"{tag(files[file])}"')
        else:
            self.answer(
                404, b"{}", X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id"
            )

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


def tag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(tiny_model_dir: Path) -> Iterator[Hub]:
    with Hub(tiny_model_dir) as hub:
        threading.Thread(target=hub.serve_forever).start()
        yield hub
        hub.shutdown()


def plan(
    tmp_path: Path, environment: dict[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    """Run train.py --dry-run with these environment variables."""
    whole = command(tmp_path / "runs", *SMALL_GUESS, "--dry-run", *words)
    return subprocess.run(
        whole, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.runs
def test_a_model_of_the_hub_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    """The first run fetches the model into HF_HOME and shows the progress of the download. A second run in offline mode
    fetches nothing."""
    environment = hub.environment(tmp_path / "home")
    first = plan(tmp_path, environment, f"model_path={NAME}")
    assert first.returncode == 0, first.stderr
    folder = tmp_path / f"home/hub/models--someone--tiny-model/snapshots/{COMMIT}"
    assert f"--model-path {folder}" in first.stdout
    assert "100%" in first.stderr
    assert (folder / "model.safetensors").stat().st_size > 0
    fetched = len(hub.asked)
    second = plan(tmp_path, environment | {"HF_HUB_OFFLINE": "1"}, f"model_path={NAME}")
    assert second.stdout == first.stdout
    assert len(hub.asked) == fetched


@pytest.mark.runs
def test_a_gated_model_needs_the_token(hub: Hub, tmp_path: Path) -> None:
    """A gated model is fetched with the token in HF_TOKEN. Without the token, one line says why the model is not
    available, and what to check."""
    hub.token = "hf_secret"
    without = plan(tmp_path, hub.environment(tmp_path / "home"), f"model_path={NAME}")
    assert without.returncode == 2
    [line] = without.stderr.splitlines()
    assert line.startswith(f"error: model {NAME}: no such folder, and the hub does not give it (")
    assert "HF_TOKEN" in line
    assert (
        plan(
            tmp_path, hub.environment(tmp_path / "home", HF_TOKEN="hf_secret"), f"model_path={NAME}"
        ).returncode
        == 0
    )


@pytest.mark.runs
@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["model_path=someone/else"], {}),
        ([f"model_path={NAME}", "model_revision=v9"], {}),
        ([f"model_path={NAME}"], {"HF_HUB_OFFLINE": "1"}),
        ([f"model_path={NAME}"], {"HF_ENDPOINT": "http://127.0.0.1:9"}),
    ],
    ids=["name", "revision", "offline", "network"],
)
def test_what_the_hub_does_not_give_is_one_line(
    hub: Hub, tmp_path: Path, words: list[str], more: dict[str, str]
) -> None:
    """The run ends with a one-line error if the model's name or revision is unknown, or if there is no network. In
    offline mode, the run ends with a one-line error if the model is not in the cache."""
    done = plan(tmp_path, hub.environment(tmp_path / "home", **more), *words)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(
        f"error: {words[0].replace('_path=', ' ')}: no such folder, and the hub does not give it ("
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.runs
def test_a_run_keeps_the_revision(hub: Hub, tmp_path: Path) -> None:
    """A run of two ranks fetches the model's revision once, trains, and writes the commit into config.yaml."""
    words = [f"model_path={NAME}", "model_revision=v1", "max_steps=1", "actor.kl_ctl=0"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    python, _, *script = command(tmp_path, *SMALL_GUESS, *words)
    environment = hub.environment(tmp_path / "home")
    done = subprocess.run(
        [python, *torchrun, *script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    config = OmegaConf.load(tmp_path / "e/t/config.yaml")
    assert config.model_revision == COMMIT
    assert Path(config.model_path).name == COMMIT
    assert (
        sum(path.endswith("model.safetensors") for path in hub.asked) <= 2
    )  # one HEAD and one GET request
