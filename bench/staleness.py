"""Claim: standard PPO learns more slowly from stale data, and the decoupled objective avoids most
of this slowdown.

    python bench/staleness.py                              # all: 7 lags, 3 methods, 5 seeds
    python bench/staleness.py --etas 0 4 inf --seeds 1 2   # some of the runs
    python bench/staleness.py --draw                       # only table and figure, from the CSV

The benchmark repeats the experiment of the paper's staleness table (arXiv 2505.24298) on the game
of tasks/guess.py. Training uses training/actor.py and ppo.py, as in a real run. Each run writes one
line of docs/staleness.csv, and is not repeated if this line exists. The figure docs/staleness.png
shows the results, and the page docs/staleness.md explains them.

**A fixed lag.** A real run on a small machine has little lag, because generation is only as fast as
training and few batches wait for the trainer. Here generation and training alternate in one
process, so the benchmark can choose the lag. Steps are counted from 0. All tokens of step s come
from version max(s - eta, 0), the oldest version that the gate (staleness.py) allows in step s. With
eta = inf there is no gate: every version samples two batches, so version s // 2 samples the batch
of step s. Every run trains on 64 batches of 120 games. The CSV file contains the measured lag: the
trainer's version minus the version that sampled the token.

**Methods.** "naive" is standard PPO whose old policy is the behaviour policy. "decoupled" is
decoupled PPO that computes pi_prox by a forward pass. "loglinear" is decoupled PPO that
interpolates pi_prox between pi_behav and pi_theta.

**Recipe.** The recipe is configs/demo.yaml with one pass over each batch instead of two. An entropy
bonus replaces the KL penalty, which keeps the policy near the base model and could hide the effect
of the lag. The learning rate is 1e-3 after ten steps of warm-up, as in an earlier recipe of the
demo. Each step makes four optimizer steps, one per mini-batch, so the policy changes much within a
few versions. With a learning rate of 1e-4, a lag has no effect, because the policy changes too
little in 64 steps. Training computes shared prefixes only once (training/tree_attention.py), which
affects only the speed.

**Success is exact.** Success is the probability that the policy finds the secret: the sum of the
probabilities of all games that find it. Nothing is sampled for this, so the differences between
seeds in docs/staleness.png come only from training.
"""

import argparse
import csv
import os
import sys
import time
from collections import deque
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from rollout.trajectory import complete  # noqa: E402
from run.config import PPOActorConfig, load  # noqa: E402
from tasks import base_model, guess  # noqa: E402
from training.actor import FSDPPPOActor  # noqa: E402

ETAS = ["0", "1", "2", "4", "8", "16", "inf"]
METHODS: dict[str, dict[str, Any]] = {
    "naive": {"use_decoupled_loss": False, "recompute_logprob": False},
    "decoupled": {"use_decoupled_loss": True, "prox_logp_method": "recompute"},
    "loglinear": {"use_decoupled_loss": True, "prox_logp_method": "loglinear"},
}
STEPS, GAMES, EVERY = (
    64,
    20,
    8,
)  # steps of a run; games per secret in a batch; steps between two points of the curve
MAX_NEW_TOKENS = 4
MEASURED = (
    "clip_frac",
    "behave_weight_mean",
    "dropped_share",
    "kl",
    "entropy",
)  # metrics averaged over a run's steps
CURVE = [f"success_{step}" for step in range(0, STEPS + 1, EVERY)]
COLUMNS = ["eta", "method", "seed", "lag_mean", "lag_max", *CURVE, *MEASURED, "cpu_s"]
TABLE, BASES = ROOT / "docs" / "staleness.csv", ROOT / "runs" / "staleness"
FIGURE = ROOT / "docs" / "staleness.png"


# Games


class Script:
    """The token ids of the game's messages, as the chat template renders them."""

    def __init__(self) -> None:
        tokenizer = base_model.make_tokenizer(guess.WORDS)

        def render(role: str, text: str) -> list[int]:
            messages = [{"role": role, "content": text}]
            return list(
                tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False
                )
            )

        self.start = render("user", guess.QUESTION)
        self.tails = {word: render("user", word) for word in ("higher", "lower")}
        self.end = int(tokenizer.eos_token_id)
        self.number = {int(tokenizer.convert_tokens_to_ids(str(s))): s for s in guess.SECRETS}


class Transcript:
    """The tokens of one guessing game. Each sampled token has a logprob and a turn; other tokens
    have logprob 0 and turn -1."""

    def __init__(self, script: Script, secret: int) -> None:
        self.script, self.secret, self.reward, self.turn = script, secret, 0.0, 0
        self.ids, self.logp, self.turns = (
            list(script.start),
            [0.0] * len(script.start),
            [-1] * len(script.start),
        )
        self.said: list[int] = []  # sampled tokens of the current turn
        self.over = False

    def hear(self, token: int, logp: float) -> None:
        """Add a sampled token. If the token ends a turn, add the game's reply, as GuessAgent
        does."""
        self.ids.append(token)
        self.logp.append(logp)
        self.turns.append(self.turn)
        self.said.append(token)
        if token != self.script.end:
            self.over = len(self.said) == MAX_NEW_TOKENS
            return
        number = self.script.number.get(self.said[0]) if len(self.said) == 2 else None
        self.turn, self.said = self.turn + 1, []
        if number == self.secret:
            self.reward = 1.0
        self.over = number is None or number == self.secret or self.turn == guess.GUESSES
        if number is not None and not self.over:
            tail = self.script.tails[guess.feedback(number, self.secret)]
            self.ids += tail
            self.logp += [0.0] * len(tail)
            self.turns += [-1] * len(tail)


def last_logp(model: Any, rows: list[list[int]]) -> Tensor:
    """Return the log-probabilities (n, V) of the next token of each row. Identical rows go through
    the model only once."""
    number = {row: i for i, row in enumerate(dict.fromkeys(map(tuple, rows)))}
    lengths = torch.tensor([len(row) for row in number])
    ids = torch.zeros(len(number), int(lengths.max()), dtype=torch.long)
    for row, i in number.items():
        ids[i, : len(row)] = torch.tensor(row)
    logits = model(input_ids=ids, use_cache=False).logits[torch.arange(len(number)), lengths - 1]
    return torch.log_softmax(logits, -1)[[number[tuple(row)] for row in rows]]


@torch.no_grad()
def play(model: Any, script: Script, version: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Play GAMES games for each secret. Return a batch with one row for each game."""
    games = [Transcript(script, secret) for secret in guess.SECRETS for _ in range(GAMES)]
    while playing := [game for game in games if not game.over]:
        log_p = last_logp(model, [game.ids for game in playing])
        tokens = torch.multinomial(log_p.exp(), 1, generator=generator)
        for game, token, logp in zip(
            playing, tokens[:, 0].tolist(), log_p.gather(1, tokens)[:, 0].tolist()
        ):
            game.hear(token, logp)

    longest = max(len(game.ids) for game in games)

    def padded(name: str, fill: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor(
            [[*getattr(g, name), *[fill] * (longest - len(g.ids))] for g in games], dtype=dtype
        )

    turns = padded("turns", -1, torch.int32)
    traj = {
        "input_ids": padded("ids", 0, torch.int32),
        "attention_mask": torch.arange(longest)
        < torch.tensor([len(game.ids) for game in games])[:, None],
        "loss_mask": (turns >= 0).int(),
        "logprobs": padded("logp", 0.0, torch.float32),
        "turn_ids": turns,
        "rewards": torch.tensor([game.reward for game in games]),
    }
    return complete(traj, 0, version) | {
        "group_ids": torch.tensor([game.secret for game in games], dtype=torch.int32)
    }


@torch.no_grad()
def success(model: Any, script: Script) -> float:
    """Return the exact probability that the policy finds the secret, as a mean over all secrets."""
    # P(find a secret) is the sum of the probabilities of all games that find it. The probability of
    # a game is the product of p(number) p(end) over its guesses.
    found, reached = (
        0.0,
        [(script.start, {secret: 1 / len(guess.SECRETS) for secret in guess.SECRETS})],
    )
    for _ in range(guess.GUESSES):
        said = [
            ([*ids, token], number, weights)
            for ids, weights in reached
            for token, number in script.number.items()
        ]
        rows = torch.tensor(
            [ids for ids, _, _ in said]
        )  # shape (n, t): each of the n rows has t tokens
        log_p = torch.log_softmax(
            model(input_ids=rows, use_cache=False).logits[:, -2:], -1
        )  # (n, 2, V)
        p = (log_p[:, 0].gather(1, rows[:, -1:])[:, 0] + log_p[:, 1, script.end]).exp().tolist()
        reached = []
        for (ids, number, weights), q in zip(said, p):
            found += q * weights.get(number, 0.0)
            for word, tail in script.tails.items():
                rest = {
                    s: w * q
                    for s, w in weights.items()
                    if s != number and guess.feedback(number, s) == word
                }
                if rest:
                    reached.append(([*ids, script.end, *tail], rest))
    return found


# Runs


def sampled_at(step: int, eta: str) -> int:
    """Return the version that samples the batch of step `step`, counted from 0."""
    return step // 2 if eta == "inf" else max(step - int(eta), 0)


def run(eta: str, method: str, seed: int, base: Path, recipe: PPOActorConfig) -> dict[str, Any]:
    """Train one run and return its line for the CSV file."""
    began = time.process_time()
    actor = FSDPPPOActor(recipe.model_copy(update=METHODS[method]), base)
    actor.create_process_group()
    actor.initialize(STEPS)
    sampler = AutoModelForCausalLM.from_pretrained(base)
    script, generator = Script(), torch.Generator().manual_seed(seed)
    queue: deque[dict[str, Tensor]] = deque()
    made, lags, stats, curve = 0, [], [], [success(sampler, script)]
    for version in range(STEPS):
        # 1. Generate the batches that the current version samples.
        while made < STEPS and sampled_at(made, eta) <= version:
            queue.append(play(sampler, script, version, generator))
            made += 1
        # 2. Train on the oldest batch.
        batch = queue.popleft()
        lags.append((version - batch["versions"][batch["loss_mask"] > 0]).float().mean().item())
        if actor.should_compute_prox_logp():
            batch["prox_logp"] = actor.compute_logp(batch)
        actor.compute_advantages(batch)
        stats.append(actor.ppo_update(batch))
        actor.step_lr_scheduler()
        actor.set_version(version + 1)
        sampler.load_state_dict(actor.model.state_dict(), strict=False)
        if (version + 1) % EVERY == 0:
            curve.append(success(sampler, script))
    actor.destroy()
    line: dict[str, Any] = {
        "eta": eta,
        "method": method,
        "seed": seed,
        "lag_mean": mean(lags),
        "lag_max": max(lags),
    }
    line |= dict(zip(CURVE, curve)) | {name: mean(s[name] for s in stats) for name in MEASURED}
    return line | {"cpu_s": time.process_time() - began}


def read() -> list[dict[str, Any]]:
    """Return the lines of the CSV file, with numbers as floats."""
    if not TABLE.exists():
        return []
    with TABLE.open() as file:
        return [
            {
                key: value if key in ("eta", "method") else float(value)
                for key, value in line.items()
            }
            for line in csv.DictReader(file)
        ]


def append(line: dict[str, Any]) -> None:
    """Append a line to the CSV file. If the file is new, write the column names first."""
    new = not TABLE.exists()
    with TABLE.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(
            {
                key: f"{value:.5g}" if isinstance(value, float) else value
                for key, value in line.items()
            }
        )


# Tables and figures


def cells(lines: list[dict[str, Any]], column: str) -> dict[tuple[str, str], list[float]]:
    """Return a dict that maps each (eta, method) to the values of a column, one value for each
    seed."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        found.setdefault((line["eta"], line["method"]), []).append(line[column])
    return found


def print_table(lines: list[dict[str, Any]]) -> None:
    """Print the measured lag, and the median, lowest and highest success after the last step."""
    last, lag, largest = cells(lines, CURVE[-1]), cells(lines, "lag_mean"), cells(lines, "lag_max")
    print(
        "| eta | lag, mean | lag, max | "
        + " | ".join(METHODS)
        + " |\n"
        + "|---" * (3 + len(METHODS))
        + "|"
    )
    for eta in ETAS:
        here = [m for m in METHODS if (eta, m) in last]
        if here:
            shown = [middle(last[eta, m]) if m in here else "" for m in METHODS]
            lags = f"{mean(lag[eta, here[0]]):.2f} | {max(largest[eta, here[0]]):.0f}"
            print(f"| {eta} | {lags} | " + " | ".join(shown) + " |")


def middle(values: list[float]) -> str:
    """Return a text with the median, the lowest and the highest value."""
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def draw(lines: list[dict[str, Any]], curves_of: str = "16") -> None:
    """Draw the success after the last step as a function of eta (left), and the success during
    training for one eta (right)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4), sharey=True, constrained_layout=True
    )
    last, colors = cells(lines, CURVE[-1]), dict(zip(METHODS, ("tab:red", "tab:blue", "tab:green")))
    for i, (method, color) in enumerate(colors.items()):
        at = [k for k, eta in enumerate(ETAS) if (eta, method) in last]
        seeds = [last[ETAS[k], method] for k in at]
        left.plot(at, [median(s) for s in seeds], color=color, label=method)
        left.fill_between(
            at,
            [min(s) for s in seeds],
            [max(s) for s in seeds],
            color=color,
            alpha=0.15,
            linewidth=0,
        )
        for k, s in zip(at, seeds):
            left.plot([k + 0.06 * (i - 1)] * len(s), s, ".", color=color, markersize=4)
        runs = [
            [line[c] for c in CURVE]
            for line in lines
            if (line["eta"], line["method"]) == (curves_of, method)
        ]
        for curve in runs:
            right.plot(range(0, STEPS + 1, EVERY), curve, color=color, alpha=0.35, linewidth=0.8)
        if runs:
            right.plot(
                range(0, STEPS + 1, EVERY),
                [median(c) for c in zip(*runs)],
                color=color,
                label=method,
            )
    left.set(
        xlabel="eta (versions of lag)",
        ylabel="success",
        title=f"after {STEPS} steps, median and range of the seeds",
    )
    left.set_xticks(range(len(ETAS)), ["∞" if eta == "inf" else eta for eta in ETAS])
    right.set(xlabel="training step", title=f"on the way, eta = {curves_of}")
    left.legend()
    figure.savefig(FIGURE, dpi=110)


def load_recipe() -> PPOActorConfig:
    """Return the trainer's recipe: configs/demo.yaml with the changes that this file's docstring
    lists."""
    words = [
        "actor.ppo_epochs=1",
        "actor.kl_ctl=0",
        "actor.entropy_coeff=0.03",
        "actor.enable_tree_training=true",
    ]
    words += [
        "actor.optimizer.lr=1e-3",
        "actor.optimizer.warmup_steps=10",
        "actor.ppo_n_minibatches=4",
    ]
    return load(["--config", str(ROOT / "configs" / "demo.yaml"), *words])[0].actor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--etas", nargs="*", choices=ETAS, default=ETAS)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=[*METHODS])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    recipe = load_recipe()
    done = {(line["eta"], line["method"], line["seed"]) for line in read()}
    # All runs of one seed come before those of the next, so a benchmark that is stopped has
    # complete results for some seeds.
    for seed in [] if args.draw else args.seeds:
        base = BASES / f"base-{seed}"
        if not base.exists():
            guess.make_model(base, seed)
        for eta in args.etas:
            for method in args.methods:
                if (eta, method, seed) not in done:
                    line = run(eta, method, seed, base, recipe)
                    append(line)
                    shown = f"lag {line['lag_mean']:.2f}, success {line[CURVE[-1]]:.3f}, {line['cpu_s']:.0f} s"
                    print(f"eta {eta}, {method}, seed {seed}: {shown}", flush=True)
    lines = [line for line in read() if line["seed"] <= 5]
    print_table(lines)
    draw(lines)


if __name__ == "__main__":
    main()
