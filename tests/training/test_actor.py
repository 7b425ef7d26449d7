"""The actor divides a batch into pieces, but computes the same numbers as a plain model, up to rounding.

The plain model is an unmodified Hugging Face model in a simple loop. The actor has one rank, divides the batch into
mini-batches and pieces, and trims the padding.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import (
    FAMILIES,
    NEVER,
    PLAIN,
    gradients,
    make_batch,
    make_config,
    make_family,
    prepare,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from inference.weights import WeightUpdateMeta
from ppo import describe_mode, ppo_actor_loss_fn
from training.actor import FSDPEngine, FSDPPPOActor, lr_factor, share_of_peak, split_minibatches
from training.config import OptimizerConfig
from training.corrections import effective_sample_size
from training.layout import row_lengths, split_microbatches, split_packs


@pytest.fixture
def make_actor(tiny_model_dir: Path):
    """Return a function make_actor(path, key=value...) that returns an initialised actor of one rank. The default path
    is that of the tiny model."""
    actors = []

    def make(path: Path = tiny_model_dir, **changes) -> FSDPPPOActor:
        actor = FSDPPPOActor(make_config(**changes), path)
        actors.append(actor)
        actor.create_process_group()
        actor.initialize(max_steps=10)
        return actor

    yield make
    for actor in reversed(actors):
        actor.destroy()


@pytest.fixture
def plain(tiny_model_dir: Path):
    """Return the tiny model as an unmodified Hugging Face model."""
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)


def plain_logp(model, batch: dict[str, Tensor]) -> Tensor:
    """Compute log p of each token (B, T), one row at a time without padding. The result is 0 at position 0 and at
    padding."""
    logp = torch.zeros(batch["input_ids"].shape)
    for i, n in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids = batch["input_ids"][i, :n].long()
        logits = model(ids[None]).logits[0, :-1] / batch["temperatures"][i, 1:n, None]
        logp[i, 1:n] = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
    return logp


def parameters(actor: FSDPPPOActor) -> dict[str, Tensor]:
    """Return a copy of the whole model's weights."""
    return {name: p.clone() for name, p in actor.full_state().items()}


def test_compute_logp_is_the_log_softmax_at_each_tokens_temperature(make_actor, plain):
    """Column t of compute_logp is log p(token t | earlier tokens) at the temperature of token t. Padding does not
    change the log-probabilities that compute_logp returns. For tokens outside loss_mask, such as prompt tokens,
    compute_logp returns 0."""
    batch = make_batch()
    with torch.no_grad():
        expected = plain_logp(plain, batch)
    for mb_tokens in (16384, 40, 1):
        actor = make_actor(mb_tokens=mb_tokens)
        for mask in (batch["loss_mask"], batch["attention_mask"]):
            logp = actor.compute_logp(batch | {"loss_mask": mask})
            torch.testing.assert_close(logp, expected * mask, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "changes", [{}, {"layout": "packed"}, {"enable_tree_training": True}], ids=str
)
def test_compute_logp_reads_no_prompt_through_the_last_layer(make_actor, changes):
    """In every layout, compute_logp computes the logits of the trained tokens and of no other token."""
    batch, actor = make_batch(), make_actor(mb_tokens=40, **changes)
    vocabulary = actor.model.config.vocab_size
    rows = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket is torch.ops.aten.mm and out.shape[1] == vocabulary:
                rows.append(len(out))
            return out

    with Products():
        actor.compute_logp(batch)
    assert sum(rows) == batch["loss_mask"].sum()


@pytest.mark.parametrize("mb_tokens", [16384, 40, 1])
def test_packed_rows_do_not_see_each_other(make_actor, plain, mb_tokens):
    """Sequences that are packed into one row get the same log-probabilities as separate sequences."""
    batch = make_batch()
    with torch.no_grad():
        expected = plain_logp(plain, batch) * batch["loss_mask"]
    logp = make_actor(mb_tokens=mb_tokens, layout="packed").compute_logp(batch)
    torch.testing.assert_close(logp, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "changes", [{}, {"layout": "packed"}, {"enable_tree_training": True}], ids=str
)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layout_is_right_for_a_family_or_refuses_it(make_actor, tmp_path, name, changes):
    """For each model family, a layout either gives the plain model's log-probabilities or raises an error."""
    path, batch = make_family(tmp_path, name), make_batch()
    if name in NEVER or (changes and name not in PLAIN):
        with pytest.raises(
            ValueError,
            match="not support|attention of its own" if name in NEVER else "layout=padded",
        ):
            make_actor(path, **changes)
        return
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = plain_logp(model.eval(), batch) * batch["loss_mask"]
    logp = make_actor(path, **changes).compute_logp(batch)
    torch.testing.assert_close(logp, expected, atol=1e-4, rtol=0)


def test_the_metrics_are_on_the_device_of_the_loss(make_actor, monkeypatch):
    """All metrics of a piece must be on the device of the loss, because the metrics are stacked into one tensor. The
    test uses the device "meta" in place of a GPU."""
    actor, devices = make_actor(enable_tree_training=True), list[str]()
    batch = prepare(actor, make_batch())

    def piece_loss(*_):
        loss = torch.zeros((), device="meta", requires_grad=True)
        return loss, {"loss": loss.detach()}

    def stack(tensors):
        devices.extend(x.device.type for x in tensors)
        raise StopIteration

    monkeypatch.setattr(actor, "piece_loss", piece_loss)
    monkeypatch.setattr(torch, "stack", stack)
    with pytest.raises(StopIteration):
        actor.ppo_update(batch)
    assert devices == ["meta"] * 2


@pytest.mark.parametrize(
    "changes", [{}, {"layout": "packed"}, {"enable_tree_training": True}], ids=str
)
def test_capped_attention_is_refused(make_actor, tmp_path, monkeypatch, changes):
    """Every layout refuses the model Gemma 2, because transformers 5.19 computes the attention of Gemma 2 without the
    cap on the attention scores. SGLang 0.5.23 pins transformers 5.19."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM has attention of its own"):
        make_actor(make_family(tmp_path, "gemma2"), **changes)


@pytest.mark.parametrize(
    "changes", [{}, {"layout": "packed"}, {"gradient_checkpointing": True}], ids=str
)
def test_the_sharded_gradient_is_the_plain_models(make_actor, plain, changes):
    """The actor's gradient, summed over the pieces of the batch, is the gradient of the plain model."""
    actor = make_actor(mb_tokens=40, **changes)
    batch = prepare(actor, make_batch())
    stats = actor.ppo_update(batch)

    prox, behav, A, mask = (batch[k] for k in ("prox_logp", "logprobs", "advantages", "loss_mask"))
    loss, _ = ppo_actor_loss_fn(plain_logp(plain, batch), prox, behav, A, mask, actor.config)
    loss.backward()
    assert stats["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for name, gradient in gradients(actor.model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, atol=1e-6, rtol=1e-4)


def test_a_model_that_splits_the_tensors_of_its_files_is_refused(make_actor, tmp_path):
    """The actor refuses a model that splits one tensor of its weight files into several parameters, because a weight
    update sends one parameter at a time."""
    with pytest.raises(ValueError, match="cannot be undone"):
        make_actor(make_family(tmp_path, "hrm_text"))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # FSDP2 warns about every OPT model
@pytest.mark.parametrize("name", ["opt", "falcon"])
def test_a_checkpointed_layer_drops_nothing_out(make_actor, tmp_path, name):
    """With gradient checkpointing no dropout is applied, even in model families whose layers call dropout functions."""
    path, batch = make_family(tmp_path, name, dropout=0.5, hidden_dropout=0.5), make_batch()
    actor = make_actor(path, gradient_checkpointing=True)
    assert torch.equal(actor.compute_logp(batch), actor.compute_logp(batch))
    assert actor.ppo_update(prepare(actor, batch, drift=0.0))["clip_frac"] == 0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_checkpointed_layer_computes_again_in_the_backward_pass(make_actor, checkpointed):
    """In a step the forward pass of each layer runs twice with gradient_checkpointing, and once without."""
    actor = make_actor(gradient_checkpointing=checkpointed)
    batch, entered = prepare(actor, make_batch()), []
    layers = actor.model.base_model.layers
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda *_: entered.append(1))
    actor.ppo_update(batch)
    assert len(entered) == (2 if checkpointed else 1) * len(layers)


def test_micro_batches_do_not_change_the_step(make_actor):
    """The metrics and the new weights do not depend on the number of pieces in a mini-batch."""
    results = []
    for mb_tokens in (16384, 1):
        actor = make_actor(mb_tokens=mb_tokens, entropy_coeff=0.1, ppo_n_minibatches=2)
        stats = actor.ppo_update(prepare(actor, make_batch()))
        results.append((stats, parameters(actor)))
    (a, weights_a), (b, weights_b) = results
    assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    for name in weights_a:
        torch.testing.assert_close(weights_a[name], weights_b[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "units"), [({}, 0), ({"offload": True}, 3), ({"dtype": "bfloat16"}, 3)]
)
def test_a_single_rank_uses_fsdp_only_if_it_must(make_actor, changes, units):
    """With a single rank in float32, FSDP wraps no module. With offload or bfloat16, FSDP wraps each of the two layers
    and the rest of the model. In float32, an update with FSDP gives the same weights as an update without FSDP, up to
    rounding."""
    expected, actor = make_actor(), make_actor(**changes)
    assert sum(isinstance(module, FSDPModule) for module in actor.model.modules()) == units
    if "dtype" in changes:
        return
    norms = []
    for one in (expected, actor):
        batch = prepare(one, make_batch())
        norms += [
            one.ppo_update(batch)["grad_norm"] for _ in range(3)
        ]  # updates 2 and 3 use Adam's moments
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-5)
    for name, weight in parameters(actor).items():
        torch.testing.assert_close(weight, parameters(expected)[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("trees", [False, True])
def test_every_epoch_uses_the_same_pieces(make_actor, monkeypatch, trees):
    """Dividing a mini-batch into pieces takes time. The actor divides each mini-batch into pieces only once, and uses
    these pieces in all epochs."""
    actor = make_actor(ppo_epochs=3, ppo_n_minibatches=2, enable_tree_training=trees)
    batch, original = prepare(actor, make_batch()), actor.layout
    cut: list[Any] = []

    def counted(batch, rows, mb_tokens):
        cut.append(rows)
        return original.cut(batch, rows, mb_tokens)

    monkeypatch.setattr(actor, "layout", original._replace(cut=counted))
    actor.ppo_update(batch)
    assert len(cut) == 2


def test_the_first_update_on_fresh_data_is_the_policy_gradient(make_actor, plain):
    """If the current policy sampled the data, the gradient of the loss is the gradient of -mean(A log pi)."""
    actor = make_actor()
    batch = prepare(actor, make_batch(), drift=0.0)
    stats = actor.ppo_update(batch)
    (-(batch["advantages"] * plain_logp(plain, batch)).sum() / batch["loss_mask"].sum()).backward()
    for name, gradient in gradients(actor.model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, atol=1e-6, rtol=1e-4)
    assert stats["clip_frac"] == 0
    assert stats["behave_weight_mean"] == pytest.approx(1)


def test_an_update_makes_rewarded_tokens_likelier(make_actor):
    """After a few steps, tokens with A > 0 are more likely than before, and tokens with A < 0 are less likely."""
    actor = make_actor(ppo_n_minibatches=2, ppo_epochs=2)
    batch = prepare(actor, make_batch())
    actor.ppo_update(batch)
    change = actor.compute_logp(batch) - batch["prox_logp"]
    assert change[batch["advantages"] > 0].mean() > 0.05
    assert change[batch["advantages"] < 0].mean() < -0.05


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 300)
)
@settings(max_examples=200, deadline=None)
def test_cutting_loses_no_row_and_balances_tokens(lengths, n, mb_tokens):
    """Every row is in exactly one mini-batch and one piece. The numbers of tokens in any two mini-batches differ by at
    most the length of the longest row."""
    minibatches = split_minibatches(lengths, n)
    assert sorted(row for part in minibatches for row in part) == list(range(len(lengths)))
    assert all(minibatches)
    loads = [sum(lengths[row] for row in part) for part in minibatches]
    assert max(loads) - min(loads) <= max(lengths)
    for part in minibatches:
        pieces = split_microbatches(part, lengths, mb_tokens)
        assert sorted(row for piece in pieces for row in piece) == sorted(part)
        for piece in pieces:
            assert len(piece) == 1 or len(piece) * max(lengths[row] for row in piece) <= mb_tokens
        packs = split_packs(part, lengths, mb_tokens)
        assert sorted(row for piece in packs for row in piece) == sorted(part)
        assert all(
            len(piece) == 1 or sum(lengths[row] for row in piece) <= mb_tokens for piece in packs
        )


def test_cutting_is_the_same_every_time():
    """Rows of equal length are distributed over the mini-batches in the order of the batch, so a repeated run makes the
    same mini-batches."""
    assert split_minibatches([5] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert split_microbatches([0, 1, 2, 3], [4, 9, 4, 8], 18) == [[1, 3], [0, 2]]


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_what_is_not_trained_cannot_leak_into_the_weights(make_actor, poison):
    """The values at untrained tokens change neither the metrics nor the weights, even if a value is NaN or infinite, or
    a temperature is 0."""
    results = []
    for dirty in (False, True):
        actor = make_actor()
        batch = prepare(actor, make_batch())
        if dirty:
            outside = batch["loss_mask"] == 0
            for key in ("logprobs", "prox_logp", "advantages"):
                batch[key] = batch[key].masked_fill(outside, poison)
            batch["temperatures"] = batch["temperatures"].masked_fill(outside, 0.0)
        results.append((actor.ppo_update(batch), parameters(actor)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_a_loss_that_is_not_a_number_stops_before_the_weights(make_actor):
    """A NaN at a trained token raises an error that names the step, and the weights do not change."""
    actor = make_actor()
    batch = prepare(actor, make_batch())
    before = parameters(actor)
    batch["logprobs"][0, 4] = math.nan
    with pytest.raises(FloatingPointError, match="training step 1; only earlier mini-batches"):
        actor.ppo_update(batch)
    assert all(torch.equal(before[name], p) for name, p in parameters(actor).items())


def test_a_batch_without_a_trained_token_is_an_error(make_actor):
    """A batch without a trained token raises an error. A mini-batch without a trained token is skipped."""
    actor = make_actor(ppo_n_minibatches=4)
    batch = prepare(actor, make_batch())
    batch["loss_mask"][2:] = 0
    assert math.isfinite(actor.ppo_update(batch)["loss"])
    batch["loss_mask"][:] = 0
    with pytest.raises(ValueError, match="no token of the batch is trained"):
        actor.ppo_update(batch)


def test_truncated_turns_leave_the_update(make_actor):
    """With mask_truncated, the update is the same as an update without the truncated rows."""
    actors = [make_actor(mask_truncated=cut) for cut in (True, False)]
    batch = make_batch()
    batch["truncated"] = torch.zeros(len(batch["loss_mask"]), dtype=torch.int32)
    batch["truncated"][1:3] = 1
    without = {key: x.clone() for key, x in batch.items()}
    without["loss_mask"][1:3] = 0
    a = actors[0].ppo_update(cut := prepare(actors[0], batch))
    b = actors[1].ppo_update(prepare(actors[1], without))
    assert not cut["loss_mask"][1:3].any()
    assert a == b


def test_a_batch_that_is_not_ready_says_what_is_missing(make_actor):
    """If a batch lacks keys, ppo_update raises an error that names the keys. row_lengths refuses padding on the
    left."""
    actor = make_actor()
    with pytest.raises(ValueError, match=r"\['advantages', 'prox_logp'\]"):
        actor.ppo_update(make_batch())
    batch = make_batch()
    with pytest.raises(ValueError, match="on the right"):
        row_lengths(batch | {"attention_mask": batch["attention_mask"].flip(1)})


def test_standard_ppo_takes_its_old_policy_from_where_it_is_told(make_actor):
    """In standard PPO the old log-probabilities come from a forward pass if recompute_logprob is set, and from the
    server if not."""
    fractions = {}
    for recompute in (True, False):
        actor = make_actor(use_decoupled_loss=False, recompute_logprob=recompute)
        batch = prepare(actor, make_batch())
        assert actor.should_compute_prox_logp() is recompute
        fractions[recompute] = actor.ppo_update(batch)["clip_frac"]
    assert fractions[True] == 0
    assert fractions[False] > 0


def stale(actor: FSDPPPOActor, version=5) -> dict[str, Tensor]:
    """Make a batch whose rows are 0 to 3 versions old, and give the actor the version `version`."""
    batch = prepare(actor, make_batch())
    actor.set_version(version)
    ages = torch.arange(len(batch["loss_mask"]))[:, None] % 4
    batch["versions"] = torch.where(batch["loss_mask"] > 0, version - ages, -1)
    return batch


def test_loglinear_needs_no_forward_pass_and_starts_at_the_truth(make_actor):
    """If all tokens are stale, a training step of one mini-batch gives the same weights and metrics with
    prox_logp_method=loglinear as with recompute."""
    steps = {}
    for method in ("recompute", "loglinear"):
        actor = make_actor(prox_logp_method=method)
        batch = stale(actor)
        batch["versions"] -= 1
        assert actor.should_compute_prox_logp() is (method == "recompute")
        if method == "loglinear":
            del batch["prox_logp"]
        steps[method] = actor.ppo_update(batch), parameters(actor)
    (a, weights_a), (b, weights_b) = steps.values()
    assert b.pop("versions_ahead") == 0
    assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    for name in weights_a:
        torch.testing.assert_close(weights_a[name], weights_b[name], atol=1e-5, rtol=0)


def test_metrics_trains_on_the_truth_and_reports_the_guesses(make_actor):
    """prox_logp_method=metrics gives bitwise the same weights as recompute, and logs 18 metrics: six errors for each of
    three guesses of pi_prox."""
    steps = {}
    for method in ("recompute", "metrics"):
        actor = make_actor(prox_logp_method=method, ppo_n_minibatches=4)
        steps[method] = actor.ppo_update(stale(actor)), parameters(actor)
    (a, weights_a), (b, weights_b) = steps.values()
    assert all(torch.equal(weights_a[name], weights_b[name]) for name in weights_a)
    errors = {key: value for key, value in b.items() if key.endswith("_error")}
    assert len(errors) == 18
    assert 0 < errors["loglinear_logp_abs_error"] < errors["rollout_logp_abs_error"]
    assert a.items() <= b.items()


def test_a_token_from_the_future_counts_as_fresh_and_is_counted(make_actor):
    """The loss stays finite if some tokens have a newer version than the trainer. The metric versions_ahead counts the
    tokens whose version is newer than the trainer's."""
    actor = make_actor(prox_logp_method="loglinear", ppo_n_minibatches=2)
    batch = stale(actor)
    ahead = batch["loss_mask"][0] > 0
    batch["versions"][0][ahead] = 99
    stats = actor.ppo_update(batch)
    assert stats["versions_ahead"] == int(ahead.sum())
    assert math.isfinite(stats["loss"])


def test_loglinear_without_versions_says_so(make_actor):
    """With prox_logp_method=loglinear a batch without versions raises an error."""
    actor = make_actor(prox_logp_method="loglinear")
    with pytest.raises(ValueError, match="versions"):
        actor.ppo_update(prepare(actor, make_batch()))


def test_the_effective_sample_size_is_that_of_the_weights(make_actor):
    """The metric behave_ess is the effective sample size divided by the number of trained tokens in the step. For n
    tokens with the behaviour weights w, behave_ess is (sum w)^2 / (n sum w^2). The metric behave_ess is 1 if all tokens
    have the same weight, and 0 if all tokens are dropped."""
    actor = make_actor(mb_tokens=40, behave_imp_weight_cap=None)
    batch = prepare(actor, make_batch())
    w = (batch["prox_logp"] - batch["logprobs"]).exp()[batch["loss_mask"] > 0]
    assert actor.ppo_update(batch)["behave_ess"] == pytest.approx(
        (w.sum() ** 2 / (len(w) * w.square().sum())).item(), rel=1e-4
    )
    fresh = prepare(actor, make_batch(), drift=0.0)
    assert actor.ppo_update(fresh)["behave_ess"] == pytest.approx(1, abs=1e-5)
    assert effective_sample_size({"behave_weight_mean": 0.0, "behave_weight_square": 0.0}) == 0, (
        "every token is dropped"
    )


def test_a_small_effective_sample_makes_a_small_step(make_actor):
    """The metric behave_ess of a mini-batch is the effective sample size divided by the number of trained tokens. With
    ess_lr_power=p, the learning rate and the change of the weights are behave_ess^p times as large as with
    ess_lr_power=0. The metric lr includes the factor behave_ess^p."""
    steps, stats = {}, {}
    for power in (0.0, 0.5, 2.0):
        actor = make_actor(behave_imp_weight_cap=None, ppo_n_minibatches=1, ess_lr_power=power)
        before = parameters(actor)
        stats[power] = actor.ppo_update(prepare(actor, make_batch()))
        after = parameters(actor)
        steps[power] = torch.cat([(after[name] - before[name]).flatten() for name in before])
    share = stats[0.0]["behave_ess"]
    assert share < 0.99
    for power, step in steps.items():
        assert stats[power]["lr"] == pytest.approx(stats[0.0]["lr"] * share**power)
        torch.testing.assert_close(step, steps[0.0] * share**power, rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("how", ["sequence", "constant"])
def test_every_aggregation_is_the_same_however_it_is_cut(make_actor, plain, how):
    """With loss_aggregation=sequence or constant, the loss equals that of a plain loop, for all sizes of pieces and all
    layouts."""
    actors = [
        make_actor(loss_aggregation=how, max_new_tokens=20, **cut)
        for cut in ({"mb_tokens": 40}, {"layout": "packed"})
    ]
    losses = [actor.ppo_update(batch := prepare(actor, make_batch()))["loss"] for actor in actors]
    prox, behav, A, mask = (batch[k] for k in ("prox_logp", "logprobs", "advantages", "loss_mask"))
    per_token = torch.zeros(mask.shape)
    for i, t in mask.nonzero().tolist():
        one = (x[i, t : t + 1] for x in (prox, prox, behav, A, mask))
        theta_1, prox_1, behav_1, A_1, mask_1 = one
        per_token[i, t] = ppo_actor_loss_fn(
            theta_1, prox_1, behav_1, A_1, mask_1, actors[0].config
        )[0]
    n = mask.sum(1)
    expected = (per_token.sum(1) / (n if how == "sequence" else 20)).mean()
    assert losses == pytest.approx([expected.item()] * 2, abs=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {"importance_sampling_level": "sequence", "eps_clip": 0.01},
        {"behave_imp_weight_level": "sequence", "behave_imp_weight_cap": 1.5},
        {"behave_imp_weight_level": "geometric", "reject_veto": 0.6, "reject_max_k2": 0.4},
        {"use_cispo_loss": True, "behave_imp_weight_floor": 0.7},
    ],
)
def test_corrections_of_whole_rows_are_the_same_however_a_batch_is_cut(make_actor, keys):
    """A row is never split between pieces. If ratios, behaviour weights or rejections are computed for whole rows, the
    loss does not depend on the size of the pieces or on the layout."""
    cuts: tuple[dict[str, Any], ...] = (
        {},
        {"mb_tokens": 40},
        {"layout": "packed"},
        {"enable_tree_training": True},
    )
    stats = []
    for cut in cuts:
        actor = make_actor(ppo_epochs=2, **keys, **cut)
        stats.append(actor.ppo_update(prepare(actor, make_batch())))
    for name in ("loss", "dropped_share", "clip_frac", "grad_norm"):
        assert [s[name] for s in stats] == pytest.approx(
            [stats[0][name]] * len(cuts), rel=1e-3, abs=1e-5
        ), name
    if "importance_sampling_level" not in keys:
        assert 0 < stats[0]["dropped_share"] < 1


def test_the_speed_counts_tokens_and_flops(make_actor):
    """The speed metrics count the tokens of all rows. The FLOPs for computing log pi_prox are counted only if the
    trainer recomputes log pi_prox."""
    batch = make_batch()
    tokens = int(batch["attention_mask"].sum())
    for method, per_parameter in (("recompute", 14), ("loglinear", 12)):
        actor = make_actor(prox_logp_method=method, ppo_epochs=2)
        found = actor.speed(batch, 0.5)
        n = sum(x.numel() for x in actor.full_state().values())
        assert found["train_tokens_s"] == 2 * tokens
        assert found["train_tflops"] == pytest.approx(per_parameter * n * 2 * tokens / 1e12)


def test_the_share_of_the_peak_is_that_of_the_gpu():
    """The metric peak_share is the achieved TFLOPS divided by the peak TFLOPS of the named GPU. The metric peak_share
    is missing if the GPU's peak is not known."""
    assert share_of_peak("NVIDIA H100 80GB HBM3", 400) == {"peak_share": 400 / 989}
    assert share_of_peak("NVIDIA H100 PCIe", 378) == {"peak_share": 0.5}
    assert share_of_peak("NVIDIA GeForce GTX 1080", 4) == {}


def test_a_learning_rate_of_0_changes_no_weight(make_actor):
    """With lr=0 an update changes no weight, even with weight decay."""
    actor = make_actor(optimizer=OptimizerConfig(lr=0.0, weight_decay=0.1))
    before = parameters(actor)
    actor.ppo_update(prepare(actor, make_batch()))
    assert all(torch.equal(before[name], p) for name, p in parameters(actor).items())


def test_kl_in_the_loss_pulls_towards_the_reference(make_actor):
    """If all rewards are 0, the KL term in the loss moves the policy towards the reference policy."""
    actor = make_actor(kl_ctl=0.5, kl_placement="loss", kl_estimator="k2")
    batch = make_batch()
    batch["turn_rewards"][:] = 0
    batch = prepare(actor, batch, drift=0.0)
    with pytest.raises(ValueError, match="ref_logp"):
        actor.ppo_update(batch)
    batch["ref_logp"] = batch["prox_logp"] - 1.0
    before = actor.ppo_update(batch)["ref_kl"]
    assert before == pytest.approx(math.exp(-1), abs=1e-5)
    change = (actor.compute_logp(batch) - batch["prox_logp"])[batch["loss_mask"] > 0]
    assert change.mean() < 0, "log pi starts above the reference and must fall"


def test_half_precision_trains_float32_weights(make_actor):
    """With dtype=bfloat16, parameters and gradients stay float32, and the gradient norm changes by at most 10
    percent."""
    exact, half = make_actor(), make_actor(dtype="bfloat16")
    batch = prepare(exact, make_batch())
    a, b = (actor.ppo_update(dict(batch)) for actor in (exact, half))
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in half.model.parameters()} == {torch.float32}
    assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.1)


BENT: dict[str, dict[str, Any]] = {
    "gemma3_text": {"final_logit_softcapping": 30.0},
    "granite": {"logits_scaling": 2.0},
    "cohere": {"logit_scale": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "recurrent_gemma": {
        "logits_soft_cap": 5.0,
        "lru_width": 32,
        "block_types": ["recurrent", "attention"],
    },
    "phi": {},
}


@pytest.mark.parametrize("name", BENT)
def test_a_model_that_bends_its_logits_is_refused(make_actor, tmp_path, name):
    """If a model caps, scales or shifts its logits, initialising the actor raises an error."""
    path = make_family(tmp_path, name, **BENT[name])
    with pytest.raises(ValueError, match=f"{[*BENT[name], 'a bias'][0]}.*logprobs.py"):
        make_actor(path)


def test_the_mode_is_said_in_words():
    """describe_mode states how the log-probabilities of each policy are obtained."""
    assert "pi_prox from a forward pass" in describe_mode(make_config())
    assert "pi_old from a forward pass" in describe_mode(make_config(use_decoupled_loss=False))
    assert "no forward pass" in describe_mode(make_config(prox_logp_method="loglinear"))
    assert "is logged" in describe_mode(make_config(prox_logp_method="metrics"))
    clamped = make_config(behave_imp_weight_level="sequence", behave_imp_weight_action="clamp")
    assert "behaviour weight per row (product), clamp above 5" in describe_mode(clamped)
    varied = make_config(
        behave_imp_weight_level="geometric", behave_imp_weight_floor=0.5, use_cispo_loss=True
    )
    assert (
        "CISPO; behaviour weight per row (geometric mean), mask above 5 and below 0.5"
        in describe_mode(varied)
    )
    assert describe_mode(make_config(use_decoupled_loss=False, mask_truncated=True)).endswith(
        "truncated turns left out"
    )
    standard = describe_mode(make_config(use_decoupled_loss=False, recompute_logprob=False))
    assert "pi_old from the inference server" in standard


def test_the_learning_rate_schedule():
    """The learning rate rises linearly during warm-up. After the warm-up, the learning rate follows its schedule down
    to min_lr_ratio * lr."""
    table = {
        "constant": [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1],
        "linear": [0.25, 0.5, 0.75, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1],
        "cosine": [0.25, 0.5, 0.75, 1, 1, 0.868198, 0.55, 0.231802, 0.1, 0.1],
    }
    for kind, expected in table.items():
        o = OptimizerConfig(lr_scheduler_type=kind, warmup_steps=4, min_lr_ratio=0.1)  # type: ignore[arg-type]
        assert [lr_factor(step, o, 8) for step in range(10)] == pytest.approx(expected, abs=1e-6)


def test_schedules_move_once_a_training_step(make_actor):
    """Only step_lr_scheduler advances the learning rate schedules, by one step for each call. Mini-batches and epochs
    do not advance the schedules."""
    actor = make_actor(ppo_n_minibatches=2, ppo_epochs=2, entropy_coeff=0.3, anneal=True)
    actor.config.optimizer.lr_scheduler_type = "linear"
    for step in range(3):
        assert actor.ppo_update(prepare(actor, make_batch()))["lr"] == pytest.approx(
            1e-3 * (1 - step / 10)
        )
        assert actor.annealed(0.3) == pytest.approx(0.3 * (1 - step / 10))
        actor.step_lr_scheduler()


def test_the_entropy_bonus_raises_entropy(make_actor):
    """If all rewards are 0, the entropy bonus raises the entropy in every step."""
    actor = make_actor(entropy_coeff=1.0)
    entropies = []
    for _ in range(4):
        batch = make_batch()
        batch["turn_rewards"][:] = 0
        entropies.append(actor.ppo_update(prepare(actor, batch))["entropy"])
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.05


def test_gradients_are_clipped_to_their_norm(make_actor):
    """gradient_clipping limits the norm of the gradient. The metric grad_norm is the norm of the gradient before
    clipping."""
    actor = make_actor(gradient_clipping=0.01)
    stats = actor.ppo_update(prepare(actor, make_batch()))
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients(actor.model).values()))
    assert norm == pytest.approx(0.01, rel=1e-3)
    assert stats["grad_norm"] > 0.02


def test_no_clipping_is_0(make_actor):
    """With gradient_clipping=0 gradients are not clipped."""
    actor = make_actor(gradient_clipping=0.0)
    stats = actor.ppo_update(prepare(actor, make_batch()))
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients(actor.model).values()))
    assert norm == pytest.approx(stats["grad_norm"], rel=1e-3)
    assert norm > 0.02


def test_a_resumed_optimizer_obeys_its_own_keys(make_actor, tmp_path):
    """A resumed optimizer takes Adam's moments from the checkpoint, and lr, betas, eps and weight decay from the
    configuration."""
    actor = make_actor()
    actor.ppo_update(prepare(actor, make_batch()))
    actor.save_state(tmp_path).result()
    moments = [state["exp_avg"] for state in actor.optimizer.state.values()]
    changed = OptimizerConfig(lr=3e-3, beta1=0.5, beta2=0.6, eps=1e-2, weight_decay=0.3)
    again = make_actor(optimizer=changed)
    again.load_state(tmp_path)
    loaded = [state["exp_avg"] for state in again.optimizer.state.values()]
    assert all(map(torch.equal, loaded, moments))
    [group] = again.optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        3e-3,
        (0.5, 0.6),
        1e-2,
        0.3,
    )


def test_saved_weights_are_a_hugging_face_model(make_actor, tmp_path):
    """save() writes a directory that transformers can load. The saved model, loaded with transformers, gives the same
    log-probabilities as the actor."""
    actor = make_actor()
    batch = prepare(actor, make_batch())
    actor.ppo_update(batch)
    actor.save(tmp_path / "checkpoint")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint").eos_token == "<|im_end|>"
    assert json.loads((tmp_path / "checkpoint/config.json").read_text())["architectures"] == [
        "Qwen3ForCausalLM"
    ]
    with torch.no_grad():
        torch.testing.assert_close(
            plain_logp(loaded, batch) * batch["loss_mask"],
            actor.compute_logp(batch),
            atol=2e-5,
            rtol=0,
        )


def test_a_weight_update_writes_first_and_tells_the_servers_then(make_actor, tmp_path):
    """With mode="disk", update_weights writes a complete checkpoint before the servers load it."""
    actor = make_actor()
    seen = []

    class Rollout:
        def update_weights(self, meta: WeightUpdateMeta, buckets: tuple) -> None:
            state = AutoModelForCausalLM.from_pretrained(meta.directory).state_dict()
            seen.append(
                (meta.version, all(torch.equal(state[k], v) for k, v in actor.full_state().items()))
            )

    meta = WeightUpdateMeta(path=str(tmp_path))
    actor.connect_engine(Rollout(), meta)
    actor.ppo_update(prepare(actor, make_batch()))
    actor.update_weights(meta.with_version(1))
    actor.set_version(1)
    assert seen == [(1, True)]
    assert actor.get_version() == 1


def test_a_reference_model_stays_where_it_was(make_actor, tiny_model_dir):
    """When the actor is updated, the log-probabilities of a reference model do not change."""
    actor = make_actor()
    ref = FSDPEngine(make_config(), tiny_model_dir)
    ref.create_process_group()
    ref.initialize()
    batch = prepare(actor, make_batch())
    batch["ref_logp"] = before = ref.compute_logp(batch)
    assert torch.equal(before, batch["prox_logp"])
    actor.ppo_update(batch)
    assert torch.equal(ref.compute_logp(batch), before)
    assert not torch.equal(actor.compute_logp(batch), before)
    ref.destroy()
    assert torch.distributed.is_initialized(), (
        "the actor made the process group, so it is still there"
    )
