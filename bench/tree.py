"""Claim: a training pass takes time in proportion to the tokens of the tree, and building a tree
takes about 1 ms.

    python bench/tree.py [--quick]

**Training.** A random Qwen3 model (4 layers, float32, one thread) makes one forward and one
backward pass over 16 rows. The rows share a prefix, and the loss covers the tokens after the
prefix. Four ways to compute it must all give the same gradients. `padded` computes a batch of 16
equally long rows, with causal attention and without a mask. `hf` concatenates the rows as
transformers does: positions restart at each row, and attention has an N x N mask. `dense` computes
the tree with an N x N mask. `tree` computes it with the blocks of training/tree_attention.py, and
its time includes building the tree.

The benchmark repeats the four ways in turn and prints the smallest CPU time of each, because other
programs on the machine lengthen the wall time. `gain` is the time of `padded` divided by that of
`tree`. `ratio` is the number of tokens in the tree divided by that in the rows, so `gain` is at
most 1 / `ratio`. The target is a `gain` of 2 at hidden size 384, for rows of 256 tokens that share
3/4 of their tokens.

**Building.** The last table has the time to build the tree of 16 rows of 2,500 tokens. If `areal`
can be imported (areal 1.0.4, in a separate venv), AReaL's `_greedy_build_tries` builds a tree of
the same rows for comparison.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:  # import areal before transformers: if transformers is imported first, areal's imports are circular
    import areal  # noqa: F401
    from areal.models.tree_attn.tree import _greedy_build_tries
except ImportError:
    _greedy_build_tries = None

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from training.tree_attention import PackedTree, build_trees

ROWS, LAYERS, VOCABULARY = 16, 4, 4096
CASES = [  # each case is (hidden size, tokens per row, length of the common prefix divided by the length of a row)
    (384, 256, 0.75),
    (64, 256, 0.75),
    (768, 256, 0.75),
    (384, 64, 0.75),
    (384, 1024, 0.75),
    (384, 256, 0.0),
    (384, 256, 0.25),
    (384, 256, 0.5),
    (384, 256, 0.875),
    (64, 16, 0.5),
]


def build(width: int) -> Any:
    """Make a random Qwen3 with two query heads for each key head. The head size is 64, or 16 in the
    narrowest model."""
    torch.manual_seed(0)
    d = 64 if width >= 256 else 16
    shape = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": LAYERS,
        "head_dim": d,
    }
    heads = {"num_attention_heads": width // d, "num_key_value_heads": width // d // 2}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=VOCABULARY, max_position_embeddings=4096, **shape, **heads)
    )


def make_rows(length: int, share: float) -> Tensor:
    """Make random rows (ROWS, length). The first `share` * `length` tokens are the same in all
    rows."""
    rows = torch.randint(VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(0))
    rows[:, : int(share * length)] = rows[0, : int(share * length)]
    return rows


def loss_of(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the mean negative log-probability of the token ids (n,). Row i of `hidden` (n, H)
    predicts id i."""
    return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), ids)


def ways(model: Any, rows: Tensor, share: float) -> dict[str, Callable[[], Tensor]]:
    """Return the four ways to compute the training pass, each as a function that returns the loss
    of the tokens after the shared prefix."""
    length = rows.shape[1]
    own = max(int(share * length), 1)  # the index of the first trained token
    wanted = rows[:, own:].flatten()

    def padded() -> Tensor:
        model.set_attn_implementation("sdpa")
        hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state
        return loss_of(model, hidden[:, own - 1 : -1].flatten(0, 1), wanted)

    def hf() -> Tensor:
        model.set_attn_implementation("sdpa")
        positions = torch.arange(length).repeat(ROWS)[None]
        inputs = {"input_ids": rows.view(1, -1), "position_ids": positions}
        hidden = model.model(**inputs, use_cache=False).last_hidden_state.view(ROWS, length, -1)
        return loss_of(model, hidden[:, own - 1 : -1].flatten(0, 1), wanted)

    def over(tree: PackedTree, dense: bool) -> Tensor:
        model.set_attn_implementation("sdpa" if dense else "tree")
        inputs = dict(tree.inputs)
        if dense:
            end = inputs.pop("subtree_end")
            k = torch.arange(len(end))
            inputs["attention_mask"] = ((k <= k[:, None]) & (k[:, None] < end))[None, None]
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[0]
        before = tree.states[:, own - 1 : -1].flatten()
        return loss_of(model, hidden[before], torch.cat([rows[row, own:] for row in tree.rows]))

    def tree() -> Tensor:
        return over(build_trees(rows, rows.numel())[0], dense=False)

    def dense() -> Tensor:
        return over(build_trees(rows, rows.numel())[0], dense=True)

    return {"padded": padded, "hf": hf, "dense": dense, "tree": tree}


def measure(width: int, length: int, share: float, rounds: int) -> str:
    """Measure the four ways for one case, and return the case's row of the table."""
    model, rows = build(width), make_rows(length, share)
    best: dict[str, float] = {}
    truth: list[Tensor] = []
    worst = 0.0
    for _ in range(rounds):
        for name, way in ways(model, rows, share).items():
            if rows.numel() > 8192 and name in ("hf", "dense"):
                continue  # with long rows, a pass with an N x N mask takes a minute
            model.zero_grad()
            began = time.process_time()
            way().backward()
            best[name] = min(best.get(name, float("inf")), time.process_time() - began)
            gradients = [p.grad.clone() for p in model.parameters()]
            truth = truth or gradients
            worst = max(
                worst, *(float((g - t).norm() / t.norm()) for g, t in zip(gradients, truth))
            )
    [tree] = build_trees(rows, rows.numel())
    gain = best["padded"] / best["tree"]
    shown = [
        f"{best[name] * 1e3:.0f}" if name in best else ""
        for name in ("padded", "hf", "dense", "tree")
    ]
    cells = [
        width,
        length,
        f"{share:g}",
        f"{tree.inputs['input_ids'].numel() / rows.numel():.2f}",
        *shown,
        f"**{gain:.2f}**",
        f"{worst:.0e}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def measure_building(rounds: int) -> None:
    """Print the milliseconds that this project and AReaL need to build the tree of 16 rows of 2,500
    tokens."""
    print("\n| 16 x 2,500 tokens | ours, ms | AReaL, ms |\n|---|---|---|")
    for share in (0.0, 0.75):
        rows = make_rows(2500, share).int()
        data = {"input_ids": rows, "attention_mask": torch.ones_like(rows, dtype=torch.bool)}
        best = {"ours": float("inf"), "theirs": float("inf")}
        for _ in range(rounds):
            began = time.process_time()
            build_trees(rows, rows.numel())
            best["ours"] = min(best["ours"], time.process_time() - began)
            if _greedy_build_tries:
                began = time.process_time()
                _greedy_build_tries(data, rows.numel())
                best["theirs"] = min(best["theirs"], time.process_time() - began)
        theirs = f"{best['theirs'] * 1e3:.1f}" if _greedy_build_tries else "peer absent"
        print(f"| {share:.0%} shared | {best['ours'] * 1e3:.1f} | {theirs} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first two cases only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [
        "width",
        "tokens",
        "shared",
        "ratio",
        "padded",
        "hf",
        "dense",
        "tree",
        "gain",
        "gradients",
    ]
    print(
        "Milliseconds of process time. `gradients` is the largest relative difference from a gradient of `padded`.\n"
    )
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for case in CASES[: 2 if args.quick else None]:
        print(measure(*case, rounds=3), flush=True)
    measure_building(rounds=10)


if __name__ == "__main__":
    main()
