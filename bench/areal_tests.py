"""Run three of AReaL's own test files against this project's modules. The files test concepts that AReaL and this
project have in common.

    git clone https://github.com/inclusionAI/AReaL /tmp/AReaL
    python bench/areal_tests.py /tmp/AReaL

The script makes AReaL's import names point to this project's modules. If an argument has different names in the two
projects, a small adapter in this file translates the name. AReaL's tests are read from the checkout, and nothing of
AReaL is copied. For each file the script prints how many tests pass and how many fail. Some tests fail because this
project differs from AReaL on purpose. The script groups the failed tests by these differences. A failure that no such
difference explains is marked NOT EXPLAINED, and makes the exit status 1.
"""

import importlib.util
import sys
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
from training.config import PPOActorConfig  # noqa: E402
from training.corrections import reduce_sequence  # noqa: E402
from training.proximal import interpolation, linear, loglinear, rollout  # noqa: E402


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
    """Call this project's loss with the arguments of AReaL's loss. Return the loss and the statistics that AReaL's loss
    returns."""
    assert rejection_sampling is None
    if importance_sampling_level not in ("token", "sequence"):
        raise ValueError(f"Invalid importance_sampling_level: {importance_sampling_level}")
    if cu_seqlens is None:
        ids = torch.arange(len(logprobs))[:, None]
        if logprobs.ndim == 1:
            raise ValueError("cu_seqlens is required for 1D tensors")
    else:
        ids = torch.bucketize(torch.arange(len(logprobs)), cu_seqlens[1:].long(), right=True)
    config = PPOActorConfig(
        eps_clip=eps_clip,
        eps_clip_higher=eps_clip_higher,
        c_clip=c_clip,
        importance_sampling_level=importance_sampling_level,
        behave_imp_weight_cap=None,
    )
    tensors = (logprobs, proximal_logprobs, old_logprobs, advantages)
    loss, _ = ppo.ppo_actor_loss_fn(*tensors, loss_mask, config, sequence_ids=ids)
    mask = loss_mask.bool()
    weight, objective, clipped, _ = ppo.token_objectives(*tensors, mask, config, ids)
    log_u = torch.where(mask, logprobs - proximal_logprobs, 0.0)
    if importance_sampling_level == "sequence":
        log_u = reduce_sequence(log_u, mask, ids, "mean")
    stats = {
        "importance_weight": log_u.exp().where(mask, torch.zeros(())).detach(),
        "approx_kl": (logprobs - proximal_logprobs).detach(),
        "clip_mask": clipped,
        "dual_clip_mask": (objective == c_clip * advantages if c_clip else torch.zeros_like(clipped)) & mask,
        "loss": -weight * objective.detach(),
    }
    return loss, stats


def compute_prox_logp_approximations(
    old_logp: Tensor, logprobs: Tensor, versions: Tensor, current_version: int, method: str | None = None
) -> dict[str, Tensor]:
    """Call this project's functions that guess pi_prox.

    The third argument of `interpolation` is the share of the step's mini-batches that are done. The share is 1 here,
    because AReaL guesses pi_prox as if all mini-batches were done.
    """
    alpha = interpolation(versions, current_version - 1, 1.0)
    guesses = {guess.__name__: guess(old_logp, logprobs, alpha) for guess in (loglinear, linear, rollout)}
    return guesses if method is None else {method: guesses[method]}


FILES = ("tests/test_staleness_manager.py", "tests/test_functional.py", "tests/test_prox_approx.py")
# Each key is a part of a failed test's name or of its error message. The value is the deliberate difference that
# explains the failure. docs/differences.md has more about each difference.
DIFFERENCES = {
    "test_accept_without_submit_is_invalid": "an event that is impossible in the current state raises RuntimeError",
    "absent: sapo_loss_fn": "there is no SAPO",
    "absent: RejectionSamplingConfig": "keys of PPOActorConfig set the tests of whole rows (training/corrections.py)",
    "absent: grpo_loss_fn": "FSDPPPOActor.piece_loss computes the loss, and takes other arguments",
    "absent: PPOActorConfig": "FSDPPPOActor contains no engine, and takes other arguments",
    "must be called with a dataclass": "a key's type lists the key's choices; AReaL lists them in the field's metadata",
    "absent: stats_tracker": "ppo_update returns its metrics; there is no tracker",
    "test_negative_versions_in_prompt": "pi_prox is guessed for trained tokens only, and not for a prompt's tokens",
}


class Results:
    """A pytest plugin that keeps the outcome of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}  # test -> outcome, error

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid.partition("::")[2]] = report.outcome, str(report.longrepr or "")


def provide(checkout: Path) -> None:
    """Make AReaL's import names point to this project's modules."""

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        made.__path__ = []  # a package
        vars(made).update(names)
        made.__getattr__ = absent  # type: ignore[method-assign]
        sys.modules[name] = made

    for name in ("areal", "areal.infra", "areal.utils", "areal.trainer", "areal.trainer.ppo", "areal.api"):
        module(name)
    module("areal.api.cli_args")
    module("areal.utils.functional", ppo_actor_loss_fn=ppo_actor_loss_fn)
    module("areal.trainer.ppo.actor", compute_prox_logp_approximations=compute_prox_logp_approximations)
    sys.modules["areal.infra.staleness_manager"] = staleness
    path = checkout / "areal" / "utils" / "constants.py"  # AReaL's names of the ways to guess pi_prox
    spec = importlib.util.spec_from_file_location("areal.utils.constants", path)
    assert spec is not None
    assert spec.loader is not None
    constants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(constants)
    sys.modules["areal.utils.constants"] = constants


class Absent:
    """A stand-in for a part of AReaL that this project does not have. A test that uses this part fails."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pytest.fail(f"absent: {self.name}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.fail(f"absent: {self.name}.{name}")


def absent(name: str) -> Absent:
    """Return a stand-in for a name that this project's adapters do not define."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name)


def main(checkout: Path) -> int:
    provide(checkout)
    unexplained = 0
    for file in FILES:
        results = Results()
        options = ["-q", "--noconftest", "-c", "/dev/null", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
        pytest.main([*options, "--no-header", "--no-summary", str(checkout / file)], plugins=[results])
        passed = [test for test, (outcome, _) in results.outcomes.items() if outcome == "passed"]
        failed = {test: error for test, (outcome, error) in results.outcomes.items() if outcome == "failed"}
        reasons: dict[str, list[str]] = {}
        for test, error in failed.items():
            key = next((key for key in DIFFERENCES if key in test or key in error), "")
            reasons.setdefault(DIFFERENCES.get(key, f"NOT EXPLAINED: {error.strip().splitlines()[-1]}"), []).append(
                test
            )
            unexplained += not key
        print(f"\n{file}: {len(passed)} passed, {len(failed)} failed")
        for reason, tests in reasons.items():
            print(f"  {len(tests)}: {reason}\n     " + "\n     ".join(tests))
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
