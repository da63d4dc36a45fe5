"""The way of a placement through the parts of a process: volumes, then the lock of its node, then
the binding; and what extenders and controllers it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.binding.statuses import PodStatus, Shown
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.tables.booking import PlannedVolumes
from kube.connection import Connection
from kube.kept_client import KeptClient
from tests.cluster.scheduler.serving.exercised import decide, new_process

_VOLUMES = PlannedVolumes(binds=(("default/c", "v"),))


class _Parts:
    """Takes what a process gives to its parts."""

    def __init__(self, process: SchedulerProcess) -> None:
        self.given: list[str] = []
        # `decide` takes the place of the binder.
        (self.placement,) = decide(process, [("p", "1")], nodes=1)
        for name in ("binder", "node_locks", "volume_binder"):
            vars(getattr(process, name))["submit"] = self._take(name)

    def _take(self, name: str) -> Callable[[Any], None]:
        return lambda _: self.given.append(name)


def _pre_binds(process: SchedulerProcess) -> dict[str, int]:
    points = process.timings["koord-scheduler"].points
    return {status: each.count for (step, status), each in points.items() if step == "PreBind"}


@pytest.mark.parametrize(
    ("volumes", "lock", "parts"),
    [
        (False, "", ["binder"]),
        (True, "", ["volume_binder", "binder"]),
        (False, "held", ["node_locks", "binder"]),
        # A lock may last less long than volumes take.
        (True, "held", ["volume_binder", "node_locks", "binder"]),
    ],
)
def test_a_placement_is_prepared_before_it_is_bound(
    volumes: bool, lock: str, parts: list[str]
) -> None:
    process = new_process()
    found = _Parts(process)
    placement = replace(found.placement, lock=lock)
    if volumes:
        placement = replace(placement, volumes=_VOLUMES)
    process.bind(placement)
    assert found.given == parts[:1]
    if volumes:
        process._volumes_bound(placement)
    if lock:
        process._prepared(placement)
    assert found.given == parts
    # The steps before the binding are timed together.
    assert _pre_binds(process) == ({} if len(parts) == 1 else {"Success": 1})


def test_a_placement_that_cannot_be_prepared_is_given_up() -> None:
    process = new_process()
    found = _Parts(process)
    placement = replace(found.placement, volumes=_VOLUMES)
    process.bind(placement)
    process._wake.clear()
    process._not_prepared(placement, Refused(Why.FAILING, "no volume"))
    assert found.given == ["volume_binder"]
    assert process.queue.state_of(placement.uid) is QueueState.BACKOFF
    assert not process.tables.bookings
    assert process._wake.is_set()
    # It took time under the profile of its pod; nothing is counted twice.
    process._not_prepared(placement, Refused(Why.FAILING, "no volume"))
    assert _pre_binds(process) == {"Error": 1}


def _process(extenders: str) -> SchedulerProcess:
    text = (
        "apiVersion: kubescheduler.config.k8s.io/v1\n"
        "kind: KubeSchedulerConfiguration\n"
        f"extenders: {extenders}\n"
    )
    nowhere = KeptClient(Connection("http://127.0.0.1:1", None, lambda: None))
    return SchedulerProcess(nowhere, read_configuration(text, obj="test"), seed=1)


@pytest.mark.parametrize(
    ("extenders", "asked", "caches_of_nodes"),
    [
        ("[]", False, 1),
        ("[{urlPrefix: 'http://e', filterVerb: filter, nodeCacheCapable: true}]", True, 1),
        # One that keeps no nodes is sent whole ones, which the scheduler's own cache has not.
        ("[{urlPrefix: 'http://e', filterVerb: filter}]", True, 2),
    ],
)
def test_extenders_are_asked_as_they_are_configured(
    extenders: str, asked: bool, caches_of_nodes: int
) -> None:
    process = _process(extenders)
    assert (process.extenders is not None) is asked
    assert process.attempts.consultant is process.extenders
    kinds = [cache.resource.kind for cache in process.caches]
    assert kinds.count("Node") == caches_of_nodes


def test_nothing_more_is_written_about_a_pod_that_is_settled() -> None:
    process = new_process()
    found = _Parts(process)
    status = PodStatus("default", "p", found.placement.uid, "Unschedulable", "waits")
    process.status(status, Shown())
    assert process.statuses.waiting == 1
    process.settled(found.placement)
    assert process.statuses.waiting == 0
