"""FastForward gives the same tokens and logits as transformers' own forward pass, before and after weight updates."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import free_port
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from inference.group import join_group
from inference.tiny.fast import fits
from inference.tiny.model import (
    MAX_TOKENS,
    MIN_ROWS,
    TinyModel,
    key_length,
    read_weights,
    receive_weights,
    run_step,
    unpack_weights,
)
from inference.tiny.scheduler import PREFILL_TOKENS, SamplingParams, Scheduler, Sequence
from inference.weights import serialise

SHAPE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
SHAPE |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512}
SHAPE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "head_dim": 8}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 with a head for each group": ("qwen3", {"num_key_value_heads": 6, "head_dim": 16}),
}


def make_model(path: Path, family: str, noise: float = 0.0, **changes: Any) -> Path:
    """Write a random model of the architecture `family` to `path`. Add noise to the weights of the norms and to the
    biases. (In a new model every norm weight is 1 and every bias is 0.)"""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **SHAPE | changes), dtype=torch.float32
    )
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            weight.data += noise * torch.randn_like(weight)
    model.save_pretrained(path)
    return path


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def path(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Path:
    """Return the folder of a random model of KINDS[kind]. If the model's weights are tied, one matrix is both embedding
    and head."""
    family, changes = KINDS[kind]
    return make_model(
        tmp_path / "model", family, noise=0.3, **changes, tie_word_embeddings=request.param
    )


def both(path: Path, **options: Any) -> tuple[TinyModel, TinyModel]:
    """Load the model in the folder `path` twice: the first copy runs with FastForward, and the second with the forward
    pass of transformers."""
    fast, general = (TinyModel(str(path), slots=4, **options) for _ in range(2))
    assert fast.fast is not None
    general.fast = None
    return fast, general


def generate(tiny: TinyModel) -> list[Sequence]:
    """Return six finished sequences with prompts of 3 to 48 tokens. The six sequences run in four slots."""
    scheduler = Scheduler(tiny.slots, 10_000, "0", str)
    made = [
        Sequence(
            str(i),
            [(7 * j + i) % 90 for j in range(3 + 9 * i)],
            SamplingParams(max_new_tokens=8 + i, sampling_seed=i),
        )
        for i in range(6)
    ]
    for one in made:
        scheduler.submit(one)
    while run_step(scheduler, tiny):
        pass
    return made


def assert_equal(fast: TinyModel, general: TinyModel) -> None:
    """Check that both models give the same tokens, and the same logits in prefill and in decoding."""
    prompts = [[(5 * j + i) % 90 for j in range(20 + 3 * i)] for i in range(3)]
    for feeds, cached in (
        (prompts, [0, 0, 0]),
        ([[3], [4], [5]], [20, 23, 26]),
        ([[1, 2], [3], [4, 5, 6]], [21, 24, 27]),
    ):
        ours, theirs = (
            tiny.step(feeds, cached, first_slot=1, all_logits=True) for tiny in (fast, general)
        )
        for row, feed in enumerate(feeds):  # a short row begins with padding
            torch.testing.assert_close(
                ours[row, -len(feed) :], theirs[row, -len(feed) :], rtol=1e-5, atol=1e-5
            )
    for one, other in zip(generate(fast), generate(general), strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_written_out_pass_equals_transformers(path: Path, deterministic: bool) -> None:
    """For each architecture that `fits` accepts, FastForward and transformers give the same tokens, and logits that
    agree to 1e-5."""
    assert_equal(*both(path, deterministic=deterministic))


def by_disk(new: dict[str, torch.Tensor], path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors that a server reads from the folder `path`."""
    yield read_weights(str(path))


def by_tensor(new: dict[str, torch.Tensor], path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors that a server unpacks from the bodies of requests, one tensor for each body."""
    for pair in new.items():
        yield unpack_weights([serialise([pair])])


def by_broadcast(new: dict[str, torch.Tensor], path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors that a server receives in a process group of two ranks, one tensor at a time."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        sender, receiver = pool.map(
            lambda rank: join_group("127.0.0.1", port, rank, 2, "w", "gloo"), (0, 1)
        )
        for name, tensor in new.items():
            sent = pool.submit(sender.broadcast, tensor, 0)
            yield receive_weights(receiver, [name], [str(tensor.dtype)[6:]], [list(tensor.shape)])
            sent.result().wait()


@pytest.mark.parametrize("mode", [by_disk, by_tensor, by_broadcast])
def test_new_weights_reach_the_fused_matrices(path: Path, mode: Any) -> None:
    """After a weight update in any of the three modes, FastForward and transformers use the new weights."""
    fast, general = both(path)
    before = fast.step([[1, 2, 3]], [0])
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(2)
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    model.save_pretrained(path)
    for named in mode(load_file(path / "model.safetensors"), path):
        for tiny in (fast, general):
            tiny.replace_weights(named, whole=mode is by_disk)
    assert_equal(fast, general)
    after = fast.step([[1, 2, 3]], [0])[0, -1]
    assert not torch.allclose(before[0, -1], after, atol=0.01)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)


def test_the_model_has_no_second_copy_of_its_weights(path: Path) -> None:
    """The model's q, k, v, gate and up matrices are views of the fused matrices that FastForward reads."""
    tiny = TinyModel(str(path), 2)
    assert tiny.fast is not None
    (_, qkv, *_, gate_up, _), *_ = tiny.fast.layers
    attention, mlp = tiny.model.model.layers[0].self_attn, tiny.model.model.layers[0].mlp
    for part, whole in (
        (attention.q_proj, qkv),
        (attention.v_proj, qkv),
        (mlp.gate_proj, gate_up),
        (mlp.up_proj, gate_up),
    ):
        assert part.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_neox", {"num_key_value_heads": 6}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        ),
    ],
)
def test_any_other_model_takes_the_general_path(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """If `fits` refuses a model, transformers computes the forward pass, and the server's logits are those of the
    model's own forward pass."""
    path = make_model(tmp_path, family, **changes)
    tiny, model = TinyModel(str(path), 2), AutoModelForCausalLM.from_pretrained(path)
    assert not fits(model)
    assert tiny.fast is None
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    torch.testing.assert_close(
        tiny.step([[5, 6, 7]], [0], all_logits=True), expected, rtol=1e-4, atol=1e-4
    )


def test_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server never calls torch.compile."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", refuse)
    tiny = TinyModel(str(make_model(tmp_path, "qwen3")), 4)
    assert len(generate(tiny)) == 6


@pytest.mark.parametrize("path_of_code", ["fast", "general"])
def test_deterministic_products_have_a_bounded_number_of_rows(
    tmp_path: Path, path_of_code: str
) -> None:
    """In deterministic mode each matrix product has 8 to 128 rows, so a long prompt takes several passes. The logits of
    a prompt that takes several passes equal those of a single pass."""
    fast, general = both(make_model(tmp_path, "qwen3"), deterministic=True)
    tiny = {"fast": fast, "general": general}[path_of_code]
    passes = []
    linear, run = torch.nn.functional.linear, tiny.step
    whole = TinyModel(str(tmp_path), 4)
    prompts = [[(3 * j + i) % 90 for j in range(length)] for i, length in enumerate((300, 70, 1))]

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        passes.append(x.numel() // x.shape[-1])
        return linear(x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", counted)
        ours = run(prompts, [0, 0, 0], all_logits=True)
        last = run([[1], [2]], [300, 70])
    assert min(passes) >= MIN_ROWS
    assert max(passes) <= MAX_TOKENS
    theirs = whole.step(prompts, [0, 0, 0], all_logits=True)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(
            ours[row, -len(prompt) :], theirs[row, -len(prompt) :], rtol=1e-4, atol=1e-4
        )
    torch.testing.assert_close(last, whole.step([[1], [2]], [300, 70]), rtol=1e-4, atol=1e-4)


def test_a_long_prompt_is_fed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of an attention mask grows with the square of the number of tokens in a pass, so a long prompt is
    prefilled in several passes. The prompt's logits equal those of transformers."""
    path = make_model(tmp_path, "qwen3", max_position_embeddings=4096)
    tiny, prompt = TinyModel(str(path), 4), [3 * j % 90 for j in range(2500)]
    sizes = []
    begin_step = tiny.cache.begin_step

    def counted(first_slot: int, positions: torch.Tensor, *rest: Any) -> None:
        sizes.append(positions.numel())
        begin_step(first_slot, positions, *rest)

    monkeypatch.setattr(tiny.cache, "begin_step", counted)
    ours = tiny.step([prompt, prompt[:9]], [0, 0])
    assert max(sizes) <= PREFILL_TOKENS
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for row, ids in enumerate((prompt, prompt[:9])):
        with torch.no_grad():
            expected = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(ours[row, -1], expected, rtol=1e-4, atol=1e-4)


def test_the_number_of_keys_covers_all_and_avoids_what_rounds_differently() -> None:
    """Without deterministic mode, `key_length` exceeds the number of required keys by at most 15. In deterministic
    mode, `key_length` is a multiple of 512, plus 0, 64, 128 or 192."""
    for n in range(1, 3000):
        assert 0 <= key_length(n, False) - n < 16
        keys = key_length(n, True)
        assert keys >= n
        assert keys % 512 in (0, 64, 128, 192)
        assert keys - n < 64 or keys % 512 == 0
