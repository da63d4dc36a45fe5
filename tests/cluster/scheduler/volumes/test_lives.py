"""Random lives with claims: they are bound with their pods, go, and come again.

As process/test_lives, with claims and local volumes among the objects. The writes for the claims of
a pod are carried out with its binding, or refused as the API server would.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from cluster.scheduler.binding.placement import Placement
from kube.cache import Cache
from tests.cluster.scheduler.beds.lives import NODES, Lives, milli
from tests.cluster.scheduler.volumes.making import HOST, claim_json, on, volume_json

_CLAIMS = ("c0", "c1", "c2", "c3")
_VOLUMES = {"v0": "n0", "v1": "n1", "v2": "n2", "v3": ""}
"""Name -> the node from which the volume is reached, or "" for all."""


class VolumeLives(Lives):
    def __init__(self) -> None:
        self.storage: dict[str, dict[str, Any]] = {}
        self.late_storage: deque[tuple[str, bytes]] = deque()
        """Kind of the object, event."""
        super().__init__()
        self._put(
            "class",
            {
                "metadata": {"name": "wait"},
                "provisioner": "kubernetes.io/no-provisioner",
                "volumeBindingMode": "WaitForFirstConsumer",
            },
        )
        for name, node in _VOLUMES.items():
            terms = on(HOST, node) if node else None
            self._put("volume", volume_json(name, terms=terms))
        for name in _CLAIMS:
            self.claim_comes(name)
        self.see_storage(len(self.late_storage))
        for number, claim in enumerate(_CLAIMS):
            self.create_with_claims(6 + number, 500, {claim})

    def _start(self) -> None:
        super()._start()
        # The claims of a pod are written when the machine carries its binding out.
        self.process.volume_binder = self.binder  # type: ignore[assignment]

    # --- the API server ------------------------------------------------------------------------

    def _put(self, kind: str, tree: dict[str, Any]) -> None:
        name = tree["metadata"]["name"]
        change = "MODIFIED" if name in self.storage else "ADDED"
        self.storage[name] = tree
        self.late_storage.append((kind, self._line(change, tree)))

    def _claims_of(self, pod: dict[str, Any]) -> list[str]:
        volumes = pod["spec"].get("volumes", ())
        return [each["persistentVolumeClaim"]["claimName"] for each in volumes]

    def _holder(self, volume: str) -> str:
        reference = self.storage[volume]["spec"].get("claimRef")
        return reference["name"] if reference else ""

    def _bind(self, placement: Placement) -> bool:
        pod = self.pods.get(placement.name)
        if pod is None or pod["metadata"]["uid"] != placement.uid or pod["spec"].get("nodeName"):
            return False
        binds = [(key.partition("/")[2], volume) for key, volume in placement.volumes.binds]
        for claim, volume in binds:
            if claim not in self.storage or self._holder(volume) not in ("", claim):
                return False
        for claim, volume in binds:
            reference = {"namespace": "default", "name": claim, "uid": f"u-{claim}"}
            spec = self.storage[volume]["spec"] | {"claimRef": reference}
            self._put("volume", self.storage[volume] | {"spec": spec})
            self._put("claim", self._claim(claim, volume))
        return super()._bind(placement)

    def _claim(self, name: str, volume: str = "") -> dict[str, Any]:
        return claim_json(name, volume=volume, metadata={"uid": f"u-{name}"})

    # --- what users do -------------------------------------------------------------------------

    @rule(
        name=st.integers(0, 9),
        milli=st.sampled_from([0, 500, 1500]),
        claims=st.sets(st.sampled_from(_CLAIMS), min_size=1, max_size=2),
    )
    def create_with_claims(self, name: int, milli: int, claims: set[str]) -> None:
        key = f"p{name}"
        if key in self.pods:
            return
        self.create(name, milli, "koord-scheduler", gated=False)
        self.late_pods.pop()
        self.pods[key]["spec"]["volumes"] = [
            {"name": claim, "persistentVolumeClaim": {"claimName": claim}}
            for claim in sorted(claims)
        ]
        self.late_pods.append(self._line("ADDED", self.pods[key]))

    @rule(name=st.sampled_from(_CLAIMS))
    def claim_comes(self, name: str) -> None:
        if name not in self.storage:
            self._put("claim", self._claim(name))

    @rule(name=st.sampled_from(_CLAIMS))
    def claim_goes(self, name: str) -> None:
        """A claim is deleted, and its volume is cleaned and free again."""
        claim = self.storage.pop(name, None)
        if claim is None:
            return
        self.late_storage.append(("claim", self._line("DELETED", claim)))
        volume = claim["spec"].get("volumeName")
        if volume:
            spec = {k: v for k, v in self.storage[volume]["spec"].items() if k != "claimRef"}
            self._put("volume", self.storage[volume] | {"spec": spec})

    # --- what the scheduler sees ---------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def see_storage(self, count: int) -> None:
        for _ in range(min(count, len(self.late_storage))):
            self._see(*self.late_storage.popleft())

    @rule()
    def catch_up(self) -> None:
        self._see_all()
        self.schedule(20.0)

    @rule(name=st.integers(0, 9), claims=st.sets(st.sampled_from(_CLAIMS), min_size=1, max_size=3))
    def replace(self, name: int, claims: set[str]) -> None:
        """A pod goes and another one of its name comes, with claims."""
        self.delete(name)
        self.create_with_claims(name, 500, claims)

    def _see(self, kind: str, line: bytes) -> None:
        source = self.process.volumes
        caches: dict[str, Cache[Any]] = {
            "claim": source.claims,
            "volume": source.volumes,
            "class": source.caches[2],
        }
        caches[kind].take(line)

    def _see_all(self) -> None:
        self.see_storage(len(self.late_storage) or 1)
        super()._see_all()

    def _after_restart(self) -> None:
        self.late_storage.clear()
        for name, tree in self.storage.items():
            kind = "class" if name == "wait" else "claim" if name in _CLAIMS else "volume"
            self._see(kind, self._line("ADDED", tree))

    # --- what must hold ------------------------------------------------------------------------

    @invariant()
    def no_volume_is_planned_for_two_claims(self) -> None:
        claims: dict[str, set[str]] = defaultdict(set)
        for booking in self.process.tables.bookings.values():
            for claim, volume in booking.allocation.volumes.binds:
                claims[volume].add(claim)
        assert all(len(of) == 1 for of in claims.values()), claims

    def _held_back(self, pod: dict[str, Any]) -> bool:
        return bool(self._claims_of(pod))

    def teardown(self) -> None:
        super().teardown()
        bookings = self.process.tables.bookings.values()
        assert not any(booking.allocation.volumes for booking in bookings)
        for pod in self.pods.values():
            claims = self._claims_of(pod)
            if pod["spec"].get("nodeName") or len(claims) != 1 or claims[0] not in self.storage:
                continue
            bound = self.storage[claims[0]]["spec"].get("volumeName")
            usable = [bound] if bound else [name for name in _VOLUMES if not self._holder(name)]
            for node in self.nodes:
                if any(_VOLUMES[name] in ("", node) for name in usable):
                    cpu, most = NODES[node]
                    full = self._count(node) >= most
                    assert full or self._requested(node) + milli(pod) > cpu, (pod, node)


VolumeLives.TestCase.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestVolumeLives = VolumeLives.TestCase
