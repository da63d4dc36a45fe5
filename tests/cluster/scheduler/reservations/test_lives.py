"""Random lives with Reservations: they come, are edited, expire, end with nodes and are deleted.

As `test_lives`, with Reservations among the objects and with the controller's steps. A reservation
and the pods that use it count together, with the larger of what is reserved and what they request.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from apis.core import pod_requests
from apis.meta import ObjectReference, format_time
from cluster.scheduler.binding.placement import Bound, Placement, Refused, Why
from cluster.scheduler.binding.reservation_writer import ReservationRefusal
from cluster.scheduler.binding.reservations import ReservationPlacement
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.controllers.reservation_lifecycle import Delete, Owner, Write, next_step
from cluster.scheduler.sources.bookings import reservation_of
from tests.cluster.fake_api import merged
from tests.cluster.scheduler.beds.lives import NODES, Lives, milli
from tests.cluster.scheduler.reservations.bed import CONFIGURATION

_USES = "scheduling.koordinator.sh/reservation-allocated"
_ENDED = ("Failed", "Succeeded")


class _Writer:
    """Keeps placements of Reservations until the machine decides what becomes of them."""

    def __init__(self) -> None:
        self.waiting: deque[ReservationPlacement] = deque()
        self.refused: dict[str, str] = {}

    def submit(self, placement: ReservationPlacement) -> None:
        self.waiting.append(placement)

    def refuse(self, refusal: ReservationRefusal) -> None:
        self.refused[refusal.uid] = refusal.message


class ReservationLives(Lives):
    configuration = read_configuration(CONFIGURATION, obj="test")

    def __init__(self) -> None:
        self.reservations: dict[str, dict[str, Any]] = {}
        self.late_reservations: deque[bytes] = deque()
        self.writer = _Writer()
        super().__init__()
        for number in range(3):
            self.reserve(
                number, 1500, "koord-scheduler", True, "24h", "", "web", "Restricted", False
            )

    def _start(self) -> None:
        super()._start()
        self.writer = _Writer()
        self.process.reservation_writer = self.writer  # type: ignore[assignment]

    # --- the API server ------------------------------------------------------------------------

    def _changed(self, name: str) -> None:
        line = self._line("MODIFIED", self.reservations[name])
        self.late_reservations.append(line)

    def _on_node(self, node: str) -> list[dict[str, Any]]:
        return [
            each
            for each in self.reservations.values()
            if each["status"].get("nodeName") == node and each["status"]["phase"] not in _ENDED
        ]

    def _users(self, uid: str, node: str) -> list[dict[str, Any]]:
        return [
            pod for pod in self._on(node) if uid in pod["metadata"]["annotations"].get(_USES, "")
        ]

    def _requested(self, node: str) -> int:
        total = super()._requested(node)
        for each in self._on_node(node):
            used = sum(milli(pod) for pod in self._users(each["metadata"]["uid"], node))
            total += max(0, int(each["status"]["allocatable"]["cpu"][:-1]) - used)
        return total

    def _count(self, node: str) -> int:
        return super()._count(node) + sum(
            not self._users(each["metadata"]["uid"], node) for each in self._on_node(node)
        )

    def _bind(self, placement: Placement) -> bool:
        pod = self.pods.get(placement.name)
        if pod is not None and pod["metadata"]["uid"] == placement.uid:
            # The annotations travel in the Binding.
            stored = pod["metadata"]["annotations"]
            if not pod["spec"].get("nodeName"):
                pod["metadata"]["annotations"] = {**stored, **placement.annotations}
        return super()._bind(placement)

    def _bind_reservation(self, placement: ReservationPlacement) -> bool:
        found = self.reservations.get(placement.name)
        if found is None or found["metadata"]["uid"] != placement.uid:
            return False
        if found["status"]["phase"] in _ENDED or found["status"].get("nodeName"):
            return False
        assert placement.uid not in self.bound
        self.bound.add(placement.uid)
        self._mark(placement)
        stamp = format_time(datetime.fromtimestamp(self.now, UTC))
        found["status"] = {
            "phase": "Available",
            "nodeName": placement.node,
            "allocatable": {"cpu": f"{_milli_of(placement.allocatable['cpu'])}m"},
            "conditions": [{"type": "Scheduled", "status": "True", "lastTransitionTime": stamp}],
        }
        self._changed(placement.name)
        cpu, most = NODES[placement.node]
        assert self._requested(placement.node) <= cpu
        assert self._count(placement.node) <= most
        return True

    def _mark(self, placement: ReservationPlacement) -> None:
        """Mark the pods that a Reservation takes over."""
        for taken in placement.takes:
            pod = self.pods.get(taken.name)
            if pod is not None and pod["metadata"]["uid"] == taken.uid:
                text = f'{{"name":"{placement.name}","uid":"{placement.uid}"}}'
                pod["metadata"]["annotations"] = {**pod["metadata"]["annotations"], _USES: text}
                self.late_pods.append(self._line("MODIFIED", pod))

    # --- what users do -------------------------------------------------------------------------

    @rule(
        name=st.integers(0, 5),
        milli=st.sampled_from([500, 1500, 2500, 9000]),
        scheduler=st.sampled_from(["koord-scheduler", "koord-scheduler", "other"]),
        once=st.booleans(),
        ttl=st.sampled_from(["24h", "1h", "0s", "soon"]),
        gang=st.sampled_from(["", "", "", "a"]),
        app=st.sampled_from(["web", "db"]),
        policy=st.sampled_from(["Aligned", "Restricted"]),
        pre=st.sampled_from([False, False, True]),
    )
    def reserve(
        self,
        name: int,
        milli: int,
        scheduler: str,
        once: bool,
        ttl: str,
        gang: str,
        app: str,
        policy: str,
        pre: bool,
    ) -> None:
        key = f"r{name}"
        if key in self.reservations:
            return
        self.made += 1
        prefix = "gang.scheduling.koordinator.sh"
        annotations = {f"{prefix}/name": gang, f"{prefix}/min-available": "2"} if gang else {}
        resources = {"requests": {"cpu": f"{milli}m"}}
        self.reservations[key] = {
            "metadata": {
                "name": key,
                "uid": f"r-uid-{self.made}",
                "creationTimestamp": format_time(datetime.fromtimestamp(self.now, UTC)),
                "annotations": annotations,
            },
            "spec": {
                "template": {
                    "spec": {
                        "schedulerName": scheduler,
                        "containers": [{"name": "c", "resources": resources}],
                    }
                },
                "owners": [{"labelSelector": {"matchLabels": {"app": app}}}],
                "ttl": ttl,
                "allocateOnce": once,
                "allocatePolicy": policy,
                "preAllocation": pre,
                "preAllocationPolicy": {"enableMultiple": milli > 1500},
            },
            "status": {"phase": "Pending"},
        }
        self.late_reservations.append(self._line("ADDED", self.reservations[key]))

    @rule(name=st.integers(0, 9), app=st.sampled_from(["web", "db"]))
    def become(self, name: int, app: str) -> None:
        """A pod gets the label by which reservations know their owners."""
        pod = self.pods.get(f"p{name}")
        if pod is not None:
            pod["metadata"]["labels"] = {"app": app}
            self.late_pods.append(self._line("MODIFIED", pod))

    @rule(
        name=st.integers(0, 5),
        edit=st.sampled_from(["bad", "good", "closed", "open", "small", "delete", "fail", "back"]),
    )
    def edit(self, name: int, edit: str) -> None:
        key = f"r{name}"
        found = self.reservations.get(key)
        if found is None:
            return
        spec, status = found["spec"], found["status"]
        match edit:
            case "bad":
                spec["owners"] = []
            case "good":
                spec["owners"], spec["ttl"] = [{}], "24h"
            case "closed" | "open":
                spec["unschedulable"] = edit == "closed"
            case "small":
                (container,) = spec["template"]["spec"]["containers"]
                container["resources"] = {"requests": {"cpu": "100m"}}
            case "delete":
                del self.reservations[key]
                self.late_reservations.append(self._line("DELETED", found))
                return
            case "fail":
                found["status"] = {**status, "phase": "Failed"}
            case "back" if status["phase"] == "Available":
                # As after a restore from a backup: it has no node any more.
                found["status"] = {"phase": "Pending"}
                self.bound.discard(found["metadata"]["uid"])
        self._changed(key)

    # --- what the scheduler sees and does ------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def see_reservations(self, count: int) -> None:
        for _ in range(min(count, len(self.late_reservations))):
            self.process.reservations.take(self.late_reservations.popleft())

    @precondition(lambda self: self.writer.waiting)
    @rule(fails=st.sampled_from([None, None, None, Why.CONFLICT, Why.FAILING]))
    def carry_out_reservation(self, fails: Why | None) -> None:
        placement = self.writer.waiting.popleft()
        if fails is not None:
            self.process.attempts.bound(placement, Refused(fails, "as the test wants it"))
        elif self._bind_reservation(placement):
            self.process.attempts.bound(placement, Bound())
        else:
            found = self.reservations.get(placement.name)
            why = Why.DELETED
            if found is not None:
                same = found["metadata"]["uid"] == placement.uid
                why = Why.CONFLICT if same else Why.OTHER_UID
            self.process.attempts.bound(placement, Refused(why, "as the API server has it"))

    @rule(name=st.integers(0, 5))
    def control(self, name: int) -> None:
        """The controller looks at what the cache has, and writes if that is the newest version."""
        seen = self.process.reservations.get(f"r{name}")
        found = self.reservations.get(f"r{name}")
        if seen is None or found is None:
            return
        node = seen.status.node_name
        owners = [
            Owner(
                ObjectReference(namespace="default", name=pod.metadata.name, uid=pod.metadata.uid),
                pod_requests(pod),
            )
            for pod in self.process.pods.items.values()
            if reservation_of(pod) == seen.metadata.uid and pod.spec.node_name == node
        ]
        step = next_step(
            seen,
            owners=owners,
            node_exists=node in self.nodes,
            now=self.now,
            collect_after_s=3600,
            pending_expire=True,
        )
        version = found["metadata"]["resourceVersion"]
        if isinstance(step, Write) and version == seen.metadata.resource_version:
            found["status"] = merged(found["status"], step.status)
            self._changed(f"r{name}")
        elif isinstance(step, Delete) and found["metadata"]["uid"] == seen.metadata.uid:
            self.edit(name, "delete")

    @rule(applied=st.lists(st.sampled_from(["all", "marks", "nothing"]), max_size=4))
    def kill(self, applied: list[str]) -> None:
        """The process is killed; of its writes under way some still reach the server."""
        for reaches, placement in zip(applied, self.writer.waiting, strict=False):
            if reaches == "all":
                self._bind_reservation(placement)
            elif reaches == "marks":
                self._mark(placement)
        self.restart([each == "all" for each in applied])

    def _after_restart(self) -> None:
        self.late_reservations.clear()
        for each in self.reservations.values():
            self.process.reservations.take(self._line("ADDED", each))

    def _labels(self, number: int) -> dict[str, str]:
        return {"app": "web"} if number % 3 else {}

    def _is_late(self) -> bool:
        return super()._is_late() or bool(self.late_reservations)

    def _see_all(self) -> None:
        while self.writer.waiting:
            self.carry_out_reservation(None)
        self.see_reservations(len(self.late_reservations) or 1)
        super()._see_all()

    def teardown(self) -> None:
        # Labels of pods do not change after this, so nobody is helped by a change of theirs.
        super().teardown()
        for each in self.reservations.values():
            status, uid = each["status"], each["metadata"]["uid"]
            if status.get("nodeName") or status["phase"] in _ENDED:
                continue
            spec = each["spec"]
            bad = spec["preAllocation"] and spec["allocatePolicy"] != "Restricted"
            if bad or not spec["owners"] or spec["ttl"] == "soon":
                assert self.writer.refused.get(uid, "Reservation r").startswith("Reservation r")
                continue
            if spec["template"]["spec"]["schedulerName"] == "other":
                continue
            if each["metadata"]["annotations"] or spec["preAllocation"]:
                continue
            for name in self.nodes:
                cpu, most = NODES[name]
                wanted = _milli_of(
                    spec["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
                )
                full = self._count(name) >= most
                assert full or self._requested(name) + wanted > cpu, (each, name)

    def _placed(self) -> dict[str, str]:
        kept = {
            each["metadata"]["uid"]: each["status"]["nodeName"]
            for each in self.reservations.values()
            if each["status"].get("nodeName") and each["status"]["phase"] not in _ENDED
        }
        return {**super()._placed(), **kept}


def _milli_of(text: str) -> int:
    return int(text[:-1]) if text.endswith("m") else 1000 * int(text)


ReservationLives.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None
)
TestReservationLives = ReservationLives.TestCase
