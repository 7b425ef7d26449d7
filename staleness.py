"""The staleness gate: how many prompt groups may start, and how old they can get.

A group starts under one policy version, and a step consumes it at the same or a later one. The
**lag** of a token is the version at which a step consumes it, minus the version that sampled it.
The **age** of a group is the lag of its oldest trained token, and `head_version` is that token's
version. No age may exceed eta (`max_head_offpolicyness`). With eta = 0, training is synchronous.

**The gate.** A step consumes B groups. At version v there are (eta + v + 1) B places, and a group
starts only while a place is free. Every running group holds a place, and so does every group
accepted since the run began:

    enqueued -> running -> accepted   (keeps its place even when consumed; a new version adds B)
                        -> rejected   (gives its place back; a failed group counts as rejected)
                accepted -> dropped (too old) or withdrawn (fetched by id)   (gives its place back)

    B = 2, eta = 1:   version 0, 4 places   groups 1 2 3 4 start   step 1 takes 1 2, of age 0
                      version 1, 6 places   groups 5 6 start       step 2 takes 3 4, of age 1

**The gate alone does not bound the age.** If steps took the groups that finish first, a slow group
would grow old: in tests/test_staleness.py, with eta = 1 and B = 2, one reaches age 5. So
rollout/dispatcher.py applies a second rule, which `rollout.stale` names:

- **wait** (default) takes the groups that started first. *Proof* that no age exceeds eta: number
  the groups that keep their places, in order of start. When group p starts, at version s, groups 1
  to p hold places, so p <= (eta + s + 1) B. Step k takes the next B groups at version k - 1, so p
  is taken at version ceil(p / B) - 1 <= eta + s. No token of p is older than s, because all servers
  have version s when p starts (inference/servers.py).
- **mask** takes the groups that finished first, so no step waits for a slow group. It excludes
  tokens with a lag above eta from the loss, and drops groups with no trained token left. If a group
  ends at version f, its tokens of version f are never too old. *Proof:* number groups as they end.
  When p ends, p <= (eta + f + 1) B, so p is taken by version eta + f. So few groups are dropped.
- **drop** takes the groups that finished first, but drops a group whose age exceeds eta.

The proofs assume that every step consumes B groups, and that versions never fall. Otherwise a group
can be too old, and `check_age` raises StalenessError.
"""

from dataclasses import dataclass, field, replace
from typing import Any


class StalenessError(AssertionError):
    """A group is too old to be consumed, or newer than the policy."""


@dataclass
class RolloutStat:
    """The number of prompt groups in each state."""

    enqueued: int = 0
    running: int = 0
    accepted: int = 0  # including consumed ones
    rejected: int = 0
    failed: int = 0  # rejected because they raised
    dropped: int = 0  # accepted, but too old for their step
    withdrawn: int = 0  # accepted, and fetched by wait_for_task
    failed_members: int = 0  # episodes that raised; their groups finished without them


@dataclass(eq=False)
class StalenessManager:
    """The gate and the age check. Both run in one event loop, so there is no lock."""

    version_provider: Any  # has get_version(), like the engine
    max_concurrent_rollouts: int  # groups that run at once
    consumer_batch_size: int  # groups that a step consumes (B)
    max_staleness: int  # eta
    _stat: RolloutStat = field(default_factory=RolloutStat, init=False)

    def get_capacity(self) -> int:
        """Return how many groups may start now; 0 or less means none.

        capacity = min(max_concurrent - running, (eta + v + 1) B - (accepted + running))

        The gate never deadlocks. Suppose the trainer waits at version v and no group runs. The v B
        groups that the first v steps consumed hold places. Unconsumed groups hold at most B - 1
        places, because B of them would end the wait. So at least
        (eta + v + 1) B - v B - (B - 1) = eta B + 1 places are free.
        """
        version = self.version_provider.get_version()
        stat = self._stat
        places = (self.max_staleness + version + 1) * self.consumer_batch_size
        free = places - (stat.accepted + stat.running)
        return min(self.max_concurrent_rollouts - stat.running, free)

    def get_pending_limit(self) -> int:
        """Return how many prompts should wait at the gate: (eta + 1) B."""
        return (self.max_staleness + 1) * self.consumer_batch_size

    def get_stats(self) -> RolloutStat:
        return replace(self._stat)

    def oldest_version(self) -> int:
        """The oldest version whose tokens a step may train on now."""
        return self.version_provider.get_version() - self.max_staleness

    def is_fresh(self, head_version: int | None) -> bool:
        """Return whether a group may be consumed now. `head_version` is None if the group has no
        trained token.

        Raises StalenessError if `head_version` is newer than the policy.
        """
        age = 0 if head_version is None else self.version_provider.get_version() - head_version
        if age < 0:
            raise StalenessError(f"a group of version {head_version} is newer than the policy")
        return age <= self.max_staleness

    def check_age(self, head_version: int | None) -> None:
        """Raise StalenessError if a group with this head version is too old to consume."""
        if not self.is_fresh(head_version):
            raise StalenessError(
                f"a group of version {head_version} is consumed at version"
                f" {self.version_provider.get_version()}: older than max_head_offpolicyness="
                f"{self.max_staleness} allows. Consume {self.consumer_batch_size} groups per version"
                " in order of start, or set rollout.stale=mask or rollout.stale=drop"
            )

    # ---- events

    def on_rollout_enqueued(self) -> None:
        self._stat.enqueued += 1

    def on_rollout_submitted(self) -> None:
        """Count a group that starts. Call this only while get_capacity is positive."""
        self._move("enqueued", "running")

    def on_rollout_accepted(self) -> None:
        self._move("running", "accepted")

    def on_rollout_rejected(self, failed: bool = False) -> None:
        self._move("running", "rejected")
        self._stat.failed += failed

    def on_rollout_dropped(self) -> None:
        self._move("accepted", "dropped")

    def on_rollout_withdrawn(self) -> None:
        self._move("accepted", "withdrawn")

    def on_members_failed(self, count: int) -> None:
        self._stat.failed_members += count

    def on_version_recovered(self, version: int) -> None:
        """Count the groups consumed before a restart as accepted. Otherwise the gate would admit
        too many groups (AReaL #1388)."""
        self._stat.accepted = version * self.consumer_batch_size

    def _move(self, source: str, target: str) -> None:
        if getattr(self._stat, source) == 0:
            raise RuntimeError(f"a rollout became {target}, but none was {source}: {self._stat}")
        setattr(self._stat, source, getattr(self._stat, source) - 1)
        setattr(self._stat, target, getattr(self._stat, target) + 1)
