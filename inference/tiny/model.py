"""The forward pass of Llama, Qwen2 and Qwen3, with a cache of keys and values.

The hidden state x holds one vector of D numbers for each token. Each layer adds two terms to it:

    q, k, v = W_q norm(x), W_k norm(x), W_v norm(x)          q and k are rotated by the position
    x += W_o softmax(q k' / sqrt(d)) v                       attention to this and earlier tokens
    x += W_down (silu(W_gate norm(x)) * W_up norm(x))        the feed-forward network

After the last layer, logits = W_head norm(x). Qwen2 adds biases to q, k and v; Qwen3 applies norm
to each head of q and k before the rotation. In a small model every tensor operation costs about a
microsecond, whatever its size, so one product computes q, k and v, and another gate and up.

`step` feeds each sequence the tokens that its slot of the cache does not hold yet. Prefill, decode
and the next turn of a conversation differ only in how many these are. Rows are padded on the left,
so all end in the last column. For feeds=[[b0, b1, b2, b3], [c2, c3]], cached=[0, 2], first_slot=1:

    cache    position 0  1  2  3      batch    column 0  1  2  3      position      written to slot
    slot 1            .  .  .  .      row 0           b0 b1 b2 b3     0  1  2  3     1  1  1  1
    slot 2            c0 c1 .  .      row 1           -- -- c2 c3     0  1  2  3     x  x  2  2

*Bits.* In deterministic mode a row's logits do not depend on the other rows. Torch picks a kernel
by the shapes of the matrices, and two kernels may add in different orders. So weights are stored
column by column (`_fuse`), a product has 8 to 128 rows (`product`, `attend`), a prompt is fed in
multiples of 8 tokens up to 128, and the number of keys is chosen (`key_length`). These rules come
from measurements (docs/results.md); another CPU may need others.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from inference.tiny.sampling import sample, score_prompt
from inference.tiny.scheduler import Sequence

SUPPORTED: dict[str, tuple] = {  # field of config.json: the values that work, the default first
    "model_type": ("llama", "qwen2", "qwen3"),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
}
LAYER = {  # what `forward` multiplies by in a layer: the weights of the folder that it joins
    "norm_1": ["input_layernorm.weight"],  # (D,)
    "w_qkv": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "b_qkv": ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"],
    "qk_norm": ["self_attn.q_norm.weight", "self_attn.k_norm.weight"],  # (2 * d,)
    "w_o": ["self_attn.o_proj.weight"],  # (heads * d, D)
    "norm_2": ["post_attention_layernorm.weight"],
    "w_gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],  # (D, 2 * width)
    "w_down": ["mlp.down_proj.weight"],  # (width, D)
}


def read_weights(folder: str) -> dict[str, Tensor]:
    """Return the tensors of a folder's safetensors files."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"no *.safetensors in {folder}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def receive_weights(
    group: Any, names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> dict[str, Tensor]:
    """Return the tensors that rank 0 of the process group broadcasts, in the order of `names`."""
    named = {}
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        named[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        group.broadcast(named[name], 0).wait()
    return named


def rope_frequencies(config: dict[str, Any], d: int) -> Tensor:
    """Return the angle by which each pair of a head's elements turns per position: (d/2,)."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.get("rope_theta")}
    rope |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, d, 2) / d)
    if rope["rope_type"] == "default":
        return frequencies
    if rope["rope_type"] != "llama3":
        raise ValueError(f"rope_type {rope['rope_type']} is not supported, only default and llama3")
    # Slow the pairs that turn only a few times within the original context.
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / rope["factor"])


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Return x / sqrt(|x|^2 / D + eps) * weight, in half the time of F.rms_norm."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # |x|
    return x * torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_() * weight


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Return (a + ib) e^(i angle) for the halves a and b of each head of x (..., d). `rotation` is
    complex, (..., d/2). The result interleaves the halves; q k' does not notice."""
    a, b = x.chunk(2, dim=-1)
    return torch.view_as_real(torch.complex(a, b) * rotation).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, min_rows: int) -> Tensor:
    """Return softmax(q k' / sqrt(d) + mask) v, (T, heads * d). The query heads that share a key
    head are stacked into one product. Shapes: q (rows, columns, heads, d), k and v (rows, groups,
    keys, d), mask (rows, 1, 1 or heads/groups * columns, keys)."""
    rows, columns, heads, d = q.shape
    groups = k.shape[1]
    q = q.view(rows, columns, groups, -1, d).permute(0, 2, 3, 1, 4).reshape(rows, groups, -1, d)
    n = q.shape[2]  # heads/groups * columns
    if n < min_rows:  # only in decode; what the copies give is dropped
        q = q.repeat(1, 1, -(-min_rows // n), 1)
    out = F.scaled_dot_product_attention(q, k, v, mask)[:, :, :n]
    return out.view(rows, groups, -1, columns, d).permute(0, 3, 1, 2, 4).reshape(-1, heads * d)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def key_length(longest: int, deterministic: bool) -> int:
    """Return to how many keys every row of a step attends; `longest` of them are needed.

    The attention kernel works in blocks of 512 keys. When the last block had 256 to 448 keys, it
    added in another order (measured on two CPUs), so deterministic mode avoids such lengths.
    """
    keys = round_up(longest, 64 if deterministic else 16)
    return round_up(keys, 512) if deterministic and keys % 512 > 192 else keys


class Model:
    """A language model in float32, and the keys and values of its slots."""

    def __init__(self, folder: str, slots: int, deterministic: bool = False) -> None:
        """Load a Hugging Face folder. Raises ValueError if this pass cannot compute it."""
        path = Path(folder)
        if not (path / "config.json").is_file():
            raise ValueError(f"no model in {folder}: a folder with config.json is needed")
        config = generation = json.loads((path / "config.json").read_text())
        if (path / "generation_config.json").is_file():
            generation = json.loads((path / "generation_config.json").read_text())
        eos = generation.get("eos_token_id")
        self.eos = frozenset(eos if isinstance(eos, list) else [eos])  # tokens that end a text
        for key, works in SUPPORTED.items():
            if (value := config.get(key, works[0])) not in works:
                raise ValueError(
                    f"{key} {value} is not supported, only {', '.join(map(str, works))}"
                )
        self.slots, self.deterministic = slots, deterministic
        # the fewest rows of a product, and the most tokens of a sequence in one step
        self.min_rows, self.chunk = (8, 128) if deterministic else (1, 1024)
        self.vocab_size: int = config["vocab_size"]
        self.context_length: int = config["max_position_embeddings"]
        self.heads: int = config["num_attention_heads"]
        self.groups: int = config.get("num_key_value_heads") or self.heads
        self.d: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps, self.one = torch.tensor(config["rms_norm_eps"]), torch.ones(1)
        self.frequencies = rope_frequencies(config, self.d)
        self.of_head = torch.tensor([0] * self.heads + [1] * self.groups)  # 0: a query, 1: a key
        n_layers: int = config["num_hidden_layers"]
        # (layers, keys and values, slots, positions, groups, d). Padding is written to the last
        # slot, and `step` adds positions.
        self.kv = torch.zeros(n_layers, 2, slots + 1, 64, self.groups, self.d)

        self.weights = {name: weight.float() for name, weight in read_weights(folder).items()}
        self.layers = []
        for i in range(n_layers):
            prefix = f"model.layers.{i}."
            joined = {part: self._fuse(prefix, *names) for part, names in LAYER.items()}
            self.layers.append(SimpleNamespace(**joined))
        self.norm = self._fuse("model.", "norm.weight")  # (D,)
        self.tied = bool(config.get("tie_word_embeddings"))
        if self.tied:
            self.weights["lm_head.weight"] = self.weights["model.embed_tokens.weight"]
        self.head = self._fuse("", "lm_head.weight")  # (D, vocab)
        if self.tied:
            self.weights["model.embed_tokens.weight"] = self.weights["lm_head.weight"]
        self.embedding = self.weights["model.embed_tokens.weight"]  # (vocab, D)

    def _fuse(self, prefix: str, *names: str) -> Any:
        """Join weights (out, in) along `out` into one matrix (in, out), or biases into one vector.
        The named weights become views of it, so an update of them changes it, too."""
        full = [prefix + name for name in names]
        if missing := [name for name in full if name not in self.weights]:
            if names[0].endswith(("q_proj.bias", "q_norm.weight")):
                return None  # only Qwen2 has the former, only Qwen3 the latter
            raise ValueError(f"the model has no weight {missing[0]}")
        parts = [self.weights[name] for name in full]
        fused = torch.cat([part.t() for part in parts], dim=-1)
        views = fused.t().split([len(part) for part in parts])
        self.weights.update(zip(full, views, strict=True))
        return fused

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        """Return x w, (T, n). In deterministic mode, torch gets 8 to 128 rows at a time."""
        rows = len(x)
        if not self.deterministic or 8 <= rows <= 128:
            return x @ w
        x = F.pad(x, (0, 0, 0, max(0, 8 - rows)))
        return torch.cat([part @ w for part in x.split(128)])[:rows]

    def forward(
        self, ids: Tensor, positions: Tensor, slots: Tensor, first_slot: int, n_keys: int, kept: int
    ) -> Tensor:
        """Return the logits (rows, kept, vocab) of the last `kept` columns. `ids`, `positions` and
        `slots` (where a token's key is written) have the shape (rows, columns). Row r attends to
        the first n_keys keys of slot first_slot + r."""
        (rows, columns), heads, groups, d = ids.shape, self.heads, self.groups, self.d
        # A token sees the positions up to its own: (rows, 1, columns, n_keys).
        seen = torch.arange(n_keys) <= positions[:, None, :, None]
        mask = torch.where(seen, 0.0, -torch.inf)
        if columns > 1:
            mask = mask.repeat(1, 1, heads // groups, 1)
        # e^(i p f): (rows, columns, 1, d/2)
        rotation = torch.polar(self.one, positions[:, :, None, None] * self.frequencies)
        read = self.kv[:, :, first_slot : first_slot + rows, :n_keys].transpose(3, 4)

        x = F.embedding(ids.view(-1), self.embedding)  # (T, D) with T = rows * columns
        for w, kv, (keys, values) in zip(self.layers, self.kv, read, strict=True):
            # q, k, v = W_q norm(x), W_k norm(x), W_v norm(x); q and k are rotated
            qkv = self.product(rms_norm(x, w.norm_1, self.eps), w.w_qkv)
            qkv = qkv if w.b_qkv is None else qkv + w.b_qkv
            qk, v = qkv.view(rows, columns, -1, d).split([heads + groups, groups], dim=2)
            if w.qk_norm is not None:
                norms = w.qk_norm.view(2, d).index_select(0, self.of_head)  # (heads + groups, d)
                qk = rms_norm(qk, norms, self.eps)
            q, k = rotate(qk, rotation).split([heads, groups], dim=2)
            kv[:, slots, positions] = torch.stack((k, v))

            # x += W_o softmax(q k' / sqrt(d)) v
            x = x + self.product(attend(q, keys, values, mask, self.min_rows), w.w_o)

            # x += W_down (silu(W_gate norm(x)) * W_up norm(x))
            gate_up = self.product(rms_norm(x, w.norm_2, self.eps), w.w_gate_up)
            gate, up = gate_up.chunk(2, dim=-1)  # (T, width)
            x = x + self.product(F.silu(gate) * up, w.w_down)

        # logits = W_head norm(x)
        x = x.view(rows, columns, -1)[:, -kept:].flatten(0, 1)  # (rows * kept, D)
        return self.product(rms_norm(x, self.norm, self.eps), self.head).view(rows, kept, -1)

    @torch.inference_mode()
    def step(
        self,
        feeds: list[list[int]],
        cached: list[int],
        first_slot: int = 0,
        all_logits: bool = False,
    ) -> Tensor:
        """Feed tokens feeds[r] to slot first_slot + r, which caches cached[r] tokens before them.

        Returns the logits (n, k, vocab) of the last k columns, where k is the length of the longest
        feed if `all_logits` is set, and 1 otherwise.
        """
        # 1. Pad on the left; deterministic prefill has a multiple of 8 columns.
        rows, longest = len(feeds), max(map(len, feeds))
        columns = round_up(longest, self.min_rows) if longest > 1 else 1
        padded = [token for feed in feeds for token in [0] * (columns - len(feed)) + feed]
        ids = torch.tensor(padded).view(rows, columns)

        # 2. A row's positions rise by one per column, and padding comes before its first token.
        ends = [done + len(feed) for done, feed in zip(cached, feeds, strict=True)]
        positions = torch.tensor(ends)[:, None] + torch.arange(-columns, 0)  # (rows, columns)
        slots = torch.arange(first_slot, first_slot + rows)[:, None]
        if min(map(len, feeds)) < columns:
            padding = positions < torch.tensor(cached)[:, None]
            slots = torch.where(padding, self.slots, slots)
            positions.masked_fill_(padding, 0)

        # 3. Make the cache long enough.
        n_keys, length = key_length(max(ends), self.deterministic), self.kv.shape[3]
        if n_keys > length:
            self.kv = F.pad(self.kv, (0, 0, 0, 0, 0, max(n_keys, 2 * length) - length))
        kept = longest if all_logits else 1
        return self.forward(ids, positions, slots, first_slot, n_keys, kept)

    @torch.inference_mode()
    def next_tokens(
        self, batch: list[Sequence], feeds: list[list[int]], first_slot: int
    ) -> tuple[list[int], list[float]]:
        """Feed sequences, and draw a token for each. Return the tokens and their logprobs. Gives
        the sequences that want them the logprobs of their prompts."""
        scored = [i for i, one in enumerate(batch) if one.wants_prompt_logprobs and not one.output]
        cached = [one.cached for one in batch]
        logits = self.step(feeds, cached, first_slot, bool(scored))  # (n, k, vocab)
        for i in scored:
            score_prompt(batch[i], logits[i, -len(feeds[i]) :])
        return sample(logits[:, -1], batch)

    @torch.inference_mode()
    def exchange(self, i: int, j: int) -> None:
        """Exchange the keys and values of two slots."""
        self.kv[:, :, [i, j]] = self.kv[:, :, [j, i]]

    @torch.inference_mode()
    def replace_weights(self, named: Mapping[str, Tensor], whole: bool = True) -> None:
        """Copy new weights into the model. Raises ValueError, before any weight has changed, if a
        name or a shape does not match or, with `whole`, if a weight is missing."""
        own = self.weights
        if unknown := named.keys() - own.keys():
            raise ValueError(f"no weight is named {min(unknown)} ({len(unknown)} unknown in all)")
        missing = own.keys() - named.keys() - ({"lm_head.weight"} if self.tied else set())
        if whole and missing:
            raise ValueError(f"weight {min(missing)} is missing ({len(missing)} in all)")
        for name, tensor in named.items():
            if tensor.shape != own[name].shape:
                raise ValueError(f"{name} has shape {[*tensor.shape]}, not {[*own[name].shape]}")
        for name, tensor in named.items():
            own[name].copy_(tensor)
        # Weights that are not finite leave NaNs in the cache, which no mask hides: 0 * NaN = NaN.
        self.kv.nan_to_num_(0.0, 0.0, 0.0)
