"""Check every part of the project that needs a GPU, and write a page with the results. The script needs no internet.

    python bench/gpu_check.py                    # run all cells on a machine with GPUs, in at most 55 minutes
    python bench/gpu_check.py --minutes 9        # run the most important cells first, and stop after 9 minutes
    python bench/gpu_check.py --cells train-packed run-async-disk    # run only the cells with these names
    python bench/gpu_check.py --list             # print the cells and their commands, and start nothing
    python bench/gpu_check.py --list --gpus 4    # print the cells of a machine with four GPUs
    CUDA_VISIBLE_DEVICES= python bench/gpu_check.py      # try the script without a GPU, with a small model

A cell is one process that checks one part of the project, and the page of results has one row for each cell. `probe`
measures the GPU's peak speed: the FLOP/s of a large matrix product, and the bytes per second of a copy. `head` measures
how precise log-probabilities are if the last layer computes in bfloat16 or in float32. A cell `train-...` trains on
random rows without an inference server, so the cell needs only torch and transformers. `test-...` runs the tests for
code that behaves differently on a GPU, such as FlexAttention. `run-...` is a whole run of train.py. The run's server is
SGLang if SGLang is installed in this Python environment. Without SGLang the server is the small server on the CPU, with
a small model.

The models have random weights, so the check does not test whether a model learns. If a cell takes longer than its
limit, the script ends all processes of the cell. If a cell fails, the next cell still runs. The script writes the page
of results again after every cell. A second call with the same work folder (`--work`) runs only the cells that have not
succeeded. The exit code is 1 if a cell has failed.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPES = {  # maps a name to (layers, hidden size, MLP size, heads, key-value heads, head size, vocabulary)
    "0.6b": (28, 1024, 3072, 16, 8, 128, 151936),  # Qwen3-0.6B
    "1.5b": (
        28,
        1536,
        8960,
        12,
        2,
        128,
        151936,
    ),  # Qwen2.5-1.5B, with Qwen3's norms of queries and keys
    "tiny": (2, 64, 128, 4, 2, 16, 512),  # a model for the small server on the CPU
}
# MISMATCH is the largest allowed difference, in nats, between the log-probabilities of server and trainer. A random
# model with 151,936 tokens gives each token a log-probability near -12, and bfloat16 numbers near -12 are 0.06 apart.
MISMATCH = 0.2
GRACE_SECONDS = 10.0  # seconds between SIGTERM and SIGKILL
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that decide which cells can run."""

    gpus: int
    has_sglang: bool
    missing: str = ""  # names of the packages that train.py needs and that are not installed


@dataclass(frozen=True)
class Cell:
    """One process of the GPU check. If the process runs train.py, `words` are the arguments of train.py."""

    name: str
    command: list[str]
    limit: int  # seconds
    words: tuple[str, ...] = ()
    shape: str = ""  # the model that the cell needs
    ranks: int = 1


# The cells


def list_cells(machine: Machine, work: Path) -> list[Cell]:
    """Return the cells that can run on a machine, the most important first."""
    own, python = [sys.executable, str(Path(__file__).resolve())], sys.executable
    big = "1.5b" if machine.gpus else "tiny"
    cells = [Cell("probe", [*own, "probe"], 120), Cell("head", [*own, "head", "--shape", big], 120)]
    train = [*own, "trainer", str(work / f"model-{big}"), "--shape", big]
    for name, options in {
        "packed": [],
        "eager": ["--eager"],
        "padded": [],
        "tree": [],
        "long": ["--long"],
    }.items():
        layout = "packed" if name in ("eager", "long") else name
        cells.append(Cell(f"train-{name}", [*train, "--layout", layout, *options], 300, shape=big))
    for name in ("test_logprobs", "test_layout", "test_actor", "test_tree_attention"):
        words = [*("-q", "-m", "not runs", "-p", "no:cacheprovider"), f"tests/training/{name}.py"]
        cells.append(Cell(name.replace("_", "-"), [python, "-m", "pytest", *words], 600))
    return cells + ([] if machine.missing else list_runs(machine, work))


def list_runs(machine: Machine, work: Path) -> list[Cell]:
    """Return the cells that run train.py. No cell connects two processes on one GPU, because NCCL cannot make this
    connection."""
    long = 8192 if machine.has_sglang else 256
    changes: dict[str, list[str]] = {
        "async-disk": ["weight_update.mode=disk"],
        "sync-disk": ["weight_update.mode=disk", "rollout.max_head_offpolicyness=0"],
        "async-tensor": ["weight_update.mode=tensor"],
        "released": ["server.release_memory=true"],
        "padded": ["actor.layout=padded"],
        "eager": ["actor.compile=false"],
        "tree": ["actor.enable_tree_training=true"],
        "torchrun": [],
        "long": [
            f"gconfig.max_new_tokens={long}",
            "gconfig.n_samples=4",
            "train_dataset.batch_size=4",
        ],
    }
    if machine.has_sglang:
        changes["bf16-head"] = ["server.fp32_head=false"]
        changes["1.5b"] = []
    if not machine.has_sglang or machine.gpus > 1:
        changes["distributed"] = ["weight_update.mode=distributed"]
    if machine.has_sglang and machine.gpus > 1:
        changes["split"] = []
    return [make_run(name, own, machine, work) for name, own in changes.items()]


def make_run(name: str, own: list[str], machine: Machine, work: Path) -> Cell:
    """Return the cell run-NAME, which runs train.py. `own` holds the arguments that only this cell has."""
    shape = name if name in SHAPES else "0.6b" if machine.has_sglang else "tiny"
    words = ["--config", "configs/gsm8k.yaml", f"model_path={work / f'model-{shape}'}"]
    words += ["train_dataset.path=tests/data/gsm8k.jsonl", "workflow=workflow.RLVRWorkflow"]
    words += [
        "workflow_kwargs.reward_fn=gpu_check.reward",
        "max_steps=6",
        "evaluator.interval=0",
        "saver.interval=0",
    ]
    words += [
        f"fileroot={work}",
        f"experiment_name=run-{name}",
        "trial_name=run",
        "recover=off",
        "logger.live=false",
    ]
    if machine.has_sglang:
        words += ["server.backend=sglang", "gconfig.n_samples=8", "train_dataset.batch_size=16"]
        words += ["gconfig.max_new_tokens=512", "server.max_total_tokens=131072"]
        words += [f"server.colocate={str(name not in ('distributed', 'split')).lower()}"]
    else:
        words += ["server.backend=tiny", "gconfig.n_samples=2", "train_dataset.batch_size=2"]
        words += ["gconfig.max_new_tokens=16", "actor.dtype=float32"]
    words += own  # if two arguments set the same key, train.py uses the last one
    # torchrun starts one rank for each GPU, or two ranks on a CPU.
    ranks = (machine.gpus or 2) if name == "torchrun" else 1
    start = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if name == "torchrun"
        else []
    )
    return Cell(
        f"run-{name}", [sys.executable, *start, "train.py", *words], 600, tuple(words), shape, ranks
    )


# Start and end of a cell


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own parent has ended (Linux). After a call of
    `adopt_orphans`, the function `descendants` also finds orphaned processes."""
    pr_set_child_subreaper = 36
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Return the ids of all living processes that this process or its descendants have started."""
    parent = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, ppid = (
                stat.read_text().rpartition(")")[2].split()[:2]
            )  # format: pid (name) state ppid ...
            if state != "Z":
                parent[int(stat.parent.name)] = int(ppid)
    found, fresh = set[int](), {os.getpid()}
    while fresh:
        fresh = {pid for pid, ppid in parent.items() if ppid in fresh} - found
        found |= fresh
    return sorted(found)


def end(process: subprocess.Popen[bytes]) -> int:
    """End a cell's process and all its descendants. Return how many processes needed SIGKILL."""
    process.terminate()  # `terminate` does nothing if the process has ended
    deadline, killed = time.monotonic() + GRACE_SECONDS, set[int]()
    while pids := descendants():
        if time.monotonic() > deadline:
            killed |= {*pids}
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        # `poll` removes the cell's process from the process table if the process has ended.
        process.poll()
        time.sleep(0.1)
    process.wait()
    for pid in killed - {process.pid}:
        with suppress(
            ChildProcessError
        ):  # the killed process's own parent has already read its exit status
            os.waitpid(pid, 0)
    return len(killed)


def run_cell(cell: Cell, folder: Path, limit: float) -> dict[str, Any]:
    """Run a cell for at most `limit` seconds. Return a dict with the cell's exit code, its duration in seconds, and the
    peak GPU memory in GiB. The exit code is None if the cell reached its time limit."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        """Read the used memory of each GPU every second, and keep the largest value."""
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not done.wait(1.0):
            with suppress(OSError, subprocess.SubprocessError, ValueError):
                text = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
                peak[0] = max(peak[0], *(int(word) / 1024 for word in text.split()))

    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'bench'}:{ROOT}", "PYTHONUNBUFFERED": "1"}
    begin, code = time.monotonic(), None
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            cell.command,
            cwd=ROOT,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            done.set()
            watcher.join()
            killed = end(process)
    return {
        "code": code,
        "seconds": time.monotonic() - begin,
        "limit": limit,
        "killed": killed,
        "peak": peak[0],
    }


def check(
    cells: list[Cell], work: Path, seconds: float, prepare: Callable[[Cell], None], head: str
) -> int:
    """Run the cells one after another for at most `seconds` seconds. Return the number of cells that failed.

    `prepare(cell)` makes the model that a cell needs. `head` is the first paragraph of the page.
    """
    adopt_orphans()
    deadline, results = time.monotonic() + seconds, dict[str, dict[str, Any]]()
    for cell in cells:
        folder = work / cell.name
        file = folder / "result.json"
        result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        if result.get("code") != 0:
            result = try_cell(cell, folder, deadline, prepare)
            file.write_text(json.dumps(result))
        results[cell.name] = result
        print(" | ".join(row(cell.name, result, folder)), flush=True)
        (work / "gpu.md").write_text(page(results, work, head))
    return sum(result["code"] != 0 for result in results.values())


def try_cell(
    cell: Cell, folder: Path, deadline: float, prepare: Callable[[Cell], None]
) -> dict[str, Any]:
    """Run a cell in a new folder, and delete the large files that it wrote. Return the cell's result."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = {"code": None, "seconds": 0.0, "limit": 0.0, "killed": 0, "peak": 0.0}
    try:
        if time.monotonic() < deadline:
            prepare(cell)
        if (left := deadline - time.monotonic()) > 0:
            result = run_cell(cell, folder, min(cell.limit, left))
    except Exception as error:  # if a cell raises an exception, the next cell still runs
        (folder / "log").write_text(f"{type(error).__name__}: {error}\n")
        result["code"] = 1
    for name in ("checkpoints", "recover", "weights", "tokens"):
        shutil.rmtree(folder / "run" / name, ignore_errors=True)
    return result


# The page


def row(name: str, result: dict[str, Any], folder: Path) -> list[str]:
    """Return the table row of one cell. The first step of a run is slower, so the means exclude the first step."""
    log = folder / "log"
    words = (
        [w for w in log.read_text(errors="replace").splitlines() if w.strip()]
        if log.exists()
        else []
    )
    last, seconds = (words or ["no output"])[-1], f"{result['seconds']:.0f}"
    empty = ["-"] * 5
    if result["code"] is None:
        ended = f"ended after the time limit of {result['limit']:.0f} s, at: {last[:60]}"
        return [
            name,
            ended if result["limit"] else "not started: the time was over",
            seconds,
            *empty,
        ]
    peak = f"{result['peak']:.1f}" if result["peak"] else "-"
    if result["code"]:
        return [
            name,
            f"failed with code {result['code']}: {last[:100]}".replace("|", "/"),
            seconds,
            *empty,
        ]
    ok = f"ok, {result['killed']} processes were left" if result["killed"] else "ok"
    metrics = folder / "run" / "metrics.jsonl"
    if metrics.exists():
        lines = [json.loads(line) for line in metrics.read_text().splitlines()][1:]
        mean = {
            key: sum(line[key] for line in lines) / len(lines)
            for key in ("tokens", "step_s", "train_s", "sync_s")
        }
        worst = max(line["logp_mismatch"] for line in lines)
        ok = ok if worst <= MISMATCH else f"mismatch above {MISMATCH}"
        times = [f"{mean[key]:.2f}" for key in ("train_s", "sync_s")]
        return [
            name,
            ok,
            seconds,
            f"{mean['tokens'] / mean['step_s']:.0f}",
            *times,
            peak,
            f"{worst:.1e}",
        ]
    if last.startswith("{"):
        numbers = json.loads(last)
        if "tokens_s" in numbers:
            times = [f"{numbers['train_s']:.2f}", "-", f"{numbers['peak_gib']:.1f}", "-"]
            ok = f"{ok}, {numbers['tflops']:.3g} TFLOP/s"
            return [name, ok, seconds, f"{numbers['tokens_s']:.0f}", *times]
        return [
            name,
            f"{ok}; " + ", ".join(f"{key} {value}" for key, value in numbers.items()),
            seconds,
            *empty,
        ]
    return [
        name,
        f"{ok}; {last.strip('= ')[:80]}" if name.startswith("test") else ok,
        seconds,
        *empty,
    ]


def page(results: dict[str, dict[str, Any]], work: Path, head: str) -> str:
    """Return the page of results as Markdown."""
    columns = ["cell", "result", "s", "tokens/s", "train s", "sync s", "peak GiB", "mismatch"]
    rows = [
        columns,
        ["---"] * len(columns),
        *(row(name, result, work / name) for name, result in results.items()),
    ]
    return "\n".join(
        [
            "# Measurements on a GPU",
            "",
            head,
            "",
            "Every cell uses a model with random weights. tokens/s: in cells run-... the trained tokens of a step, divided",
            "by the time of the step; in cells train-... all tokens of the rows, divided by the time of a training step.",
            "TFLOP/s: the FLOPs of the rows without padding (bench/roofline.py), divided by this time. The peak is the",
            "memory in use on the fullest GPU; in cells train-... the memory of the trainer's tensors. The mismatch is the",
            "largest difference between the log-probabilities of a token that server and trainer compute under the same",
            "weights, in nats.",
            "",
            *("| " + " | ".join(line) + " |" for line in rows),
            "",
        ]
    )


def describe(machine: Machine) -> str:
    """Return the page's first paragraph, which names the machine, the libraries and the server."""
    import platform

    import torch
    import transformers

    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    cpu = f"no GPU ({platform.machine()}, {os.cpu_count()} cores): a check of the script, not a result"
    server = "SGLang" if machine.has_sglang else "a small server on the CPU, with a small model"
    lacks = f"\n{machine.missing} is missing, so no cell runs train.py." if machine.missing else ""
    return (
        f"Written by `bench/gpu_check.py`; every number was measured on: {', '.join(gpus) or cpu}.\n"
        f"torch {torch.__version__}, transformers {transformers.__version__}; the server of cells run-...: {server}.{lacks}"
    )


# Functions that the cells run


def reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **_
) -> float:
    """Return the share of odd token ids as the reward. The samples of one prompt get different rewards, so the
    advantages and the gradient are not zero."""
    return sum(i % 2 for i in completion_ids) / max(1, len(completion_ids))


def make_model(path: Path, shape: str) -> None:
    """Write a Qwen3 model with random weights, and a tokenizer that makes each byte one token. The model has more token
    ids than the tokenizer uses, so many token ids have no text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    if path.exists():
        return
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    marks = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **marks)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(1)
    config = make_config(shape, tokenizer.eos_token_id, tokenizer.pad_token_id)
    partial = path.with_name(path.name + ".partial")
    Qwen3ForCausalLM(config).to(config.dtype).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.replace(path)


def make_config(shape: str, eos: int, pad: int) -> Any:
    """Return the configuration of a Qwen3 model with the sizes SHAPES[shape]."""
    from transformers import Qwen3Config

    layers, width, inner, heads, kv_heads, head, vocabulary = SHAPES[shape]
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
        dtype="float32" if shape == "tiny" else "bfloat16",
    )


def timed(act: Callable[[], Any], repeat: int = 10) -> float:
    """Return the mean seconds of an action on the GPU or the CPU, after one warm-up that is not measured."""
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    act()
    wait()
    begin = time.perf_counter()
    for _ in range(repeat):
        act()
    wait()
    return (time.perf_counter() - begin) / repeat


def probe() -> dict[str, Any]:
    """Measure the peak FLOP/s of a matrix product, and the bytes per second that a copy reads and writes."""
    import torch

    on_gpu = torch.cuda.is_available()
    device, n = ("cuda", 8192) if on_gpu else ("cpu", 1024)
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    flops = 2 * n**3 / timed(lambda: a @ a)
    x = torch.empty(2**30 if on_gpu else 2**25, device=device, dtype=torch.uint8)
    y = torch.empty_like(x)
    bandwidth = 2 * x.numel() / timed(lambda: y.copy_(x))
    return {"TFLOP/s": round(flops / 1e12, 3), "GB/s": round(bandwidth / 1e9, 1)}


def head(shape: str) -> dict[str, Any]:
    """Measure the errors of log-probabilities, in nats, against a computation in float64. All weights and hidden states
    are bfloat16."""
    import torch

    from training.logprobs import token_logprobs

    device, (width, vocabulary) = (
        "cuda" if torch.cuda.is_available() else "cpu",
        (SHAPES[shape][1], SHAPES[shape][-1]),
    )
    torch.manual_seed(0)
    n = 256
    h = (4 * torch.randn(n, width, device=device)).bfloat16()
    w = (torch.randn(vocabulary, width, device=device) / width**0.5).bfloat16()
    ids = torch.randint(vocabulary, (n, 1), device=device)

    def logp(z: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(z, -1).gather(1, ids)[:, 0].double()

    exact = logp(h.double() @ w.double().t())
    results = {"bf16": logp((h @ w.t()).float()), "fp32": logp(h.float() @ w.float().t())}
    results["trainer"] = token_logprobs(h, w, ids[:, 0], torch.ones(n, device=device))[0].double()
    return {
        f"largest error of {name}": f"{(x - exact).abs().max().item():.1e}"
        for name, x in results.items()
    }


def make_rows(n: int, longest: int, vocabulary: int) -> dict[str, Any]:
    """Make n random rows in groups of 8. The rows of a group share a prompt. The prompt is a quarter as long as the
    longest row."""
    import torch

    g = torch.Generator().manual_seed(0)
    prompt = longest // 4
    lengths = torch.randint(longest // 2, longest + 1, (n,), generator=g)
    lengths[0] = longest
    real = torch.arange(longest) < lengths[:, None]  # (n, longest)
    trained = real & (torch.arange(longest) >= prompt)
    ids = torch.randint(0, vocabulary, (n, longest), generator=g)
    ids[:, :prompt] = ids[torch.arange(n) // 8 * 8, :prompt]
    rewards = torch.rand(n, generator=g)
    return {
        "input_ids": ids.masked_fill(~real, 0).int(),
        "attention_mask": real,
        "loss_mask": trained.int(),
        "logprobs": torch.zeros(n, longest),
        "turn_ids": trained.int() - 1,
        "turn_rewards": rewards[:, None] * trained,
        "temperatures": torch.ones(n, longest),
        "group_ids": (torch.arange(n) // 8).int(),
    }


def trainer(path: Path, shape: str, layout: str, is_long: bool, is_eager: bool) -> dict[str, Any]:
    """Train the actor for a few steps on random rows. Return the peak memory, and the mean speed of all steps except
    the first."""
    import torch
    from roofline import Work, flops, shape_of, step_parts

    from training.actor import FSDPPPOActor
    from training.config import PPOActorConfig

    on_gpu = torch.cuda.is_available()
    n, longest = (8, 30720) if is_long else (64, 2048)
    if shape == "tiny":
        n, longest = 8, longest // 16
    config = PPOActorConfig(
        dtype="bfloat16" if on_gpu else "float32",
        mb_tokens=max(16384, longest),
        layout="packed" if layout == "packed" else "padded",
        compile=False if is_eager else None,
        enable_tree_training=layout == "tree",
        gradient_checkpointing=True,
        ppo_n_minibatches=2,
    )
    actor = FSDPPPOActor(config, path)
    actor.create_process_group()
    actor.initialize(max_steps=10)
    seconds = []
    for step in range(4):
        batch = make_rows(n, longest, SHAPES[shape][-1])
        begin = time.perf_counter()
        batch["prox_logp"] = actor.compute_logp(batch)
        batch["logprobs"] = batch["prox_logp"] * batch["loss_mask"]
        actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        seconds.append(time.perf_counter() - begin)
        print(
            f"step {step}: {seconds[-1]:.2f} s, loss {stats['loss']:.2e}, grad_norm {stats['grad_norm']:.2e}"
        )
    actor.destroy()
    mean = sum(seconds[1:]) / len(seconds[1:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    tokens, prompt = int(batch["attention_mask"].sum()), longest // 4
    # The useful FLOPs exclude the FLOPs for padding and for the recomputation of gradient checkpointing.
    work = Work(
        n,
        prompt,
        round(tokens / n) - prompt,
        config.ppo_n_minibatches,
        config.mb_tokens,
        checkpointing=False,
    )
    parts = step_parts(shape_of(make_config(shape, 0, 0)), work).items()
    useful = sum(flops(part) for name, part in parts if not name.startswith("generation"))
    return {
        "tokens_s": tokens / mean,
        "train_s": mean,
        "peak_gib": peak,
        "tflops": useful / mean / 1e12,
    }


# The command line


def find_machine(gpus: int | None) -> Machine:
    """Return the properties of this machine. If `gpus` is given, it replaces the real number of GPUs."""
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    needed = (
        "fastapi",
        "httpx",
        "httpx_aiohttp",
        "omegaconf",
        "openai",
        "orjson",
        "rich",
        "uvicorn",
    )
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return Machine(
        gpus, gpus > 0 and importlib.util.find_spec("sglang") is not None, ", ".join(missing)
    )


def main() -> int:
    """Run the whole check, or only the part `probe`, `head` or `trainer`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", nargs="?", choices=["probe", "head", "trainer"], help="run only this part of a cell"
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny")
    parser.add_argument("--layout", choices=["packed", "padded", "tree"], default="packed")
    parser.add_argument("--long", action="store_true")
    parser.add_argument(
        "--eager", action="store_true", help="with the part `trainer`: compile nothing"
    )
    parser.add_argument("--list", action="store_true", help="print the cells, and start nothing")
    parser.add_argument(
        "--gpus", type=int, help="with --list: the cells of a machine with this number of GPUs"
    )
    parser.add_argument("--cells", nargs="+", help="run only these cells")
    parser.add_argument("--minutes", type=float, default=55.0, help="time for all cells together")
    parser.add_argument(
        "--limit", type=int, help="seconds for each cell; default: the limit in --list"
    )
    parser.add_argument(
        "--work", type=Path, default=Path(f"runs/gpu_check-{time.strftime('%Y%m%d-%H%M%S')}")
    )
    args = parser.parse_args()
    if args.part:
        parts = {"probe": probe, "head": lambda: head(args.shape)}
        parts["trainer"] = lambda: trainer(
            args.model, args.shape, args.layout, args.long, args.eager
        )
        print(json.dumps(parts[args.part]()))
        return 0

    machine, work = find_machine(args.gpus), args.work.resolve()
    cells = list_cells(machine, work)
    if unknown := {*(args.cells or [])} - {cell.name for cell in cells}:
        parser.error(
            f"no cell {', '.join(sorted(unknown))} on this machine; --list shows the cells"
        )
    cells = [cell for cell in cells if not args.cells or cell.name in args.cells]
    if args.limit:
        cells = [Cell(c.name, c.command, args.limit, c.words, c.shape, c.ranks) for c in cells]
    if args.list:
        for cell in cells:
            print(f"{cell.name} (at most {cell.limit} s)\n    {shlex.join(cell.command)}")
        return 0
    work.mkdir(parents=True, exist_ok=True)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # on SIGTERM, the script ends the running cell and exits
    prepare = lambda cell: (
        make_model(work / f"model-{cell.shape}", cell.shape) if cell.shape else None
    )  # noqa: E731
    failed = check(cells, work, 60 * args.minutes, prepare, describe(machine))
    print(
        f"{failed} of {len(cells)} cells failed; the page is {work / 'gpu.md'}, the logs are in {work}"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
