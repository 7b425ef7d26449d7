"""The forward pass gives transformers' logits, its bits do not depend on neighbours, and new
weights replace all old ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from inference.tiny.model import PACKS, Model, attend, key_length, read_weights

SHAPE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "head_dim": 8,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 with a key head for each head": ("qwen3", {"num_key_value_heads": 6, "head_dim": 16}),
}
PROMPTS = [[(7 * j + i) % 90 for j in range(20 + 3 * i)] for i in range(3)]


def make_model(path: Path, family: str, **changes: Any) -> Path:
    """Write a random model, whose norms and biases are no longer 1 and 0."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            weight.data += 0.3 * torch.randn_like(weight)
    model.save_pretrained(path)
    return path


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def path(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Path:
    family, changes = KINDS[kind]
    return make_model(tmp_path / "model", family, **changes, tie_word_embeddings=request.param)


def logits_of(path: Path, ids: list[int]) -> torch.Tensor:
    """The logits (T, vocab) of transformers' own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def assert_computes(model: Model, path: Path) -> None:
    """Check prefill, decode and a next turn against transformers, in slots 1 to 3."""
    texts = [[*prompt, 3, 1, 4, 5, 6] for prompt in PROMPTS]
    expected = [logits_of(path, ids) for ids in texts]
    cached = [0, 0, 0]
    for lengths in ([9, 1, 2], [n - 9 for n in map(len, PROMPTS)], [1, 1, 1], [4, 1, 3]):
        ends = [n + m for n, m in zip(cached, lengths, strict=True)]
        feeds = [ids[n:end] for ids, n, end in zip(texts, cached, ends, strict=True)]
        logits = model.step(feeds, cached, first_slot=1)
        for row, wanted, end in zip(logits, expected, ends, strict=True):
            torch.testing.assert_close(row, wanted[end - 1], rtol=1e-4, atol=1e-5)
        cached = ends


def test_the_logits_are_those_of_transformers(path: Path) -> None:
    """Each family has the logits that transformers computes, with and without tied embeddings and
    grouped heads."""
    assert_computes(Model(str(path), 4), path)


def test_bits_do_not_depend_on_neighbours(tiny_model_dir: Path) -> None:
    """A row has the same bits alone, in a batch, and decoded."""
    model = Model(str(tiny_model_dir), 64)
    model.resize(128)
    ids = [3 * j % 259 for j in range(100)]
    crowd = [ids, *([i] * (20 + i) for i in range(40))]
    alone = model.step([ids], [0])[0].clone()
    assert torch.equal(alone, model.step(crowd, [0] * 41)[0])
    model.step([ids[:-1]], [0])
    assert torch.equal(alone, model.step([ids[-1:]], [99])[0])
    model.step([feed[:-1] for feed in crowd], [0] * 41)
    decoded = model.step([feed[-1:] for feed in crowd], [len(feed) - 1 for feed in crowd])
    assert torch.equal(alone, decoded[0])


def test_bfloat16_stays_near_float32(path: Path) -> None:
    """Logprobs differ by a few roundings of 2^-8, in a prefill and in a decode of cached keys."""
    ids = [[*prompt, 3] for prompt in PROMPTS]
    exact = torch.stack([logits_of(path, one)[-1] for one in ids]).log_softmax(-1)
    model = Model(str(path), 4, dtype="bfloat16")
    prefill = model.step(ids, [0] * 3).log_softmax(-1)
    decode = model.step([one[-1:] for one in ids], [len(one) - 1 for one in ids]).log_softmax(-1)
    for logprobs in (prefill, decode):
        assert logprobs.dtype == torch.float32
        assert 1e-4 < (logprobs - exact).abs().max() < 0.1


def test_attention_in_bfloat16_ignores_keys_beyond_n_keys() -> None:
    """A decode multiplies all keys of a slot, but those beyond n_keys do not count."""
    torch.manual_seed(0)
    q = torch.randn(5, 1, 6, 8)
    k, v = torch.randn(2, 5, 2, 96, 8)
    mask = torch.where(torch.arange(80) <= torch.randint(40, 80, (5, 1, 1, 1)), 0.0, -torch.inf)
    whole = attend(q, k, v, mask)
    k[:, :, 80:] = v[:, :, 80:] = torch.nan
    rounded = attend(*(x.bfloat16() for x in (q, k, v, mask)))
    torch.testing.assert_close(rounded.float(), whole, rtol=0, atol=0.02)


def test_packed_weights_compute_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's order of the weights changes the speed, not the logits. New weights are packed, too.
    With packed weights, slots can have more lengths."""
    ids = [[*prompt, 3] for prompt in PROMPTS]
    model = Model(str(path), 4, dtype="bfloat16")
    old = model.step(ids, [0] * 3)
    new = {name: w * 0.9 for name, w in read_weights(str(path)).items()}
    model.replace_weights(new)
    monkeypatch.setattr("inference.tiny.model.PACKS", False)
    plain = Model(str(path), 4, dtype="bfloat16")
    assert (model.packs, plain.packs) == (PACKS, False)
    assert model.fit(700)[0] == (768 if PACKS else 1024)
    plain.replace_weights(new)
    for feeds, cached in ((ids, [0] * 3), ([[5]] * 3, [len(one) for one in ids])):
        logits = [one.step(feeds, cached) for one in (model, plain)]
        torch.testing.assert_close(*logits, rtol=0, atol=0.02)
    assert (model.step(ids, [0] * 3) - old).abs().max() > 0.1


def test_the_number_of_keys_covers_all_and_avoids_what_rounds_differently() -> None:
    """A row attends to a multiple of 512 keys, plus 0, 64, 128 or 192."""
    for n in range(1, 3000):
        keys = key_length(n)
        assert keys >= n
        assert keys % 512 in (0, 64, 128, 192)
        assert keys - n < 64 or keys % 512 == 0


def test_new_weights_replace_all_old_ones(path: Path) -> None:
    """After an update the logits are those of the new weights."""
    model, file = Model(str(path), 4), path / "model.safetensors"
    torch.manual_seed(2)
    new = {name: old + 0.05 * torch.randn_like(old) for name, old in load_file(file).items()}
    save_file(new, file, {"format": "pt"})
    model.replace_weights(read_weights(str(path)))
    assert_computes(model, path)


def test_weights_that_do_not_fit_change_nothing(tiny_model_dir: Path) -> None:
    """A weight of another size, a NaN or none at all is refused before anything is copied. Weights
    that are not sent stay."""
    model = Model(str(tiny_model_dir), 2)
    parts = [
        (names, old.clone(), old)
        for owner, part, names in model.parts
        if (old := vars(owner)[part]) is not None
    ]
    name, k = "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"
    changed = {n: t + 1 for n, t in read_weights(str(tiny_model_dir)).items()}
    nan, partial = changed | {name: changed[name] * torch.nan}, {n: changed[n] for n in (name, k)}
    for bad in (changed | {name: torch.zeros(1)}, nan, partial, {}):
        with pytest.raises(RuntimeError):
            model.replace_weights(bad)
    assert all(torch.equal(old, now) for _, old, now in parts)
    model.replace_weights({name: changed[name]})
    assert [names for names, old, now in parts if not torch.equal(old, now)] == [[name]]


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gpt_neox", {}, "model_type gpt_neox"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("llama", {"rope_parameters": YARN}, "rope_type yarn"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], says: str
) -> None:
    """Another architecture would get wrong logits, so it is refused in one line."""
    AutoConfig.for_model(family, **SHAPE | changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{says}.* is not supported"):
        Model(str(tmp_path), 2)
