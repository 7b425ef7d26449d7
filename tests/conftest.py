"""Fixtures and helpers that several test files use: small random models, and functions that start the real servers as
processes."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from inference.serve import free_port

# Property tests must pass on a slow or busy machine, so this profile removes hypothesis's time limits.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

torch.set_num_threads(1)
# If a shell starts pytest as a background job, pytest and its child processes ignore Ctrl-C. The next line restores
# Python's default handling of Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).resolve().parent.parent

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# These test files take longest. They come first, so the two processes of `make test` end at about the same time.
LONGEST = {
    "test_train.py",
    "test_museum.py",
    "test_modes.py",
    "test_tiny_server.py",
    "test_compile.py",
}


def pytest_collectstart() -> None:
    """Turn garbage collection off while the test modules are imported, because it takes much of the imports' time."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest test files first. Turn garbage collection on again. From now on it ignores the objects that exist
    already, such as the imported modules."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def make_byte_model(
    path: Path, seed: int = 0, layers: int = 2, width: int = 64, tied: bool = False
) -> Path:
    """Write a random Qwen3 model. The model's vocabulary has 259 tokens (the 256 bytes and three chat markers), and its
    context length is 2,048."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=tied,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny model. `make_byte_model` writes the tiny model with seed 0."""
    return make_byte_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a second model for tests of weight updates. The second model differs from the tiny model only in
    its weights (seed 1)."""
    return make_byte_model(tmp_path_factory.mktemp("other_model"), seed=1)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_dir: Path):
    """The tokenizer of the tiny model."""
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def two_free_ports() -> int:
    """Return a port number such that this port and the next port are free. Both ports are below 32768, like every port
    of `free_port`, so no outgoing connection of another test takes them."""
    while True:
        port = free_port()
        with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def idle_connections(transport: Any) -> int:
    """Return how many idle connections a transport keeps open. The transport must come from `make_transport`."""
    return sum(map(len, transport.client.connector._conns.values()))


def rest_of(process: subprocess.Popen[str], seconds: float) -> str:
    """Wait until a process ends, and return its unread output. If the process runs longer than `seconds`, kill it.

    This function does not use communicate(), because communicate() can lose output if the test has already read some
    lines.
    """
    assert process.stdout is not None
    watchdog = threading.Timer(seconds, process.kill)
    watchdog.start()
    try:
        with process:
            return process.stdout.read()
    finally:
        watchdog.cancel()


def wait_until_up(
    url: str, process: subprocess.Popen, path: str = "/health", seconds: float = 300
) -> None:
    """Request `path` repeatedly until the server answers 200. If the server's process ends, raise RuntimeError."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with code {process.returncode}")
        try:
            if httpx.get(url + path, timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise TimeoutError(f"{url} did not come up")


@contextmanager
def server_process(
    *command: str, out: Any = None, seconds: float = 300
) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run a server's command with a free port until the `with` block ends. Yield the server's URL and process.

    The server must answer within `seconds`. `out` is passed to subprocess.Popen as the server's stdout and stderr.
    """
    port = free_port()
    whole = [*command, "--port", str(port), "--exit-with-parent"]
    process = subprocess.Popen(whole, cwd=ROOT, stdin=subprocess.PIPE, stdout=out, stderr=out)
    assert process.stdin is not None
    try:
        wait_until_up(url := f"http://127.0.0.1:{port}", process, seconds=seconds)
        yield url, process
    finally:
        process.stdin.close()
        process.wait(timeout=120)


StartServer = Callable[..., str]


@pytest.fixture(scope="session")
def start_tiny_server(tiny_model_dir: Path) -> Iterator[StartServer]:
    """Return a function start(*arguments) that starts a process of inference/tiny/server.py and returns its URL."""
    command = [sys.executable, "-m", "inference.tiny.server", "--model-path", str(tiny_model_dir)]
    with ExitStack() as stack:
        yield lambda *extra: stack.enter_context(server_process(*command, *extra))[0]


# POCKET_AREAL_SGLANG is the path of a Python that can import SGLang. `make test-sglang` sets POCKET_AREAL_SGLANG.
SGLANG = os.environ.get("POCKET_AREAL_SGLANG", "")


@contextmanager
def run_sglang(model_dir: Path, log: Path, *extra: str) -> Iterator[str]:
    """Run the real, unmodified SGLang on a CPU until the `with` block ends. Yield SGLang's URL."""
    command = [
        SGLANG,
        str(ROOT / "tests/sglang_cpu/launch.py"),
        "--model-path",
        str(model_dir),
        *extra,
    ]
    with log.open("wb") as out:
        try:
            with server_process(*command, out=out, seconds=400) as (url, _):
                yield url
        except BaseException:
            print(
                log.read_text(errors="replace")[-3000:]
            )  # pytest shows the printed log if the test fails
            raise


@pytest.fixture(scope="session")
def tiny_server(start_tiny_server: StartServer) -> str:
    """The URL of a tiny server process that all tests share. A test must not stop the shared server or change the
    server's weights."""
    return start_tiny_server()


# The example agents run in .venv-agents, an environment that lacks some packages of the project. An import of the
# project's modules at the top of this file could fail in .venv-agents, so the fixtures below import these modules
# inside their functions.


@pytest.fixture(scope="module")
def proxy(tiny_server: str, tiny_model_dir: Path) -> Iterator[Any]:
    """The URL and the admin key of a proxy.py process that uses the tiny server."""
    from rollout.executor import ProxyAddress

    command = [
        sys.executable,
        "proxy.py",
        "--server",
        tiny_server,
        "--model-path",
        str(tiny_model_dir),
    ]
    with server_process(
        *command, "--admin-key", "secret", "--seed", "1", out=subprocess.DEVNULL
    ) as (url, _):
        yield ProxyAddress(url, "secret")


@pytest.fixture
async def start(tiny_tokenizer: Any) -> AsyncIterator[Callable[..., Any]]:
    """Return a function start(*texts, **options) that makes a Harness whose engine answers with these texts in
    order."""
    from harness import Harness

    made: list[Harness] = []

    def start(*texts: str, **options: Any) -> Harness:
        made.append(Harness(tiny_tokenizer, *texts, **options))
        return made[-1]

    yield start
    for harness in made:
        await harness.http.aclose()


@pytest.fixture(scope="module")
def real_engine(tiny_server: str) -> Iterator[Any]:
    """An engine that is connected to a process of inference/tiny/server.py."""
    from engine import RemoteInfEngine

    engine = RemoteInfEngine([tiny_server])
    engine.initialize()
    yield engine
    engine.destroy()
