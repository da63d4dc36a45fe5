"""What a real API server makes of bindings, conditions, events and reservations."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
import uvloop

from cluster.scheduler.binding import events as scheduling_events
from cluster.scheduler.binding.binder import Binder
from cluster.scheduler.binding.events import EventWriter, pod_reference
from cluster.scheduler.binding.placement import Bound, Outcome, Placement, Refused, Why
from cluster.scheduler.binding.reservations import ReservationPlacement, bind_reservation
from cluster.scheduler.binding.statuses import UNSCHEDULABLE, PodStatus, Shown, StatusWriter
from cluster.scheduler.binding.victims import Victim, evict_victim, is_other_pod
from kube.client import ApiError, Client, encode_object
from kube.kept_client import KeptClient
from kube.resources import EVENTS, PODS, RESERVATIONS
from tests.beds.apiserver import ApiServer, eventually

pytestmark = pytest.mark.apiserver


async def create(client: Client, name: str, **spec: Any) -> str:
    """Create a pod; return its uid."""
    metadata = {
        "name": name,
        "namespace": "default",
        "labels": {"app": "a"},
        "annotations": {"kept": "1", "changed": "1", "removed": "1"},
    }
    plain = {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}], **spec}}
    made = await client.create(PODS, encode_object(PODS, plain), namespace="default")
    return str(msgspec.json.decode(made)["metadata"]["uid"])


async def read(client: Client, name: str) -> Any:
    return await client.get(PODS, name, msgspec.json.decode, namespace="default")


async def bind(client: Client, *placements: Placement) -> list[Outcome]:
    """Return the outcomes in the order of the placements."""
    outcomes: dict[str, Outcome] = {}
    binder = Binder(client, lambda placement, found: outcomes.update({placement.name: found}))
    for placement in placements:
        binder.submit(placement)
    assert await binder.drain(30) == ()
    return [outcomes[placement.name] for placement in placements]


def test_a_binding_binds_records_and_refuses(server: ApiServer) -> None:
    async def run() -> None:
        async with KeptClient(server.connection()) as client:
            uids = {name: await create(client, name) for name in ("b1", "b2", "b3", "b4", "b5")}
            uids["b6"] = await create(client, "b6", schedulingGates=[{"name": "example.com/g"}])

            def to(name: str, **more: Any) -> Placement:
                recorded = {"changed": "2", "scheduling.koordinator.sh/x": '{"a":"b"}'}
                given: dict[str, Any] = {"annotations": recorded, **more}
                return Placement(
                    "default",
                    name,
                    more.pop("uid", uids[name]),
                    "n1",
                    **{key: value for key, value in given.items() if key != "uid"},
                )

            await client.delete(PODS, "b5", namespace="default")
            found = await bind(
                client,
                to("b1"),
                to("b2", labels={"l": "x"}, removed_annotations=("removed",)),
                to("b3", uid="another"),
                to("b5"),
                to("b6"),
            )
            assert found[:2] == [Bound(), Bound()]
            assert [one.why for one in found[2:] if isinstance(one, Refused)] == [
                Why.OTHER_UID,
                Why.DELETED,
                Why.CONFLICT,
            ]
            bound = await read(client, "b1")
            assert bound["spec"]["nodeName"] == "n1"
            recorded = {"kept": "1", "changed": "2", "scheduling.koordinator.sh/x": '{"a":"b"}'}
            assert bound["metadata"]["annotations"] == {**recorded, "removed": "1"}
            (condition,) = bound["status"]["conditions"]
            assert (condition["type"], condition["status"]) == ("PodScheduled", "True")
            patched = await read(client, "b2")
            assert patched["metadata"]["annotations"] == recorded
            assert patched["metadata"]["labels"] == {"app": "a", "l": "x"}
            # Again: the same is success, anything else is not.
            again = await bind(client, to("b1"), to("b2", annotations={"changed": "3"}))
            assert again[0] == Bound()
            assert isinstance(again[1], Refused)
            assert again[1].why is Why.BOUND_ELSEWHERE
            other = await bind(client, to("b4", uid=uids["b4"], labels={"l": "x"}))
            assert other == [Bound()]
        async with KeptClient(server.connection("nobody")) as client:
            (refused,) = await bind(client, to("b3"))
            assert isinstance(refused, Refused)
            assert refused.why is Why.FORBIDDEN
            assert "pods/binding" in refused.message

    uvloop.run(run())


def test_the_server_takes_annotations_of_a_binding_that_it_refuses_on_a_pod(
    server: ApiServer,
) -> None:
    """The reason for checking sizes and keys before: docs/facts/scheduler.md, "Bindings"."""

    async def run() -> None:
        async with KeptClient(server.connection()) as client:
            await create(client, "big")
            body = {
                "metadata": {"name": "big", "annotations": {"x": "y" * 300_000}},
                "target": {"kind": "Node", "name": "n1"},
            }
            path = PODS.path(namespace="default", name="big", subresource="binding")
            await client.request("POST", path, body=msgspec.json.encode(body))
            assert (await read(client, "big"))["spec"]["nodeName"] == "n1"
            with pytest.raises(ApiError, match="Too long"):
                await client.patch(
                    PODS, "big", b'{"metadata":{"labels":{"l":"x"}}}', namespace="default"
                )

    uvloop.run(run())


def test_a_condition_and_a_nomination_are_written_and_cleared(server: ApiServer) -> None:
    async def run() -> None:
        async with KeptClient(server.connection()) as client:
            uid = await create(client, "s1")
            writer = StatusWriter(client, now=lambda: 1_700_000_000.0)
            running = asyncio.create_task(writer.run())
            first = PodStatus("default", "s1", uid, UNSCHEDULABLE, "0/1 nodes are available", "n2")
            writer.submit(first, Shown())
            await eventually(lambda: writer.counts.written == 1)
            status = (await read(client, "s1"))["status"]
            assert status["nominatedNodeName"] == "n2"
            (condition,) = status["conditions"]
            assert {key: condition[key] for key in ("status", "reason", "message")} == {
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/1 nodes are available",
            }
            assert condition["lastTransitionTime"] == "2023-11-14T22:13:20Z"
            writer.submit(PodStatus("default", "s1", uid, UNSCHEDULABLE, "other", ""), Shown())
            writer.submit(PodStatus("default", "s1b", "u", UNSCHEDULABLE, "gone"), Shown())
            await eventually(lambda: writer.counts.written == 2 and writer.counts.gone == 1)
            status = (await read(client, "s1"))["status"]
            assert "nominatedNodeName" not in status
            (condition,) = status["conditions"]
            assert condition["message"] == "other"
            assert condition["lastTransitionTime"] == "2023-11-14T22:13:20Z"
            writer.submit(PodStatus("default", "s1", "another", UNSCHEDULABLE, "x"), Shown())
            await eventually(lambda: writer.counts.gone == 2)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert (writer.counts.lost, writer.faults.count) == (0, 0)

    uvloop.run(run())


def test_events_appear_as_kubectl_reads_them(server: ApiServer) -> None:
    moment = time.time()

    async def run() -> None:
        nonlocal moment
        async with KeptClient(server.connection()) as client:
            writer = EventWriter(client, instance="events-as-read", now=lambda: moment)
            running = asyncio.create_task(writer.run())
            victim = pod_reference("default", "e2", "u2")
            pod = pod_reference("default", "e1", "u1")
            failure = scheduling_events.failed(pod, "0/3 nodes are available", controller="koord")
            writer.record(failure)
            assert await writer.flush(20) == 0
            moment += 40
            writer.record(failure)
            writer.record(scheduling_events.scheduled(pod, "n1", controller="koord"))
            writer.record(scheduling_events.preempted(victim, pod, "n1", controller="koord"))
            writer.record(
                scheduling_events.scheduled(
                    scheduling_events.reservation_reference("r1", "u3"), "n1", controller="k"
                )
            )
            assert await writer.flush(20) == 0
            assert (writer.counts.written, writer.counts.repeated) == (5, 1)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

            # What kubectl reads; other tests and controllers write events on the same server.
            listed = [
                one
                for one in msgspec.json.decode(
                    await client.request("GET", EVENTS.path(namespace="default"))
                )["items"]
                if one["reportingInstance"] == "events-as-read"
            ]
        assert {
            (
                one["type"],
                one["reason"],
                one["involvedObject"]["kind"],
                one["involvedObject"]["name"],
                one["reportingComponent"],
                one.get("series", {}).get("count"),
                one["message"],
            )
            for one in listed
        } == {
            ("Warning", "FailedScheduling", "Pod", "e1", "koord", 2, "0/3 nodes are available"),
            (
                "Normal",
                "Scheduled",
                "Pod",
                "e1",
                "koord",
                None,
                "Successfully assigned default/e1 to n1",
            ),
            ("Normal", "Preempted", "Pod", "e2", "koord", None, "Preempted by pod u1 on node n1"),
            (
                "Normal",
                "Scheduled",
                "Reservation",
                "r1",
                "k",
                None,
                "Successfully assigned r1 to n1",
            ),
        }

    uvloop.run(run())


def test_a_reservation_becomes_available_once(server: ApiServer) -> None:
    async def run() -> None:
        async with KeptClient(server.connection()) as client:
            template = {"spec": {"containers": [{"name": "c", "image": "i"}]}}
            made = await client.create(
                RESERVATIONS,
                encode_object(
                    RESERVATIONS,
                    {
                        "metadata": {"name": "r1"},
                        "spec": {"template": template, "owners": [{"object": {"name": "p"}}]},
                    },
                ),
            )
            uid = msgspec.json.decode(made)["metadata"]["uid"]
            placement = ReservationPlacement("r1", uid, "n1", {"cpu": "4"}, {"example.com/a": "b"})
            for _ in range(2):
                assert await bind_reservation(client, placement, now=time.time) == Bound()
            stored = await client.get(RESERVATIONS, "r1", msgspec.json.decode)
            assert stored["metadata"]["annotations"] == {"example.com/a": "b"}
            status = stored["status"]
            assert (status["phase"], status["nodeName"]) == ("Available", "n1")
            assert status["allocatable"] == {"cpu": "4"}
            assert {(c["type"], c["status"], c["reason"]) for c in status["conditions"]} == {
                ("Scheduled", "True", "Scheduled"),
                ("Ready", "True", "Available"),
            }
            other = ReservationPlacement("r1", uid, "n2", {"cpu": "4"})
            refused = await bind_reservation(client, other, now=time.time)
            assert isinstance(refused, Refused)
            assert refused.why is Why.BOUND_ELSEWHERE

    uvloop.run(run())


def test_a_victim_is_marked_and_deleted(server: ApiServer) -> None:
    async def run() -> None:
        async with KeptClient(server.connection()) as client:
            uid = await create(client, "v1", nodeName="n1")
            later = Victim("default", "v1", "another")
            assert await evict_victim(client, later, controller="c", now=time.time) is None
            with pytest.raises(ApiError) as caught:
                await client.delete(PODS, "v1", namespace="default", uid="another")
            assert is_other_pod(caught.value)
            assert "deletionTimestamp" not in (await read(client, "v1"))["metadata"]
            victim = Victim("default", "v1", uid)
            assert await evict_victim(client, victim, controller="c", now=time.time) is None
            pod = await read(client, "v1")
            assert "deletionTimestamp" in pod["metadata"]
            assert ("DisruptionTarget", "PreemptionByScheduler") in {
                (one["type"], one.get("reason")) for one in pod["status"]["conditions"]
            }

    uvloop.run(run())
