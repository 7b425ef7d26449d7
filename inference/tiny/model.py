"""The slot cache and one step of a batch: how a Hugging Face model decodes many sequences at once.

**The rule.** A *slot* is one row of the KV cache. It knows how many of its tokens are `cached`; a step feeds what is
not, `tokens[cached:]`, for every row it is given, and returns the logits of each row's last token. So prefill, decode,
resuming after an abort, starting over under new weights and continuing a conversation are one code path: they differ
in `cached` only.

**How it works.** A transformers model asks three things of its cache and mask: it calls `past_key_values.update(k, v,
layer)`, it takes `position_ids`, and a 4-D `attention_mask` is used as it is. SlotCache answers the first by writing
keys and values where each row's sequence ends and returning a view of the cache; nothing is concatenated. The model
itself is unmodified; only its attention function is ours (transformers' AttentionInterface), because it computes all
query heads that share a key head in one go and because of the next paragraph.

**Bits.** A row's logits shall not depend on its neighbours, or a run with a fixed seed would not repeat itself: which
requests meet in a batch is a matter of milliseconds. A matrix product rounds differently when its shape makes the
library choose another kernel. Measured with torch 2.13 and MKL on a CPU with AVX-512: results are equal bit by bit as
long as every product has at least four rows and the number of keys avoids two residues (`key_length`). Then one row
alone, the same row among 64, prefill in one go, prefill after a reused prefix and token-by-token decoding all give
identical logits. Filling up to four rows makes a single stream of a larger model a quarter slower (0.13M parameters:
not at all), so it is done where `deterministic` asks for it; else batches of one to three rows differ in the last bit.
Another processor or BLAS may choose its kernels elsewhere: there the tokens are still almost always the same, and
logits agree to 1e-6. bench/engine.py prints which of the two holds.

**Randomness** is counter-based: the uniform number that picks the token at position p of a request with seed s is a
hash of (s, p). No generator has state, so a request's noise depends on nothing but itself, and an aborted request
that is sent again with its partial output goes on with the numbers it would have got.

**Logprobs** are log_softmax(logits / T) over the whole vocabulary in float32, before top_p and top_k, and after
penalties (they change the logits); at T = 0 log_softmax(logits). That is SGLang's definition and what a trainer
reproduces by dividing its logits by the same T.

What it does not do: sliding windows, recurrent layers, soft-capped attention (`check` runs a few tokens through the
model's own forward and refuses a model that disagrees), paged memory (each slot is as long as the longest sequence
so far), anything but float32. AReaL has no such file: its servers are SGLang and vLLM, on GPUs.
"""

import base64
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from inference.tiny.scheduler import SamplingParams, Scheduler, Sequence

MIN_ROWS = 4  # fewer rows in a matrix product select another kernel, and other bits


class ModelError(ValueError):
    """A model or a set of weights that cannot be used; the message is one line."""


def key_length(longest: int) -> int:
    """Keys attended to when the longest row has `longest`: a multiple of 64, so that shapes repeat; 256
    and 320 keys (modulo the attention kernel's block of 512) are summed in another order than the rest,
    so 384 replaces them."""
    keys = -(-longest // 64) * 64
    return keys + (-keys % 128 or 128 if keys % 512 in (256, 320) else 0)


def slot_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any):
    """softmax(q k' / sqrt(d) + mask) v, the query heads of one key head stacked as rows of one product.

    query (n, heads, q, d); key, value (n, groups, keys, d); mask (n, 1, q, keys), 0 or -inf. Returns (n, q, heads, d).
    """
    n, heads, q, d = query.shape
    stacked = query.reshape(n, key.shape[1], -1, d)  # (n, groups, heads/groups * q, d)
    rows = stacked.shape[2]
    if q > 1:
        attention_mask = attention_mask.repeat(1, 1, rows // q, 1)
    elif rows < MIN_ROWS:
        stacked = stacked.repeat(1, 1, -(-MIN_ROWS // rows), 1)
    out = F.scaled_dot_product_attention(stacked, key, value, attention_mask, scale=kwargs.get("scaling"))
    return out[:, :, :rows].reshape(n, heads, q, d).transpose(1, 2).contiguous(), None


AttentionInterface.register("slots", slot_attention)


class SlotCache:
    """Keys and values of all slots: `kv` (layers, 2, rows, groups, length, d). Four spare rows: filler for batches
    below four rows, the last of them also the place where the keys of padding are thrown."""

    def __init__(self, layers: int, slots: int, groups: int, d: int) -> None:
        self.kv = torch.zeros(layers, 2, slots + MIN_ROWS, groups, 64, d)
        self.where = torch.empty(0)  # (n * groups * q,): flat places that the step under way writes
        self.rows = slice(0, 0)  # the rows it reads
        self.keys = 0  # and how many of their keys

    def aim(self, rows: slice, places: Tensor, positions: Tensor, keys: int) -> None:
        """Set what `update` will do in this step: places, positions (n, q) say which cache row and position each
        fed token is written to; `rows` and `keys` what is read. Makes room for so many keys, at least doubling, so
        that copying stays rare."""
        groups, length = self.kv.shape[-3:-1]
        if keys > length:
            length = max(keys, 2 * length)
            self.kv = F.pad(self.kv, (0, 0, 0, length - self.kv.shape[-2]))
        flat = (places[:, None] * groups + torch.arange(groups)[:, None]) * length + positions[:, None]
        self.where, self.rows, self.keys = flat.flatten(), rows, keys  # flat: (n, groups, q)

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What transformers calls: k, v (n, groups, q, d) of the fed tokens -> views (n, groups, keys, d) of all."""
        d = k.shape[-1]
        keys, values = self.kv[layer]
        keys.view(-1, d).index_copy_(0, self.where, k.reshape(-1, d))
        values.view(-1, d).index_copy_(0, self.where, v.reshape(-1, d))
        return keys[self.rows, :, : self.keys], values[self.rows, :, : self.keys]

    def swap(self, i: int, j: int) -> None:
        """Exchange two rows."""
        self.kv[:, :, [i, j]] = self.kv[:, :, [j, i]]


class TinyModel:
    """A causal LM and its slots. `step` is the only forward pass; `replace_weights` the only change of weights."""

    def __init__(self, path: str, slots: int, deterministic: bool = False) -> None:
        """Read a Hugging Face directory. Raises ModelError where it is none or of an architecture that does not fit,
        and what transformers raises for other reasons: OSError and ValueError."""
        if not (Path(path) / "config.json").is_file():
            raise ModelError(f"no model in {path}: a Hugging Face directory with config.json is needed")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="slots")
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        self.model = model.eval()
        self.slots = slots
        self.min_rows = MIN_ROWS if deterministic else 1
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        eos = model.generation_config.eos_token_id
        self.eos = frozenset(eos if isinstance(eos, list) else [eos])  # ids that end a sequence; may hold None
        groups = getattr(config, "num_key_value_heads", None) or heads
        d = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.cache = SlotCache(config.num_hidden_layers, slots, groups, d)
        self.check()

    @torch.inference_mode()
    def check(self) -> None:
        """Refuse a model whose own forward pass disagrees with `step`."""
        kinds = set(getattr(self.model.config, "layer_types", None) or []) - {"full_attention"}
        if kinds:
            raise ModelError(f"layers of kind {', '.join(kinds)} are not supported, only full attention")
        ids = [i * 7 % self.vocab_size for i in range(6)]
        ours = self.step([ids], [0])[0, -1]
        self.model.set_attn_implementation("sdpa")
        theirs = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        self.model.set_attn_implementation("slots")
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
            raise ModelError(f"{type(self.model).__name__} does not fit the slot cache: its logits are others")

    @torch.inference_mode()
    def step(self, feeds: list[list[int]], cached: list[int], first: int = 0, every: bool = False) -> Tensor:
        """Feed the rows first, first + 1, .. their next tokens.

        feeds: per row, the tokens behind its `cached` first ones. Returns logits (n, k, vocab), the last of the k
        being those of each row's last token; with `every` k covers the longest feed. Rows are right-aligned.
        """
        n, q = len(feeds), max(map(len, feeds))
        if q > 1:  # prefill: columns of padding in front
            q = -(-q // MIN_ROWS) * MIN_ROWS
        else:  # decode: at least min_rows rows
            fill = max(0, self.min_rows - n)
            feeds, cached = [*feeds, *[[]] * fill], [*cached, *[0] * fill]
        rows = len(feeds)
        ids = torch.tensor([[0] * (q - len(feed)) + feed for feed in feeds])  # (rows, q)
        ends = torch.tensor([c + len(feed) for c, feed in zip(cached, feeds, strict=True)])[:, None]
        positions = ends + torch.arange(-q, 0)  # (rows, q)
        padding = positions < torch.tensor(cached)[:, None]
        positions = positions.masked_fill(padding, 0)
        places = torch.arange(first, first + rows)[:, None].masked_fill(padding, self.slots + MIN_ROWS - 1)
        keys = key_length(int(positions.max()) + 1)
        self.cache.aim(slice(first, first + rows), places, positions, keys)
        mask = torch.zeros(rows, q, keys).masked_fill_(torch.arange(keys) > positions[:, :, None], float("-inf"))
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask[:, None],
            past_key_values=self.cache,
            logits_to_keep=q if every else min(q, MIN_ROWS),
        )
        return output.logits[:n]

    @torch.inference_mode()
    def replace_weights(self, named: Mapping[str, Tensor], whole: bool = True) -> None:
        """Copy new weights over the old; an error, and nothing copied, when names or shapes do not match, or when it
        should be the `whole` model and is not. What is NaN or infinite in the cache becomes 0: a row's next sequence
        masks it by adding -inf and weighs it with 0, and NaN stays NaN under both."""
        own = self.model.state_dict()
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        if unknown := named.keys() - own.keys():
            raise ModelError(f"the model has no weight {min(unknown)} ({len(unknown)} unknown in all)")
        if whole and (missing := own.keys() - named.keys() - set(tied)):
            raise ModelError(f"weight {min(missing)} is missing ({len(missing)} in all)")
        for name, tensor in named.items():
            if tensor.shape != own[name].shape:
                raise ModelError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(own[name].shape)}")
        for name, tensor in named.items():
            own[name].copy_(tensor)
        self.cache.kv.nan_to_num_(0.0, 0.0, 0.0)


def read_weights(path: str) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files; ModelError when there are none or they cannot be read."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ModelError(f"no *.safetensors in {path}")
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights in {path}: {error}") from error


def receive_weights(group: Any, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> dict[str, Tensor]:
    """The tensors that rank 0 of `group` broadcasts in this order."""
    like = zip(names, dtypes, shapes, strict=True)
    named = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in like}
    for work in [group.broadcast(tensor, 0) for tensor in named.values()]:
        work.wait()
    return named


class TensorReader(pickle.Unpickler):
    """Reads tensors and nothing else: a pickle can call any function, and this one came over HTTP."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):  # which itself would read any pickle
            return lambda raw: torch.load(io.BytesIO(raw), weights_only=True)
        if (module, name) in {("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")}:
            return super().find_class(module, name)
        raise ModelError(f"tensors do not need {module}.{name}")


def unpack_weights(serialised: list[str]) -> dict[str, Tensor]:
    """The tensors in weights.serialise's base64, one for each rank of a server."""
    return dict(TensorReader(io.BytesIO(base64.b64decode(serialised[0]))).load())


def uniforms(seeds: list[int], positions: list[int]) -> Tensor:
    """One number in [0, 1) per row, a hash (splitmix64) of (seed, position). (n,) float32, 23 bits."""
    x = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    for word in (np.array(positions, dtype=np.uint64), np.uint64(0)):
        x = (x ^ word) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(41)).astype(np.float32) * np.float32(2**-23))


def truncate(weights: Tensor, params: list[SamplingParams]) -> Tensor:
    """Zero what top_k and top_p leave out, never the likeliest; not renormalised. weights (n, vocab) -> the same."""
    ranked, order = weights.sort(dim=-1, descending=True)
    rank = torch.arange(weights.shape[1])
    top_k = torch.tensor([p.top_k if p.top_k > 0 else weights.shape[1] for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params])[:, None]
    keep = (rank < top_k) & ((ranked.cumsum(-1) - ranked < top_p) | (top_p >= 1) | (rank == 0))
    return torch.zeros_like(weights).scatter(1, order, ranked * keep)


@torch.inference_mode()
def sample(logits: Tensor, batch: list[Sequence]) -> tuple[list[int], list[float]]:
    """Draw the next token of each sequence; logits (n, vocab). Returns n tokens and their logprobs."""
    params = [one.params for one in batch]
    for i, one in enumerate(batch):  # logit_v -= penalty * (how often v was generated)
        if penalty := one.params.frequency_penalty:
            logits[i] -= penalty * torch.bincount(torch.tensor(one.output, dtype=torch.int), minlength=logits.shape[1])
    temperature = torch.tensor([p.temperature for p in params])[:, None]  # (n, 1)
    greedy = temperature < 1e-6  # dividing by less would overflow; SGLang takes it as greedy too
    logprobs = torch.log_softmax(logits / temperature.masked_fill(greedy, 1), dim=-1)  # (n, vocab)
    weights = logprobs.exp()
    if cut := [i for i, p in enumerate(params) if p.top_p < 1 or p.top_k > 0]:  # only these: others must not see it
        weights[cut] = truncate(weights[cut], [params[i] for i in cut])
    # token = min { v : sum_{w <= v} p_w > u * sum_w p_w }
    cdf = weights.cumsum(-1)
    u = uniforms([p.sampling_seed for p in params], [len(one.tokens) for one in batch])[:, None]
    token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_(max=cdf.shape[1] - 1)  # (n, 1)
    if greedy.any():
        token = torch.where(greedy, logprobs.argmax(-1, keepdim=True), token)
    return token[:, 0].tolist(), logprobs.gather(1, token)[:, 0].tolist()


@torch.inference_mode()
def run_step(scheduler: Scheduler, model: TinyModel) -> bool:
    """Plan, compute and account one step; False when there was nothing to do."""
    first, batch = scheduler.plan()
    if not batch:
        return False
    while scheduler.moves:
        model.cache.swap(*scheduler.moves.pop(0))
    scored = [i for i, one in enumerate(batch) if one.scored and not one.input_logprobs]
    feeds = [one.tokens[one.cached :] for one in batch]
    logits = model.step(feeds, [one.cached for one in batch], first, every=bool(scored))
    for i in scored:
        batch[i].input_logprobs = score_prompt(batch[i].tokens, logits[i])
    scheduler.advance(batch, *sample(logits[:, -1], batch))
    return True


def score_prompt(prompt: list[int], logits: Tensor) -> list[float | None]:
    """log p(t | before) at temperature 1 of each token, None for the first; logits (at least n, vocab) of n tokens,
    right-aligned."""
    logprobs = torch.log_softmax(logits[-len(prompt) : -1], dim=-1)  # (n - 1, vocab)
    return [None, *logprobs.gather(1, torch.tensor(prompt)[1:, None])[:, 0].tolist()]
