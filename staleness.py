"""The staleness gate limits how many prompt groups may start, and checks the age of each group before training.

In asynchronous training a rollout starts under one policy version, and a later step trains on the rollout. The **lag**
of a token is the policy version of the step that trains on the token, minus the version that generated the token. The
**age** of a prompt group is the lag of its oldest token. The version of the group's oldest token is the group's head
version. The key `max_head_offpolicyness` (eta) sets the maximum age of a group. With eta = 0 training is synchronous.

**The gate** (write-up, section 1.2) counts prompt groups. A group is the n_samples episodes of one prompt. A step
consumes B groups (`consumer_batch_size`). At version v the gate has (eta + v + 1) * B places. Each running group and
each group accepted since the run began takes one place. A group may start if a place is free and fewer than
`max_concurrent_rollouts` groups run. A group has these states:

    enqueued -> running -> accepted   (the group keeps its place for ever: every step adds B new places)
                        -> rejected   (the group's place becomes free; a failed group counts as rejected, too)

If a step drops an accepted group, or if wait_for_task (rollout/dispatcher.py) fetches it, its place becomes free. The
gate cannot block forever: at version v the trainer has consumed v * B groups. If no group runs and fewer than B groups
wait for the trainer, fewer than (v + 1) * B of all (eta + v + 1) * B places are taken, so a group may start.

**The gate alone does not bound the age.** If each step consumed the groups that finished first, many steps could pass
while a slow group runs. In an example with eta = 1 and B = 2, a slow group reaches age 5 (tests/test_staleness.py).
`rollout.stale` chooses one of three rules that limit the lag of every trained token to eta:

- **wait** consumes the groups that started first, so batches wait for slow groups. *Proof:* let p be the
  number of groups that started no later than a given group and were not rejected. If the group starts at version s, all
  p groups have places, so p <= (eta + s + 1) * B. Later rejections only lower p. Step ceil(p / B) consumes the group at
  version ceil(p / B) - 1 <= eta + s. All its tokens have versions >= s, so its age is at most eta.

- **mask** consumes the groups that finished first. The loss excludes tokens whose lag is above eta. The first tokens of
  long answers are masked most often, because they are the oldest. With `mask`, no step waits for a slow group. A group
  is dropped if all its tokens are too old. *Proof:* number the accepted groups in order of finish. If group p finishes
  at version s, then p <= (eta + s + 1) * B. As in the proof of `wait`, a step consumes group p at a version <= eta + s.
  When the step consumes the group, a token of version s has a lag of at most eta, so the loss includes the token.

- **drop** consumes the groups that finished first, and drops groups whose age is above eta. Long episodes are dropped
  most often. *Proof:* a step checks each group's age before it trains on the group. A dropped group frees its place.

**What is not promised.** The proofs assume that the trainer consumes B groups per version, that versions only grow, and
that set_version is called after the servers have the new weights. With each of the three rules, the age check raises
StalenessError if a step is about to train on a token whose lag is above eta.
"""

import threading
from dataclasses import dataclass, field, replace
from typing import Protocol


class VersionProvider(Protocol):
    """An object that reports the current policy version. In a run the engine reports the version."""

    def get_version(self) -> int: ...


class StalenessError(AssertionError):
    """Raised if a step is about to consume a group that is older than max_head_offpolicyness allows, or newer than the
    policy. Also raised if a group starts although the gate has no free place."""


@dataclass
class RolloutStat:
    """The number of prompt groups in each state. A failed group is counted in both `failed` and `rejected`."""

    enqueued: int = 0  # groups that are submitted and have not started
    running: int = 0  # groups that have started and not finished
    accepted: int = 0  # groups that finished with a trajectory; consumed groups are included
    rejected: int = 0  # groups that finished without a trajectory
    failed: int = 0  # rejected groups in which an exception was raised
    dropped: int = 0  # accepted groups that were too old when a step was about to consume them
    withdrawn: int = 0  # accepted groups that wait_for_task fetched; no batch contains these groups
    failed_members: int = (
        0  # members that raised an exception; the group continued without these members
    )


@dataclass(eq=False)
class StalenessManager:
    """The staleness gate (write-up, section 1.2) and the age check at consumption. All methods are thread-safe.

    No method holds `_lock` while it calls version_provider.get_version(). `get_capacity` reads the version before the
    counters. If the version grows after `get_capacity` has read the version, the capacity is too small for a moment,
    but never too large.
    """

    version_provider: VersionProvider
    max_concurrent_rollouts: int  # largest number of prompt groups that run at the same time
    consumer_batch_size: int  # prompt groups that one step consumes (B)
    max_staleness: int  # largest allowed age of a group, in versions (eta)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _stat: RolloutStat = field(
        default_factory=RolloutStat, init=False
    )  # all mutable state of this object

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(
                f"max_staleness (max_head_offpolicyness) must be 0 or more, not {self.max_staleness}"
            )
        self.max_concurrent_rollouts = max(1, self.max_concurrent_rollouts)
        self.consumer_batch_size = max(1, self.consumer_batch_size)

    def __repr__(self) -> str:
        return (
            f"StalenessManager(version={self.version_provider.get_version()}, {self.get_stats()})"
        )

    # ---- queries

    def get_capacity(self) -> int:
        """Return how many prompt groups may start now. If the returned number is zero or negative, no group may start.

        capacity = min(max_concurrent - running, (eta + v + 1) * B - (accepted + running))    (write-up, section 1.2.1)
        """
        version, stat = self.version_provider.get_version(), self.get_stats()
        concurrency_capacity = self.max_concurrent_rollouts - stat.running
        places = (self.max_staleness + version + 1) * self.consumer_batch_size
        staleness_capacity = places - (stat.accepted + stat.running)
        return min(concurrency_capacity, staleness_capacity)

    def get_pending_limit(self) -> int:
        """Return (eta + 1) * B, the number of prompts that the dispatcher keeps pending, ready to start."""
        return (self.max_staleness + 1) * self.consumer_batch_size

    def get_stats(self) -> RolloutStat:
        """Return a copy of the counters."""
        with self._lock:
            return replace(self._stat)

    def oldest_version(self) -> int:
        """Return the oldest version whose tokens a step may train on now."""
        return self.version_provider.get_version() - self.max_staleness

    def is_fresh(self, head_version: int | None) -> bool:
        """Return whether a group is young enough to be consumed now. A group without tokens (head_version None) is
        always young enough.

        Raises StalenessError if head_version is newer than the policy's version.
        """
        age = 0 if head_version is None else self.version_provider.get_version() - head_version
        if age < 0:
            raise StalenessError(
                f"a group of version {head_version} is newer than the policy: its age is {age}"
            )
        return age <= self.max_staleness

    def check_age(self, head_version: int | None) -> None:
        """Raise StalenessError if a group with this head version is too old to be consumed now."""
        if not self.is_fresh(head_version):
            raise StalenessError(
                f"a group of version {head_version} is consumed at version {self.version_provider.get_version()}: it is "
                f"older than max_head_offpolicyness={self.max_staleness} allows. Consume {self.consumer_batch_size} "
                "groups per version in order of start, or set rollout.stale=mask or rollout.stale=drop"
            )

    # ---- events

    def on_rollout_enqueued(self) -> None:
        """Count a prompt that was submitted and has not started."""
        with self._lock:
            self._stat.enqueued += 1

    def on_rollout_submitted(self) -> None:
        """Count an enqueued group as running. Raises StalenessError if no place of the gate is free."""
        stat, version = self.get_stats(), self.version_provider.get_version()
        if (
            stat.accepted + stat.running
        ) // self.consumer_batch_size > self.max_staleness + version:
            raise StalenessError(
                f"a group must not start at version {version}, because the gate is closed: {stat}"
            )
        self._move("enqueued", "running")

    def on_rollout_accepted(self) -> None:
        """Count a running group as accepted."""
        self._move("running", "accepted")

    def on_rollout_rejected(self, failed: bool = False) -> None:
        """Count a running group as rejected, and also as failed if `failed` is true."""
        self._move("running", "rejected")
        with self._lock:
            self._stat.failed += failed

    def on_rollout_dropped(self) -> None:
        """Count an accepted group as dropped because the group was too old. The group's place becomes free."""
        self._move("accepted", "dropped")

    def on_rollout_withdrawn(self) -> None:
        """Count an accepted group as withdrawn, after wait_for_task has fetched the group. The group's place becomes
        free."""
        self._move("accepted", "withdrawn")

    def on_members_failed(self, count: int) -> None:
        """Count `count` group members that raised an exception. The counters of groups do not change."""
        with self._lock:
            self._stat.failed_members += count

    def on_version_recovered(self, version: int, finished_untrained: int = 0) -> None:
        """After a restart, set `accepted` to version * B + finished_untrained. The steps before the restart have
        consumed version * B groups, and finished_untrained is the number of restored groups.

        With `accepted` = 0 after a restart, the gate would admit version * B groups too many (AReaL #1388).
        """
        with self._lock:
            self._stat.accepted = version * self.consumer_batch_size + finished_untrained

    def _move(self, source: str, target: str) -> None:
        """Move one group from the counter `source` to the counter `target`. Raises RuntimeError if `source` is 0."""
        with self._lock:
            if getattr(self._stat, source) == 0:
                raise RuntimeError(
                    f"a rollout became {target}, but none was {source}: {self._stat}"
                )
            setattr(self._stat, source, getattr(self._stat, source) - 1)
            setattr(self._stat, target, getattr(self._stat, target) + 1)
