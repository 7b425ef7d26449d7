"""Run seven of AReaL's own test files against this project's modules. The seven test files cover concepts that AReaL
and this project have in common.

    git clone https://github.com/areal-project/AReaL /tmp/AReaL
    git -C /tmp/AReaL checkout cbff54d
    python bench/areal_tests.py /tmp/AReaL

The script makes AReaL's import names point to this project's modules. If a key, a function or an argument has different
names in the two projects, a small adapter in this file translates the name. The script reads AReaL's tests from the
checkout and copies nothing of AReaL. For each file the script prints how many tests pass and how many fail. Some tests
fail because this project differs from AReaL on purpose. The script groups the failed tests by the difference that
explains the failure. If no known difference explains a failure, the script prints NOT EXPLAINED and exits with status
1. Tests of objects that only AReaL has, such as configuration classes, do not run, and the script prints their number.
"""

import importlib.util
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ppo  # noqa: E402
import staleness  # noqa: E402
from training import config as training_config  # noqa: E402
from training.config import PPOActorConfig  # noqa: E402
from training.corrections import reduce_sequence  # noqa: E402
from training.proximal import interpolation, linear, loglinear, rollout  # noqa: E402


@dataclass
class RejectionSamplingConfig:
    """This class has the fields of AReaL's class RejectionSamplingConfig, but does not check their values."""

    level: str = "token"
    action: str = "mask"
    metric: str = "ratio"
    agg: str = "mean"
    upper: float = 5.0
    lower: float | None = None


def weight_keys(config: RejectionSamplingConfig | None) -> PPOActorConfig:
    """Return the configuration keys of this project that have the effect of AReaL's `rejection_sampling`."""
    if config is None:
        return PPOActorConfig(behave_imp_weight_cap=None)
    kind = (config.level, config.metric, config.agg)
    if config.metric == "ratio" and (config.level == "token" or config.agg == "mean"):
        return PPOActorConfig(
            behave_imp_weight_level="token" if config.level == "token" else "geometric",
            behave_imp_weight_action="clamp" if config.action == "clamp" else "mask",
            behave_imp_weight_cap=config.upper,
            behave_imp_weight_floor=config.lower or None,
        )
    if kind == (
        "sequence",
        "kl_k1",
        "mean",
    ):  # reject a sequence if abs(mean(log w)) > log(reject_geometric_mean)
        return PPOActorConfig(
            behave_imp_weight_cap=None, reject_geometric_mean=math.exp(config.upper)
        )
    if kind == ("sequence", "kl_k2", "max"):
        return PPOActorConfig(behave_imp_weight_cap=None, reject_max_k2=config.upper)
    pytest.fail(f"absent: rejection_sampling {config.level}, {config.metric}, {config.agg}")


def sequence_ids(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return, for each token, the index of its sequence. In packed rows, sequence i begins at cu_seqlens[i]."""
    if cu_seqlens is not None:
        return torch.bucketize(torch.arange(len(tokens)), cu_seqlens[1:].long(), right=True)
    return (
        torch.arange(len(tokens))[:, None]
        if tokens.ndim == 2
        else torch.zeros(len(tokens), dtype=torch.long)
    )


def apply_rejection_sampling(
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor | None,
    config: RejectionSamplingConfig,
) -> SimpleNamespace:
    """Compute the correction for stale tokens with this project's functions. Return the behaviour weights, the loss
    mask of the tokens that are kept, and the share of dropped tokens."""
    keys, mask = weight_keys(config), loss_mask > 0
    ids, zero = sequence_ids(loss_mask, cu_seqlens), torch.zeros_like(proximal_logprobs)
    weight, _, _, dropped = ppo.token_objectives(
        proximal_logprobs, proximal_logprobs, old_logprobs, zero, mask, keys, ids
    )
    kept = mask if config.action == "clamp" else mask & ~dropped
    share = float(dropped.sum()) / max(1, int(mask.sum()))
    return SimpleNamespace(
        loss_mask=kept.to(loss_mask.dtype), behave_imp_weight=weight, filtered_fraction=share
    )


def cispo_loss_fn(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_higher: float,
    loss_mask: Tensor,
    old_logprobs: Tensor | None = None,
    rejection_sampling: RejectionSamplingConfig | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the CISPO loss with this project's functions. Return the loss, and statistics under AReaL's names."""
    config = replace(
        weight_keys(rejection_sampling),
        use_cispo_loss=True,
        eps_clip=eps_clip,
        eps_clip_higher=eps_clip_higher,
    )
    old = proximal_logprobs if old_logprobs is None else old_logprobs
    tensors, ids = (logprobs, proximal_logprobs, old, advantages), sequence_ids(logprobs, None)
    loss, _ = ppo.ppo_actor_loss_fn(*tensors, loss_mask, config, sequence_ids=ids)
    weight, _, clipped, dropped = ppo.token_objectives(*tensors, loss_mask, config, ids)
    return loss, {
        "importance_weight": (logprobs - proximal_logprobs).exp().detach(),
        "clip_mask": clipped,
        "dual_clip_mask": torch.zeros_like(clipped),
        "behave_imp_weight": weight,
        "behave_mask": loss_mask & ~dropped,
        "behave_approx_kl": (proximal_logprobs - old).detach(),
    }


@dataclass
class NormConfig:
    """This class has the fields of AReaL's class NormConfig, but does not check their values."""

    mean_level: Any = "batch"
    mean_leave1out: bool = False
    std_level: Any = "batch"
    std_unbiased: bool = True
    eps: float = 1e-5
    group_size: int = 1


class Normalization:
    """This class has the interface of AReaL's class Normalization, and normalises with this project's `ppo.normalise`.
    The class treats every number whose mask is 1 as the reward of one turn."""

    def __init__(self, config: NormConfig) -> None:
        if not config.std_unbiased and config.std_level:
            pytest.fail("absent: std_unbiased=False")
        self.group_size = config.group_size
        self.norm = training_config.NormConfig(
            mean_level=config.mean_level or "none",
            std_level=config.std_level or "none",
            mean_leave1out=config.mean_leave1out,
            per_turn=False,
            eps=config.eps,
        )

    def __call__(
        self,
        x: Tensor,
        loss_mask: Tensor | None = None,
        reduce_group: Any = None,
        group_sizes: Any = None,
    ) -> Tensor:
        trained = torch.ones_like(x) > 0 if loss_mask is None else loss_mask > 0
        groups = torch.arange(len(x)) // self.group_size
        if group_sizes is not None:
            groups = torch.repeat_interleave(torch.tensor(group_sizes))
        ids = groups.reshape(-1, *[1] * (x.ndim - 1)).expand(x.shape)[trained]
        result = torch.zeros(x.shape)
        result[trained] = ppo.normalise(x[trained], ids, torch.zeros_like(ids), self.norm)
        return result


def ppo_actor_loss_fn(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    loss_mask: Tensor,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    rejection_sampling: Any = None,
    importance_sampling_level: Any = "token",
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call this project's loss with the arguments of AReaL's loss. Return the loss, and statistics under AReaL's
    names."""
    if importance_sampling_level not in ("token", "sequence"):
        raise ValueError(f"Invalid importance_sampling_level: {importance_sampling_level}")
    if cu_seqlens is None and logprobs.ndim == 1:
        raise ValueError("cu_seqlens is required for 1D tensors")
    ids = sequence_ids(logprobs, cu_seqlens)
    config = replace(
        weight_keys(rejection_sampling),
        eps_clip=eps_clip,
        eps_clip_higher=eps_clip_higher,
        c_clip=c_clip,
        importance_sampling_level=importance_sampling_level,
    )
    tensors = (logprobs, proximal_logprobs, old_logprobs, advantages)
    loss, _ = ppo.ppo_actor_loss_fn(*tensors, loss_mask, config, sequence_ids=ids)
    mask = loss_mask.bool()
    weight, objective, clipped, dropped = ppo.token_objectives(*tensors, mask, config, ids)
    log_u = torch.where(mask, logprobs - proximal_logprobs, 0.0)
    if importance_sampling_level == "sequence":
        log_u = reduce_sequence(log_u, mask, ids, "mean")
    stats = {
        "importance_weight": log_u.exp().where(mask, torch.zeros(())).detach(),
        "approx_kl": (logprobs - proximal_logprobs).detach(),
        "clip_mask": clipped,
        "dual_clip_mask": (
            objective == c_clip * advantages if c_clip else torch.zeros_like(clipped)
        )
        & mask,
        "loss": -weight * objective.detach(),
    }
    if rejection_sampling is not None:
        stats |= {"behave_imp_weight": weight, "behave_mask": mask & ~dropped}
        stats["behave_approx_kl"] = (proximal_logprobs - old_logprobs).detach()
        stats["filtered_fraction"] = dropped.sum() / max(1, int(mask.sum()))
    return loss, stats


def compute_prox_logp_approximations(
    old_logp: Tensor,
    logprobs: Tensor,
    versions: Tensor,
    current_version: int,
    method: str | None = None,
) -> dict[str, Tensor]:
    """Estimate pi_prox with this project's functions.

    AReaL's estimate of pi_prox assumes that all mini-batches of the step are done, so `interpolation` gets 1.0 as the
    share of mini-batches that are done.
    """
    alpha = interpolation(versions, current_version - 1, 1.0)
    guesses = {
        guess.__name__: guess(old_logp, logprobs, alpha) for guess in (loglinear, linear, rollout)
    }
    return guesses if method is None else {method: guesses[method]}


FILES = (
    "tests/test_staleness_manager.py",
    "tests/test_functional.py",
    "tests/test_prox_approx.py",
    "tests/test_rejection_sampling.py",
    "tests/test_cispo_loss.py",
    "tests/test_adv_norm_config.py",
    "tests/test_reward_norm_variable_group.py",
)
# Each key of DIFFERENCES is a piece of text from the name or the error message of a failed test. Each value of
# DIFFERENCES is the difference between the two projects that explains the failure. The page docs/differences.md
# explains the differences in more detail.
DIFFERENCES = {
    "test_accept_without_submit_is_invalid": "an event that is impossible in the current state raises RuntimeError",
    "test_concurrent_mixed_operations": "an event that is impossible in the current state raises RuntimeError",
    "test_capacity_can_be_negative": "a group that starts while the gate is closed raises StalenessError",
    "test_concurrent_submissions": "a group that starts while the gate is closed raises StalenessError",
    "absent: sapo_loss_fn": "there is no SAPO",
    "absent: rejection_sampling": "rows are tested by their geometric mean, their largest k2 or a veto, tokens by their w",
    "test_shape_mismatch": "a wrong shape raises an error of torch, which is a RuntimeError",
    "test_cispo_rejects_nonpositive_eps_clip_higher": "CISPO also works with the default bounds",
    "absent: std_unbiased": "the standard deviation always divides by n - 1",
    "test_mean_leave1out_single_element": "an entry that is alone in its cell has advantage 0",
    "test_mask_edge_cases": "an entry that is alone in its cell has advantage 0",
    "test_adv_norm_distributed": "every rank has the whole batch, so ranks add up nothing",
    "test_group_size_edge_cases": "the turns of a group are compared, and a row of this test counts as two turns",
    "test_non_trivial_loss_mask_leave_one_out": "the leave-one-out mean does not change the standard deviation",
    "absent: grpo_loss_fn": "FSDPPPOActor.piece_loss computes the loss, and takes other arguments",
    "absent: PPOActorConfig": "FSDPPPOActor contains no engine, and takes other arguments",
    "absent: stats_tracker": "ppo_update returns its metrics; there is no tracker",
    "test_negative_versions_in_prompt": "pi_prox is guessed for trained tokens only, and not for a prompt's tokens",
}
# The script leaves out a test if its name contains a key of LEFT_OUT. Each value of LEFT_OUT is a reason for leaving a
# test out.
LEFT_OUT = {
    "TestRejectionSamplingConfig": "checks and fields of AReaL's configuration classes",
    "TestConfigValidation": "checks and fields of AReaL's configuration classes",
    "test_adv_norm_config_": "checks and fields of AReaL's configuration classes",
    "test_cispo_config_": "checks and fields of AReaL's configuration classes",
    "test_adv_norm_initialization": "fields of AReaL's class Normalization",
    "test_normalization_initialization": "fields of AReaL's class Normalization",
    "singleton_reward": "warnings of AReaL's configuration classes",
    "test_group_sizes_": "AReaL's argument group_sizes; here each row holds the id of its group",
    "test_batched_call": "AReaL's function batched_call",
}


class Results:
    """This pytest plugin deselects the tests of LEFT_OUT and records the outcome of every other test."""

    def __init__(self) -> None:
        self.outcomes: dict[
            str, tuple[str, str]
        ] = {}  # maps a test to its outcome and its error message
        self.left_out: Counter[str] = Counter()  # maps a reason to the number of tests left out

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items.copy():
            name = item.nodeid.partition("::")[2].partition("[")[0]
            if key := next((key for key in LEFT_OUT if key in name), None):
                self.left_out[LEFT_OUT[key]] += 1
                items.remove(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid.partition("::")[2]] = (
                report.outcome,
                str(report.longrepr or ""),
            )


def provide(checkout: Path) -> None:
    """Make AReaL's import names point to this project's modules."""

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        made.__path__ = []  # a package
        vars(made).update(names)
        made.__getattr__ = absent  # type: ignore[method-assign]
        sys.modules[name] = made

    for name in (
        "areal",
        "areal.infra",
        "areal.utils",
        "areal.trainer",
        "areal.trainer.ppo",
        "areal.api",
    ):
        module(name)
    module(
        "areal.api.cli_args", RejectionSamplingConfig=RejectionSamplingConfig, NormConfig=NormConfig
    )
    losses = {"ppo_actor_loss_fn": ppo_actor_loss_fn, "cispo_loss_fn": cispo_loss_fn}
    module("areal.utils.functional", **losses, apply_rejection_sampling=apply_rejection_sampling)
    module("areal.utils.data", Normalization=Normalization)
    module(
        "areal.trainer.ppo.actor", compute_prox_logp_approximations=compute_prox_logp_approximations
    )
    sys.modules["areal.infra.staleness_manager"] = staleness
    path = (
        checkout / "areal" / "utils" / "constants.py"
    )  # the file that defines AReaL's names for estimates of pi_prox
    spec = importlib.util.spec_from_file_location("areal.utils.constants", path)
    assert spec is not None
    assert spec.loader is not None
    constants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(constants)
    sys.modules["areal.utils.constants"] = constants


class Absent:
    """A stand-in for a class or a function of AReaL that is missing in this project. A test that uses the stand-in
    fails."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pytest.fail(f"absent: {self.name}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.fail(f"absent: {self.name}.{name}")


def absent(name: str) -> Absent:
    """Return a stand-in for a name of AReaL that no adapter in this file defines."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name)


def main(checkout: Path) -> int:
    provide(checkout)
    unexplained = 0
    for file in FILES:
        results = Results()
        options = [
            "-q",
            "--noconftest",
            "-c",
            "/dev/null",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--tb=short",
        ]
        pytest.main(
            [*options, "--no-header", "--no-summary", str(checkout / file)], plugins=[results]
        )
        passed = [test for test, (outcome, _) in results.outcomes.items() if outcome == "passed"]
        failed = {
            test: error
            for test, (outcome, error) in results.outcomes.items()
            if outcome == "failed"
        }
        reasons: dict[str, list[str]] = {}
        for test, error in failed.items():
            key = next((key for key in DIFFERENCES if key in test or key in error), "")
            reasons.setdefault(
                DIFFERENCES.get(key, f"NOT EXPLAINED: {error.strip().splitlines()[-1]}"), []
            ).append(test)
            unexplained += not key
        print(
            f"\n{file}: {len(passed)} passed, {len(failed)} failed, {results.left_out.total()} left out"
        )
        for reason, count in results.left_out.items():
            print(f"  {count} left out: {reason}")
        for reason, tests in reasons.items():
            print(f"  {len(tests)}: {reason}\n     " + "\n     ".join(tests))
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
