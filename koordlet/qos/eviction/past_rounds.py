"""What former rounds, kubelet's evictions and pods that leave mean for the next round. No I/O.

Moments are seconds of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from koordlet.qos.eviction.round import Key, releases_by_pod
from koordlet.qos.strategy import PodOnNode, Shortage, Situation

_EXPECTED_S: Final = 120.0
"""How long a pod that leaves counts as released. Upstream remembers an evicted pod as long; a pod
with a longer grace is then stuck as far as the node is concerned."""
_SETTLE_S: Final = 5.0
"""How long stopped containers count as released. Chosen: measurements show it after two samples and
a mean of three. Twice the value delays further evictions if kubelet starts them again."""
_KUBELET_S: Final = 10.0
"""How long after kubelet's eviction of a pod ours wait. Chosen: kubelet looks every 10 s whether
another pod must go."""


class Eviction(msgspec.Struct, frozen=True):
    """Of one pod. releases: (resource, whether amounts are requests, amount).
    counts_until: how long its release is expected. stopping: whether its containers are being
    stopped by this daemon, whose end leaves those running that had not ended."""

    at: float
    releases: tuple[tuple[str, bool, int], ...]
    counts_until: float
    stopping: bool = False


class Past(msgspec.Struct, frozen=True):
    """What outlasts a restart of the daemon.

    evicted: by uid, the pods that are not evicted again now. cooled_at: gate -> when the last round
    that evicted for it began.
    """

    evicted: Mapping[str, Eviction] = {}
    cooled_at: Mapping[str, float] = {}


class PastRounds:
    """See the module.

    cool_downs: gate -> seconds, where they differ from the shortage's own.
    """

    def __init__(self, cool_downs: Mapping[str, float]) -> None:
        self._cool_downs = cool_downs
        self._evicted: dict[str, Eviction] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        """uid -> (until when the pod is not tried again, why)."""
        self._leaving_since: dict[str, float] = {}
        self._kubelets: dict[str, float] = {}
        """uid -> since when kubelet's eviction of the pod is known."""
        self._begun = False
        self._cooled_at: dict[str, float] = {}
        """gate -> when the last round that evicted for it began."""

    @property
    def past(self) -> Past:
        """What outlasts a restart, as of now."""
        return Past(dict(self._evicted), dict(self._cooled_at))

    def resume(self, past: Past, now: float) -> None:
        """Go on from what the last daemon of this boot remembered. Before the first round.

        A stop that the last daemon did not finish is left out: the pod may go on running.
        """
        # A moment to come is not a moment of this boot's clock.
        self._evicted = {
            uid: each for uid, each in past.evicted.items() if each.at <= now and not each.stopping
        }
        self._cooled_at = {gate: at for gate, at in past.cooled_at.items() if at <= now}

    # --- what happens --------------------------------------------------------------------------

    def look_at(self, pods: Mapping[str, PodOnNode], now: float) -> None:
        """Note which pods leave; drop pods that have left, and what is too old to count.

        pods: the node's, by uid.
        """
        self._evicted = {
            uid: each
            for uid, each in self._evicted.items()
            if uid in pods and now - each.at < _EXPECTED_S
        }
        self._refused = {
            uid: each for uid, each in self._refused.items() if uid in pods and now < each[0]
        }
        self._leaving_since = {
            uid: self._leaving_since.get(uid, now) for uid, each in pods.items() if each.terminating
        }
        before, self._kubelets = self._kubelets, {}
        for uid, each in pods.items():
            if each.pod.status_reason == "Evicted":
                # Pods that kubelet evicted before our start say nothing about now.
                self._kubelets[uid] = before.get(uid, now if self._begun else -_KUBELET_S)
        self._begun = True

    def evicted(
        self, uid: str, releases: Mapping[Key, int], now: float, *, stopping: bool = False
    ) -> None:
        """Expect from now on that the pod releases these amounts.

        stopping: whether that takes this daemon until `stopped` or `not_stopped`.
        """
        released = tuple((*key, amount) for key, amount in releases.items())
        self._evicted[uid] = Eviction(now, released, now + _EXPECTED_S, stopping)

    def stopped(self, uid: str, now: float) -> None:
        """The pod's containers have ended: measurements show soon what that released."""
        self._evicted[uid] = msgspec.structs.replace(
            self._evicted[uid], counts_until=now + _SETTLE_S, stopping=False
        )

    def not_stopped(self, uid: str) -> None:
        """The pod's containers could not be stopped: it releases nothing."""
        self._evicted.pop(uid, None)

    def refused(self, uid: str, *, until: float, why: str) -> None:
        """Leave the pod alone until then."""
        self._refused[uid] = until, why

    def served(self, gates: Iterable[str], now: float) -> None:
        """Let these gates cool down: a round evicted for them."""
        for gate in gates:
            self._cooled_at[gate] = now

    # --- what that means for a round -----------------------------------------------------------

    def kubelet_evicts(self, situation: Situation, now: float) -> str:
        """Return why kubelet is taken to evict pods now; "" if it is not."""
        pressures = situation.inputs.node.pressures
        if pressures:
            return f"kubelet evicts pods itself: the Node has {', '.join(sorted(pressures))}"
        for each in situation.pods:
            since = self._kubelets.get(each.pod.uid)
            if since is not None and (each.containers or now - since < _KUBELET_S):
                return f"kubelet evicts pods itself: {each.pod.obj}"
        return ""

    def expected(self, shortages: Sequence[Shortage], now: float) -> dict[str, dict[Key, int]]:
        """Return what pods that were evicted, or that leave by themselves, will release, by uid.

        A pod that has left for too long releases nothing more: it is stuck.
        """
        expected: dict[str, dict[Key, int]] = {}
        releases = releases_by_pod(shortages)
        for uid, since in self._leaving_since.items():
            counts = now - since < _EXPECTED_S
            expected[uid] = releases.get(uid, {}) if counts else {}
        for uid, each in self._evicted.items():
            if uid not in expected:
                released = {(resource, kind): n for resource, kind, n in each.releases}
                counts = now < each.counts_until
                expected[uid] = {**released, **releases.get(uid, {})} if counts else {}
        return expected

    def barred(self, pods: Mapping[str, PodOnNode], now: float) -> dict[str, str]:
        """Return the pods that are not tried again yet, by uid, each with the reason."""
        return {
            uid: f"{pods[uid].pod.obj}: {why}; tried again in {until - now:.0f} s"
            for uid, (until, why) in self._refused.items()
        }

    def cooling(self, shortages: Sequence[Shortage], now: float) -> dict[str, float]:
        """Return the gates that cool down now, each with its cool-down in seconds."""
        cool_downs = {
            each.gate: self._cool_downs.get(each.gate, each.cool_down_s)
            for each in shortages
            if each.gate in self._cooled_at
        }
        return {
            gate: cool_down_s
            for gate, cool_down_s in cool_downs.items()
            if now - self._cooled_at[gate] < cool_down_s
        }
