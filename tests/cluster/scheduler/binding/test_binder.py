"""Bindings: one write each, order for each pod, and outcomes that are read and never guessed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest
from aiohttp import web

from cluster.scheduler.binding import pauses
from cluster.scheduler.binding.binder import Binder, BindingCounts
from cluster.scheduler.binding.placement import Bound, Outcome, Placement, Refused, Why
from cluster.scheduler.binding.turns import Turns
from cluster.scheduler.cycle.timings import BIND, PRE_BIND
from kube.kept_client import KeptClient
from tests.beds.apiserver import eventually
from tests.cluster.scheduler.binding.stored_pods import (
    After,
    Fault,
    StoredPods,
    cut,
    refuse,
    serving,
)
from tests.kube.scripted import answer, status

RECORDED = {"koordinator.sh/cpus": "0-3"}
PLACEMENT = Placement("ns", "p", "u", "n1", annotations=RECORDED)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pauses, "FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(pauses, "LONGEST_PAUSE_S", 0.01)
    yield


@dataclass
class Bed:
    store: StoredPods
    binder: Binder
    outcomes: list[tuple[Placement, Outcome]] = field(default_factory=list)

    async def outcome(self, placement: Placement = PLACEMENT) -> Outcome:
        self.binder.submit(placement)
        await eventually(lambda: self.outcomes, every=0.002)
        return self.outcomes.pop()[1]


@asynccontextmanager
async def bed(store: StoredPods, *, at_once: int = 16, **more: Any) -> AsyncIterator[Bed]:
    outcomes: list[tuple[Placement, Outcome]] = []
    async with serving(store) as client:
        binder = Binder(client, lambda *both: outcomes.append(both), at_once=at_once, **more)
        try:
            yield Bed(store, binder, outcomes)
        finally:
            await binder.drain(0)


def one_pod(*faults: Fault | After | None, **metadata: Any) -> StoredPods:
    store = StoredPods(faults=deque(faults))
    store.add("p", **metadata)
    return store


def outcome(store: StoredPods, placement: Placement = PLACEMENT) -> Outcome:
    async def run() -> Outcome:
        async with bed(store) as here:
            return await here.outcome(placement)

    return asyncio.run(run())


def test_one_request_binds_and_records() -> None:
    store = one_pod()
    assert outcome(store, replace(PLACEMENT, annotations=MappingProxyType(RECORDED))) == Bound()
    assert store.requests == [
        (
            "POST",
            "/api/v1/namespaces/ns/pods/p/binding",
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": "p", "namespace": "ns", "uid": "u", "annotations": RECORDED},
                "target": {"kind": "Node", "name": "n1"},
            },
        )
    ]


@pytest.mark.parametrize(
    ("fault", "writes", "reads"),
    [
        (After(cut), 1, 1),
        (After(refuse(500, "InternalError")), 1, 1),
        (After(refuse(504, "Timeout")), 1, 1),
        (cut, 2, 1),
        (refuse(500, "InternalError"), 2, 1),
        (refuse(503, "ServiceUnavailable"), 2, 1),
        (refuse(408, "Timeout"), 2, 1),
        (refuse(429, "TooManyRequests"), 2, 0),
        (refuse(401, "Unauthorized"), 2, 0),
    ],
)
def test_an_answer_that_is_lost_is_resolved_by_reading(
    fault: Fault | After, writes: int, reads: int
) -> None:
    store = one_pod(fault)
    assert outcome(store) == Bound()
    assert store.writes == ["POST binding"] * writes
    assert store.reads == reads
    assert store.pods["p"]["metadata"]["annotations"] == RECORDED


def test_an_answer_after_the_time_limit_is_resolved_by_reading() -> None:
    async def run() -> None:
        store = one_pod()
        store.delay = 0.3
        async with (
            serving(store) as client,
            KeptClient(client._connection, timeout_seconds=0.1) as hasty,
        ):
            outcomes: list[Outcome] = []
            binder = Binder(hasty, lambda _, found: outcomes.append(found))
            binder.submit(PLACEMENT)
            await eventually(lambda: binder.unknown)
            store.delay = 0
            await eventually(lambda: outcomes)
            assert outcomes == [Bound()]

    asyncio.run(run())


def test_a_retry_after_is_respected_up_to_the_longest_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pauses, "LONGEST_PAUSE_S", 0.1)
    store = one_pod(refuse(429, "TooManyRequests", **{"Retry-After": "1"}))

    async def run() -> float:
        loop = asyncio.get_running_loop()
        async with bed(store) as here:
            started = loop.time()
            assert await here.outcome() == Bound()
            return loop.time() - started

    assert asyncio.run(run()) >= 0.1


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize(
    ("pod", "why"),
    [
        ({"spec": {"nodeName": "n2"}}, Why.BOUND_ELSEWHERE),
        ({"spec": {"nodeName": "n1"}}, Why.BOUND_ELSEWHERE),
        ({"metadata": {"uid": "other"}}, Why.OTHER_UID),
        ({"metadata": {"uid": "other"}, "spec": {"nodeName": "n1"}}, Why.OTHER_UID),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, Why.DELETED),
        ({"spec": {"schedulingGates": [{"name": "g"}]}}, Why.CONFLICT),
        (None, Why.DELETED),
    ],
)
def test_a_refusal_names_what_the_pod_shows(
    pod: dict[str, dict[str, Any]] | None, why: Why, lost: bool
) -> None:
    store = one_pod(*([cut] if lost else []))
    if pod is None:
        store.pods.clear()
    else:
        for part, values in pod.items():
            store.pods["p"][part].update(values)
    found = outcome(store)
    assert isinstance(found, Refused)
    assert found.why is why
    assert "p" in found.message


def test_the_same_binding_made_before_is_success() -> None:
    store = one_pod(annotations={**RECORDED, "other": "x"})
    store.pods["p"]["spec"]["nodeName"] = "n1"
    assert outcome(store) == Bound()


@pytest.mark.parametrize(
    ("code", "reason", "why"),
    [
        (403, "Forbidden", Why.FORBIDDEN),
        (400, "BadRequest", Why.INVALID),
        (413, "RequestEntityTooLarge", Why.INVALID),
        (422, "Invalid", Why.INVALID),
    ],
)
def test_a_certain_refusal_is_not_repeated(code: int, reason: str, why: Why) -> None:
    store = one_pod(refuse(code, reason, "so it is"))
    found = outcome(store)
    assert isinstance(found, Refused)
    assert found.why is why
    assert "so it is" in found.message
    assert (store.writes, store.reads) == (["POST binding"], 0)


def test_a_refusal_after_a_lost_answer_does_not_hide_a_success() -> None:
    """The first write is carried out late: after the pod was read, before the second write."""
    store = one_pod(cut)

    def late(_: Any) -> Any:
        store.pods["p"]["spec"]["nodeName"] = "n1"
        store.pods["p"]["metadata"]["annotations"] = RECORDED
        return refuse(403, "Forbidden", "rights were taken away")(_)

    store.faults.append(late)
    assert outcome(store) == Bound()


def test_a_server_that_always_fails_does_not_hold_a_booking_for_ever() -> None:
    store = one_pod()
    store.always = refuse(500, "InternalError", "failed calling webhook")
    found = outcome(store)
    assert isinstance(found, Refused)
    assert found.why is Why.FAILING
    assert "failed calling webhook" in found.message
    assert len(store.writes) == 6


def test_without_an_api_server_there_is_no_outcome_until_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = one_pod()
    store.down = True

    async def run() -> None:
        async with bed(store) as here:
            here.binder.submit(PLACEMENT)
            await eventually(lambda: len(store.requests) > 20)
            assert here.outcomes == []
            assert (here.binder.in_flight, here.binder.unknown) == (1, 1)
            store.down = False
            await eventually(lambda: here.outcomes == [(PLACEMENT, Bound())])
            await eventually(lambda: here.binder.in_flight == 0)
            assert here.binder.unknown == 0

    asyncio.run(run())
    # Not with each of the tries.
    text = "1 bindings have no certain outcome yet, the last is of pod ns/p: "
    assert caplog.text.count(text) == 1


def test_requests_run_in_parallel_up_to_the_bound() -> None:
    store = StoredPods(delay=0.01)
    for number in range(40):
        store.add(f"p{number}")

    async def run() -> None:
        async with bed(store, at_once=5) as here:
            for number in range(40):
                here.binder.submit(replace(PLACEMENT, name=f"p{number}"))
            await eventually(lambda: len(here.outcomes) == 40)
            assert all(found == Bound() for _, found in here.outcomes)
            assert here.binder.counts.bound == 40

    asyncio.run(run())
    assert store.most_parallel == 5


class PartlyDown(StoredPods):
    """Cuts every request about pods whose name begins with "stuck"."""

    def _answer(self, request: web.Request, body: dict[str, Any]) -> web.Response | None:
        return None if "/pods/stuck" in request.path else super()._answer(request, body)


def test_failures_count_in_a_row_and_not_over_a_time_without_a_server() -> None:
    failing = [refuse(500, "InternalError")] * 5
    assert outcome(one_pod(*failing, cut, *failing)) == Bound()


_REFUSED = refuse(403, "Forbidden", "no")


@pytest.mark.parametrize(
    ("faults", "labels", "steps", "counts"),
    [
        ([], {}, [("bind", True)], BindingCounts(bound=1)),
        ([cut], {}, [("bind", True)], BindingCounts(bound=1, lost=1)),
        ([_REFUSED], {}, [("bind", False)], BindingCounts(refused=1)),
        (
            [], {"l": "x"}, [("pre_bind", True), ("bind", True)],
            BindingCounts(bound=1, patches=1),
        ),
        ([_REFUSED], {"l": "x"}, [("pre_bind", False)], BindingCounts(refused=1, patches=1)),
    ],
)  # fmt: skip
def test_each_step_is_counted_and_noted_with_its_success_and_seconds(
    faults: list[Fault | None], labels: dict[str, str], steps: list[tuple[str, bool]],
    counts: BindingCounts,
) -> None:  # fmt: skip
    placement = replace(PLACEMENT, labels=labels)
    noted: list[tuple[Placement, str, bool, float]] = []

    async def run() -> BindingCounts:
        async with bed(one_pod(*faults), on_step=lambda *step: noted.append(step)) as here:
            await here.outcome(placement)
            return here.binder.counts

    assert asyncio.run(run()) == counts
    names = {"bind": BIND, "pre_bind": PRE_BIND}
    assert [(step, done) for _, step, done, _ in noted] == [(names[one], ok) for one, ok in steps]
    assert all(each is placement and 0 <= seconds < 60 for each, _, _, seconds in noted)


def test_a_defect_in_a_binding_is_an_outcome_and_counted() -> None:
    async def broken(key: str) -> None:
        raise ValueError(key)

    async def run() -> None:
        async with bed(one_pod(), before=broken) as here:
            assert await here.outcome() == Refused(Why.FAILING, "ValueError: ns/p")
            assert here.binder.faults.count == 1
            assert here.binder.counts == BindingCounts(refused=1)

    asyncio.run(run())


def test_a_pod_that_is_bound_before_its_patch_lacks_what_the_patch_says() -> None:
    store = one_pod(annotations=RECORDED)

    def meanwhile(_: Any) -> None:
        store.pods["p"]["spec"]["nodeName"] = "n1"

    store.faults.append(meanwhile)
    assert outcome(store, replace(PLACEMENT, labels={"l": "x"})) == Refused(
        Why.BOUND_ELSEWHERE, "pod ns/p was bound before its patch"
    )


def test_a_read_that_fails_is_repeated() -> None:
    class Unreadable(StoredPods):
        def _answer(self, request: web.Request, body: dict[str, Any]) -> web.Response | None:
            if request.method == "GET" and self.reads < 4:
                return [status(500, "InternalError"), answer([]), None][self.reads - 1]
            return super()._answer(request, body)

    store = Unreadable(faults=deque([After(cut)]))
    store.add("p")
    assert outcome(store) == Bound()
    assert (store.reads, len(store.writes)) == (4, 1)


def test_placements_without_an_outcome_hold_up_no_others() -> None:
    store = PartlyDown()
    stuck = [f"stuck{number}" for number in range(12)]
    for name in (*stuck, "p"):
        store.add(name)

    async def run() -> None:
        async with bed(store, at_once=2) as here:
            for name in (*stuck, "p"):
                here.binder.submit(replace(PLACEMENT, name=name, uid=f"u-{name}"))
            store.pods["p"]["metadata"]["uid"] = "u-p"
            await eventually(lambda: here.outcomes)
            ((placement, found),) = here.outcomes
            assert (placement.name, found) == ("p", Bound())
            assert (here.binder.in_flight, here.binder.unknown) == (12, 12)

    asyncio.run(run())


def test_placements_of_one_name_are_carried_out_in_order() -> None:
    """A StatefulSet's pod that was replaced while the binding of the former was in flight."""
    store = one_pod(cut, cut, uid="new")

    async def run() -> None:
        async with bed(store) as here:
            here.binder.submit(PLACEMENT)
            here.binder.submit(replace(PLACEMENT, uid="new", node="n2"))
            await eventually(lambda: len(here.outcomes) == 2)
            (first, refused), (second, bound) = here.outcomes
            assert (first.uid, second.uid) == ("u", "new")
            assert isinstance(refused, Refused)
            assert bound == Bound()

    asyncio.run(run())


def test_what_a_binding_cannot_carry_is_patched_before() -> None:
    store = one_pod(annotations={"old": "1"}, labels={"app": "a"})
    placement = replace(PLACEMENT, labels={"l": "x"}, removed_annotations=("old",))
    assert outcome(store, placement) == Bound()
    assert store.writes == ["PATCH p", "POST binding"]
    metadata = store.pods["p"]["metadata"]
    assert metadata["annotations"] == RECORDED
    assert metadata["labels"] == {"app": "a", "l": "x"}


@pytest.mark.parametrize(
    ("faults", "uid", "expected"),
    [
        ([After(cut)], "u", None),
        ([cut], "u", None),
        ([None, After(cut)], "u", None),
        ([], "other", Why.OTHER_UID),
        ([None, refuse(403, "Forbidden")], "u", Why.FORBIDDEN),
    ],
)
def test_a_patch_is_resolved_like_a_binding(
    faults: list[Fault | After | None], uid: str, expected: Why | None
) -> None:
    store = one_pod(*faults)
    placement = replace(PLACEMENT, uid=uid, labels={"l": "x"})
    found = outcome(store, placement)
    assert (found.why if isinstance(found, Refused) else None) is expected
    assert bool(store.pods["p"]["spec"].get("nodeName")) == (expected is None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"node": ""}, "no node"),
        ({"uid": ""}, "no uid"),
        ({"annotations": {"a b": "x"}}, "'a b' is not a valid key"),
        ({"annotations": {"a": "x" * 262_144}}, "262145 bytes of annotations"),
        ({"labels": {"/": "x"}}, "'/' is not a valid key"),
    ],
)
def test_what_would_leave_a_broken_pod_is_not_sent(change: dict[str, Any], text: str) -> None:
    store = one_pod()
    found = outcome(store, replace(PLACEMENT, **change))
    assert isinstance(found, Refused)
    assert found.why is Why.INVALID
    assert text in found.message
    assert store.requests == []


def test_draining_finishes_what_it_can_and_names_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = StoredPods(delay=0.05)
    for name in ("p", "q"):
        store.add(name)

    async def run() -> None:
        async with bed(store) as here:
            here.binder.submit(PLACEMENT)
            await asyncio.sleep(0.01)
            # It ends with the placement, long before its time is over.
            assert await asyncio.wait_for(here.binder.drain(10_000), 30) == ()
            assert here.outcomes == [(PLACEMENT, Bound())]
            with pytest.raises(RuntimeError, match="draining"):
                here.binder.submit(PLACEMENT)
        store.down = True
        async with bed(store) as here:
            here.binder.submit(replace(PLACEMENT, name="q"))
            (left,) = await here.binder.drain(0.1)
            assert left.name == "q"
            assert here.outcomes == []
            assert here.binder.in_flight == 0

    asyncio.run(run())
    assert "1 bindings have no certain outcome at the end: ns/q" in caplog.text


@pytest.mark.parametrize(("count", "more"), [(10, ""), (11, ", ...")])
def test_of_many_placements_that_are_left_ten_are_named(
    caplog: pytest.LogCaptureFixture, count: int, more: str
) -> None:
    store = StoredPods(down=True)

    async def run() -> None:
        async with bed(store) as here:
            for number in range(count):
                here.binder.submit(replace(PLACEMENT, name=f"p{number}", uid=str(number)))
            assert here.binder.in_flight == count
            assert len(await here.binder.drain(0)) == count

    asyncio.run(run())
    named = ", ".join(f"ns/p{number}" for number in range(10))
    assert f"{count} bindings have no certain outcome at the end: {named}{more}\n" in caplog.text


def test_a_defect_in_taking_an_outcome_harms_no_other_placement() -> None:
    store = one_pod()
    store.add("q")
    taken: list[str] = []

    def take(placement: Placement, _: Outcome) -> None:
        taken.append(placement.name)
        raise ValueError("a defect")

    async def run() -> None:
        async with serving(store) as client:
            binder = Binder(client, take)
            binder.submit(PLACEMENT)
            binder.submit(replace(PLACEMENT, name="q"))
            await eventually(lambda: len(taken) == 2 and not binder.in_flight)
            assert binder.faults.count == 2

    asyncio.run(run())


def test_turns_keep_their_order_also_when_one_is_cancelled() -> None:
    order: list[str] = []

    async def run() -> None:
        turns = Turns()
        release = asyncio.Event()

        async def work(name: str, until: asyncio.Event | None = None) -> None:
            async with turns.of("k"):
                order.append(name)
                if until is not None:
                    await until.wait()

        first = asyncio.create_task(work("first", release))
        await asyncio.sleep(0)
        second = asyncio.create_task(work("second"))
        third = asyncio.create_task(work("third"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert order == ["first"]
        assert turns.busy("k")
        release.set()
        await asyncio.gather(first, third)
        assert order == ["first", "third"]
        await asyncio.sleep(0)
        assert len(turns) == 0

    asyncio.run(run())


DELEGATED = replace(PLACEMENT, delegated=True)


def test_an_extender_that_says_that_it_bound_a_pod_is_not_believed_for_ever() -> None:
    async def run() -> Outcome:
        async def binds(placement: Placement) -> bool:
            return True

        async with bed(one_pod(), delegate=binds, delegated_s=0.05) as here:
            return await here.outcome(DELEGATED)

    assert asyncio.run(run()) == Refused(
        Why.FAILING,
        "pod ns/p: its extender answered that it is bound, and it has no node after 0.05 s",
    )


@pytest.mark.parametrize(("node", "bound"), [("n1", True), ("n2", False)])
def test_an_extender_may_bind_after_its_answer(node: str, bound: bool) -> None:
    """While it is waited for, other placements go on."""

    async def run() -> Outcome:
        store = StoredPods()
        late = ("a", "b", "c", "d")
        for name in (*late, "p"):
            store.add(name, uid="u" if name == "p" else name)

        async def binds(placement: Placement) -> bool:
            return True

        async with bed(store, at_once=1, delegate=binds, delegated_s=60.0) as here:
            for name in late:
                here.binder.submit(replace(DELEGATED, name=name, uid=name))
            assert isinstance(await here.outcome(), Bound)
            for name in late:
                store.pods[name]["spec"]["nodeName"] = node
            await eventually(lambda: len(here.outcomes) == 4, every=0.002)
            return here.outcomes.pop()[1]

    found = asyncio.run(run())
    assert isinstance(found, Bound) == bound
    if isinstance(found, Refused):
        assert found.why is Why.BOUND_ELSEWHERE
