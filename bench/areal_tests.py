"""Run four of AReaL's own test files against this project's modules.

    git clone https://github.com/areal-project/AReaL /tmp/AReaL
    git -C /tmp/AReaL checkout cbff54d
    python bench/areal_tests.py /tmp/AReaL

AReaL's import names are made to point to this project's modules, and the adapters below translate
arguments whose names differ. Nothing of AReaL is copied. Where this project differs on purpose, a
test fails, and is listed under the difference that explains its failure (docs/differences.md). If
nothing explains a failure, it is printed as NOT EXPLAINED, and the exit code is 1. Tests of AReaL's
configuration classes do not run, and are only counted.
"""

import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ppo  # noqa: E402
import staleness  # noqa: E402
from extras import losses  # noqa: E402
from training.proximal import interpolation  # noqa: E402


@dataclass
class RejectionSamplingConfig:
    """The fields of AReaL's class, without its checks."""

    level: str = "token"
    action: str = "mask"
    metric: str = "ratio"
    agg: str = "mean"
    upper: float = 5.0
    lower: float | None = None


def cap_of(config: RejectionSamplingConfig | None) -> float | None:
    """The key actor.behave_imp_weight_cap that has the effect of AReaL's `rejection_sampling`."""
    if config is None:
        return None
    if (config.level, config.metric, config.action, config.lower) != (
        "token",
        "ratio",
        "mask",
        None,
    ):
        pytest.fail(f"absent: rejection_sampling {config}")
    return config.upper


def sequence_ids(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """The sequence of each token. In packed rows, sequence i begins at cu_seqlens[i]."""
    if cu_seqlens is None:
        return None
    return torch.bucketize(torch.arange(len(tokens)), cu_seqlens[1:].long(), right=True)


def statistics(
    policies: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Tensor,
    clip: dict[str, Any],
    cap: float | None,
    ids: Tensor | None = None,
    by_rows: bool = False,
) -> dict[str, Tensor]:
    """What AReaL's losses return beside the loss, under its names."""
    logp, prox, old, _ = policies
    mask = mask.bool()
    A = torch.where(mask, policies[3], 0.0)
    log_u, log_w = ppo.log_ratio(logp, prox, mask), ppo.log_ratio(prox, old, mask)
    if by_rows:
        log_u = losses.over_rows(log_u, mask, ids, "mean")
    u = log_u.exp()
    objective = torch.minimum(u * A, ppo.clip(u, clip["eps_clip"], clip["eps_clip_higher"]) * A)
    if clip["c_clip"]:
        objective = torch.where(A < 0, torch.maximum(objective, clip["c_clip"] * A), objective)
    clipped = objective != u * A
    w = log_w.exp().masked_fill(~mask, 0.0)
    dropped = w > (torch.inf if cap is None else cap)
    dual = objective == clip["c_clip"] * A if clip["c_clip"] else torch.zeros_like(mask)
    return {
        "importance_weight": log_u.exp().masked_fill(~mask, 0.0).detach(),
        "approx_kl": (logp - prox).detach(),
        "clip_mask": clipped & mask,
        "dual_clip_mask": dual & mask,
        "loss": -w.masked_fill(dropped, 0.0) * objective.detach(),
        "behave_imp_weight": w.masked_fill(dropped, 0.0),
        "behave_mask": mask & ~dropped,
        "behave_approx_kl": (prox - old).detach(),
        "filtered_fraction": dropped.sum() / max(1, int(mask.sum())),
    }


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
    """This project's loss with the arguments of AReaL's."""
    if importance_sampling_level not in ("token", "sequence"):
        raise ValueError(f"Invalid importance_sampling_level: {importance_sampling_level}")
    if cu_seqlens is None and logprobs.ndim == 1:
        raise ValueError("cu_seqlens is required for 1D tensors")
    by_rows = importance_sampling_level == "sequence"
    clip = {"eps_clip": eps_clip, "eps_clip_higher": eps_clip_higher, "c_clip": c_clip}
    policies, cap = (
        (logprobs, proximal_logprobs, old_logprobs, advantages),
        cap_of(rejection_sampling),
    )
    ids = sequence_ids(logprobs, cu_seqlens)
    more: dict[str, Any] = {"behave_imp_weight_cap": cap, "sequence_ids": ids}
    compute = losses.gspo if by_rows else ppo.ppo_actor_loss_fn
    loss, _ = compute(*policies, loss_mask, **clip, **more)
    found = statistics(policies, loss_mask, clip, cap, ids, by_rows)
    if rejection_sampling is None:
        found = {key: x for key, x in found.items() if not key.startswith(("behave", "filtered"))}
    return loss, found


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
    """extras.losses.cispo with the arguments of AReaL's loss."""
    old = proximal_logprobs if old_logprobs is None else old_logprobs
    policies, cap = (logprobs, proximal_logprobs, old, advantages), cap_of(rejection_sampling)
    clip: dict[str, Any] = {"eps_clip": eps_clip, "eps_clip_higher": eps_clip_higher}
    loss, _ = losses.cispo(*policies, loss_mask, **clip, behave_imp_weight_cap=cap)
    u = (logprobs - proximal_logprobs).exp().detach()
    found = statistics(policies, loss_mask, clip | {"c_clip": None}, cap)
    outside = (u < 1 - eps_clip) | (u > 1 + eps_clip_higher)
    return loss, found | {"importance_weight": u, "clip_mask": outside & loss_mask.bool()}


def compute_prox_logp_approximations(
    old_logp: Tensor,
    logprobs: Tensor,
    versions: Tensor,
    current_version: int,
    method: str | None = None,
) -> dict[str, Tensor]:
    """Estimate pi_prox with this project's functions.

    AReaL's estimate of pi_prox assumes that all mini-batches of the step are done, so
    `interpolation` gets 1.0 as the share of mini-batches that are done.
    """
    alpha = interpolation(versions, current_version - 1, 1.0)
    guesses = losses.guesses(old_logp, logprobs, alpha)
    return guesses if method is None else {method: guesses[method]}


FILES = (
    "tests/test_staleness_manager.py",
    "tests/test_functional.py",
    "tests/test_prox_approx.py",
    "tests/test_cispo_loss.py",
)
# A text in a failed test's name or error, and the difference that explains the failure.
DIFFERENCES = {
    "TestThreadSafety": "one event loop calls the gate, so it has no lock",
    "test_accept_without_submit_is_invalid": "an impossible event raises an error",
    "absent: sapo_loss_fn": "there is no SAPO",
    "absent: rejection_sampling": "a token is left out by its w and a cap; other rules are in extras",
    "test_cispo_rejects_nonpositive_eps_clip_higher": "CISPO also works with the default bounds",
    "test_cispo_closed_form_value": "the loss of CISPO has the same gradient and another value",
    "absent: grpo_loss_fn": "FSDPPPOActor.piece_loss takes other arguments",
    "absent: PPOActorConfig": "FSDPPPOActor contains no engine, and takes other arguments",
    "absent: stats_tracker": "ppo_update returns its metrics; there is no tracker",
    "test_negative_versions_in_prompt": "pi_prox is guessed for trained tokens only",
}
# A text in the name of a test that does not run, and why.
LEFT_OUT = dict.fromkeys(
    ("TestConfigValidation", "test_cispo_config_"),
    "checks and fields of AReaL's configuration classes",
)


class Results:
    """This pytest plugin deselects the tests of LEFT_OUT and records the outcome of every other
    test."""

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
    module("areal.api.cli_args", RejectionSamplingConfig=RejectionSamplingConfig)
    functions = {"ppo_actor_loss_fn": ppo_actor_loss_fn, "cispo_loss_fn": cispo_loss_fn}
    module("areal.utils.functional", **functions)
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
    """A stand-in for a class or a function of AReaL that is missing in this project. A test that
    uses it fails."""

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
