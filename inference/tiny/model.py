"""This module computes one step of generation: a Hugging Face model processes a batch of sequences with a KV cache.

**The rule.** A step feeds the model all tokens that are not yet in the cache, and returns the logits of each sequence's
last token. Prefill, decoding and the next turn of a conversation differ only in the number of cached tokens.

**The parts.** `SlotCache` stores keys and values. `TinyModel` computes the logits of a batch, with `FastForward`
(fast.py) for Llama, Qwen2 and Qwen3, and with transformers for all other models. `sample` draws tokens. `run_step`
plans and computes one step. **Three coordinates** locate a token:

    slot      the row of the cache that belongs to the token's sequence
    row       the row of the batch that feeds the token; row r belongs to slot first_slot + r
    position  the index of the token in its sequence, from 0; the cache stores its key and value at (slot, position)

In the example below, slots 0 to 5 belong to the scheduler, and slots 6 to 13 are spare (`SlotCache`). The example shows
step(feeds=[[b0, b1, b2, b3], [c2, c3]], cached=[0, 2], first_slot=1). The rows are padded on the left, so all rows end
in the last column. Padding (--) is written to slot 13, which no step reads.

    cache    position 0  1  2  3      batch    column 0  1  2  3      position       written to slot
    slot 0            a0 a1 a2 a3
    slot 1            .  .  .  .      row 0           b0 b1 b2 b3      0  1  2  3      1  1  1  1
    slot 2            c0 c1 .  .      row 1           -- -- c2 c3      0  0  2  3     13 13  2  2

**Bits.** In deterministic mode (`--seed`), two runs with the same seed give the same tokens, because the logits of a
row do not depend on the other rows of the batch. Torch chooses a matrix kernel by the shapes of matrices, and two
kernels may add the same numbers in different orders. Three rules make torch choose the same kernel for every batch:

- The weight matrix of a linear layer is stored in column-major order (`fuse`).

- Every matrix product has 8 to 128 rows (MIN_ROWS, MAX_TOKENS). `step_in_parts` splits a larger step.

- `key_length` chooses the number of keys to which a step attends.

The three rules come from measurements (docs/results.md). On other CPUs, the logits of two runs may agree only to about
1e-6. Padding to eight rows costs time, so the rules for rows and keys hold only in deterministic mode.

**Randomness.** Each token is sampled with one random number: a hash of (s, p) for position p of a request with seed s.
If a client resends an aborted request with its partial output, sampling continues with the same random numbers.
**Logprobs** are log_softmax(logits / T) after penalties, but before top_p and top_k. For T = 0, the logprobs use T = 1.

**Not supported** are sliding windows, recurrent layers, soft-capped attention, paged memory, and types except float32.
"""

import base64
import functools
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
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AutoModelForCausalLM

from inference.tiny.fast import FastForward, fits, fuse
from inference.tiny.scheduler import PREFILL_TOKENS, SamplingParams, Scheduler, Sequence

MIN_ROWS = 8  # smallest number of rows of a matrix product in deterministic mode
MAX_TOKENS = 128  # largest number of rows of a matrix product in deterministic mode


class ModelError(ValueError):
    """Raised if a model folder or a set of weights cannot be used. The error message is one line and gives the
    reason."""


# The cache, and the attention function that reads it


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def key_length(longest: int, deterministic: bool) -> int:
    """Return the number of keys to which every row of a step attends. This number is at least `longest`, the length of
    the longest sequence.

    The attention kernel works in blocks of 512 keys. In measurements on two CPUs, the kernel changed the order of its
    additions if the last block had 256 to 448 keys. In deterministic mode the function returns a number for which the
    last block has 64, 128, 192 or 512 keys.
    """
    if not deterministic:
        return round_up(longest, 16)
    keys = round_up(longest, 64)
    return round_up(keys, 512) if keys % 512 > 192 else keys


def slot_attention(
    _: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    min_rows: int = 1,
    **kwargs: Any,
):
    """Compute softmax(q k' / sqrt(d) + mask) v. Query heads that share a key head are stacked in one matrix product.

    Shapes: query (n, heads, q, d); key and value (n, groups, keys, d); mask (n, 1, q, keys) with values 0 or -inf.
    Returns the output (n, q, heads, d), and None in place of the attention weights that transformers expects.
    """
    n, heads, q, d = query.shape
    stacked = query.reshape(n, key.shape[1], -1, d)  # (n, groups, heads/groups * q, d)
    rows = stacked.shape[2]
    if q > 1:
        mask = mask.repeat(1, 1, rows // q, 1)
    # In a decoding step, `stacked` can have fewer than `min_rows` rows. Repeat the rows of `stacked` until it has at
    # least `min_rows` rows. After the attention, drop the results of the repeated rows.
    elif rows < min_rows:
        stacked = stacked.repeat(1, 1, -(-min_rows // rows), 1)
    out = F.scaled_dot_product_attention(stacked, key, value, mask, scale=kwargs.get("scaling"))
    return out[:, :, :rows].reshape(n, heads, q, d).transpose(1, 2).contiguous(), None


AttentionInterface.register("slots", slot_attention)
AttentionInterface.register(
    "slots deterministic", functools.partial(slot_attention, min_rows=MIN_ROWS)
)


class SlotCache:
    """The keys and values of all slots, in one tensor `kv` (layers, 2, slots + 8, groups, positions, d).

    In deterministic mode every matrix product has at least eight rows (module docstring, "Bits"). A batch of fewer than
    eight sequences gets additional rows, and these rows read the eight spare slots. The keys and values of all padding,
    additional rows included, are written to the last spare slot, which no step reads.
    """

    def __init__(self, layers: int, slots: int, groups: int, d: int) -> None:
        self.allocate(torch.zeros(layers, 2, slots + MIN_ROWS, groups, 64, d))
        self.write: (
            Tensor  # row indices of the new keys, then of the new values, in the matrices `flat`
        )
        self.read: tuple[
            Tensor, ...
        ]  # keys and values that a step reads in each layer: (2, rows, groups, n_keys, d)

    def allocate(self, kv: Tensor) -> None:
        """Use `kv` as the tensor of the cache, and compute where its keys and values are."""
        self.kv = kv
        layers, _, rows, groups, length, d = kv.shape
        self.flat = kv.view(
            layers, -1, d
        ).unbind()  # for each layer, a matrix with one key or value in each row
        # In this matrix, the row of a key is slot * groups * length + group * length + position. The row of a value is
        # larger by rows * groups * length, the number of keys.
        self.starts = torch.arange(rows)[:, None] * groups * length  # (slots + 8, 1)
        offsets = torch.tensor([0, rows * groups * length])[:, None] + torch.arange(groups) * length
        self.offsets = offsets[:, None, :, None]  # (2, 1, groups, 1)
        self.ramp = torch.tensor([0.0, -torch.inf]).repeat_interleave(
            length
        )  # `step` cuts attention masks out of it

    def begin_step(
        self, first_slot: int, positions: Tensor, padding: Tensor | None, n_keys: int
    ) -> None:
        """Make the cache long enough for n_keys positions, and choose which entries `update` writes and returns.

        Row r of the batch belongs to slot first_slot + r. `positions` and `padding` have the shape (rows, columns).
        `update` returns the first n_keys keys and values of each of these slots. The keys and values of padding go to
        the last spare slot. If the cache is too short, its length is at least doubled.
        """
        length, rows = self.kv.shape[-2], len(positions)
        if n_keys > length:
            self.allocate(F.pad(self.kv, (0, 0, 0, max(n_keys, 2 * length) - length)))
        place = self.starts[first_slot : first_slot + rows] + positions  # (rows, columns)
        if padding is not None:
            place = torch.where(padding, self.starts[-1], place)
        self.write = (place[:, None] + self.offsets).view(
            -1
        )  # (2, rows, groups, columns), flattened
        self.read = self.kv.narrow(2, first_slot, rows).narrow(-2, 0, n_keys).unbind()

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the fed tokens, and return all keys and values of the step's rows.

        transformers calls this method in every layer. The arguments `k` and `v` have the shape (rows, groups, columns,
        d). The returned views have the shape (rows, groups, keys, d).
        """
        self.flat[layer].index_copy_(0, self.write, torch.cat((k, v)).reshape(-1, k.shape[-1]))
        keys, values = self.read[layer].unbind()
        return keys, values

    def exchange(self, i: int, j: int) -> None:
        """Exchange the contents of slots i and j."""
        self.kv[:, :, [i, j]] = self.kv[:, :, [j, i]]


# The model


class TinyModel:
    """A causal language model and its cache. `step` runs the model, and `replace_weights` loads new weights."""

    def __init__(self, path: str, slots: int, deterministic: bool = False) -> None:
        """Load the model of a Hugging Face folder, with `slots` slots for sequences.

        Raises ModelError if the folder contains no model, or a model that does not work with the slot cache. For any
        other error in the folder, transformers raises OSError or ValueError.
        """
        if not (Path(path) / "config.json").is_file():
            raise ModelError(
                f"no model in {path}: a Hugging Face directory with config.json is needed"
            )
        self.attention = "slots deterministic" if deterministic else "slots"
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=self.attention
        )
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        for linear in (layer for layer in model.modules() if isinstance(layer, nn.Linear)):
            fuse(linear.weight)  # `fuse` stores the weight in column-major order
        self.model = model.eval()
        self.fast = (
            FastForward(model, AttentionInterface()[self.attention]) if fits(model) else None
        )
        self.slots = slots
        self.min_rows = (
            MIN_ROWS if deterministic else 1
        )  # smallest number of rows of a matrix product
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        eos = model.generation_config.eos_token_id
        self.eos = frozenset(
            eos if isinstance(eos, list) else [eos]
        )  # token ids that end a text; may contain None
        groups = getattr(config, "num_key_value_heads", None) or heads
        d = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.cache = SlotCache(config.num_hidden_layers, slots, groups, d)
        self.check()

    @torch.inference_mode()
    def check(self) -> None:
        """Compare the logits of `step` with those of the model's own forward pass. Raises ModelError if the logits
        differ."""
        kinds = set(getattr(self.model.config, "layer_types", None) or []) - {"full_attention"}
        if kinds:
            raise ModelError(
                f"layers of kind {', '.join(kinds)} are not supported, only full attention"
            )
        ids = [i * 7 % self.vocab_size for i in range(6)]
        ours = self.step([ids], [0])[0, -1]
        self.model.set_attn_implementation("sdpa")
        theirs = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        self.model.set_attn_implementation(self.attention)
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
            raise ModelError(
                f"{type(self.model).__name__} is not supported: the slot cache changes its logits"
            )

    @torch.inference_mode()
    def step(
        self,
        feeds: list[list[int]],
        cached: list[int],
        first_slot: int = 0,
        all_logits: bool = False,
    ) -> Tensor:
        """Run one forward pass. Row r of the batch processes the tokens feeds[r] and belongs to slot first_slot + r.
        Slot first_slot + r already holds cached[r] tokens.

        Returns the logits (n, k, vocab) of the last k columns. The entries logits[:, -1] are the logits of each row's
        last token. The number k is the length of the longest feed if `all_logits` is set, and 1 otherwise.
        """
        # 1. Pad the batch: in deterministic mode, prefill has a multiple of 8 columns, and decode has at least 8 rows.
        n, longest = len(feeds), max(map(len, feeds))
        columns = round_up(longest, self.min_rows) if longest > 1 else 1
        if n * columns > (MAX_TOKENS if self.min_rows > 1 else PREFILL_TOKENS):
            return self.step_in_parts(feeds, cached, first_slot, all_logits)
        rows = max(n, self.min_rows) if longest == 1 else n
        feeds, cached = feeds + [[]] * (rows - n), cached + [0] * (rows - n)
        padded = [token for feed in feeds for token in [0] * (columns - len(feed)) + feed]
        ids = torch.tensor(padded).view(
            rows, columns
        )  # torch reads a flat list faster than nested lists

        # 2. Positions: the position increases by one per column, and each row's last token is in the last column.
        # Padding has position 0.
        ends = [done + len(feed) for done, feed in zip(cached, feeds, strict=True)]
        positions = torch.tensor(ends)[:, None] + torch.arange(-columns, 0)  # (rows, columns)

        # 3. Cache: a fed token is stored in its row's own slot, and padding is stored in the last spare slot.
        padding = None
        if min(map(len, feeds)) < columns:
            padding = positions < torch.tensor(cached)[:, None]
            positions.masked_fill_(padding, 0)
        n_keys = key_length(max(ends), deterministic=self.min_rows > 1)
        self.cache.begin_step(first_slot, positions, padding, n_keys)

        # 4. Mask: a token at position p attends to positions 0 to p. The mask is 0 at positions 0 to p and -inf
        # elsewhere. L is the length of the cache, and `ramp` holds L zeros, then L times -inf. The mask of position p
        # is the part of `ramp` with n_keys numbers that begins at index L - 1 - p.
        ramp = self.cache.ramp
        mask = ramp.unfold(0, n_keys, 1)[len(ramp) // 2 - 1 - positions][
            :, None
        ]  # (rows, 1, columns, n_keys)

        # 5. Run the model. In each layer, `update` stores the new keys and values, and attention reads all keys and
        # values.
        kept = columns if all_logits else min(columns, self.min_rows)
        if self.fast:
            logits = self.fast(ids, positions, mask, self.cache, kept)
        else:
            inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
            logits = self.model(**inputs, past_key_values=self.cache, logits_to_keep=kept).logits
        return logits[:n, -longest if all_logits else -1 :]

    def step_in_parts(
        self, feeds: list[list[int]], cached: list[int], first_slot: int, all_logits: bool
    ) -> Tensor:
        """Compute a large step as two smaller steps. Each smaller step has half of the rows or, if there is only one
        row, half of its tokens.

        The attention mask and the activations of a step need memory for each fed token. A long prompt is prefilled in
        parts, so the memory does not grow with the square of the prompt's length.
        """
        half, cut = len(feeds) // 2, len(feeds[0]) // 2
        if half:
            upper = self.step(feeds[:half], cached[:half], first_slot, all_logits)
            lower = self.step(feeds[half:], cached[half:], first_slot + half, all_logits)
            return pad_sequence([*upper, *lower], batch_first=True, padding_side="left")
        before = self.step([feeds[0][:cut]], cached, first_slot, all_logits)
        after = self.step([feeds[0][cut:]], [cached[0] + cut], first_slot, all_logits)
        return torch.cat([before, after], dim=1) if all_logits else after

    @torch.inference_mode()
    def replace_weights(self, named: Mapping[str, Tensor], whole: bool = True) -> None:
        """Copy the tensors of `named` into the model's weights.

        Raises ModelError if a name or a shape does not match, or if `whole` is set and a weight is missing. After a
        ModelError no weight has changed.
        """
        own = self.model.state_dict()
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        if unknown := named.keys() - own.keys():
            raise ModelError(
                f"the model has no weight {min(unknown)} ({len(unknown)} unknown in all)"
            )
        if whole and (missing := own.keys() - named.keys() - set(tied)):
            raise ModelError(f"weight {min(missing)} is missing ({len(missing)} in all)")
        for name, tensor in named.items():
            if tensor.shape != own[name].shape:
                raise ModelError(
                    f"{name} has shape {tuple(tensor.shape)}, not {tuple(own[name].shape)}"
                )
        for name, tensor in named.items():
            own[name].copy_(tensor)
        # Bad weights may have left NaNs and infinities in the cache. The attention mask does not remove a NaN, because
        # NaN + -inf and 0 * NaN are NaN.
        self.cache.kv.nan_to_num_(0.0, 0.0, 0.0)

    @torch.inference_mode()
    def lose_weights(self) -> None:
        """Overwrite all weights with NaN. A server loses its weights when its memory is released."""
        for weight in self.model.parameters():
            weight.fill_(torch.nan)


# Reading new weights


def read_weights(path: str) -> dict[str, Tensor]:
    """Read all tensors from the safetensors files of a folder. Raises ModelError if a file is damaged or there is no
    file."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ModelError(f"no *.safetensors in {path}")
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights in {path}: {error}") from error


def receive_weights(
    group: Any, names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> dict[str, Tensor]:
    """Receive the tensors that rank 0 of the process group broadcasts, in the order of `names`."""
    like = zip(names, dtypes, shapes, strict=True)
    named = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in like}
    for work in [group.broadcast(tensor, 0) for tensor in named.values()]:
        work.wait()
    return named


class TensorReader(pickle.Unpickler):
    """An unpickler that accepts only tensors. An ordinary unpickler would let a pickle from the network call any
    function."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the function or class `name` of `module`, if pickled tensors need this function or class. Raises
        ModelError for any other name."""
        if (module, name) == (
            "torch.storage",
            "_load_from_bytes",
        ):  # torch's `_load_from_bytes` would load any pickle
            return lambda raw: torch.load(io.BytesIO(raw), weights_only=True)
        if (module, name) in {
            ("torch._utils", "_rebuild_tensor_v2"),
            ("collections", "OrderedDict"),
        }:
            return super().find_class(module, name)
        raise ModelError(f"tensors do not need {module}.{name}")


def unpack_weights(serialised: list[str]) -> dict[str, Tensor]:
    """Return the tensors of an /update_weights_from_tensor body.

    `serialised` has one base64 text for each GPU of a server, and this server reads only the first text.
    """
    return dict(TensorReader(io.BytesIO(base64.b64decode(serialised[0]))).load())


# Sampling


def uniforms(seeds: list[int], positions: list[int]) -> Tensor:
    """Return n pseudorandom numbers in [0, 1), shape (n,): the first 23 bits of the splitmix64 hash of (seed,
    position)."""
    x = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    for word in (np.array(positions, dtype=np.uint64), np.uint64(0)):
        x = (x ^ word) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(41)).astype(np.float32) * np.float32(2**-23))


def truncate(weights: Tensor, params: list[SamplingParams]) -> Tensor:
    """Set to 0 the sampling weights of the tokens that top_k or top_p excludes. The most likely token always keeps its
    weight.

    `weights` and the result have the shape (n, vocab). The sum of a row of the result may be below 1.
    """
    ranked, order = weights.sort(dim=-1, descending=True)
    rank = torch.arange(weights.shape[1])
    top_k = torch.tensor([p.top_k if p.top_k > 0 else weights.shape[1] for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params])[:, None]
    keep = (rank < top_k) & ((ranked.cumsum(-1) - ranked < top_p) | (top_p >= 1) | (rank == 0))
    return torch.zeros_like(weights).scatter(1, order, ranked * keep)


@torch.inference_mode()
def sample(logits: Tensor, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
    """Sample the next token of each sequence from its row of logits (n, vocab). Return n tokens and n logprobs."""
    params = [sequence.params for sequence in sequences]
    vocab = logits.shape[1]

    # 1. Penalties: logit_v -= penalty * (number of times that token v was generated)
    for i, sequence in enumerate(sequences):
        if penalty := params[i].frequency_penalty:
            logits[i] -= penalty * torch.bincount(
                torch.tensor(sequence.output, dtype=torch.int), minlength=vocab
            )

    # 2. Logprobs: log_softmax(logits / T)
    greedy, temperatures = None, [p.temperature for p in params]
    if set(temperatures) != {1.0}:
        t = torch.tensor(temperatures)[:, None]  # (n, 1)
        greedy = t < 1e-6  # as in SGLang, a temperature below 1e-6 means greedy sampling
        logits = logits / torch.where(greedy, 1.0, t)  # (n, vocab) / (n, 1)
    logprobs = torch.log_softmax(logits, dim=-1)  # (n, vocab)

    # 3. Apply top_k and top_p only to rows that need them, because `truncate` sorts the whole vocabulary.
    weights = logprobs.exp()
    if cut := [i for i, p in enumerate(params) if p.top_p < 1 or p.top_k > 0]:
        weights[cut] = truncate(weights[cut], [params[i] for i in cut])

    # 4. Draw a token: token = min { v : sum_{w <= v} p_w > u * sum_w p_w }
    cdf = weights.cumsum(-1)
    u = uniforms(
        [p.sampling_seed for p in params], [len(sequence.tokens) for sequence in sequences]
    )[:, None]  # (n, 1)
    token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_(max=vocab - 1)  # (n, 1)
    if greedy is not None:
        token = torch.where(greedy, logprobs.argmax(-1, keepdim=True), token)
    return token[:, 0].tolist(), logprobs.gather(1, token)[:, 0].tolist()


def score_prompt(prompt: list[int], logits: Tensor) -> list[float | None]:
    """Return log p(token | tokens before it) at temperature 1 for each prompt token, and None for the first token.

    `logits` has the shape (k, vocab) with k >= len(prompt). The last len(prompt) rows of `logits` belong to the prompt.
    """
    logprobs = torch.log_softmax(logits[-len(prompt) : -1], dim=-1)  # (len(prompt) - 1, vocab)
    return [None, *logprobs.gather(1, torch.tensor(prompt)[1:, None])[:, 0].tolist()]


# One step of the scheduler, the model and the sampling


@torch.inference_mode()
def run_step(scheduler: Scheduler, model: TinyModel) -> bool:
    """Plan and compute one step, and give its new tokens to the scheduler. Return False if the step is empty."""
    step = scheduler.plan()
    if not step.sequences:
        return False
    for i, j in scheduler.moves:
        model.cache.exchange(i, j)
    scheduler.moves.clear()
    unscored = [s for s in step.sequences if s.wants_prompt_logprobs and not s.prompt_logprobs]
    logits = model.step(
        step.feeds, step.cached, step.first_slot, all_logits=bool(unscored)
    )  # (n, k, vocab)
    for sequence in unscored:
        sequence.prompt_logprobs = score_prompt(
            sequence.tokens, logits[step.sequences.index(sequence)]
        )
    scheduler.extend(step, *sample(logits[:, -1], step.sequences))
    return True
