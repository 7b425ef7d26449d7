"""How old may training data be? The gate that admits rollouts, and the check at the place of consumption.

Asynchronous training starts rollouts before the weights that will be trained on them exist. A group's **age**
is the version of the policy at the step that trains on the group, minus the version of the oldest weights
that computed one of its tokens (its head version). max_head_offpolicyness, here eta, is the largest age allowed;
eta = 0 is synchronous training.

**The unit is one prompt group**: the n_samples answers to one prompt start, finish, are accepted or rejected, and
are consumed together. B (consumer_batch_size) and max_concurrent_rollouts count groups, never sequences.

**The gate.** At version v a group may start while fewer than (eta + v + 1) * B groups have been accepted or are
running, and fewer than max_concurrent_rollouts are running. A group goes through

    enqueued -> running -> accepted   (it keeps its place in the sum, also after it has been consumed)
                        -> rejected   (it gives its place back; a failed group is a rejected one)

and an accepted group may still be dropped (too old) or withdrawn (fetched by wait_for_task, beside the batches);
both give the place back.

**Why age <= eta.** The gate alone proves nothing; the gate and *consumption in order of start* do. Number the
groups that were not rejected 1, 2, 3, ... in order of start. A group that starts at version s has at that moment a
number p <= (eta + s + 1) * B, because the gate counted it and everything before it; later rejections can only lower
p. Each step consumes the next B numbers and makes one version, so number p is trained on in step ceil(p / B), that
is at version ceil(p / B) - 1 <= eta + s. Weights only get newer, so no token of the group is older than s, and
its age is at most eta. Nothing can hang either: if at version v nothing runs and no batch is complete, fewer than
(v + 1) * B groups are in the sum, and the gate is open.

**Why not order of completion.** A straggler holds one of the (eta + v + 1) * B places and nothing else; the others
overtake it, versions go by, and it is trained on whenever it arrives. With eta = 1, B = 2 and one slow group the age
reaches 5 (tests/test_staleness.py runs it). The price of the right order: a batch waits for its oldest member.

**What is not promised.** The proof needs B groups a version (a trainer that consumes fewer makes the rest
older), versions that only grow, and set_version after the servers have the new weights. Therefore the age is
checked where groups are consumed: a breach is a StalenessError, or, with drop_stale, a counted drop.

**Beside AReaL.** Formula, life cycle and names are AReaL's (write-up, section 1.2). There nothing looks at
versions at consumption, consumption is in order of completion, events may arrive out of order and push counters
below zero, and a dropped or withdrawn group does not exist.
"""

import threading
from dataclasses import dataclass, field, replace
from typing import Protocol


class VersionProvider(Protocol):
    def get_version(self) -> int: ...


class StalenessError(AssertionError):
    """A group older than eta reached consumption although pacing promises that none does."""


@dataclass
class RolloutStat:
    """How many prompt groups are where in the life cycle; `failed` is a part of `rejected`."""

    enqueued: int = 0  # submitted, not started
    running: int = 0  # started, not finished
    accepted: int = 0  # finished well: waiting, or consumed
    rejected: int = 0  # finished without a trajectory
    failed: int = 0  # rejected because of an exception
    dropped: int = 0  # was accepted, then too old at consumption
    withdrawn: int = 0  # was accepted, then fetched beside the batches
    failed_members: int = 0  # no groups: members that raised where others of their group did not


@dataclass(eq=False)
class StalenessManager:
    """The gate of section 1.2 and the age check at consumption. Thread-safe; its lock is a leaf.

    version_provider.get_version() is called outside the lock: versions only grow, so a version read a moment too
    early makes the gate stricter, never laxer.
    """

    version_provider: VersionProvider
    max_concurrent_rollouts: int  # prompt groups
    consumer_batch_size: int  # prompt groups
    max_staleness: int  # versions
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _stat: RolloutStat = field(default_factory=RolloutStat, init=False)  # all mutable state

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness (max_head_offpolicyness) must be 0 or more, not {self.max_staleness}")
        self.max_concurrent_rollouts = max(1, self.max_concurrent_rollouts)
        self.consumer_batch_size = max(1, self.consumer_batch_size)

    def __repr__(self) -> str:
        return f"StalenessManager(version={self.version_provider.get_version()}, {self.get_stats()})"

    # ---- questions

    def get_capacity(self) -> int:
        """How many prompt groups may start now; none when it is not positive.

        capacity = min(max_concurrent - running, (eta + v + 1) * B - (accepted + running))    (section 1.2)
        """
        version, stat = self.version_provider.get_version(), self.get_stats()
        concurrency_capacity = self.max_concurrent_rollouts - stat.running
        places = (self.max_staleness + version + 1) * self.consumer_batch_size
        staleness_capacity = places - (stat.accepted + stat.running)
        return min(concurrency_capacity, staleness_capacity)

    def get_pending_limit(self) -> int:
        """Prompts worth keeping enqueued: as many as the gate can admit between two batches, (eta + 1) * B."""
        return (self.max_staleness + 1) * self.consumer_batch_size

    def get_stats(self) -> RolloutStat:
        """A copy of the counters."""
        with self._lock:
            return replace(self._stat)

    def is_fresh(self, head_version: int | None) -> bool:
        """Whether the group may be consumed now; one without a generated token (None) always may."""
        return head_version is None or self.version_provider.get_version() - head_version <= self.max_staleness

    def check_age(self, head_version: int | None) -> None:
        """Raises StalenessError for a group that is too old to be consumed now."""
        if not self.is_fresh(head_version):
            raise StalenessError(
                f"a group of version {head_version} is consumed at version {self.version_provider.get_version()}: "
                f"older than max_head_offpolicyness={self.max_staleness}. Pacing needs {self.consumer_batch_size} "
                f"groups consumed a version, in order of start; rollout.drop_stale=true drops such groups instead"
            )

    # ---- events

    def on_rollout_enqueued(self) -> None:
        with self._lock:
            self._stat.enqueued += 1

    def on_rollout_submitted(self) -> None:
        self._move("enqueued", "running")

    def on_rollout_accepted(self) -> None:
        self._move("running", "accepted")

    def on_rollout_rejected(self, failed: bool = False) -> None:
        self._move("running", "rejected")
        with self._lock:
            self._stat.failed += failed

    def on_rollout_dropped(self) -> None:
        """An accepted group was too old at consumption; its place is given back."""
        self._move("accepted", "dropped")

    def on_rollout_withdrawn(self) -> None:
        """An accepted group was fetched beside the batches; its place is given back."""
        self._move("accepted", "withdrawn")

    def on_members_failed(self, count: int) -> None:
        """Members of a group raised; what becomes of the group is told by itself."""
        with self._lock:
            self._stat.failed_members += count

    def on_version_recovered(self, version: int, finished_untrained: int = 0) -> None:
        """After a restart at `version`: version * B groups were consumed, and some more may have been kept.

        Without this the sum starts at 0 while the version does not, and the gate opens version * B places
        too wide (AReaL #1388).
        """
        with self._lock:
            self._stat.accepted = version * self.consumer_batch_size + finished_untrained

    def _move(self, source: str, target: str) -> None:
        with self._lock:
            if getattr(self._stat, source) == 0:
                raise RuntimeError(f"a rollout became {target}, but none was {source}: {self._stat}")
            setattr(self._stat, source, getattr(self._stat, source) - 1)
            setattr(self._stat, target, getattr(self._stat, target) + 1)
