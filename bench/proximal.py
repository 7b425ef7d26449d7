"""Claim: log pi_prox can be estimated from the tokens' versions, with smaller errors for smaller
lags.

    python bench/proximal.py [--eta 4] [--steps 80] [--seed 1]

The benchmark trains a model on the maze asynchronously (train.py, eta = 4) with
`actor.prox_logp_method=metrics`. The trainer then also computes log pi_prox of every trained token
by a forward pass, so the error of each estimate is known. The run writes its tokens to
tokens/*.safetensors. The lag of a token is v - v_b, where version v_b sampled it and version v is
trained on it. For each lag and each of three estimates, the benchmark prints the mean error
|estimate - log pi_prox|. An estimate is log pi_behav + alpha (log pi_theta - log pi_behav), and
each has an alpha of its own.

`loglinear` (training/proximal.py) uses alpha = (v - v_b) / (v + f - v_b), where f is the share of
the step's mini-batches that are done. `AReaL` uses alpha = (v - 1 - v_b) / (v - v_b), where v_b is
the version of the previous token. For the first token after a prompt, `AReaL` uses alpha = 0.
`rollout` uses alpha = 0 for every token, so the estimate is log pi_behav, as in standard PPO.

If the run exists already, the benchmark uses its files and does not train again.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from training.proximal import interpolation, loglinear  # noqa: E402


def train(folder: Path, eta: int, steps: int, seed: int) -> None:
    """Train a model on the maze in another process. The run writes its files to `folder`."""
    words = [
        f"fileroot={folder.parent.parent}",
        f"trial_name={folder.name}",
        "experiment_name=maze",
        f"seed={seed}",
    ]
    words += [
        f"rollout.max_head_offpolicyness={eta}",
        "rollout.max_concurrent_rollouts=null",
        f"max_steps={steps}",
    ]
    words += ["actor.prox_logp_method=metrics", "callbacks=[]"]
    command = [sys.executable, "train.py", "--config", "configs/maze.yaml", *words]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def areal(old: Tensor, theta: Tensor, versions: Tensor, version: int) -> Tensor:
    """Return AReaL's estimate of log pi_prox, a tensor (B, T). For each token it uses the version
    of the previous token instead of the token's own."""
    neighbour = versions.roll(1, dims=1)
    lag = (version - neighbour).float()
    alpha = torch.where((neighbour >= 0) & (lag > 0), ((lag - 1) / lag).clamp(0, 1), 0.0)
    return old + alpha * (theta - old)


def errors_by_lag(folder: Path) -> dict[int, Tensor]:
    """Return a dict that maps each lag to a tensor (4,): the number of tokens, and the summed
    errors of the three estimates."""
    sums: dict[int, Tensor] = defaultdict(lambda: torch.zeros(4, dtype=torch.float64))
    for path in sorted((folder / "tokens").glob("*.safetensors")):
        t, version = load_file(path), int(path.stem) - 1
        old, theta, truth, versions = (
            t["logprobs"],
            t["theta_logp"],
            t["prox_logp"],
            t["versions"],
        )  # (B, T)
        ours = loglinear(old, theta, interpolation(versions, version, t["step_fraction"][:, None]))
        guesses = torch.stack([ours, areal(old, theta, versions, version), old])  # (3, B, T)
        trained = t["loss_mask"] > 0
        errors, lags = (
            (guesses - truth).abs()[:, trained].double(),
            version - versions[trained],
        )  # (3, N), (N,)
        for lag in lags.unique().tolist():
            found = errors[:, lags == lag]
            sums[lag] += torch.cat(
                [torch.tensor([float(found.shape[1])], dtype=torch.float64), found.sum(1)]
            )
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eta", type=int, default=4)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fileroot", type=Path, default=Path("runs/proximal"))
    args = parser.parse_args()
    folder = args.fileroot / "maze" / f"eta{args.eta}-seed{args.seed}-{args.steps}"
    if not (folder / "checkpoints" / f"step{args.steps:05d}").exists():
        train(folder, args.eta, args.steps, args.seed)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    print(
        f"reward {lines[0]['reward']:.2f} -> {lines[-1]['reward']:.2f} in {len(lines)} steps, eta = {args.eta}\n"
    )
    print("| lag v - v_b | tokens | loglinear | AReaL | rollout |\n|---|---|---|---|---|")
    sums = errors_by_lag(folder)
    total = torch.stack(list(sums.values())).sum(0)
    for name, (count, *errors) in [
        *((str(lag), sums[lag].tolist()) for lag in sorted(sums)),
        ("all", total.tolist()),
    ]:
        print(
            f"| {name} | {count:,.0f} | "
            + " | ".join(f"{error / count:.2e}" for error in errors)
            + " |"
        )


if __name__ == "__main__":
    main()
