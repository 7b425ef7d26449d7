"""The actor cuts a batch into pieces, and computes what a plain model computes in a simple loop."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from trainers import (
    DEVICE,
    FAMILIES,
    NAN,
    NEVER,
    PLAIN,
    Products,
    gradients,
    make_batch,
    make_config,
    make_family,
    parameters,
    prepare,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from extras.losses import cispo, gspo, icepop, reject, row_weight
from extras.vcpo import VCPO
from inference.weights import WeightUpdateMeta
from ppo import describe_mode, ppo_actor_loss_fn
from run.config import ConfigError, OptimizerConfig, PPOActorConfig
from training.actor import FSDPEngine, FSDPPPOActor, lr_factor
from training.layout import cut_rows, deal, pick_layout, row_lengths, split_minibatches, take
from training.tree_attention import cut_trees

make_actor = trainers.make_actor
LAYOUTS = ("padded", "packed", "tree")


@pytest.fixture
def plain(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)


def plain_logp(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """log p of each token (B, T), row by row, without padding; 0 at position 0 and at padding."""
    logp = torch.zeros(batch["input_ids"].shape)
    for i, n in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids = batch["input_ids"][i, :n].long()
        logits = model(ids[None]).logits[0, :-1] / batch["temperatures"][i, 1:n, None]
        logp[i, 1:n] = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
    return logp


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], atol: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=atol, rtol=1e-4, msg=name)


# ---- forward passes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mb_tokens", [16384, 40, 21])
def test_compute_logp_is_log_softmax_at_a_tokens_temperature(make_actor, plain, layout, mb_tokens):
    """Rows in one piece do not see each other, and padding changes nothing."""
    batch = make_batch()
    with torch.no_grad():
        expected = plain_logp(plain, batch)
    actor = make_actor(mb_tokens=mb_tokens, layout=layout)
    for mask in (batch["loss_mask"], batch["attention_mask"]):
        logp = actor.compute_logp(batch | {"loss_mask": mask})
        torch.testing.assert_close(logp, expected * mask, atol=2e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compute_logp_reads_no_prompt_through_the_last_layer(make_actor, layout):
    """The logits of untrained tokens are never computed."""
    batch, actor = make_batch(), make_actor(mb_tokens=40, layout=layout)
    with Products() as products:
        actor.compute_logp(batch)
    rows = [len(out) for out in products.results if out.shape[1] == actor.model.config.vocab_size]
    assert sum(rows) == batch["loss_mask"].sum()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layout_is_right_for_a_family_or_refuses_it(make_actor, tmp_path, name, layout):
    """No family gets wrong numbers without an error. On a GPU, the rows of a family that cannot be
    packed are padded."""
    path, batch = make_family(tmp_path, name), make_batch()
    if name in NEVER or (layout == "tree" and name not in PLAIN):
        with pytest.raises(ValueError, match=r"not support|cannot be trained"):
            make_actor(path, layout=layout)
        return
    actor = make_actor(path, layout="padded" if name not in PLAIN else layout)
    on_gpu = pick_layout(PPOActorConfig(dtype="bfloat16"), "cuda", actor.model)
    assert on_gpu == ("packed" if name in PLAIN else "padded")
    on_cpu = pick_layout(PPOActorConfig(), "cpu", actor.model)
    assert on_cpu == ("tree" if name in PLAIN else "padded")
    eager: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **eager).eval()
    with torch.no_grad():
        expected = plain_logp(model, batch) * batch["loss_mask"]
    torch.testing.assert_close(actor.compute_logp(batch), expected, atol=1e-4, rtol=0)


BENT: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 50.0},
    "gemma3_text": {"final_logit_softcapping": 30.0},
    "cohere": {"logit_scale": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "phi": {},
    "minicpm3": {"dim_model_base": 16, "kv_lora_rank": 16, "q_lora_rank": 16},
}
REASONS = {"phi": "a bias", "minicpm3": "logits_scaling"}


@pytest.mark.parametrize("name", BENT)
def test_a_model_that_bends_its_logits_is_refused(make_actor, tmp_path, monkeypatch, name):
    """Caps, scales and biases of the logits are not in hidden @ weight.T. transformers 5.19, which
    SGLang pins, computes Gemma 2's attention without its cap."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    reason = REASONS.get(name) or min(BENT[name])
    with pytest.raises(ValueError, match=f"cannot be trained.*{reason}"):
        make_actor(make_family(tmp_path, name, **BENT[name]))


ROWS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=40)


@given(ROWS, st.integers(1, 8), st.integers(1, 300))
def test_cutting_loses_no_row_and_balances_tokens(pairs, n, mb_tokens):
    """Every row is in one mini-batch and in one piece, and every group is in one mini-batch. Only a
    piece of a single row may exceed mb_tokens. Mini-batches differ by at most one group, and ranks
    by at most the tokens of the longest row."""
    lengths, groups = map(torch.tensor, zip(*pairs, strict=True))
    real = torch.arange(max(lengths)) < lengths[:, None]
    batch = dict.fromkeys(("input_ids", "attention_mask", "loss_mask"), real.int())
    batch |= {"row": torch.arange(len(pairs)), "group_ids": groups}
    minibatches, shares = split_minibatches(batch, n), deal(lengths.tolist(), n)
    for parts in (minibatches, shares):
        assert sorted(row for part in parts for row in part) == list(range(len(pairs)))
        assert all(parts)
    counts = [len(groups[part].unique()) for part in minibatches]
    assert sum(counts) == len(groups.unique())
    assert max(counts) - min(counts) <= 1
    loads = [sum(lengths[part]) for part in shares]
    assert max(loads) - min(loads) <= max(lengths)
    for cut in (cut_rows, partial(cut_trees, shares=False)):
        times = torch.zeros(real.shape)
        for part in minibatches:
            for piece in cut(take(batch, part), mb_tokens):
                times[piece.tokens["row"], piece.tokens["column"]] += 1
                rows = len(piece.inputs.get("bounds", [*piece.inputs["input_ids"], 0])) - 1
                assert piece.inputs["input_ids"].numel() <= mb_tokens or rows == 1
        assert torch.equal(times, (real & (torch.arange(max(lengths)) > 0)).float())


# ---- the update


WAYS: list[dict[str, Any]] = [{"layout": name} for name in LAYOUTS]
WAYS += [{"gradient_checkpointing": True}, {"mb_tokens": 1}]


@pytest.mark.parametrize("changes", WAYS, ids=str)
def test_the_gradient_is_the_plain_models(make_actor, plain, changes):
    """The gradients of the pieces add up to that of the whole batch. A single rank in float32 does
    without FSDP."""
    actor = make_actor(**{"mb_tokens": 40, "behave_imp_weight_cap": 1.5} | changes)
    assert not any(isinstance(module, FSDPModule) for module in actor.model.modules())
    batch = prepare(actor, make_batch())
    stats = actor.ppo_update(batch)

    logp = plain_logp(plain, batch)
    tensors = [batch[k] for k in ("prox_logp", "logprobs", "advantages", "loss_mask")]
    loss, expected = ppo_actor_loss_fn(logp, *tensors, behave_imp_weight_cap=1.5)
    loss.backward()
    assert stats["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert stats["dropped_share"] == pytest.approx(expected["dropped_share"].item()) != 0
    k2 = (logp - batch["logprobs"])[batch["loss_mask"] > 0].square().mean() / 2
    assert stats["kl"] == pytest.approx(k2.item(), rel=1e-4)
    assert_same({n: p.grad for n, p in plain.named_parameters()}, gradients(actor), atol=1e-6)


def test_each_epoch_knows_how_much_of_the_step_is_done(make_actor):
    """A row's step_fraction is that of the last pass over it."""
    actor = make_actor(ppo_epochs=3, ppo_n_minibatches=2)
    actor.ppo_update(batch := prepare(actor, make_batch()))
    assert sorted(batch["step_fraction"].tolist()) == pytest.approx([4 / 6] * 4 + [5 / 6] * 4)


@pytest.mark.parametrize("name", ["opt", "falcon"])
def test_a_checkpointed_layer_runs_again_and_drops_nothing_out(make_actor, tmp_path, name):
    """A checkpointed layer runs again in the backward pass. It needs no training mode, in which
    some models apply dropout."""
    path, batch = make_family(tmp_path, name, dropout=0.5, hidden_dropout=0.5), make_batch()
    actor, entered = make_actor(path, gradient_checkpointing=True), []
    batch = prepare(actor, batch, drift=0.0)
    modules = [m for m in actor.model.modules() if type(m).__name__.endswith("DecoderLayer")]
    for module in modules:
        next(module.children()).register_forward_pre_hook(lambda *_: entered.append(1))
    assert actor.ppo_update(batch)["clip_frac"] == 0
    assert len(entered) == 2 * len(modules) > 0


def test_a_loss_that_is_not_a_number_stops_before_the_weights(make_actor):
    """A NaN at a trained token is an error that names the step, and the weights do not change."""
    actor = make_actor()
    batch, before = prepare(actor, make_batch()), parameters(actor)
    batch["logprobs"][0, 4] = NAN
    with pytest.raises(FloatingPointError, match="training step 1 is not finite"):
        actor.ppo_update(batch)
    assert all(torch.equal(before[name], p) for name, p in parameters(actor).items())


def test_a_batch_without_a_trained_token_is_an_error(make_actor):
    """A mere mini-batch without a trained token is skipped."""
    actor = make_actor(ppo_n_minibatches=4)
    batch = prepare(actor, make_batch())
    batch["loss_mask"][2:] = 0
    assert math.isfinite(actor.ppo_update(batch)["loss"])
    batch["loss_mask"][:] = 0
    with pytest.raises(ValueError, match="no token of the batch is trained"):
        actor.ppo_update(batch)


def test_only_standard_ppo_trains_without_the_servers_logprobs(make_actor):
    """Its old policy is the one before the step, whose log-probabilities the trainer computes."""
    actor, standard = make_actor(), partial(make_actor, use_decoupled_loss=False)
    batch = prepare(actor, make_batch())
    without = {key: x for key, x in batch.items() if key != "logprobs"}
    with pytest.raises(ValueError, match="returns no logprobs"):
        actor.ppo_update(without)
    assert standard().ppo_update(without)["loss"] == standard().ppo_update(batch)["loss"]


def test_padding_on_the_left_is_refused():
    """A layout would take it for tokens."""
    with pytest.raises(ValueError, match="on the right"):
        row_lengths({"attention_mask": make_batch()["attention_mask"].flip(1)})


def test_half_precision_trains_float32_weights(make_actor):
    """With bfloat16 in the passes, parameters and gradients stay float32. A CPU needs no FSDP for
    it."""
    exact, half = make_actor(), make_actor(dtype="bfloat16")
    batch = prepare(exact, make_batch())
    a, b = (actor.ppo_update(dict(batch)) for actor in (exact, half))
    assert {x.dtype for p in half.model.parameters() for x in (p, p.grad)} == {torch.float32}
    assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.1)
    wrapped = sum(isinstance(module, FSDPModule) for module in half.model.modules())
    assert wrapped == (3 if DEVICE == "cuda" else 0)


# ---- pi_prox


def test_standard_ppo_takes_its_old_policy_from_where_it_is_told(make_actor):
    """With recompute_logprob, a forward pass gives log pi_old. Without it, the server does."""
    fractions = {}
    for recompute in (True, False):
        actor = make_actor(use_decoupled_loss=False, recompute_logprob=recompute)
        batch = prepare(actor, make_batch())
        assert actor.should_compute_prox_logp() is recompute
        fractions[recompute] = actor.ppo_update(batch)["clip_frac"]
    assert fractions[True] == 0 < fractions[False]


def stale(actor: FSDPPPOActor, version: int = 5) -> dict[str, Tensor]:
    """A batch whose rows are 0 to 3 versions older than the actor."""
    batch = prepare(actor, make_batch())
    actor.set_version(version)
    ages = torch.arange(len(batch["loss_mask"]))[:, None] % 4
    batch["versions"] = torch.where(batch["loss_mask"] > 0, version - ages, -1)
    return batch


def test_loglinear_needs_no_forward_pass_and_starts_at_the_truth(make_actor):
    """Before the first optimizer step pi_theta equals pi_prox, so the guess is exact."""
    steps = {}
    for method in ("recompute", "loglinear"):
        actor = make_actor(prox_logp_method=method)
        batch = stale(actor)
        batch["versions"] -= 1
        assert actor.should_compute_prox_logp() is (method == "recompute")
        prox = batch.pop("prox_logp") if method == "loglinear" else None
        steps[method] = actor.ppo_update(batch), parameters(actor)
    torch.testing.assert_close(batch["start_logp"], prox, atol=1e-5, rtol=0)
    (a, weights_a), (b, weights_b) = steps.values()
    assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    assert_same(weights_a, weights_b, atol=1e-5)


def test_metrics_trains_on_the_truth_and_reports_the_guesses(make_actor):
    """The weights are those of recompute, bit by bit. For each of three guesses, six errors are
    logged."""
    one, other = make_actor(), make_actor(prox_logp_method="metrics")
    a, b = (actor.ppo_update(stale(actor)) for actor in (one, other))
    assert all(torch.equal(parameters(one)[name], p) for name, p in parameters(other).items())
    assert a.items() <= b.items()
    assert sum(key.endswith("_error") for key in b) == 18
    assert 0 < b["loglinear_logp_abs_error"] < b["rollout_logp_abs_error"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "pi_prox from a forward pass"),
        ({"prox_logp_method": "loglinear"}, "no forward pass"),
        ({"prox_logp_method": "metrics"}, "is logged"),
        ({"use_decoupled_loss": False}, "pi_old from a forward pass"),
        ({"use_decoupled_loss": False, "recompute_logprob": False}, "from the inference server"),
    ],
)
def test_the_mode_is_said_in_words(keys, words):
    """describe_mode says where the log-probabilities of each policy come from."""
    assert words in describe_mode(make_config(**keys))


# ---- variants that a key names


@pytest.mark.parametrize(
    ("loss", "keys"),
    [
        (gspo, {"eps_clip": 0.01}),
        (partial(row_weight, how="sum"), {"behave_imp_weight_cap": 1.5}),
        (partial(reject, veto=0.6, k2=0.4, base=row_weight), {}),
        (partial(cispo, base=partial(icepop, floor=0.7)), {}),
    ],
)
def test_losses_of_whole_rows_are_the_same_however_a_batch_is_cut(make_actor, loss, keys):
    """A row is never split between pieces, so its ratio does not depend on the layout."""
    stats = []
    padded = {"layout": "padded"}
    for cut in (padded, padded | {"mb_tokens": 40}, {"layout": "packed"}, {"layout": "tree"}):
        actor = make_actor(ppo_epochs=2, **keys, **cut)
        actor.loss_fn = loss
        stats.append(actor.ppo_update(prepare(actor, make_batch())))
    for name in ("loss", "dropped_share", "clip_frac", "grad_norm"):
        expected = pytest.approx([stats[0][name]] * 4, rel=1e-3, abs=1e-5)
        assert [s[name] for s in stats] == expected, name
    if loss is not gspo:
        assert 0 < stats[0]["dropped_share"] < 1


def test_a_small_effective_sample_makes_a_small_step(make_actor):
    """With VCPO, rate and change of the weights are (ESS / M)^power times as large, where ESS is
    (sum w)^2 / sum w^2."""
    steps, stats = {}, {}
    for power in (0.0, 0.5, 2.0):
        actor = make_actor(behave_imp_weight_cap=None)
        callback = VCPO(None)
        callback.power = power
        callback.on_start(SimpleNamespace(actor=actor))
        before = parameters(actor)
        stats[power] = actor.ppo_update(batch := prepare(actor, make_batch()))
        after = parameters(actor)
        steps[power] = torch.cat([(after[name] - before[name]).flatten() for name in before])
    w = (batch["prox_logp"] - batch["logprobs"]).exp()[batch["loss_mask"] > 0]
    share = (w.sum() ** 2 / (len(w) * w.square().sum())).item()
    assert share < 0.99
    for power, step in steps.items():
        assert stats[power]["behave_ess"] == pytest.approx(share, rel=1e-4)
        assert stats[power]["lr"] == pytest.approx(1e-3 * share**power, rel=1e-4)
        torch.testing.assert_close(step, steps[0.0] * share**power, rtol=1e-2, atol=1e-7)


# ---- the optimizer and the other terms of the loss


def test_the_learning_rate_schedule():
    """The rate warms up linearly, then stays constant or falls to a tenth of its peak."""
    table = {
        "constant": [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1],
        "linear": [0.25, 0.5, 0.75, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1],
    }
    for kind, expected in table.items():
        o = OptimizerConfig(lr_scheduler_type=kind, warmup_steps=4)
        assert [lr_factor(step, o, 8) for step in range(10)] == pytest.approx(expected, abs=1e-6)


def test_schedules_move_once_a_training_step(make_actor):
    """Only step_lr_scheduler advances them, not mini-batches and epochs."""
    actor = make_actor(ppo_n_minibatches=2, ppo_epochs=2, entropy_coeff=0.3, anneal=True)
    actor.config.optimizer.lr_scheduler_type = "linear"
    for step in range(3):
        stats = actor.ppo_update(prepare(actor, make_batch()))
        assert stats["lr"] == pytest.approx(1e-3 * (1 - 0.9 * step / 10))
        assert actor.anneal == pytest.approx(1 - step / 10)
        actor.step_lr_scheduler()


def test_norms_and_biases_do_not_decay(make_actor):
    """Without a gradient, decay shrinks matrices by lr * weight_decay, but no vector."""
    actor = make_actor(optimizer=OptimizerConfig(lr=0.1, weight_decay=0.5))
    batch = prepare(actor, make_batch())
    batch["advantages"].zero_()
    before = parameters(actor)
    actor.ppo_update(batch)
    for name, p in parameters(actor).items():
        torch.testing.assert_close(p, before[name] * (0.95 if p.dim() > 1 else 1), msg=name)


def test_kl_in_the_loss_pulls_towards_the_reference(make_actor):
    """Without any reward, the k2 term moves the policy towards the reference."""
    actor, batch = make_actor(kl_ctl=0.5), make_batch()
    batch["turn_rewards"][:] = 0
    batch = prepare(actor, batch, drift=0.0)
    with pytest.raises(KeyError, match="ref_logp"):
        actor.ppo_update(batch)
    batch["ref_logp"] = batch["prox_logp"] - 1.0
    assert actor.ppo_update(batch)["ref_kl"] == pytest.approx(0.5, abs=1e-5)
    change = (actor.compute_logp(batch) - batch["prox_logp"])[batch["loss_mask"] > 0]
    assert change.mean() < 0, "log pi starts above the reference and must fall"


@pytest.mark.parametrize("name", ["entropy", "rewarded"])
def test_steps_raise_what_the_objective_asks_for(make_actor, name):
    """With entropy_coeff and without rewards, the entropy grows. With rewards, the rewarded tokens
    become likelier than the others."""
    actor, found = make_actor(entropy_coeff=float(name == "entropy")), []
    for _ in range(4):
        batch = make_batch()
        batch["turn_rewards"] *= name == "rewarded"
        entropy = actor.ppo_update(prepare(actor, batch))["entropy"]
        gain = (batch["advantages"] * batch["prox_logp"]).sum().item()
        found.append(entropy if name == "entropy" else gain)
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.05


@pytest.mark.parametrize("limit", [0.01, 0.0])
def test_gradients_are_clipped_to_their_norm(make_actor, limit):
    """A limit of 0 means no limit. The metric grad_norm is the norm before the clip."""
    actor = make_actor(optimizer=OptimizerConfig(lr=1e-3, gradient_clipping=limit))
    stats = actor.ppo_update(prepare(actor, make_batch()))
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients(actor).values()))
    assert norm == pytest.approx(limit or stats["grad_norm"], rel=1e-3)
    assert stats["grad_norm"] > 0.02


# ---- frozen layers


@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("qwen3", True), ("opt", True)])
def test_layers_that_learn_get_the_gradients_they_always_get(make_actor, tmp_path, family, tied):
    """What is frozen has no gradient and no optimizer state, and keeps every bit. Frozen layers run
    once for a piece, in the pass for pi_prox."""
    path = make_family(tmp_path, family, tie_word_embeddings=tied)
    whole, part = make_actor(path), make_actor(path, frozen_layers=1)
    before, ran = parameters(part), []
    part.frozen[0].self_attn.register_forward_pre_hook(lambda *_: ran.append(1))
    for actor in (whole, part):
        actor.ppo_update(prepare(actor, make_batch()))
    assert len(ran) == 1
    expected, found, after = gradients(whole), gradients(part), parameters(part)
    frozen = {n for n in expected if "layers.0." in n or "embed" in n}
    assert found.keys() == expected.keys() - frozen
    assert {n for n, p in part.model.named_parameters() if not p.requires_grad} == frozen
    assert_same({name: expected[name] for name in found}, found, atol=1e-6)
    assert {n for n, p in after.items() if torch.equal(p, before[n])} == frozen
    assert len(part.optimizer.state) == len(found)
    with pytest.raises(ValueError, match="frozen_layers=3, but the model has 2 layers"):
        make_actor(path, frozen_layers=3)


@pytest.mark.parametrize("tied", [False, True])
def test_only_what_learns_is_pushed_and_kept(make_actor, tmp_path, tied):
    """The first push has all weights, because the servers may have had others. A saved model has
    all weights, too. Later pushes and checkpoints have only the weights that learn."""
    path = make_family(tmp_path / "base", "qwen3", tie_word_embeddings=tied)
    actor, again = (make_actor(path, frozen_layers=1) for _ in range(2))
    actor.connect_engine(SimpleNamespace(update_weights=lambda *_: None), None)
    actor.ppo_update(prepare(actor, make_batch()))
    for version in (1, 2):
        actor.update_weights(WeightUpdateMeta(path=str(tmp_path), version=version))
    actor.save(tmp_path / "model")
    v1, v2, model = (load_file(tmp_path / n / "model.safetensors") for n in ("v1", "v2", "model"))
    assert v2.keys() == gradients(actor).keys()
    assert v1.keys() == model.keys() == parameters(actor).keys()
    for name, weight in parameters(actor).items():
        assert all(torch.equal(file.get(name, weight), weight) for file in (v1, v2, model))
    assert actor.state()["model"].keys() == v2.keys()
    actor.save_state(tmp_path / "state")
    again.load_state(tmp_path / "state")
    assert all(torch.equal(p, v1[name]) for name, p in parameters(again).items())
    (whole := make_actor(path)).save_state(tmp_path / "all")
    for now, then, frozen in ((again, "all", 0), (whole, "state", 1)):
        with pytest.raises(ConfigError, match=rf"made with actor\.frozen_layers={frozen}"):
            now.load_state(tmp_path / then)


# ---- checkpoints and weights


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(make_actor, tmp_path):
    """Weights, moments and steps come from the checkpoint, rate and weight decay from the keys."""
    one = make_actor()
    one.ppo_update(prepare(one, make_batch()))
    one.step_lr_scheduler()
    one.save_state(tmp_path)
    batch = prepare(one, make_batch(seed=1))
    again = make_actor(optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.3, gradient_clipping=0.0))
    again.load_state(tmp_path)
    assert again.steps == 1
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.3
    assert again.optimizer.param_groups[0]["lr"] == 3e-3
    again.config = one.config
    for group in again.optimizer.param_groups:
        group["weight_decay"] = 0.01 if group["weight_decay"] else 0.0
    for actor in (one, again):
        actor.ppo_update(dict(batch))
    assert all(torch.equal(parameters(one)[n], p) for n, p in parameters(again).items())


def test_a_weight_update_writes_a_model_first_and_tells_the_servers_then(make_actor, tmp_path):
    """In mode disk, transformers loads the folder and gives the actor's logprobs."""
    actor, seen = make_actor(), []
    batch = prepare(actor, make_batch())

    class Rollout:
        def update_weights(self, meta: WeightUpdateMeta, buckets: tuple) -> None:
            assert AutoTokenizer.from_pretrained(meta.directory).eos_token == "<|im_end|>"
            model = AutoModelForCausalLM.from_pretrained(meta.directory)
            assert model.config.architectures == ["Qwen3ForCausalLM"]
            with torch.no_grad():
                seen.append((meta.version, plain_logp(model, batch) * batch["loss_mask"]))

    meta = WeightUpdateMeta(path=str(tmp_path))
    actor.connect_engine(Rollout(), meta)
    actor.ppo_update(batch)
    actor.update_weights(meta.with_version(1))
    actor.set_version(1)
    [(version, logp)] = seen
    assert version == actor.get_version() == 1
    torch.testing.assert_close(logp, actor.compute_logp(batch), atol=2e-5, rtol=0)


def test_a_reference_model_stays_where_it_was(make_actor, tiny_model_dir):
    """The reference model keeps the actor's first weights. If it is destroyed, the actor's ranks
    stay."""
    actor, ref = make_actor(), FSDPEngine(make_config(), tiny_model_dir)
    ref.create_process_group()
    ref.initialize()
    batch = prepare(actor, make_batch())
    batch["ref_logp"] = before = ref.compute_logp(batch)
    assert torch.equal(before, batch["prox_logp"])
    actor.ppo_update(batch)
    assert torch.equal(ref.compute_logp(batch), before)
    assert not torch.equal(actor.compute_logp(batch), before)
    ref.destroy()
    assert torch.distributed.is_initialized(), "the actor has made the process group"
