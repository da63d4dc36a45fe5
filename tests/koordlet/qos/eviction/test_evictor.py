"""The evictor: means, what holds it back, what it remembers and what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest

from hooks.subject import Pod
from koordlet.events import Severity
from koordlet.qos.eviction.means import Answer, Answered
from koordlet.qos.strategy import Note, Situation
from tests.koordlet.qos.eviction.making import (
    BUDGET,
    SILENT,
    A,
    Api,
    B,
    Bed,
    C,
    Runtime,
    short,
)
from tests.koordlet.qos.eviction_making import a_pod, a_situation, on_node
from tests.waiting import until


def test_an_eviction_over_the_api_is_reported_everywhere() -> None:
    bed = Bed(api=Api(), runtime=Runtime())
    asyncio.run(bed.round(short(15, (A, 10), (B, 10), (C, 10))))
    assert bed.api is not None and bed.runtime is not None
    assert (bed.api.asked, bed.runtime.stopped) == (["a", "b"], [])
    text = (
        "evict Pod:default/a, reason: evicted, message: trigger by koordlet feature BEMemoryEvict,"
        " kill pod: a; the node uses 79.3 %"
    )
    assert bed.api.events[0] == ("a", "evictPodSuccess", text)
    assert bed.notes[0] == Note(0, "evicted", text, "default/a")
    assert bed.kinds == ["eviction", "eviction"]
    assert bed.evictor.reports.evictions == 2
    assert bed.evictor.reports.details() == {("default", "a"): 1, ("default", "b"): 1}
    assert [(one["pod"], one["means"], one["at"]) for one in bed.evictor.status()["last"]] == [
        ("Pod default/a", "api", 5.0),
        ("Pod default/b", "api", 5.0),
    ]


def test_a_series_of_a_pod_ends_five_minutes_after_its_eviction() -> None:
    bed = Bed(api=Api())
    asyncio.run(bed.round(short(5, (A, 10))))
    bed.now += 300
    assert bed.evictor.reports.details() == {("default", "a"): 1}
    bed.now += 1
    assert bed.evictor.reports.details() == {}
    assert bed.evictor.reports.evictions == 1


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


def test_the_status_shows_what_is_short_now_and_a_bounded_history() -> None:
    bed = Bed(api=Api(), most_per_round=1000)
    pods = [(a_pod(f"p{index}"), 1) for index in range(300)]

    async def test() -> None:
        await bed.round(short(301, *pods))
        status = bed.evictor.status()
        assert (status["evictions"], len(status["last"])) == (300, 256)
        assert status["short"] == [
            {
                "gate": "BEMemoryEvict",
                "resource": "memory",
                "needed": 301,
                "missing": 1,
                "numbers": "the node uses 79.3 %",
                "why": "no pod is left that may be evicted and would release any",
            }
        ]
        bed.now += 5
        assert len(bed.evictor.status()["short"]) == 1
        bed.now += 0.1
        assert bed.evictor.status()["short"] == []

    asyncio.run(test())


def test_a_failure_that_repeats_keeps_its_words_so_that_events_are_counted() -> None:
    bed = Bed(api=Api({"a": BUDGET}))

    async def test() -> None:
        for _ in range(3):
            await bed.round(short(5, (A, 10)))
            bed.now += 10

    asyncio.run(test())
    assert bed.api is not None
    assert len(bed.api.events) == 3 and len(set(bed.api.events)) == 1
    assert len(bed.notes) == 1


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
        await bed.round(short(5, (A, 10), leaving=[(C, 10)]), pods=[A, leaves])

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


# --- kubelet -----------------------------------------------------------------------------------


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


# --- containers --------------------------------------------------------------------------------


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


def test_a_pod_that_is_gone_counts_as_released() -> None:
    bed = Bed(api=Api({"a": Answer(Answered.GONE, "404")}), runtime=Runtime())
    asyncio.run(bed.round(short(5, (A, 10), (B, 10))))
    assert bed.api is not None
    assert (bed.api.asked, bed.evictor.reports.evictions, bed.notes) == (["a"], 0, [])


def test_a_dry_run_only_reports_and_repeats_nothing_for_two_minutes() -> None:
    for api in (Api(), None):
        bed = Bed(api=api, runtime=Runtime(), dry_run=True)

        async def test(bed: Bed = bed) -> None:
            for _ in range(20):
                await bed.round(short(5, (A, 10), (B, 10)))
                bed.now += 5

        asyncio.run(test())
        assert bed.runtime is not None and bed.runtime.stopped == []
        assert api is None or (api.asked, api.events) == ([], [])
        assert (bed.evictor.reports.evictions, bed.evictor.reports.details()) == (0, {})
        (note,) = bed.notes
        assert note.message.startswith("dry run: would evict Pod:default/a")
        assert note.reason == "evictionDryRun"
        (last,) = bed.evictor.status()["last"]
        assert (last["means"], last["outcome"]) == ("dry-run", "would be evicted")


# --- the loop ----------------------------------------------------------------------------------


def situation(bed: Bed, *pods: Pod) -> Situation:
    return a_situation(pods, now=bed.now)


def test_what_is_submitted_is_carried_out_unless_it_is_old() -> None:
    async def test() -> None:
        bed = Bed(api=Api())
        assert bed.api is not None
        running = asyncio.create_task(bed.evictor.run())
        await asyncio.to_thread(bed.evictor.submit, [short(5, (A, 10))], situation(bed, A))
        await until(lambda: bed.evictor.reports.evictions == 1)
        stale = a_situation([B], now=bed.now - 6)
        bed.evictor.submit([short(5, (B, 10))], stale)
        await until(lambda: bed.evictor._submitted is None)
        assert bed.api.asked == ["a"], "old measurements evict nothing"
        running.cancel()

    asyncio.run(test())


def test_a_defect_in_a_round_does_not_end_the_evictor() -> None:
    class Broken(Api):
        async def evict(self, pod: Pod) -> Answer:
            if pod.name == "a":
                raise ZeroDivisionError
            return await super().evict(pod)

    async def test() -> None:
        bed = Bed(api=Broken())
        running = asyncio.create_task(bed.evictor.run())
        bed.evictor.submit([short(5, (A, 10))], situation(bed, A))
        await until(lambda: bed.evictor._submitted is None)
        bed.evictor.submit([short(5, (B, 10))], situation(bed, B))
        await until(lambda: bed.evictor.reports.evictions == 1)
        running.cancel()

    asyncio.run(test())


# --- what is kept, and in which words ----------------------------------------------------------


def lines(bed: Bed) -> list[tuple[str, str, str, str]]:
    return [
        (one["pod"], one["gate"], one["means"], one["outcome"])
        for one in bed.evictor.status()["last"]
    ]


@pytest.mark.parametrize(
    ("bed", "expected"),
    [
        (lambda: Bed(api=Api()), [("api", "evicted")]),
        (lambda: Bed(api=Api({"a": BUDGET})), [("api", "failed")]),
        (lambda: Bed(api=Api({"a": SILENT})), [("api", "failed")]),
        (
            lambda: Bed(api=Api({"a": SILENT}), runtime=Runtime()),
            [("api", "failed"), ("cri", "evicted")],
        ),
        (lambda: Bed(runtime=Runtime()), [("cri", "evicted")]),
        (lambda: Bed(runtime=Runtime("no")), [("cri", "failed")]),
        (lambda: Bed(api=Api(), dry_run=True), [("dry-run", "would be evicted")]),
        (lambda: Bed(runtime=Runtime(), dry_run=True), [("dry-run", "would be evicted")]),
    ],
)
def test_the_history_has_a_line_for_each_attempt(
    bed: Callable[[], Bed], expected: list[tuple[str, str]]
) -> None:
    used = bed()
    asyncio.run(used.round(short(5, (A, 10))))
    assert lines(used) == [("Pod default/a", "BEMemoryEvict", *each) for each in expected]


def test_a_failures_words_are_new_after_five_minutes_or_with_another_error() -> None:
    bed = Bed(api=Api({"a": BUDGET}))

    async def round_(numbers: str) -> str:
        assert bed.api is not None
        await bed.round(msgspec.structs.replace(short(5, (A, 10)), numbers=numbers))
        return bed.api.events[-1][2].rpartition("; ")[2]

    async def test() -> None:
        assert bed.api is not None
        assert await round_("first") == "first"
        bed.now += 299
        assert await round_("second") == "first"
        bed.now += 1  # the pod's refusal counts until 10 s later
        bed.now += 10
        assert await round_("third") == "third"
        bed.now += 10
        bed.api.answers["a"] = Answer(Answered.REFUSED, "another reason")
        assert await round_("fourth") == "fourth"
        assert len(bed.notes) == 3

    asyncio.run(test())


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


def test_evictions_of_pods_of_one_name_are_counted_together() -> None:
    bed = Bed(api=Api())

    async def test() -> None:
        await bed.round(short(5, (A, 10)))
        bed.now += 200
        await bed.round(short(5, (a_pod("a", qos="BE", uid="another"), 10)))
        bed.now += 200
        assert bed.evictor.reports.details() == {("default", "a"): 2}
        assert bed.evictor.reports.evictions == 2

    asyncio.run(test())


@pytest.mark.parametrize(
    ("bed", "pod", "why"),
    [
        (
            lambda: Bed(api=Api(), runtime=Runtime()),
            a_pod("p", annotations={"kubernetes.io/config.source": "file"}),
            "it is a static pod, which kubelet would start again",
        ),
        (lambda: Bed(), A, "there is no connection to an API server"),
        (
            lambda: Bed(api=Api({"a": SILENT})),
            A,
            "the API server does not answer, and containers may not be stopped instead",
        ),
        (
            lambda: Bed(runtime=Runtime(), only_by_api=True),
            A,
            "there is no connection to an API server",
        ),
    ],
)
def test_a_pod_that_may_not_go_says_why(bed: Callable[[], Bed], pod: Pod, why: str) -> None:
    used = bed()
    asyncio.run(used.round(short(5, (pod, 10))))
    assert used.why == [f"{pod.obj}: {why}"]
    (event,) = [one for one in used.events.latest() if one.kind == "eviction-short"]
    assert (event.obj, event.message) == ("BEMemoryEvict", f"memory: {pod.obj}: {why}")


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


def test_pressures_are_named_in_order_and_once_for_each_change() -> None:
    bed = Bed(api=Api())
    held = "kubelet evicts pods itself: the Node has DiskPressure, MemoryPressure"

    async def test() -> None:
        for pressures in (["MemoryPressure", "DiskPressure"], ["DiskPressure", "MemoryPressure"]):
            await bed.round(short(5, (A, 10)), pressures=pressures)
            assert bed.why == [held]
        assert bed.evictor.status()["short"][0]["missing"] == 5
        await bed.round(short(5, (A, 10)), pressures=["PIDPressure"])

    asyncio.run(test())
    said = [event for event in bed.events.latest() if event.kind == "eviction-held"]
    assert sorted((one.obj, one.message, one.severity, one.count) for one in said) == [
        ("node", held, Severity.INFO, 1),
        ("node", "kubelet evicts pods itself: the Node has PIDPressure", Severity.INFO, 1),
    ]


def test_a_dry_run_says_what_it_leaves_out() -> None:
    bed = Bed(api=Api(), dry_run=True)
    asyncio.run(bed.round(short(5, (A, 10))))
    text = (
        "dry run: would evict Pod:default/a, reason: evicted, message: trigger by koordlet feature"
        " BEMemoryEvict, kill pod: a; the node uses 79.3 %"
    )
    assert bed.notes == [Note(0, "evictionDryRun", text, "default/a")]
    assert bed.evictor.status()["dryRun"]


def test_stopping_that_raises_is_a_failure_of_that_eviction() -> None:
    class Broken(Runtime):
        async def stop(self, container_ids: Sequence[str], *, grace_s: float) -> str:
            raise ZeroDivisionError("a defect")

    bed = Bed(runtime=Broken())
    asyncio.run(bed.round(short(5, (A, 10))))
    assert "error ZeroDivisionError: a defect; the node uses" in bed.notes[0].message
    assert bed.evictor.reports.evictions == 0


# --- the loop, once more -----------------------------------------------------------------------


def test_what_was_submitted_before_the_start_is_carried_out() -> None:
    async def test() -> None:
        bed = Bed(api=Api())
        bed.evictor.submit([short(5, (A, 10))], situation(bed, A))
        running = asyncio.create_task(bed.evictor.run())
        await until(lambda: bed.evictor.reports.evictions == 1)
        running.cancel()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("interval_s", "age_s", "asked"),
    [(1.0, 5.0, ["a"]), (1.0, 5.1, []), (4.0, 12.0, ["a"]), (4.0, 12.1, [])],
)
def test_measurements_are_old_after_five_seconds_or_three_intervals(
    interval_s: float, age_s: float, asked: list[str]
) -> None:
    async def test() -> None:
        bed = Bed(api=Api())
        assert bed.api is not None
        then = a_situation([A], now=bed.now - age_s)
        bed.evictor.submit(
            [short(5, (A, 10))], msgspec.structs.replace(then, interval_s=interval_s)
        )
        running = asyncio.create_task(bed.evictor.run())
        await until(lambda: bed.evictor._submitted is None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bed.api.asked == asked
        running.cancel()

    asyncio.run(test())


def test_the_end_of_the_evictor_is_the_end_of_its_waiting_for_containers() -> None:
    async def test() -> None:
        cancelled = asyncio.Event()

        class Hanging(Runtime):
            async def stop(self, container_ids: Sequence[str], *, grace_s: float) -> str:
                self.stopped.append((tuple(container_ids), grace_s))
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()
                return ""

        bed = Bed(runtime=Hanging())
        assert bed.runtime is not None
        running = asyncio.create_task(bed.evictor.run())
        bed.evictor.submit([short(5, (A, 10))], situation(bed, A))
        await until(lambda: bed.runtime is not None and bed.runtime.stopped)
        running.cancel()
        await asyncio.wait_for(cancelled.wait(), 10)
        # Nothing takes what is submitted now, and nothing fails.
        bed.evictor.submit([short(5, (B, 10))], situation(bed, B))

    asyncio.run(test())


def test_a_defect_in_rounds_is_logged_and_not_each_time(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Api):
        async def evict(self, pod: Pod) -> Answer:
            self.asked.append(pod.name)
            raise ZeroDivisionError

    async def test() -> None:
        bed = Bed(api=Broken())
        assert bed.api is not None
        running = asyncio.create_task(bed.evictor.run())
        for count in (1, 2, 3):
            bed.evictor.submit([short(5, (A, 10))], situation(bed, A))
            await until(lambda count=count: bed.api and len(bed.api.asked) == count)  # type: ignore[misc]
        running.cancel()

    asyncio.run(test())
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("koordlet.qos", "ERROR")
    assert record.getMessage() == "a round of evictions failed"
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError
