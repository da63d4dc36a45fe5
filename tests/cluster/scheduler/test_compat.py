"""Switches that bring upstream's behaviour back, each of them on and off, in a whole scheduler."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.process import SchedulerProcess
from kube.client import Client
from tests.cluster.scheduler.beds.core import Bed
from tests.cluster.scheduler.configuration.files import args, chart_profile, file
from tests.cluster.scheduler.reservations.bed import ReservationBed

Plain = dict[str, Any]
_OWNER = {"labels": {"app": "web"}}


def _text(plugin: str, switches: list[str], **more: Any) -> str:
    """Return the profile of upstream's chart, with switches of one plugin."""
    profile = chart_profile()
    given = [each for each in profile["pluginConfig"] if each["name"] == plugin]
    arguments = given[0]["args"] if given else {}
    profile["pluginConfig"] = [
        *(each for each in profile["pluginConfig"] if each["name"] != plugin),
        args(plugin, **{**arguments, **more, "compat": switches}),
    ]
    profile["plugins"]["postFilter"]["enabled"].append({"name": "DefaultPreemption"})
    return json.dumps(file(profiles=[profile]))


@pytest.mark.parametrize(
    "label",
    [
        {"quota.scheduling.koordinator.sh/preemptible": "false"},
        {"scheduling.koordinator.sh/disable-preemptible": "true"},
    ],
)
@pytest.mark.parametrize("switches", [[], ["EvictsProtectedPods"]])
def test_labels_protect_from_default_preemption(switches: list[str], label: Plain) -> None:
    bed = Bed(_text("DefaultPreemption", switches))
    bed.node("n", 2)
    bed.pod("protected", 2, 0, node="n")
    bed.pods["protected"]["metadata"]["labels"] = label
    bed.change("protected")
    bed.pod("important", 2, 1000)
    bed.run()
    assert bed.evicted() == (["protected"] if switches else [])


def test_a_reservation_evicts_no_protected_pod_under_the_switch() -> None:
    text = json.loads(_text("DefaultPreemption", ["EvictsProtectedPods"]))
    text["profiles"][0]["pluginConfig"].append(args("Reservation", enablePreemption=True))
    bed = ReservationBed(json.dumps(text))
    protected = {"labels": {"scheduling.koordinator.sh/disable-preemptible": "true"}}
    bed.pod("protected", "4", node="n", metadata=protected)
    containers = [{"name": "c", "resources": {"requests": {"cpu": "3"}}}]
    template = {"spec": {"schedulerName": "koord-scheduler", "containers": containers}}
    pending = {"phase": "Pending", "nodeName": "", "allocatable": {}}
    bed.reservation("r", "3", template=template, status=pending)
    assert bed.placed() == {}
    assert bed.evicted() == []
    bed.pod("important", "3", priority=1000)
    assert bed.placed() == {}
    assert bed.evicted() == ["protected"]


@pytest.mark.parametrize("switches", [[], ["PodsWithoutAffinityPassTaints"]])
def test_taints_of_a_reservation_keep_pods_without_affinity_away(switches: list[str]) -> None:
    bed = ReservationBed(_text("Reservation", switches))
    taints = [{"key": "team", "value": "a", "effect": "NoSchedule"}]
    bed.reservation("r", "3", taints=taints)
    affinity = {"scheduling.koordinator.sh/reservation-affinity": "{}"}
    bed.pod("demands", "1", metadata={**_OWNER, "annotations": affinity})
    bed.pod("web", "2", metadata=_OWNER)
    # The node has 1 CPU beside the Reservation. A pod with the annotation needs a toleration.
    assert bed.placed() == ({"web": "r"} if switches else {})


@pytest.mark.parametrize("switches", [[], ["ReservationsAreNoLoad"]])
def test_reservations_count_as_load_that_is_to_come(switches: list[str]) -> None:
    bed = ReservationBed(_text("LoadAwareScheduling", switches, usageThresholds={"cpu": 60}))
    containers = [{"name": "c", "resources": {"requests": {"cpu": "2"}}}]
    bed.reservation("r", "2", template={"spec": {"containers": containers}})
    metric = {
        "metadata": {"name": "n"},
        "status": {
            "updateTime": "2027-01-15T08:00:00Z",
            "nodeMetric": {"nodeUsage": {"resources": {"cpu": "0"}}},
        },
    }
    cache = next(each for each in bed.core.caches if each.resource.kind == "NodeMetric")
    bed.show(cache, "ADDED", metric)
    # Of 4,000 m the Reservation counts with 1,700 and the pod with 850: 64 %.
    bed.pod("other", "1")
    assert bed.placed() == ({"other": ""} if switches else {})
    assert bed.core.why("default/other") is not None
    # It leaves as it came.
    bed.reservation("r", "2", kind="DELETED", template={"spec": {"containers": containers}})
    bed.pod("late", "1")
    assert bed.placed() == ({"late": ""} if switches else {"other": ""} | {"late": ""})


@pytest.mark.parametrize("switches", [[], ["PendingReservationsNeverExpire"]])
def test_a_reservation_without_a_node_expires(switches: list[str]) -> None:
    async def settings() -> bool:
        configuration = read_configuration(_text("Reservation", switches), obj="test")
        process = SchedulerProcess(cast(Client, None), configuration)
        assert process.reservation_controller is not None
        return process.reservation_controller.settings.pending_expire

    assert asyncio.run(settings()) is not bool(switches)


@pytest.mark.parametrize("switches", [[], ["OnlyPodLevelSingleNUMANode"]])
@pytest.mark.parametrize("written", ["SingleNUMANodeContainerLevel", "SingleNUMANodePodLevel"])
def test_which_policies_of_kubelet_count(switches: list[str], written: str) -> None:
    bed = Bed(_text("NodeNUMAResource", switches))
    bed.node("n", 4)
    resources = [{"name": "cpu", "capacity": "2", "allocatable": "2", "available": "2"}]
    zones = [{"name": f"node-{n}", "type": "Node", "resources": resources} for n in range(2)]
    topology = {"metadata": {"name": "n"}, "topologyPolicies": [written], "zones": zones}
    cache = next(e for e in bed.core.caches if e.resource.kind == "NodeResourceTopology")
    bed.show(cache, "ADDED", topology)
    # Kubelet starts such a pod with the policy of containers, if it has two of 1.5 CPUs.
    bed.pod("wide", 3, 0)
    bed.run()
    placed = bool(switches) and written == "SingleNUMANodeContainerLevel"
    assert bed.node_of("wide") == ("n" if placed else "")
