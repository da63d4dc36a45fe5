"""/apis/v1: what the leader's tables hold, and what is answered for anything else."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from apis.cpuset import CpuSet
from apis.decode import decode_object
from apis.device import Device, parse_device_allocated
from apis.quota import ElasticQuota
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.manifests import config_map
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.serving.debugging import debugging_page
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.numa.facts import parse_numa_facts
from cluster.scheduler.tables.reservations.facts import ReservationFacts
from cluster.scheduler.tables.shapes import Shapes
from kube.cache import Change, Event
from kube.connection import Connection
from kube.kept_client import KeptClient
from service.http_server import Request
from tests.beds.packages import CHECKOUT
from tests.cluster.scheduler.devices.making import a_gpu
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.numa.making import SMALL, SMALL_ZONES, make_topology


def _process() -> SchedulerProcess:
    nowhere = KeptClient(Connection("http://127.0.0.1:1", None, lambda: None))
    text = config_map()["data"]["koord-scheduler-config"]
    return SchedulerProcess(nowhere, read_configuration(text, obj="shipped"), seed=1)


def _get(
    process: SchedulerProcess,
    path: str,
    *,
    leading: bool = True,
    method: str = "GET",
    **query: str,
) -> tuple[int, Any]:
    page: Any = debugging_page(process, leading=lambda: leading)
    response = asyncio.run(page(Request(method, path, query, b"")))
    assert response.content_type == "application/json"
    return response.status, json.loads(response.body)


@pytest.fixture
def process() -> SchedulerProcess:
    made = _process()
    made.tables.upsert_node(make_node("n0", allocatable={"koordinator.sh/gpu-core": "200"}))
    made.tables.upsert_node(make_node("n1"))
    device = {"metadata": {"name": "n0"}, "spec": {"devices": [a_gpu(0), a_gpu(1)]}}
    made.plugins.devices.set_device(decode_object(json.dumps(device).encode(), Device, obj="n0"))
    pod = make_pod("p", requests={"cpu": "1500m", "memory": "2Gi", "koordinator.sh/gpu-core": "50"})
    gpus = json.dumps(
        {
            "gpu": [
                {
                    "minor": 1,
                    "resources": {
                        "koordinator.sh/gpu-core": "50",
                        "koordinator.sh/gpu-memory-ratio": "50",
                    },
                }
            ]
        }
    )
    allocation = Allocation(cpus=CpuSet.parse("0-1"), devices=parse_device_allocated(gpus, obj="p"))
    made.tables.place(
        Booking(
            key="default/p", uid="uid", shape=Shapes().of(pod), node="n0", allocation=allocation
        )
    )
    return made


def test_a_node_shows_what_it_has_what_is_requested_and_by_whom(process: SchedulerProcess) -> None:
    status, node = _get(process, "/apis/v1/nodes/n0")
    assert status == 200
    assert node["allocatable"]["cpu"] == "16"
    assert node["requested"] == {"cpu": "1500m", "koordinator.sh/gpu-core": "50", "memory": "2Gi"}
    assert node["remaining"]["cpu"] == "14500m"
    assert node["remaining"]["memory"] == "62Gi"
    assert node["remaining"]["koordinator.sh/gpu-core"] == "150"
    (pod,) = node["pods"]
    assert (pod["namespace"], pod["name"], pod["uid"]) == ("default", "p", "uid")
    assert (pod["cpuset"], pod["devices"]) == ("0-1", {"gpu": [1]})


def test_devices_add_up_by_type_and_by_minor(process: SchedulerProcess) -> None:
    status, everything = _get(process, "/apis/v1/plugins/DeviceShare/nodeDeviceSummaries")
    assert status == 200
    assert list(everything) == ["n0"]
    _, one = _get(process, "/apis/v1/plugins/DeviceShare/nodeDeviceSummaries/n0")
    assert one == everything["n0"]
    core, memory = "koordinator.sh/gpu-core", "koordinator.sh/gpu-memory"
    assert one["deviceTotal"]["gpu"][core] == "200"
    assert one["deviceFree"]["gpu"][core] == "150"
    assert one["deviceUsed"]["gpu"] == {core: "50", memory: "40Gi", f"{memory}-ratio": "50"}
    assert one["deviceFreeDetail"]["gpu"]["0"][memory] == "80Gi"
    assert one["deviceFreeDetail"]["gpu"]["1"][memory] == "40Gi"
    assert [each["minor"] for each in one["allocateSet"]["gpu"]["default/p"]] == [1]


def test_numa_and_load_of_a_node_are_shown_without_their_objects(process: SchedulerProcess) -> None:
    status, numa = _get(process, "/apis/v1/plugins/NodeNUMAResource/nodes/n0")
    assert status == 200
    assert numa["allocatedCPUs"] == "0-1"
    assert numa["availableCPUs"] == ""
    assert [pod["name"] for pod in numa["allocatedPods"]] == ["p"]
    status, load = _get(process, "/apis/v1/plugins/LoadAwareScheduling/node/n0")
    assert status == 200
    # 85 % of 1,500 m and 70 % of 2 GiB.
    assert load["nodeDelta"] == {"cpu": "1275m", "memory": "1503238554"}
    assert load["nodeDeltaPods"] == ["default/p"]
    assert load["reported"] is False
    assert load["pods"][0]["pod"]["name"] == "p"


def test_a_gang_shows_its_members_by_how_far_they_are(process: SchedulerProcess) -> None:
    group = "pod-group.scheduling.sigs.k8s.io"
    pod = make_pod(
        "m",
        annotations={
            "gang.scheduling.koordinator.sh/name": "train",
            "gang.scheduling.koordinator.sh/min-available": "2",
        },
        schedulerName="koord-scheduler",
    )
    assert group not in pod.metadata.labels
    process.source.pod_event(Event(Change.ADDED, None, pod))
    status, gang = _get(process, "/apis/v1/plugins/Coscheduling/gang/default/train")
    assert status == 200
    assert gang["minRequiredNumber"] == 2
    assert gang["gangFrom"] == "GangFromPodAnnotation"
    assert gang["children"] == gang["pendingChildren"] == ["default/m"]
    assert gang["waitTime"] == "10m0s"
    assert gang["hasGangInit"] is True
    assert gang["onceResourceSatisfied"] is False
    assert gang["gangGroupInfo"]["onceResourceSatisfied"] is False
    status, gangs = _get(process, "/apis/v1/plugins/Coscheduling/gangs")
    assert (status, gangs) == (200, {"default/train": gang})


def test_quotas_show_limits_and_use_and_their_pods_on_request(process: SchedulerProcess) -> None:
    quota = {
        "metadata": {"name": "team", "namespace": "default"},
        "spec": {"min": {"cpu": "1"}, "max": {"cpu": "4", "memory": "8Gi"}},
    }
    assert process.quota_source is not None
    decoded = decode_object(json.dumps(quota).encode(), ElasticQuota, obj="team")
    process.quota_source.quota_event(Event(Change.ADDED, None, decoded))
    pod = make_pod(
        "q",
        requests={"cpu": "1500m", "memory": "2Gi"},
        labels={"quota.scheduling.koordinator.sh/name": "team"},
    )
    shape = Shapes().of(pod)
    process.tables.place(Booking(key="default/q", uid="q", shape=shape, node="n1"))
    plugin = "/apis/v1/plugins/ElasticQuota/quotas"
    status, team = _get(process, f"{plugin}/team")
    assert status == 200
    assert (team["max"], team["min"]) == ({"cpu": "4", "memory": "8Gi"}, {"cpu": "1"})
    assert team["used"] == team["selfUsed"] == {"cpu": "1500m", "memory": "2Gi"}
    assert team["parentName"] == "koordinator-root-quota"
    assert "podCache" not in team
    _, team = _get(process, f"{plugin}/team", includePods="true")
    assert team["podCache"] == {"default/q": {"uid": "q", "node": "n1"}}
    status, quotas = _get(process, plugin)
    assert status == 200
    assert set(quotas) >= {"team", "koordinator-default-quota", "koordinator-system-quota"}
    assert _get(process, plugin, tree="other") == (200, {})
    assert _get(process, f"{plugin}/absent")[0] == 404


def test_reservations_of_a_node_show_what_is_left_of_them(process: SchedulerProcess) -> None:
    facts = ReservationFacts(
        name="r", uid="r-uid", owners=(), allocatable={"cpu": 4000, "memory": 8 << 30}
    )
    process.tables.reservations.upsert(facts)
    mark = {"scheduling.koordinator.sh/reserve-pod": "true"}
    held = make_pod("r", requests={"cpu": "4", "memory": "8Gi"}, annotations=mark)
    process.tables.place(Booking(key="/r", uid="r-uid", shape=Shapes().of(held), node="n1"))
    user = make_pod("u", requests={"cpu": "1", "memory": "2Gi"})
    process.tables.place(
        Booking(
            key="default/u",
            uid="u",
            shape=Shapes().of(user),
            node="n1",
            allocation=Allocation(reservation="r-uid"),
        )
    )
    path = "/apis/v1/plugins/Reservation/nodeReservations"
    status, found = _get(process, f"{path}/n1")
    assert status == 200
    (item,) = found["items"]
    assert (item["name"], item["kind"], item["available"]) == ("r", "Reservation", True)
    assert item["allocatable"] == {"cpu": "4", "memory": "8Gi"}
    assert item["allocated"] == {"cpu": "1", "memory": "2Gi"}
    assert item["availableResource"] == {"cpu": "3", "memory": "6Gi"}
    assert item["assignedPods"] == [{"namespace": "default", "name": "u", "uid": "u"}]
    assert item["allocatePolicy"] == "Default"
    assert _get(process, f"{path}/n0") == (200, {"items": []})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/apis/v1/nodes/absent", "node 'absent' is not known"),
        ("/apis/v1/nodes/", "no such path"),
        ("/apis/v1/nodes/n0/more", "no such path"),
        ("/apis/v1", "no such path"),
        ("/apis/v1/plugins/DeviceShare/nodeDeviceSummaries/n1", "has no Device"),
        ("/apis/v1/plugins/Coscheduling/gang/default/absent", "is not known"),
        ("/apis/v1/pods/default/absent", "pod 'default/absent' is not known"),
        ("/apis/v1/plugins/ElasticQuota/quotas/absent", "quota 'absent' is not known"),
        ("/apis/v2/nodes/n0", "not found"),
        ("/apis/v1/nodes/" + "x" * 5000, "is not known"),
    ],
)
def test_what_is_not_there_is_said(process: SchedulerProcess, path: str, message: str) -> None:
    status, body = _get(process, path)
    assert status == 404
    assert message in body["message"]


def test_only_the_leader_answers_and_only_to_get(process: SchedulerProcess) -> None:
    assert _get(process, "/apis/v1/nodes/n0", leading=False) == (
        503,
        {"message": "the instance is not leader"},
    )
    status, _ = _get(process, "/apis/v1/nodes/n0", method="DELETE")
    assert status == 405
    assert _get(process, "/apis/v1/nodes/n0", method="HEAD")[0] == 200


def test_every_listed_service_answers(process: SchedulerProcess) -> None:
    status, services = _get(process, "/apis/v1/__services__")
    assert status == 200
    assert len(services) == len(set(services)) >= 8
    values = {":nodeName": "n0", ":name": "n0", ":namespace": "default"}
    for service in services:
        path = "/".join(values.get(part, part) for part in service.split("/"))
        status, body = _get(process, path)
        assert status == 200 or "is not known" in body["message"], service


def _upstream_members() -> list[tuple[str, str, set[str]]]:
    """Return (route, path of the object in its answer, names of its members)."""
    text = (CHECKOUT / "docs" / "facts" / "scheduler.md").read_text()
    section = text.partition("\n## Answers of /apis/v1\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(plugins/[^`.]+)\.?([^`]*)` \| (.+) \|$", section, re.MULTILINE)
    return [(f"/apis/v1/{route}", inner, set(re.findall(r"`(\w+)`", names)))
            for route, inner, names in rows]  # fmt: skip


@pytest.mark.parametrize(("route", "inner", "names"), _upstream_members())
def test_an_answer_has_the_members_that_upstream_shows(
    process: SchedulerProcess, route: str, inner: str, names: set[str]
) -> None:
    node = make_node("n0")
    topology = make_topology("n0", cpus=SMALL.cpus(), zones=SMALL_ZONES)
    row = process.tables.upsert_node(node)
    process.plugins.numa.set_node(row, parse_numa_facts(node, topology)[0])
    process.tables.reservations.upsert(
        ReservationFacts(name="r", uid="r-uid", owners=(), allocatable={"cpu": 1000})
    )
    held = Shapes().of(make_pod("r", requests={"cpu": "1"}))
    process.tables.place(Booking(key="/r", uid="r-uid", shape=held, node="n0"))
    member = {f"gang.scheduling.koordinator.sh/{key}": value
              for key, value in (("name", "train"), ("min-available", "2"))}  # fmt: skip
    pod = make_pod("m", annotations=member, schedulerName="koord-scheduler")
    process.source.pod_event(Event(Change.ADDED, None, pod))
    quota = {
        "metadata": {"name": "team", "namespace": "default"},
        "spec": {"min": {"cpu": "1"}, "max": {"cpu": "4"}},
    }
    assert process.quota_source is not None
    decoded = decode_object(json.dumps(quota).encode(), ElasticQuota, obj="team")
    process.quota_source.quota_event(Event(Change.ADDED, None, decoded))

    named = "n0"
    if "Coscheduling" in route:
        named = "train"
    elif "ElasticQuota" in route:
        named = "team"
    values = {":nodeName": "n0", ":namespace": "default", ":name": named}
    status, found = _get(process, "/".join(values.get(part, part) for part in route.split("/")))
    assert status == 200
    for step in filter(None, inner.split(".")):
        found = found[step.removesuffix("[]")]
        if step.endswith("[]"):
            found = found[0]
    assert names
    assert names <= found.keys()
    assert route in _get(process, "/apis/v1/__services__")[1]


def test_the_list_of_upstreams_members_is_read() -> None:
    assert len(_upstream_members()) == 9


def test_an_answer_about_many_nodes_lets_others_run_in_between() -> None:
    process = _process()
    for number in range(100):
        process.tables.upsert_node(make_node(f"n{number}"))
    turns = 0

    async def run() -> int:
        nonlocal turns
        page: Any = debugging_page(process, leading=lambda: True)
        path = "/apis/v1/plugins/DeviceShare/nodeDeviceSummaries"
        answer = asyncio.ensure_future(page(Request("GET", path, {}, b"")))
        while not answer.done():
            turns += 1
            await asyncio.sleep(0)
        status: int = answer.result().status
        return status

    assert asyncio.run(run()) == 200
    assert turns >= 6
