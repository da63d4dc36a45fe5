"""Random lives of a whole scheduler: late events, failed bindings, restarts, nodes that go.

The API server is a dictionary: what it holds is the truth, and what the scheduler sees of it comes
later. Nothing is ever bound twice or beyond what a node has, and in the end everything that fits is
bound and the tables equal those of a scheduler that reads the objects afresh.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Container
from copy import copy
from typing import Any, cast

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.scheduler.binding.placement import Bound, Placement, Refused, Why
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.serving import dumps
from cluster.scheduler.tables.devices.table import NO_SLOT
from kube.client import Client

_CONFIGURATION = read_configuration(
    """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    permit: {enabled: [{name: Coscheduling}]}
- schedulerName: other
""",
    obj="test",
)
NODES = {"n0": (4000, 3), "n1": (2000, 10), "n2": (7000, 4)}
"""Name -> milli-cores, pods."""


class _Binder:
    """Keeps placements until the machine decides what becomes of them. bound: UIDs of pods."""

    def __init__(self, bound: Container[str] = ()) -> None:
        self.waiting: deque[Placement] = deque()
        self._bound = bound

    def submit(self, placement: Placement) -> None:
        assert placement.uid not in self._bound
        self.waiting.append(placement)


class _Silent:
    """Takes conditions and events."""

    def submit(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def forget(self, *_: Any) -> None: ...


class Lives(RuleBasedStateMachine):
    configuration = _CONFIGURATION
    priority = 0
    """Of the next pod."""
    longest_unschedulable_s = math.inf
    """Every pod that waits is tried when a change may help it, and never only because of time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_800_000_000.0
        self.version = 0
        self.pods: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.late_pods: deque[bytes] = deque()
        self.late_nodes: deque[bytes] = deque()
        self.made = 0
        self.bound: set[str] = set()
        self._start()
        for name in NODES:
            self._put_node(name)
        self.see_nodes(len(NODES))
        for number in range(6):
            self.create(number, 500 * number, "koord-scheduler", gated=False)

    def _start(self) -> None:
        async def make() -> SchedulerProcess:
            return SchedulerProcess(
                cast(Client, None),
                self.configuration,
                seed=3,
                clock=lambda: self.now,
                longest_unschedulable_s=self.longest_unschedulable_s,
            )

        self.process = asyncio.run(make())
        self.binder = _Binder(self.bound)
        self.process.binder = self.binder  # type: ignore[assignment]
        self.process.statuses = _Silent()  # type: ignore[assignment]
        self.process.events = _Silent()  # type: ignore[assignment]

    # --- the API server ------------------------------------------------------------------------

    def _line(self, kind: str, obj: dict[str, Any]) -> bytes:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        return msgspec.json.encode({"type": kind, "object": obj})

    def _put_node(self, name: str) -> None:
        cpu, pods = NODES[name]
        kind = "MODIFIED" if name in self.nodes else "ADDED"
        amounts = {"cpu": f"{cpu}m", "memory": "64Gi", "pods": str(pods)}
        labels = {"kubernetes.io/hostname": name}
        metadata = {"name": name, "labels": labels}
        self.nodes[name] = {"metadata": metadata, "status": {"allocatable": amounts}}
        self.late_nodes.append(self._line(kind, self.nodes[name]))

    def _on(self, node: str) -> list[dict[str, Any]]:
        return [pod for pod in self.pods.values() if pod["spec"].get("nodeName") == node]

    def _requested(self, node: str) -> int:
        return sum(milli(pod) for pod in self._on(node))

    def _count(self, node: str) -> int:
        return len(self._on(node))

    def _bind(self, placement: Placement) -> bool:
        pod = self.pods.get(placement.name)
        if pod is None or pod["metadata"]["uid"] != placement.uid or pod["spec"].get("nodeName"):
            return False
        assert placement.uid not in self.bound
        self.bound.add(placement.uid)
        pod["spec"]["nodeName"] = placement.node
        self.late_pods.append(self._line("MODIFIED", pod))
        cpu, most = NODES[placement.node]
        assert self._requested(placement.node) <= cpu
        assert self._count(placement.node) <= most
        return True

    # --- what users do -------------------------------------------------------------------------

    @rule(
        name=st.integers(0, 9),
        milli=st.sampled_from([0, 500, 1500, 2500, 9000]),
        scheduler=st.sampled_from(["koord-scheduler", "koord-scheduler", "other", "nobody"]),
        gated=st.sampled_from([False, False, False, True]),
        gang=st.sampled_from(["", "", "a", "b"]),
    )
    def create(self, name: int, milli: int, scheduler: str, gated: bool, gang: str = "") -> None:
        key = f"p{name}"
        if key in self.pods:
            return
        self.made += 1
        gates = [{"name": "g"}] if gated else []
        self.pods[key] = {
            "metadata": {
                "name": key,
                "namespace": "default",
                "uid": f"u{self.made}",
                "labels": self._labels(name),
                "annotations": _gang(gang) if gang else {},
            },
            "spec": {
                "schedulerName": scheduler,
                "schedulingGates": gates,
                "priority": self.priority,
                "containers": [{"name": "c", "resources": {"requests": _amounts(milli)}}],
            },
        }
        self.late_pods.append(self._line("ADDED", self.pods[key]))

    @rule(name=st.integers(0, 9))
    def ungate(self, name: int) -> None:
        pod = self.pods.get(f"p{name}")
        if pod is not None and pod["spec"]["schedulingGates"]:
            pod["spec"]["schedulingGates"] = []
            self.late_pods.append(self._line("MODIFIED", pod))

    @rule(name=st.integers(0, 9))
    def relabel(self, name: int) -> None:
        pod = self.pods.get(f"p{name}")
        if pod is not None:
            pod["metadata"]["labels"] |= {"v": str(self.version)}
            self.late_pods.append(self._line("MODIFIED", pod))

    @rule(name=st.integers(0, 9))
    def delete(self, name: int) -> None:
        pod = self.pods.pop(f"p{name}", None)
        if pod is not None:
            self.late_pods.append(self._line("DELETED", pod))

    @rule(name=st.integers(0, 9))
    def end(self, name: int) -> None:
        """A bound pod's containers end; it keeps its object and frees its node."""
        pod = self.pods.get(f"p{name}")
        if pod is not None and pod["spec"].get("nodeName"):
            del self.pods[f"p{name}"]
            pod["status"] = {"phase": "Succeeded"}
            self.late_pods.append(self._line("MODIFIED", pod))
            self.late_pods.append(self._line("DELETED", pod))

    @rule(name=st.sampled_from(["n0", "n1"]))
    def node_goes(self, name: str) -> None:
        node = self.nodes.pop(name, None)
        if node is not None:
            self.late_nodes.append(self._line("DELETED", node))

    @rule(name=st.sampled_from(sorted(NODES)))
    def node_comes(self, name: str) -> None:
        self._put_node(name)

    # --- what the scheduler sees and does ------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def see_pods(self, count: int) -> None:
        for _ in range(min(count, len(self.late_pods))):
            self.process.pods.take(self.late_pods.popleft())

    @rule(count=st.integers(1, 5))
    def see_nodes(self, count: int) -> None:
        for _ in range(min(count, len(self.late_nodes))):
            self.process.nodes.take(self.late_nodes.popleft())

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 15.0, 400.0]))
    def schedule(self, seconds: float) -> None:
        self.now += seconds
        assert not self.process.schedule_for(10.0)

    @precondition(lambda self: self.binder.waiting)
    @rule(fails=st.sampled_from([None, None, None, Why.CONFLICT, Why.FAILING, Why.FORBIDDEN]))
    def carry_out(self, fails: Why | None) -> None:
        placement = self.binder.waiting.popleft()
        if fails is not None:
            self.process.attempts.bound(placement, Refused(fails, "as the test wants it"))
        elif self._bind(placement):
            self.process.attempts.bound(placement, Bound())
        else:
            pod = self.pods.get(placement.name)
            why = Why.DELETED
            if pod is not None:
                same = pod["metadata"]["uid"] == placement.uid
                why = Why.BOUND_ELSEWHERE if same else Why.OTHER_UID
            self.process.attempts.bound(placement, Refused(why, "as the API server has it"))

    @rule(applied=st.lists(st.booleans(), max_size=8))
    def restart(self, applied: list[bool]) -> None:
        """The process is killed; of its requests under way some still reach the server."""
        for reaches, placement in zip(applied, self.binder.waiting, strict=False):
            if reaches:
                self._bind(placement)
        self._start()
        self.late_pods.clear()
        self.late_nodes.clear()
        self._after_restart()
        for node in self.nodes.values():
            self.process.nodes.take(self._line("ADDED", node))
        for pod in self.pods.values():
            self.process.pods.take(self._line("ADDED", pod))

    def _is_late(self) -> bool:
        """Return whether the scheduler may not know of a pod that is bound."""
        return any(pod["spec"].get("nodeName") for pod in self.pods.values()) and bool(
            self.late_pods
        )

    @invariant()
    def nothing_is_booked_beyond_what_the_scheduler_sees(self) -> None:
        nodes = self.process.tables.nodes
        rows = slice(0, len(nodes))
        if not self._is_late():
            alive = nodes.alive[rows]
            over = (nodes.requested[rows] > nodes.allocatable[rows]).any(axis=1)
            assert not (over & alive).any()
            assert not ((nodes.pods[rows] > nodes.allowed_pods[rows]) & alive).any()
            assert not (nodes.requested[rows] < 0).any()

    @invariant()
    def nothing_failed_unseen(self) -> None:
        """Parts survive faults of their own, also those of the asserts in the fake writers."""
        assert not self.process.attempts.faults.count
        caches = (*self.process.caches, self.process.pods)
        assert not any(cache.faults.count for cache in caches)

    @invariant()
    def every_pod_has_an_answer_to_why(self) -> None:
        for key, pod in self.process.pods.items.items():
            why = self.process.why(key)
            assert why is not None
            assert msgspec.json.encode(why)
            if pod.spec.node_name:
                assert (why["state"], why["node"]) == ("bound", pod.spec.node_name)
            elif why["state"] == "unschedulable":
                assert not why["node"]
            elif why["state"] == "gated":
                assert why["message"]

    def teardown(self) -> None:
        for _ in range(12):
            self._see_all()
            self.schedule(400.0)
            while self.binder.waiting:
                self.carry_out(None)
        self._see_all()
        self.nothing_failed_unseen()
        assert not self.process.attempts.held
        self._trying_all_again_places_none()
        for pod in self.pods.values():
            spec = pod["spec"]
            alone = not pod["metadata"]["annotations"] or spec["schedulerName"] == "other"
            waits = alone and not spec.get("nodeName") and not spec["schedulingGates"]
            if waits and spec["schedulerName"] != "nobody" and not self._held_back(pod):
                for name in self.nodes:
                    cpu, most = NODES[name]
                    full = self._count(name) >= most
                    assert full or self._requested(name) + milli(pod) > cpu, (pod, name)
        self._compare_with_a_scheduler_made_from_objects()

    def _trying_all_again_places_none(self) -> None:
        """No pod, and no gang, waits that would have been placed if it had been tried."""
        queue, before = self.process.queue, set(self.bound)
        queue.activate([pod["metadata"]["uid"] for pod in self.pods.values()], self.now)
        for _ in range(3):
            self.schedule(15.0)
            while self.binder.waiting:
                self.carry_out(None)
            self._see_all()
        assert self.bound == before

    def _after_restart(self) -> None:
        """Read what else there is before nodes and pods."""

    def _labels(self, number: int) -> dict[str, str]:
        """Return the labels of a new pod."""
        return {}

    def _held_back(self, pod: dict[str, Any]) -> bool:
        """Return whether something else than the nodes holds a pod back."""
        return False

    def _see_all(self) -> None:
        self.see_nodes(len(self.late_nodes) or 1)
        self.see_pods(len(self.late_pods) or 1)

    def _compare_with_a_scheduler_made_from_objects(self) -> None:
        """All that /apis/v1 shows, and all columns, are as they would be after a restart."""
        bookings = self.process.tables.bookings.values()
        assert {b.key.partition("/")[2]: b.node for b in bookings} == self._placed()
        other = copy(self)
        other.restart([])
        assert self._shown() == other._shown()

    def _shown(self) -> dict[str, Any]:
        """Return the tables by node: rows and columns have other numbers after a restart."""
        core = self.process
        tree: dict[str, Any] = {}
        for name in self.nodes:
            row = core.tables.nodes.row(name)
            assert row is not None
            pages = dumps.node, dumps.numa, dumps.devices, dumps.reservations
            tree[name] = {page.__name__: page(core, row) for page in pages}
            tree[name]["count"] = int(core.tables.nodes.pods[row])
            tree[name]["numa columns"] = _row(core.plugins.numa, row)
            (slot,) = core.plugins.devices.slots(np.array([row])).tolist()
            for kind, columns in core.plugins.devices.columns.items() if slot != NO_SLOT else ():
                # Numbers of minors and labels stay in columns when a device goes.
                tree[name][f"{kind} columns"] = _row(columns, slot, without=("minor", "labels"))
        return tree

    def _placed(self) -> dict[str, str]:
        """Return the node of each pod that has one, by name."""
        return {
            name: pod["spec"]["nodeName"]
            for name, pod in self.pods.items()
            if pod["spec"].get("nodeName")
        }


def _row(table: object, row: int, *, without: Container[str] = ()) -> dict[str, Any]:
    """Return the row of each column of a table, also of columns by the name of a resource."""
    found: dict[str, Any] = {}
    for name, value in vars(table).items():
        if name in without:
            continue
        if isinstance(value, np.ndarray):
            found[name] = value[row].tolist()
        elif isinstance(value, dict):
            columns = {each: c for each, c in value.items() if isinstance(c, np.ndarray)}
            found |= {f"{name}/{each}": column[row].tolist() for each, column in columns.items()}
    return found


def _gang(name: str) -> dict[str, str]:
    """Return the annotations of a member: gang "a" is strict, "b" is not."""
    prefix = "gang.scheduling.koordinator.sh"
    mode = "Strict" if name == "a" else "NonStrict"
    return {f"{prefix}/name": name, f"{prefix}/min-available": "2", f"{prefix}/mode": mode}


def _amounts(milli: int) -> dict[str, str]:
    """Return requests that CPUs limit: every node has more memory than all pods want."""
    return {"cpu": f"{milli}m", "memory": f"{milli}Mi"}


def milli(pod: dict[str, Any]) -> int:
    """Return what a pod of these lives requests, in milli-cores."""
    text: str = pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]
    return int(text.removesuffix("m"))
