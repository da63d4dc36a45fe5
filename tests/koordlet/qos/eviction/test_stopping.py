"""The evictor stops containers: without an API server, or with upstream's order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.koordlet.qos.eviction.making import SILENT, A, Api, B, Bed, C, Runtime, short
from tests.koordlet.qos.eviction_making import a_pod, on_node


def test_without_an_api_server_all_containers_are_stopped_with_a_grace() -> None:
    bed = Bed(runtime=Runtime(), stop_grace_s=7.0)
    asyncio.run(bed.round(short(15, (A, 10), (B, 10)), pods=[on_node(A, containers=3), B]))
    assert bed.runtime is not None
    assert bed.runtime.stopped == [
        (("uid-a-c0", "uid-a-c1", "uid-a-c2"), 7.0),
        (("uid-b-c0",), 7.0),
    ]
    assert bed.evictor.reports.evictions == 2
    assert "; stopped its containers; the node uses" in bed.notes[0].message


def test_a_round_does_not_wait_for_containers_to_end() -> None:
    async def test() -> None:
        bed = Bed(runtime=Runtime(released=asyncio.Event()))
        assert bed.runtime is not None and bed.runtime.released is not None
        await bed.round(short(5, (A, 10)))
        assert bed.evictor.reports.evictions == 0
        bed.now += 30
        await bed.round(short(5, (A, 10), (B, 10)))
        assert len(bed.runtime.stopped) == 1, "a pod that is being stopped counts as released"
        bed.runtime.released.set()
        await bed.round()
        assert bed.evictor.reports.evictions == 1

    asyncio.run(test())


def test_a_stopped_pod_that_runs_again_is_left_alone_and_does_not_count() -> None:
    bed = Bed(runtime=Runtime())

    async def test() -> None:
        assert bed.runtime is not None
        again = a_pod("again", qos="BE", restart_policy="Always")
        await bed.round(short(5, (again, 10), (B, 10)))
        assert "which kubelet will start again (restartPolicy Always)" in bed.notes[0].message
        bed.now += 4
        await bed.round(short(5, (again, 10), (B, 10)))
        assert len(bed.runtime.stopped) == 1
        bed.now += 1
        await bed.round(short(5, (again, 10), (B, 10)))
        assert [ids for ids, _ in bed.runtime.stopped] == [("uid-again-c0",), ("uid-b-c0",)]

    asyncio.run(test())


def test_a_failed_stop_is_reported_and_tried_again_later() -> None:
    bed = Bed(runtime=Runtime(error="container x: DEADLINE_EXCEEDED: "))

    async def test() -> None:
        assert bed.runtime is not None
        await bed.round(short(5, (A, 10)))
        assert bed.evictor.reports.evictions == 0
        assert "error container x: DEADLINE_EXCEEDED" in bed.notes[0].message
        bed.now += 9
        await bed.round(short(5, (A, 10)))
        assert len(bed.runtime.stopped) == 1
        bed.now += 1
        bed.runtime.error = ""
        await bed.round(short(5, (A, 10)))
        assert (len(bed.runtime.stopped), bed.evictor.reports.evictions) == (2, 1)

    asyncio.run(test())


@pytest.mark.parametrize(("policy", "stopped"), [("Always", 0), ("OnFailure", 0), ("Never", 1)])
def test_requests_are_released_only_by_pods_that_stay_stopped(policy: str, stopped: int) -> None:
    bed = Bed(runtime=Runtime())
    pod = a_pod("p", qos="BE", restart_policy=policy)
    asyncio.run(
        bed.round(
            short(
                5,
                (pod, 10),
                gate="BECPUEvict",
                resource="kubernetes.io/batch-cpu",
                of_requests=True,
            )
        )
    )
    assert bed.runtime is not None and len(bed.runtime.stopped) == stopped
    if not stopped:
        assert f"restartPolicy {policy}" in bed.why[0]


def test_a_pod_without_running_containers_releases_nothing() -> None:
    bed = Bed(runtime=Runtime())
    asyncio.run(bed.round(short(5, (A, 10)), pods=[on_node(A, containers=0)]))
    assert bed.runtime is not None and bed.runtime.stopped == []
    assert "no running container" in bed.why[0]


def test_an_api_server_that_does_not_answer_is_asked_once_and_containers_are_stopped() -> None:
    bed = Bed(api=Api({"a": SILENT, "b": SILENT}), runtime=Runtime())

    async def test() -> None:
        assert bed.api is not None and bed.runtime is not None
        await bed.round(short(15, (A, 10), (B, 10)))
        assert bed.api.asked == ["a"]
        assert len(bed.runtime.stopped) == 2
        bed.now += 10
        await bed.round(short(5, (C, 10)))
        assert bed.api.asked == ["a", "c"], "it is asked again after a while"

    asyncio.run(test())


def test_only_by_api_stops_no_container() -> None:
    for api, why in (
        (None, "no connection to an API server"),
        (Api({"a": SILENT}), "does not answer"),
    ):
        bed = Bed(api=api, runtime=Runtime(), only_by_api=True)
        asyncio.run(bed.round(short(5, (A, 10))))
        assert bed.runtime is not None and bed.runtime.stopped == []
        assert why in bed.why[0]
        assert "eviction-short" in bed.kinds


def test_upstreams_order_stops_containers_at_once_and_leaves_the_api_alone() -> None:
    switch = ["EvictionStopsContainers"]
    bed = Bed(api=Api(), runtime=Runtime())
    asyncio.run(bed.round(short(5, (A, 10)), compat=switch))
    assert bed.api is not None and bed.runtime is not None
    assert (bed.api.asked, bed.runtime.stopped) == ([], [(("uid-a-c0",), 0)])
    bed = Bed(api=Api(), runtime=Runtime(), only_by_api=True)
    asyncio.run(bed.round(short(5, (A, 10)), compat=switch))
    assert bed.api is not None and bed.runtime is not None
    assert (bed.api.asked, bed.runtime.stopped) == (["a"], [])


def test_the_reasons_of_stopped_containers() -> None:
    for bed, shortage, pods, why in (
        (
            Bed(runtime=Runtime()),
            short(5, (A, 10)),
            [on_node(A, containers=0)],
            "it has no running container, so its end would release nothing",
        ),
        (
            Bed(runtime=Runtime()),
            short(5, (A, 10)),
            [B],
            "it has no running container, so its end would release nothing",
        ),
        (
            Bed(runtime=Runtime()),
            short(5, (a_pod("a", restart_policy="Always"), 10), of_requests=True),
            [A],
            "kubelet would start its containers again (restartPolicy Always),"
            " so stopping them would release no requests",
        ),
    ):
        asyncio.run(bed.round(shortage, pods=pods))
        assert bed.why == [f"Pod default/a: {why}"]


def test_without_an_api_server_a_static_pods_containers_are_stopped() -> None:
    bed = Bed(runtime=Runtime())
    static = a_pod("s", qos="BE", annotations={"kubernetes.io/config.source": "file"})
    asyncio.run(bed.round(short(5, (static, 10))))
    assert bed.runtime is not None and bed.runtime.stopped == [(("uid-s-c0",), 10.0)]


def test_a_static_pods_containers_are_stopped_while_the_api_server_is_silent() -> None:
    bed = Bed(api=Api({"a": SILENT}), runtime=Runtime())
    static = a_pod("s", qos="BE", annotations={"kubernetes.io/config.mirror": "x"})
    asyncio.run(bed.round(short(15, (A, 10), (static, 10))))
    assert bed.runtime is not None
    assert [ids for ids, _ in bed.runtime.stopped] == [("uid-a-c0",), ("uid-s-c0",)]


def test_upstreams_order_stops_pods_whose_requests_would_stay() -> None:
    bed = Bed(api=Api(), runtime=Runtime())
    pod = a_pod("p", qos="BE", restart_policy="Always")
    shortage = short(5, (pod, 10), of_requests=True)
    asyncio.run(bed.round(shortage, compat=["EvictionStopsContainers"]))
    assert bed.runtime is not None and bed.runtime.stopped == [(("uid-p-c0",), 0)]


def test_stopping_that_raises_is_a_failure_of_that_eviction() -> None:
    class Broken(Runtime):
        async def stop(self, container_ids: Sequence[str], *, grace_s: float) -> str:
            raise ZeroDivisionError("a defect")

    bed = Bed(runtime=Broken())
    asyncio.run(bed.round(short(5, (A, 10))))
    assert "error ZeroDivisionError: a defect; the node uses" in bed.notes[0].message
    assert bed.evictor.reports.evictions == 0
