"""What the evictor reports: history, status, series, events and their words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from hooks.subject import Pod
from koordlet.qos.eviction.means import Answer, Answered
from koordlet.qos.strategy import Note
from service.events import Severity
from tests.koordlet.qos.eviction.making import BUDGET, SILENT, A, Api, B, Bed, C, Runtime, short
from tests.koordlet.qos.eviction_making import a_pod


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
