"""The forward pass of Llama, Qwen2 and Qwen3, with a cache of keys and values.

The hidden state x holds one vector of D numbers for each token. Each layer adds two terms to x:

    q, k, v = W_q norm(x), W_k norm(x), W_v norm(x)          q and k are rotated by the position
    x += W_o softmax(q k' / sqrt(d)) v                       attention to this and earlier tokens
    x += W_down (silu(W_gate norm(x)) * W_up norm(x))        the feed-forward network

After the last layer, logits = W_head norm(x). Qwen2 adds biases to q, k and v. Qwen3 applies norm
to each head (d numbers) of q and k before the rotation. In a small model a tensor operation of any
size costs about a microsecond. So one product gives q, k and v, and another gives gate and up.

*The cache* has a slot for each sequence, and `step` feeds only the tokens without cached keys.
Prefill, decode and the next turn of a conversation differ only in how many tokens they feed. Slots
have equal length (`fit`). Each is one piece, not a list of pages as in SGLang. So a step reads keys
in place, but a shared prefix has to be copied (.24 ms for 145 tokens).

*Bits.* On one CPU thread in float32, a sequence's logits never depend on the other sequences of the
step, not even in the last bit. Torch alone does not ensure this, because it picks kernels by matrix
shapes, and two kernels can add in different orders. So four rules fix the order: weights are stored
column by column (`_load`), products have 8 to 128 rows (`product`, `attend`), prompts are padded to
a multiple of 8 tokens, and `key_length` rounds up the key count.

*bfloat16.* The hidden state, norms, rotation and softmax stay in float32. On a CPU, oneDNN reorders
(packs) each weight matrix once (`_load`), not for each product.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from inference.tiny.graphs import Graphs

SUPPORTED: dict[str, tuple] = {  # field of config.json: the values that work, the default first
    "model_type": ("llama", "qwen2", "qwen3"),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "rope_type": ("default",),
    "type": ("default",),  # the old name of rope_type
}
LAYER = {  # part of a layer: its weights in the folder
    "norm_1": ["input_layernorm.weight"],  # (D,)
    "w_qkv": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "b_qkv": ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"],
    "q_norm": ["self_attn.q_norm.weight"],  # (d,)
    "k_norm": ["self_attn.k_norm.weight"],
    "w_o": ["self_attn.o_proj.weight"],  # (heads * d, D)
    "norm_2": ["post_attention_layernorm.weight"],
    "w_gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],  # (D, 2 * width)
    "w_down": ["mlp.down_proj.weight"],  # (width, D)
}

ONEDNN = torch.ops.mkldnn
# whether oneDNN multiplies bfloat16 on this CPU
PACKS = torch.backends.mkldnn.is_available() and ONEDNN._is_mkldnn_bf16_supported()
EMBEDDING = "model.embed_tokens.weight"

FEWEST, MOST = 8, 128  # limits for the rows of a float32 product on a CPU (see *Bits*)


def read_weights(folder: str) -> dict[str, Tensor]:
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"no *.safetensors in {folder}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def read_config(folder: str) -> dict[str, Any]:
    """Return config.json, updated with generation_config.json, which may name more tokens that end
    a text. Raises ValueError for an unsupported model."""
    path, generation = Path(folder, "config.json"), Path(folder, "generation_config.json")
    config = json.loads(path.read_text())
    config |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    if generation.is_file():
        config |= json.loads(generation.read_text())
    for key, works in SUPPORTED.items():
        if (value := config.get(key, works[0])) not in works:
            raise ValueError(f"{key} {value} is not supported, only {', '.join(map(str, works))}")
    return config


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Return x / sqrt(|x|^2 / D + eps) * weight, in half the time of F.rms_norm."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # |x|
    return x * torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_() * weight


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Let a and b be the halves of each head of x (..., d), and `rotation` e^(i angle), (..., d/2).
    Return (a + ib) * rotation, with real and imaginary parts interleaved. Since q and k are
    interleaved alike, q k' is the same as without interleaving."""
    a, b = x.chunk(2, dim=-1)
    return torch.view_as_real(torch.complex(a, b) * rotation).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(q k' / sqrt(d) + mask) v, (T, heads * d), with T = rows * columns.

    q       (rows, columns, heads, d)
    k, v    (rows, groups, length of a slot, d), of which only the first n_keys keys count
    mask    (rows, 1, columns, n_keys)
    """
    columns, share, n = q.shape[1], q.shape[2] // k.shape[1], mask.shape[-1]
    keys, values = k[:, :, :n], v[:, :, :n]
    if columns > 1 and q.is_cpu:
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)
    # Query heads that share a key head become one head with more queries: (rows, groups, share *
    # columns, d). With enable_gqa, a decode's attention would take four times as long, and a GPU
    # would copy all keys.
    folded = q.unflatten(2, (-1, share)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if columns > 1:
        mask = mask.repeat(1, 1, share, 1)
    if PACKS and q.is_cpu and q.dtype == torch.bfloat16:
        # In bfloat16, two matrix products are faster than torch's own attention. Multiply by whole
        # slots of k, and cut the scores to n afterwards, because torch would first copy k[:, :,
        # :n].
        scores = torch.add(mask, (folded @ k.mT)[..., :n].float(), alpha=q.shape[-1] ** -0.5)
        out = torch.softmax(scores, -1).to(v.dtype) @ values
    else:  # on a CPU, repeat q, so that a product has at least FEWEST rows
        copies = folded.repeat(1, 1, -(-FEWEST // share), 1) if q.is_cpu else folded
        out = F.scaled_dot_product_attention(copies, keys, values, mask)[:, :, : folded.shape[2]]
    return out.unflatten(2, (share, columns)).permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)


def product(x: Tensor, w: Tensor) -> Tensor:
    """Return x w, (T, n), in the type of x. With bfloat16 weights, a CPU rounds the sums to
    bfloat16, and a GPU keeps float32."""
    if x.is_cuda and w.dtype == torch.bfloat16:
        return torch.mm(x.to(w.dtype), w, out_dtype=torch.float32)
    if w.is_mkldnn:
        return ONEDNN._linear_pointwise(x.to(w.dtype), w, None, "none", [], "").to(x.dtype)
    if w.dtype == torch.bfloat16:
        return (x.to(w.dtype) @ w).to(x.dtype)
    rows = len(x)
    if FEWEST <= rows <= MOST or not x.is_cpu:
        return x @ w
    x = F.pad(x, (0, 0, 0, -rows % FEWEST))  # so the last part, too, has at least FEWEST rows
    return torch.cat([part @ w for part in x.split(MOST)])[:rows]


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def round_up_a_little(n: int, multiple: int) -> int:
    """Round n up to one of a few values. If `multiple` is 8, these are 8, 16, ..., 64, 80, 96, 112,
    128, 160 and so on."""
    return round_up(n, max(multiple, (1 << (n - 1).bit_length()) // 8))


def key_length(longest: int) -> int:
    """Round up `longest`, the number of keys that a step reads for each sequence.

    The attention kernel works in blocks of 512 keys. With 256 to 448 keys in the last block, the
    kernel adds in another order (seen on two CPUs). Another order changes the bits, so such a block
    is filled up to 512 keys.
    """
    keys = round_up(longest, 64)
    return round_up(keys, 512) if keys % 512 > 192 else keys


class Model:
    """A language model, with the keys and values of its slots."""

    def __init__(
        self,
        folder: str,
        slots: int,
        tokens: int = 16384,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        """Load a Hugging Face folder, and make a cache for at most `slots` sequences and `tokens`
        tokens in total. Raises ValueError for an unsupported model."""
        config = read_config(folder)
        files = read_weights(folder)
        eos = config.get("eos_token_id")
        self.eos = frozenset(eos if isinstance(eos, list) else [eos])  # tokens that end a text
        self.dtype: torch.dtype = getattr(torch, dtype)  # of weights, keys and products
        self.device = torch.device(device)
        self.exact = self.device.type == "cpu" and dtype == "float32"  # see "Bits" above
        # limits on a step's tokens, with padding: `prefill` for all prompts, `chunk` for one
        self.prefill = 2048 if self.device.type == "cuda" else 512
        self.chunk = MOST if self.exact else self.prefill
        self.packs = PACKS and self.device.type == "cpu" and not self.exact  # oneDNN packs w_...
        self.vocab_size: int = config["vocab_size"]
        self.context_length = min(config["max_position_embeddings"], tokens)
        self.heads: int = config["num_attention_heads"]
        self.groups: int = config["num_key_value_heads"]
        self.d: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps = torch.tensor(config["rms_norm_eps"], device=self.device)
        # the angle by which each pair of a head's elements turns per position: (d/2,)
        frequencies = 1 / config["rope_theta"] ** (torch.arange(0, self.d, 2) / self.d)
        self.frequencies = frequencies.to(self.device)
        n_layers: int = config["num_hidden_layers"]
        self.most_slots = slots
        self.positions = round_up(tokens, 512)
        shape = n_layers, 2, self.positions * self.groups + 1, self.d
        # On a CPU, parts of the cache that are never written take no memory.
        self.cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        # (layers, keys and values, slots, groups, length, d)
        self.kv = self.cache[:, :, None, None, :0]
        self.resize(1)

        is_tied = config.get("tie_word_embeddings")
        outer = {  # parts outside the layers
            "norm": "model.norm.weight",  # (D,)
            "w_head": EMBEDDING if is_tied else "lm_head.weight",  # (D, vocab)
        }
        if self.packs or not is_tied:  # else the embedding (vocab, D) is a view of w_head
            outer["embedding"] = EMBEDDING
        self.outer = SimpleNamespace(**dict.fromkeys(outer))
        self.layers = [SimpleNamespace(**dict.fromkeys(LAYER)) for _ in range(n_layers)]
        self.parts = [(self.outer, part, [name]) for part, name in outer.items()]
        self.parts += [
            (layer, part, [f"model.layers.{i}.{name}" for name in names])
            for i, layer in enumerate(self.layers)
            for part, names in LAYER.items()
        ]
        self.shapes = {name: weight.shape for name, weight in files.items()}
        self._load(files)
        if None in vars(self.outer).values():
            raise ValueError(f"{folder} has no embedding, norm or head")
        if "embedding" not in outer:
            self.outer.embedding = self.outer.w_head.t()
        self.graphs = Graphs() if self.device.type == "cuda" else None

    def _load(self, named: Mapping[str, Tensor]) -> None:
        """Join the weights (out, in) or biases (out,) of each part along `out`. A joined matrix is
        transposed to (in, out), unless oneDNN packs the matrix. New weights are copied into the old
        tensors, because CUDA graphs read those."""
        for owner, part, names in self.parts:
            if names[0] not in named:
                continue
            dtype = self.dtype if named[names[0]].ndim == 2 else torch.float32
            weights = [named[name].to(self.device, dtype) for name in names]
            if not part.startswith("w_"):
                joined = torch.cat(weights)
            elif self.packs:
                joined = ONEDNN._reorder_linear_weight(torch.cat(weights), FEWEST)
            elif self.dtype == torch.float32:
                joined = torch.cat([one.t() for one in weights], dim=-1)
            else:
                joined = torch.cat(weights).t()
            old = getattr(owner, part)
            setattr(owner, part, joined if old is None else old.copy_(joined))

    @torch.inference_mode()
    def step(self, feeds: list[list[int]], cached: list[int], first_slot: int = 0) -> Tensor:
        """Feed the tokens feeds[r] to slot first_slot + r, which already holds the keys of
        cached[r] tokens. Return the logits (rows, vocab) of each row's next token."""
        reach = max(map(sum, zip(cached, map(len, feeds), strict=True)))  # keys of the longest row
        if self.graphs is None or max(map(len, feeds)) > 1:
            inputs = self._inputs(feeds, cached, first_slot)
            inputs = inputs.to(self.device, non_blocking=self.cache.is_cuda)
            n_keys = key_length(reach) if self.exact else round_up(reach, 32)
            x = self._layers(inputs, first_slot, n_keys)
        else:
            # Add empty rows before and after `feeds`, so that few graphs are needed.
            slots, _, length = self.kv.shape[2:5]
            end = first_slot + len(feeds)
            rows = min(round_up_a_little(end, FEWEST), slots)
            n_keys = min(round_up_a_little(reach, 64), length)
            feeds = [[]] * first_slot + feeds + [[]] * (rows - end)
            cached = [0] * first_slot + cached + [0] * (rows - end)
            layers = partial(self._layers, first_slot=0, n_keys=n_keys)
            x = self.graphs.run((rows, n_keys, length), layers, self._inputs(feeds, cached, 0))
            x = x[first_slot:end]
        # logits = W_head norm(x)
        return product(rms_norm(x, self.outer.norm, self.eps), self.outer.w_head)

    def _inputs(self, feeds: list[list[int]], cached: list[int], first_slot: int) -> Tensor:
        """Return a step's inputs, (4, rows, columns): each token's id, position and place in the
        cache, and the index of its row's last token."""
        # A decode has one column, and a prefill has a multiple of 8.
        lengths = [len(feed) for feed in feeds]
        rows, longest = len(feeds), max(lengths)
        columns = round_up(longest, FEWEST) if longest > 1 else 1
        ids = torch.tensor([feed + [0] * (columns - len(feed)) for feed in feeds])
        positions = torch.tensor(cached)[:, None] + torch.arange(columns)

        # `places` says where the first head's keys go in the cache. Padding gets a huge place,
        # which `_layers` lowers to the last place of the cache.
        slots = torch.arange(first_slot, first_slot + rows)
        places = slots[:, None] * self.groups * self.kv.shape[4] + positions
        if min(lengths) < columns:
            places[torch.arange(columns) >= torch.tensor(lengths)[:, None]] = 2**40
        last = [[row * columns + max(n, 1) - 1] for row, n in enumerate(lengths)]
        return torch.stack((ids, positions, places, torch.tensor(last).expand(-1, columns)))

    def _layers(self, inputs: Tensor, first_slot: int, n_keys: int) -> Tensor:
        """Return the hidden state x of each row's last token after all layers, (rows, D)."""
        heads, groups, d = self.heads, self.groups, self.d
        ids, positions, places, last = inputs
        rows, columns = ids.shape
        offsets = torch.arange(groups, device=self.device) * self.kv.shape[4]
        # (T * groups,); the cache's last place, for padding, belongs to no slot
        places = (places[:, :, None] + offsets).flatten().clamp_(max=self.positions * groups)

        read = self.kv[:, :, first_slot : first_slot + rows]
        # A token attends to the keys up to its own position: (rows, 1, columns, n_keys).
        seen = torch.arange(n_keys, device=self.device) <= positions[:, None, :, None]
        mask = torch.where(seen, 0.0, -torch.inf).to(self.dtype)
        # e^(i p f): (rows, columns, 1, d/2)
        angle = positions[:, :, None, None] * self.frequencies
        rotation = torch.polar(torch.ones_like(angle), angle)

        # (T, D) with T = rows * columns
        x = F.embedding(ids.flatten(), self.outer.embedding).float()
        for w, kv, (keys, values) in zip(self.layers, self.cache, read, strict=True):
            # q, k, v = W_q norm(x), W_k norm(x), W_v norm(x); q and k are rotated
            qkv = product(rms_norm(x, w.norm_1, self.eps), w.w_qkv)
            qkv = qkv if w.b_qkv is None else qkv + w.b_qkv
            q, k, v = qkv.view(rows, columns, -1, d).split([heads, groups, groups], dim=2)
            if w.q_norm is not None:
                q, k = rms_norm(q, w.q_norm, self.eps), rms_norm(k, w.k_norm, self.eps)
            q, k = rotate(q, rotation).to(self.dtype), rotate(k, rotation)
            kv[:, places] = torch.stack((k, v)).flatten(1, 3).to(self.dtype)

            # x += W_o softmax(q k' / sqrt(d)) v
            x = x + product(attend(q, keys, values, mask), w.w_o)

            # x += W_down (silu(W_gate norm(x)) * W_up norm(x))
            gate_up = product(rms_norm(x, w.norm_2, self.eps), w.w_gate_up)
            gate, up = gate_up.chunk(2, dim=-1)  # (T, width)
            x = x + product(F.silu(gate) * up, w.w_down)
        return x[last[:, 0]]

    # The slots

    def fit(self, longest: int) -> tuple[int, int]:
        """Return the length of a slot that holds `longest` tokens, and the number of such slots.
        Unless oneDNN packs the weights, the length is 64, 128, 192, 640 or a multiple of 512
        (`key_length` says why)."""
        length = round_up_a_little(longest, 64)
        length = min(length if self.packs else key_length(length), self.positions)
        return length, min(self.most_slots, self.positions // length)

    def resize(self, longest: int) -> tuple[int, int]:
        """Make slots for sequences of `longest` tokens, and keep as many of the old keys and values
        as fit."""
        old, (length, slots) = self.kv, self.fit(longest)
        used = self.cache[:, :, : slots * self.groups * length]
        self.kv = used.unflatten(2, (slots, self.groups, length))
        n, m = min(slots, old.shape[2]), min(length, old.shape[4])
        for source, target in zip(old, self.kv, strict=True):
            target[:, :n, :, :m] = source[:, :n, :, :m].clone()
        return length, slots

    def exchange(self, i: int, j: int, n: int) -> None:
        kept = self.kv[:, :, i, :, :n].clone()
        self.copy(j, i, n)
        self.kv[:, :, j, :, :n] = kept

    def copy(self, source: int, target: int, n: int) -> None:
        self.kv[:, :, target, :, :n] = self.kv[:, :, source, :, :n]

    def replace_weights(self, named: Mapping[str, Tensor]) -> None:
        """Copy new weights into the model. Layers that the trainer freezes may be missing. Raises
        RuntimeError, and changes nothing, if all weights are missing, or if one has another shape
        or is not finite. A NaN is refused, because it would get into the cached keys, and the
        attention mask does not hide a NaN."""
        joined = (names for *_, names in self.parts if not named.keys().isdisjoint(names))
        new = {name for names in joined for name in names}
        wrong = [  # a sum is quick, and finite only if all numbers are
            name
            for name in new
            if name not in named
            or named[name].shape != self.shapes.get(name)
            or not named[name].sum().isfinite()
        ]
        if wrong or not new:
            raise RuntimeError(f"{wrong or 'all'}: missing, not finite or of another shape")
        self._load(named)
