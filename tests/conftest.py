"""Fixtures and helpers of several test files: small random models, and real servers as processes.

torch and transformers are imported where they are needed, so that tests without them start at once.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import aiohttp
import httpx
import pytest
from hypothesis import HealthCheck, settings

# Property tests must pass on a slow or busy machine, so hypothesis has no time limits.
slow = [HealthCheck.too_slow]
settings.register_profile("any machine", deadline=None, suppress_health_check=slow)
settings.load_profile("any machine")

# A shell's background job ignores Ctrl-C, and so would the processes that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).resolve().parent.parent

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# These test files take longest. They come first, so that the two processes of `make test` end at
# about the same time.
LONGEST = {"test_train.py", "test_museum.py", "test_modes.py", "test_tiny_server.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    gc.collect()
    gc.freeze()  # later collections pass over torch and transformers


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def make_byte_model(
    path: Path, seed: int = 0, layers: int = 2, width: int = 64, tied: bool = False
) -> Path:
    """Write a random Qwen3 model. Its 259 tokens are the bytes and three markers of chats, and its
    context has 2,048 tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
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
    """The tiny model, which `make_byte_model` writes with seed 0."""
    return make_byte_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that differs from the tiny model only in its weights."""
    return make_byte_model(tmp_path_factory.mktemp("other_model"), seed=1)


def forward_logprobs(model_dir: Path, ids: list[int], temperature: float = 1.0) -> list[float]:
    """log p(ids[t] | ids[:t]) by transformers in float32; 0 for the first token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]  # (T - 1, V)
    logp = torch.log_softmax(logits / temperature, -1)
    return [0.0, *logp.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_dir: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


def free_port() -> int:
    from inference import process

    return process.free_port()


def two_free_ports() -> int:
    """A free port whose successor is free, too."""
    import socket

    while True:
        port = free_port()
        with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


class Session:
    """An aiohttp session whose requests go to a transport of httpx."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self.transport = transport

    @asynccontextmanager
    async def request(self, method: str, url: str, **options: Any) -> AsyncIterator[Any]:
        request = httpx.Request(method, url, json=options["json"], headers=options["headers"])
        try:
            answer = await self.transport.handle_async_request(request)
        except httpx.TransportError as error:
            raise aiohttp.ClientError(str(error)) from error
        yield SimpleNamespace(status=answer.status_code, read=answer.aread)

    async def close(self) -> None: ...


def connections(transport: Any) -> tuple[int, int]:
    """Return how many connections of an SDK's aiohttp transport a request uses, and how many are
    idle."""
    connector = transport.client.connector
    return len(connector._acquired), sum(map(len, connector._conns.values()))


def rest_of(process: subprocess.Popen[str], seconds: float) -> str:
    """Wait until a process ends, and return its unread output. After `seconds`, kill it.

    communicate() can lose output if the test has already read some lines.
    """
    assert process.stdout is not None
    watchdog = threading.Timer(seconds, process.kill)
    watchdog.start()
    try:
        with process:
            return process.stdout.read()
    finally:
        watchdog.cancel()


@contextmanager
def server_process(
    *command: str, log: Path | None = None, seconds: float = 300
) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run a server with a free port until the `with` block ends. Yield its URL and process.

    The server must answer within `seconds`. Its output goes to `log`, a path that ends with .log.
    """
    from inference.process import Child

    with TemporaryDirectory() as folder:
        log = log or Path(folder) / "server.log"
        child = Child(log.stem, [*command])
        child.start(log.parent)
        watchdog = threading.Timer(seconds, child.process.kill)
        watchdog.start()
        try:
            url = child.wait_ready()
            watchdog.cancel()
            yield url, child.process
        finally:
            watchdog.cancel()
            child.end()


StartServer = Callable[..., str]


@pytest.fixture(scope="session")
def start_tiny_server(tiny_model_dir: Path) -> Iterator[StartServer]:
    """A function start(*arguments) that starts a small server and returns its URL."""
    command = [sys.executable, "-m", "inference.tiny.server", "--exit-with-parent"]
    command += ["--model-path", str(tiny_model_dir)]
    with ExitStack() as stack:
        yield lambda *extra: stack.enter_context(server_process(*command, *extra))[0]


# A Python that can import SGLang. `make test-sglang` sets it.
SGLANG = os.environ.get("POCKET_AREAL_SGLANG", "")


@contextmanager
def run_sglang(model_dir: Path, log: Path, *extra: str) -> Iterator[str]:
    """Run the real, unmodified SGLang on a CPU until the `with` block ends. Yield its URL."""
    command = [sys.executable, "-m", "inference.process", SGLANG]
    command += [str(ROOT / "tests/sglang_cpu/launch.py"), "--model-path", str(model_dir), *extra]
    try:
        with server_process(*command, log=log, seconds=400) as (url, _):
            yield url
    except BaseException:
        print(log.read_text(errors="replace")[-3000:])  # pytest shows it
        raise


@pytest.fixture(scope="session")
def tiny_server(start_tiny_server: StartServer) -> str:
    """The URL of a small server that all tests share, so no test may stop or change it."""
    return start_tiny_server()


@pytest.fixture(scope="module")
def proxy(tiny_server: str, tiny_model_dir: Path) -> Iterator[Any]:
    """The URL and the admin key of a proxy.py process that uses the tiny server."""
    from proxy import ProxyAddress

    command = [sys.executable, "-m", "proxy", "--server", tiny_server, "--exit-with-parent"]
    command += ["--model-path", str(tiny_model_dir), "--admin-key", "secret", "--seed", "1"]
    with server_process(*command) as (url, _):
        yield ProxyAddress(url, "secret")


@pytest.fixture
async def start(tiny_tokenizer: Any) -> AsyncIterator[Callable[..., Any]]:
    """A function start(*texts, **options) that makes a Harness whose engine answers with these
    texts in order; the options `tokenizer` and `engine` replace its own."""
    from harness import Harness

    made: list[Harness] = []

    def start(*texts: str, tokenizer: Any = tiny_tokenizer, **options: Any) -> Harness:
        made.append(Harness(tokenizer, *texts, **options))
        return made[-1]

    yield start
    for harness in made:
        await harness.http.aclose()


@pytest.fixture(scope="module")
def real_engine(tiny_server: str) -> Iterator[Any]:
    """An engine that is connected to the tiny server."""
    from engine import RemoteInfEngine

    engine = RemoteInfEngine([tiny_server])
    engine.initialize()
    yield engine
    engine.destroy()
