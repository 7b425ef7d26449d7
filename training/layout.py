"""A layout turns rows of a batch into the inputs of forward passes.

A piece is the input of one pass. It also says which hidden state predicts each trained token. In
every layout, a token has the log-probability that it would have if its row went through the model
alone. So layouts differ only in time and memory.

    padded    rows of similar length are stacked, and the shorter ones are padded on the right. No
              token attends to the padding after it, so no mask is needed.
    tree      rows lie end to end in one sequence, but a shared prefix appears only once
              (tree_attention.py).
    packed    like tree, but without sharing. A GPU kernel for bfloat16 keeps the rows apart.

Example: in the rows [a b c] and [d e] a model can predict b, c and e. The padded rows [a b c] and
[d e -] have 6 hidden states, and the packed rows [a b c d e] have 5. In both layouts, hidden states
0, 1 and 3 (those of a, b and d) predict b, c and e.

Packed rows need their own attention function, `packed_attention`. Other functions would have to
find the rows' borders in position_ids. A function that ignores position_ids lets the rows see each
other without an error. `packed_attention` computes only full attention, so models with sliding
windows, convolutions or recurrent states get padded rows.
"""

import re
from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from run.config import ConfigError, PPOActorConfig

Batch = dict[str, Tensor]

# Query heads may share a key head. torch 2.11 detects this, but later versions need an argument.
GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}

# Configuration keys of transformers that cap, scale or shift logits or attention.
UNUSUAL = re.compile("logit|^(lm_head|output)_multiplier$")


class Piece(NamedTuple):
    """The input of one forward pass, and the N trained tokens that it predicts."""

    inputs: dict[str, Any]  # for the model: input_ids (b, t), and what the attention needs
    # (N,) each: a token's values in the batch, and its row and column there. `predicted_by` is the
    # index (below b * t) of the hidden state that predicts the token.
    tokens: Batch


def make_piece(rows: Batch, states: Tensor, inputs: dict[str, Any]) -> Piece:
    """Return the piece of `rows`, with the model's `inputs`. Token c of row r has the hidden state
    number states[r, c], which predicts token c + 1. rows["row"] holds the rows' indices in the
    batch."""
    row, before = (rows["loss_mask"][:, 1:] > 0).nonzero(as_tuple=True)  # (N,), (N,)
    tokens = {
        key: x[row, before + 1] for key, x in rows.items() if x.shape == rows["loss_mask"].shape
    }
    tokens |= {"row": rows["row"][row], "column": before + 1}
    return Piece(inputs, tokens | {"predicted_by": states[row, before]})


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    return {key: x[rows] for key, x in batch.items()}


def row_lengths(batch: Batch) -> list[int]:
    mask = batch["attention_mask"].bool()  # (rows, T)
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("attention_mask has a 1 after a 0: pad the rows on the right")
    return mask.sum(1).tolist()


def deal(lengths: Sequence[int], n: int) -> list[list[int]]:
    """Deal rows out to n ranks in turn, the longest first, and return the rows of each rank. The
    token counts of two ranks then differ by at most the longest row's length."""
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return [rows[k::n] for k in range(min(n, len(rows)))]


def split_minibatches(batch: Batch, n: int) -> list[list[int]]:
    """Deal all prompt groups out to n mini-batches in turn, and return the rows of each mini-batch.
    The rows of a group stay together, so that their tree contains the prompt only once. If two
    kinds of prompts alternate, an even n gives each mini-batch only one kind."""
    ids = batch.get("group_ids", torch.arange(len(batch["input_ids"])))  # (rows,)
    groups, group = ids.unique(return_inverse=True)  # (G,), (rows,) from 0 to G - 1
    n = min(n, len(groups))
    return [(group % n == k).nonzero()[:, 0].tolist() for k in range(n)]


def cut_rows(batch: Batch, mb_tokens: int) -> Iterator[Piece]:
    """Cut a batch into padded pieces of at most `mb_tokens` tokens. A longer row is a piece of its
    own."""
    lengths = row_lengths(batch)
    [rows] = deal(lengths, 1)  # the longest first
    while rows:
        t = lengths[rows[0]]
        n = max(1, mb_tokens // t)
        part, rows = rows[:n], rows[n:]
        ids = batch["input_ids"][part, :t].long()  # (b, t)
        states = torch.arange(ids.numel()).view(ids.shape)  # (b, t)
        yield make_piece(take(batch, part), states, {"input_ids": ids})


def pick_layout(actor: PPOActorConfig, device: str, model: Any) -> str:
    """Return the name of the layout. Raises ConfigError for a model whose log-probabilities would
    be wrong."""
    shape = model.config.get_text_config()
    head = model.get_output_embeddings()
    window = ["sliding_window"] if getattr(shape, "sliding_window", None) else []
    beyond = {*(getattr(shape, "layer_types", None) or window)} - {"full_attention"}
    if not model.is_backend_compatible():  # would ignore our attention functions
        beyond.add("attention of its own")
    keys = filter(UNUSUAL.search, dir(shape))  # some are properties
    refused = [key for key in keys if getattr(shape, key) not in (None, False, 1)]
    if getattr(head, "bias", None) is not None:
        refused += ["a bias of the logits"]
    if actor.enable_tree_training:
        refused += beyond
    if refused:
        raise ConfigError(f"{type(model).__name__} cannot be trained, because of {refused}")
    if actor.enable_tree_training:
        return "tree"
    if beyond:
        return "padded"
    if device == "cpu":
        return "tree" if actor.enable_tree_training is None else "padded"
    return "packed" if actor.dtype == "bfloat16" else "padded"


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float,
    *,
    bounds: Tensor,
    longest: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed piece. `query` has the shape (1, heads, t, d),
    `key` and `value` (1, key_heads, t, d), and the output (1, t, heads, d)."""
    q, k, v = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
    causal: Any = {"scale": scaling, "window_size": (-1, 0), **GROUPED}  # all before, none after
    out: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, **causal)  # (t, heads, d)
    return out.unsqueeze(0), None


AttentionInterface.register("packed", packed_attention)
# cuDNN's attention is off: it prepares a plan for every shape, and most batches have new shapes.
torch.backends.cuda.enable_cudnn_sdp(False)
