"""The evictor: which pods it evicts over the API, and what holds it back."""

from __future__ import annotations

import asyncio

import pytest

from koordlet.qos.eviction.means import Answer, Answered
from tests.koordlet.qos.eviction.making import BUDGET, A, Api, B, Bed, C, Runtime, short
from tests.koordlet.qos.eviction_making import a_pod, on_node


def test_a_budget_that_refuses_makes_room_for_the_next_and_is_tried_again_later() -> None:
    bed = Bed(api=Api({"a": BUDGET}), runtime=Runtime())

    async def test() -> None:
        assert bed.api is not None and bed.runtime is not None
        await bed.round(short(5, (A, 10), (B, 10)))
        assert bed.api.asked == ["a", "b"]
        assert bed.runtime.stopped == [], "a budget is never circumvented"
        failed = bed.api.events[0]
        assert failed[:2] == ("a", "evictPodFail")
        assert failed[2].startswith(
            "evict Pod:default/a, reason: evicted, message: trigger by koordlet feature"
            " BEMemoryEvict, kill pod: a, error Cannot evict pod"
        )
        bed.now += 9
        await bed.round(short(5, (A, 10)))
        assert bed.api.asked == ["a", "b"]
        assert "tried again in 1 s" in bed.why[0]
        bed.now += 1
        bed.api.answers.clear()
        await bed.round(short(5, (A, 10)))
        assert bed.api.asked == ["a", "b", "a"]

    asyncio.run(test())


@pytest.mark.parametrize(("named", "waits"), [(7.0, 7), (0.0, 1), (9999.0, 300), (None, 10)])
def test_a_refused_pod_is_tried_again_when_the_server_says(
    named: float | None, waits: float
) -> None:
    bed = Bed(api=Api({"a": Answer(Answered.REFUSED, "a budget", named)}))

    async def test() -> None:
        assert bed.api is not None
        await bed.round(short(5, (A, 10)))
        bed.now += waits - 0.5
        await bed.round(short(5, (A, 10)))
        assert bed.api.asked == ["a"]
        bed.now += 0.5
        await bed.round(short(5, (A, 10)))
        assert bed.api.asked == ["a", "a"]

    asyncio.run(test())


def test_no_pod_is_evicted_twice_for_one_shortage() -> None:
    bed = Bed(api=Api())

    async def test() -> None:
        assert bed.api is not None
        for _ in range(20):  # the pod is still listed, and the node still short
            await bed.round(short(5, (A, 10), (B, 10)))
            bed.now += 5
        assert bed.api.asked == ["a"]
        bed.now += 20  # two minutes: it does not go
        await bed.round(short(5, (A, 10), (B, 10)))
        assert bed.api.asked == ["a", "a"]

    asyncio.run(test())


def test_what_an_evicted_pod_releases_counts_also_for_a_gate_that_does_not_name_it() -> None:
    bed = Bed(api=Api())

    async def test() -> None:
        assert bed.api is not None
        await bed.round(short(5, (A, 10)), pods=[A, B])
        await bed.round(short(5, (B, 10), gate="MemoryEvict"), pods=[A, B])
        assert bed.api.asked == ["a"]
        await bed.round(short(11, (B, 10), gate="MemoryEvict"), pods=[A, B])
        assert bed.api.asked == ["a", "b"]

    asyncio.run(test())


def test_pods_that_leave_count_for_two_minutes() -> None:
    bed = Bed(api=Api())
    leaves = on_node(C, terminating=True)

    async def round_() -> None:
        await bed.round(short(5, (A, 10), others=[(C, 10)]), pods=[A, leaves])

    async def test() -> None:
        assert bed.api is not None
        await round_()
        bed.now += 119
        await round_()
        assert bed.api.asked == []
        bed.now += 1
        await round_()
        assert bed.api.asked == ["a"]

    asyncio.run(test())


def test_the_cool_down_is_of_the_gate_and_an_operators_value_counts() -> None:
    bed = Bed(api=Api(), cool_downs={"CPUEvict": 60.0})

    async def test() -> None:
        assert bed.api is not None
        cpu = short(5, (A, 10), gate="CPUEvict", resource="cpu")
        await bed.round(cpu, pods=[A])
        await bed.round(short(5, (B, 10)), short(99, (C, 9), gate="CPUEvict", resource="cpu"))
        assert bed.api.asked == ["a", "b"]
        assert bed.why == ["within 60 s of the last evictions"]
        bed.now += 59
        await bed.round(short(99, (C, 9), gate="CPUEvict", resource="cpu"))
        assert bed.api.asked == ["a", "b"]
        bed.now += 1
        await bed.round(short(99, (C, 9), gate="CPUEvict", resource="cpu"))
        assert bed.api.asked == ["a", "b", "c"]

    asyncio.run(test())


def test_most_evictions_of_a_round() -> None:
    bed = Bed(api=Api(), most_per_round=1)
    asyncio.run(bed.round(short(50, (A, 10), (B, 10))))
    assert bed.api is not None and bed.api.asked == ["a"]


@pytest.mark.parametrize("pressure", ["MemoryPressure", "DiskPressure", "PIDPressure"])
def test_nothing_is_evicted_while_the_node_has_pressure(pressure: str) -> None:
    bed = Bed(api=Api(), runtime=Runtime())

    async def test() -> None:
        assert bed.api is not None
        await bed.round(short(5, (A, 10)), pressures=[pressure])
        assert bed.api.asked == []
        held = f"kubelet evicts pods itself: the Node has {pressure}"
        assert bed.why == [held]
        assert bed.evictor.status()["heldBack"] == held
        await bed.round(short(5, (A, 10)), pressures=[pressure])
        await bed.round(short(5, (A, 10)))
        assert bed.api.asked == ["a"]
        assert bed.evictor.status()["heldBack"] == ""

    asyncio.run(test())
    assert [(event.kind, event.count) for event in bed.events.latest()] == [
        ("eviction-held", 1),
        ("eviction", 1),
    ]


def test_nothing_is_evicted_while_kubelet_ends_a_pod_and_shortly_after() -> None:
    bed = Bed(api=Api())
    chosen = a_pod("chosen", phase="Failed", status_reason="Evicted")

    async def test() -> None:
        assert bed.api is not None
        await bed.round(pods=[A])
        await bed.round(short(5, (A, 10)), pods=[A, on_node(chosen)])
        assert bed.api.asked == []
        assert "Pod default/chosen" in bed.why[0]
        ended = on_node(chosen, containers=0)
        bed.now += 9
        await bed.round(short(5, (A, 10)), pods=[A, ended])
        assert bed.api.asked == []
        bed.now += 1
        await bed.round(short(5, (A, 10)), pods=[A, ended])
        assert bed.api.asked == ["a"]

    asyncio.run(test())


def test_pods_that_kubelet_evicted_long_ago_hold_nothing_back() -> None:
    bed = Bed(api=Api())
    old = on_node(a_pod("old", phase="Failed", status_reason="Evicted"), containers=0)
    asyncio.run(bed.round(short(5, (A, 10)), pods=[A, old]))
    assert bed.api is not None and bed.api.asked == ["a"]


@pytest.mark.parametrize(
    "annotations",
    [{"kubernetes.io/config.source": "file"}, {"kubernetes.io/config.mirror": "1"}],
)
def test_a_static_pod_is_not_evicted_over_the_api(annotations: dict[str, str]) -> None:
    bed = Bed(api=Api(), runtime=Runtime())
    static = a_pod("static", qos="BE", annotations=annotations)
    plain = a_pod("plain", qos="BE", annotations={"kubernetes.io/config.source": "api"})
    asyncio.run(bed.round(short(5, (static, 10), (plain, 10))))
    assert bed.api is not None and bed.runtime is not None
    assert (bed.api.asked, bed.runtime.stopped) == (["plain"], [])


def test_a_pod_that_is_gone_counts_as_released() -> None:
    bed = Bed(api=Api({"a": Answer(Answered.GONE, "404")}), runtime=Runtime())
    asyncio.run(bed.round(short(5, (A, 10), (B, 10))))
    assert bed.api is not None
    assert (bed.api.asked, bed.evictor.reports.evictions, bed.notes) == (["a"], 0, [])


def test_a_pod_that_was_refused_and_left_is_forgotten() -> None:
    bed = Bed(api=Api({"a": BUDGET}))

    async def test() -> None:
        assert bed.api is not None
        await bed.round(short(5, (A, 10)))
        await bed.round(short(5, (B, 10)), pods=[B])
        assert bed.api.asked == ["a", "b"]
        bed.now += 5  # the gate's cool-down has passed, the refusal's ten seconds have not
        await bed.round(short(99, (A, 10)))
        assert bed.api.asked == ["a", "b", "a"], "the same pod is on the node again"

    asyncio.run(test())
