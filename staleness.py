"""The staleness gate: it decides how many rollouts may start, and checks how old a group is when it is trained on.

Asynchronous training starts rollouts before the weights that will be trained on them exist. The **age** of a prompt
group is the policy version of the step that consumes the group, minus the group's head version (the oldest version
among its generated tokens). `max_head_offpolicyness`, here eta, is the largest age allowed. With eta = 0 training is
synchronous.

**The unit is one prompt group.** The n_samples episodes of one prompt start, finish, are accepted or rejected, and are
consumed together. B (`consumer_batch_size`) and `max_concurrent_rollouts` count groups, not sequences.

**The gate** (write-up, section 1.2). At version v a group may start while fewer than (eta + v + 1) * B groups are
accepted or running, and fewer than `max_concurrent_rollouts` groups are running. A group goes through these states:

    enqueued -> running -> accepted   (the group keeps its place in the sum, even after it was consumed)
                        -> rejected   (the group gives its place back; a failed group counts as rejected, too)

An accepted group may later be dropped (too old) or withdrawn (fetched by wait_for_task). Both give its place back.

**Why age <= eta.** The gate bounds the age only together with *consumption in order of start*. Number the groups that
were not rejected 1, 2, 3, ... in order of start. A group that starts at version s gets a number
p <= (eta + s + 1) * B, because the gate counted this group and every group before it. Rejections that come later can
only lower p. Each step consumes the next B numbers and makes one version, so group p is consumed at version
ceil(p / B) - 1 <= eta + s. No token of the group is older than s, so its age is at most eta. The gate cannot hang
either: if nothing runs at version v and no batch is complete, fewer than (v + 1) * B groups count, and the gate is
open.

Example: with eta = 1 and B = 2, four groups start at version 0. Two are consumed at age 0, two at age 1.

**Why not order of completion.** A slow group holds only one of the (eta + v + 1) * B places. Younger groups overtake
it, versions pass, and the slow group is trained on when it ends. With eta = 1, B = 2 and one slow group the age reaches
5 (tests/test_staleness.py). The price of order of start is that a batch waits for its slowest group.

**What is not promised.** The proof needs a trainer that consumes B groups per version, versions that only grow, and
set_version calls that come after the servers have the new weights. Therefore the age is checked when a group is
consumed: a group that is too old raises StalenessError, or with drop_stale it is dropped and counted.
"""

import threading
from dataclasses import dataclass, field, replace
from typing import Protocol


class VersionProvider(Protocol):
    """Anything that knows the current policy version: in a run, the engine."""

    def get_version(self) -> int: ...


class StalenessError(AssertionError):
    """A group that a step wants to consume is older than max_head_offpolicyness allows."""


@dataclass
class RolloutStat:
    """How many prompt groups are in each state of the life cycle. Failed groups are counted in `rejected`, too."""

    enqueued: int = 0  # submitted, not started
    running: int = 0  # started, not finished
    accepted: int = 0  # finished with a trajectory: waiting to be consumed, or consumed
    rejected: int = 0  # finished without a trajectory
    failed: int = 0  # rejected because an exception was raised
    dropped: int = 0  # accepted, then too old when a step wanted to consume it
    withdrawn: int = 0  # accepted, then fetched by wait_for_task and not by a batch
    failed_members: int = 0  # counts members, not groups: each raised in a group that went on without it


@dataclass(eq=False)
class StalenessManager:
    """The staleness gate (write-up, section 1.2) and the age check at consumption. All methods are thread-safe.

    No other lock is taken while `_lock` is held: version_provider.get_version() is called before. A version that was
    read a moment too early makes the gate stricter, never laxer, because versions only grow.
    """

    version_provider: VersionProvider
    max_concurrent_rollouts: int  # prompt groups that may run at once
    consumer_batch_size: int  # prompt groups that one step consumes
    max_staleness: int  # the largest age allowed, in versions (eta)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _stat: RolloutStat = field(default_factory=RolloutStat, init=False)  # all mutable state of this object

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness (max_head_offpolicyness) must be 0 or more, not {self.max_staleness}")
        self.max_concurrent_rollouts = max(1, self.max_concurrent_rollouts)
        self.consumer_batch_size = max(1, self.consumer_batch_size)

    def __repr__(self) -> str:
        return f"StalenessManager(version={self.version_provider.get_version()}, {self.get_stats()})"

    # ---- questions

    def get_capacity(self) -> int:
        """Return how many prompt groups may start now. No group may start if the number is zero or negative.

        capacity = min(max_concurrent - running, (eta + v + 1) * B - (accepted + running))    (write-up, section 1.2.1)
        """
        version, stat = self.version_provider.get_version(), self.get_stats()
        concurrency_capacity = self.max_concurrent_rollouts - stat.running
        places = (self.max_staleness + version + 1) * self.consumer_batch_size
        staleness_capacity = places - (stat.accepted + stat.running)
        return min(concurrency_capacity, staleness_capacity)

    def get_pending_limit(self) -> int:
        """Return how many prompts to keep enqueued: (eta + 1) * B, the most that can start between two batches."""
        return (self.max_staleness + 1) * self.consumer_batch_size

    def get_stats(self) -> RolloutStat:
        """Return a copy of the counters."""
        with self._lock:
            return replace(self._stat)

    def is_fresh(self, head_version: int | None) -> bool:
        """Return whether a group may be consumed now. A group without generated tokens (None) is always fresh."""
        return head_version is None or self.version_provider.get_version() - head_version <= self.max_staleness

    def check_age(self, head_version: int | None) -> None:
        """Raise StalenessError if the group is too old to be consumed now."""
        if not self.is_fresh(head_version):
            raise StalenessError(
                f"a group of version {head_version} is consumed at version {self.version_provider.get_version()}: it is "
                f"older than max_head_offpolicyness={self.max_staleness} allows. Consume {self.consumer_batch_size} "
                "groups per version in order of start, or set rollout.drop_stale=true to drop such groups"
            )

    # ---- events

    def on_rollout_enqueued(self) -> None:
        """Count a prompt that was submitted and has not started."""
        with self._lock:
            self._stat.enqueued += 1

    def on_rollout_submitted(self) -> None:
        """Count an enqueued group as running."""
        self._move("enqueued", "running")

    def on_rollout_accepted(self) -> None:
        """Count a running group as accepted."""
        self._move("running", "accepted")

    def on_rollout_rejected(self, failed: bool = False) -> None:
        """Count a running group as rejected, and also as failed if an exception was raised."""
        self._move("running", "rejected")
        with self._lock:
            self._stat.failed += failed

    def on_rollout_dropped(self) -> None:
        """Count an accepted group as dropped because it was too old, and free its place."""
        self._move("accepted", "dropped")

    def on_rollout_withdrawn(self) -> None:
        """Count an accepted group as withdrawn because wait_for_task fetched it, and free its place."""
        self._move("accepted", "withdrawn")

    def on_members_failed(self, count: int) -> None:
        """Count members that raised. The group that they belong to is counted on its own."""
        with self._lock:
            self._stat.failed_members += count

    def on_version_recovered(self, version: int, finished_untrained: int = 0) -> None:
        """Count what an earlier process consumed until `version`, and the finished groups that are kept.

        Without this call the counters would start at 0 and the version would not. The gate would then admit
        version * B groups too many (AReaL #1388).
        """
        with self._lock:
            self._stat.accepted = version * self.consumer_batch_size + finished_untrained

    def _move(self, source: str, target: str) -> None:
        """Move one group from the counter `source` to the counter `target`. Raises RuntimeError if `source` is 0."""
        with self._lock:
            if getattr(self._stat, source) == 0:
                raise RuntimeError(f"a rollout became {target}, but none was {source}: {self._stat}")
            setattr(self._stat, source, getattr(self._stat, source) - 1)
            setattr(self._stat, target, getattr(self._stat, target) + 1)
