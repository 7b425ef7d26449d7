"""Claim: advantages and loss take a few milliseconds, and log-probabilities do not need the whole
matrix of logits.

    python bench/loss.py            # make all three measurements
    python bench/loss.py --small    # V = 20,000 and T = 1,024, for less than 16 GB

**Time of the advantages.** For 64 rows of 2,048 tokens, this project should need at most a tenth of
AReaL's time for the same advantages.

**Time of the loss.** For the same rows, the loss and its metrics, without the backward pass, should
take no longer than AReaL's loss for the same objective. The printed times of advantages and loss
are medians of `--repeat` rounds, each of which runs every function once, in the same process. If
`areal` cannot be imported, the benchmark prints "peer absent".

**Memory.** The benchmark computes log-probabilities, entropy and the backward pass with T = 4,096
tokens, a vocabulary of V = 151,936 and hidden size 256. The plain way keeps all logits in memory;
the chunked way keeps the logits of only one chunk of tokens at a time. Each runs in a separate
process, which measures the rise of its peak resident memory. The target is that the chunked way
needs at most a quarter of the plain way's memory. The printed check sums show that both ways
compute the same numbers.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

try:  # import areal before transformers: if transformers is imported first, areal's imports are circular
    import areal  # noqa: F401
    from areal.utils.functional import ppo_actor_loss_fn as peer_loss
except ImportError:
    peer_loss = None

import torch  # noqa: E402

from ppo import compute_advantages, ppo_actor_loss_fn  # noqa: E402
from training.logprobs import token_logprobs  # noqa: E402

torch.set_num_threads(1)


def timed(functions: dict[str, Callable[[], Any]], repeat: int) -> dict[str, tuple[float, float]]:
    """Return each function's median and minimum time in milliseconds. Each round calls every
    function once."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeat):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: (median(values), min(values)) for name, values in times.items()}


def make_batch(B: int = 64, T: int = 2048) -> dict[str, torch.Tensor]:
    """Make a random batch of B rows in groups of 8. Each row has T tokens, of which the first 200
    are the prompt."""
    g = torch.Generator().manual_seed(0)
    trained = torch.arange(T).expand(B, T) >= 200
    rewards = torch.randint(0, 2, (B,), generator=g).float()
    logprobs = -2 * torch.rand(B, T, generator=g)
    return {
        "input_ids": torch.randint(0, 1000, (B, T), generator=g),
        "attention_mask": torch.ones(B, T, dtype=torch.bool),
        "loss_mask": trained.int(),
        "turn_ids": trained.int() - 1,
        "turn_rewards": rewards[:, None] * trained,
        "rewards": rewards,
        "group_ids": torch.arange(B) // 8,
        "logprobs": logprobs,
        "prox_logp": logprobs + 0.1 * torch.randn(B, T, generator=g),
        "versions": trained.int() - 1,
    }


def peer_advantages() -> Callable[[dict[str, torch.Tensor]], Any] | None:
    """Return AReaL's function that computes advantages, or None if it cannot run.

    It normalises with the mean and the standard deviation of each group, as compute_advantages does
    in `bench_times`. If it cannot run, the reason is printed.
    """
    try:
        from areal.api.cli_args import NormConfig as PeerNorm
        from areal.api.cli_args import PPOActorConfig as PeerConfig
        from areal.trainer.ppo.actor import PPOActor

        norm = PeerNorm(mean_level="group", std_level="group", group_size=8)
        peer_config = PeerConfig(reward_norm=norm, kl_ctl=0.0, use_decoupled_loss=True)
        actor = PPOActor(peer_config, SimpleNamespace(get_version=lambda: 1))
        name = (
            "_compute_advantages" if hasattr(actor, "_compute_advantages") else "compute_advantages"
        )
        getattr(actor, name)({key: value.clone() for key, value in make_batch(8, 64).items()})
        return lambda batch: getattr(actor, name)(
            {key: value.clone() for key, value in batch.items()}
        )
    except Exception as error:  # with another version of AReaL, the benchmark skips the comparison
        print(f"advantages: peer absent ({type(error).__name__}: {str(error)[:100]})")
        return None


def bench_times(repeat: int) -> None:
    batch, cap = make_batch(), 5.0
    functions: dict[str, Callable[[], Any]] = {
        "advantages, ours": lambda: compute_advantages(batch)
    }
    if peer := peer_advantages():
        functions["advantages, AReaL"] = lambda: peer(batch)
    A = compute_advantages(batch)
    theta = batch["prox_logp"] + 0.1 * torch.randn(
        A.shape, generator=torch.Generator().manual_seed(1)
    )
    prox, old, mask = batch["prox_logp"], batch["logprobs"], batch["loss_mask"]
    tensors = (theta, prox, old, A, mask)
    functions["loss, ours"] = lambda: ppo_actor_loss_fn(*tensors, behave_imp_weight_cap=cap)
    if peer_loss is None:
        print("loss: peer absent")
    else:
        from areal.api.cli_args import RejectionSamplingConfig

        # AReaL's default objective has no behaviour weight. With `rejection_sampling`, its
        # objective equals this project's.
        where = {
            "logprobs": theta,
            "proximal_logprobs": prox,
            "old_logprobs": old,
            "advantages": A,
            "eps_clip": 0.2,
        }
        same = RejectionSamplingConfig(upper=cap)
        here, there = (
            functions["loss, ours"]()[0],
            peer_loss(**where, loss_mask=mask.bool(), rejection_sampling=same)[0],
        )
        assert torch.isclose(here, there, atol=1e-6), (
            f"the losses differ: {here} here, {there} in AReaL"
        )
        functions["loss, AReaL"] = lambda: peer_loss(
            **where, loss_mask=mask.bool(), rejection_sampling=same
        )
        functions["loss, AReaL without weight"] = lambda: peer_loss(**where, loss_mask=mask.bool())
    for name, (middle, least) in timed(functions, repeat).items():
        print(f"{name:27} median {middle:8.2f} ms   least {least:8.2f} ms")


def plain_logprobs(hidden, weight, ids, temperatures):
    """Compute log p and entropy with the whole (T, V) matrix of logits."""
    log_p = torch.log_softmax((hidden @ weight.t()).float() / temperatures[:, None], dim=-1)
    return log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def measure(way: str, T: int, V: int, H: int = 256) -> None:
    """Print three numbers: the rise of this process's peak memory in MiB, the seconds, and a check
    sum."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=g).requires_grad_()
    weight = (torch.randn(V, H, generator=g) / 16).requires_grad_()
    ids, temperatures = torch.randint(0, V, (T,), generator=g), torch.ones(T)
    function = plain_logprobs if way == "plain" else token_logprobs
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    logp, entropy = function(hidden, weight, ids, temperatures)
    (logp.mean() + 0.01 * entropy.mean()).backward()
    seconds, peak = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert weight.grad is not None
    unit = 2**20 if sys.platform == "darwin" else 2**10
    check = f"{logp.mean().item():.5f} {entropy.mean().item():.5f} {weight.grad.norm().item():.6f}"
    print(f"{(peak - before) / unit:.0f};{seconds:.1f};{check}")


def bench_memory(T: int, V: int) -> None:
    """Print the memory of the plain way and of the chunked way, each in a process of its own."""
    found = {}
    for way in ("plain", "chunked"):
        command = [sys.executable, __file__, "--measure", way, str(T), str(V)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if result.returncode:
            print(
                f"memory, {way}: failed with code {result.returncode}, perhaps for lack of memory; try --small"
            )
            return
        mib, seconds, check = result.stdout.strip().splitlines()[-1].split(";")
        found[way] = (float(mib), check)
        print(
            f"memory, {way:8} {float(mib):8.0f} MiB above the weights, {seconds} s   (log p, entropy, |dW|: {check})"
        )
    print(
        f"memory: chunked / plain = {found['chunked'][0] / found['plain'][0]:.3f} at T = {T}, V = {V}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--measure", nargs=3, metavar=("WAY", "T", "V"))
    args = parser.parse_args()
    if args.measure:
        measure(args.measure[0], int(args.measure[1]), int(args.measure[2]))
    else:
        bench_times(args.repeat)
        bench_memory(*((1024, 20_000) if args.small else (4096, 151_936)))
