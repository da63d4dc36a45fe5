"""When changes of pods reach the reconciler: a new pod soon, the others together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hooks.engine import Engine
from hooks.facts import NodeInputs
from hooks.subject import Subject
from koordlet.configuration.config import Config
from koordlet.daemon import passes as module
from koordlet.daemon.gaps import Gaps
from koordlet.daemon.passes import Passes
from koordlet.executor.journal import Journal
from koordlet.reconciler.reconciler import Reconciler
from koordlet.state import NodeState

ENGINE = Engine(NodeInputs(), (), 1)


class Recorder:
    """Stands in for the reconciler: notes which pods arrive together, and what brings a pass."""

    def __init__(self) -> None:
        self.pods: list[set[str]] = []
        self.reasons: list[str] = []
        self.emptied = 0
        self.pods_waiting = 0
        self.arrived = asyncio.Event()

    def pods_changed(
        self,
        engine: Engine,
        pods: Mapping[str, Sequence[Subject]],
        qos: Sequence[Subject],
        *,
        requests: int,
    ) -> None:
        self.pods.append(set(pods))
        self.arrived.set()

    def trigger(self, reason: str) -> None:
        self.reasons.append(reason)

    def snapshot_made(self) -> None:
        self.emptied += 1


def passes(catch_up: Callable[[], None] = lambda: None) -> tuple[Passes, Recorder]:
    made = Passes(
        Config(),
        host=cast(Any, None),
        state=NodeState(),
        rules=cast(Any, SimpleNamespace(engine=ENGINE)),
        journal=Journal(),
        decide=cast(Any, None),
        lock=None,
        catch_up=catch_up,
        published=lambda: None,
        displaced=lambda held: None,
        cpus_changed=lambda: None,
        gaps=Gaps(),
    )
    recorder = Recorder()
    made.reconciler = cast(Reconciler, recorder)
    return made, recorder


async def until(recorder: Recorder, count: int) -> None:
    async with asyncio.timeout(10):
        while len(recorder.pods) < count:
            recorder.arrived.clear()
            await recorder.arrived.wait()


def test_a_new_pod_is_queued_soon_and_those_that_follow_it_closely_together() -> None:
    async def run() -> None:
        made, recorder = passes()
        made.pod_appeared("a")
        await asyncio.sleep(0)
        assert recorder.pods == []  # not while the runtime takes the reply
        await until(recorder, 1)
        made.pod_appeared("b")
        await asyncio.sleep(0)
        made.pod_appeared("c")
        await until(recorder, 2)
        assert recorder.pods == [{"a"}, {"b", "c"}]

    asyncio.run(run())


def test_new_pods_that_have_waited_go_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        made, recorder = passes()
        made.pod_appeared("a")
        await until(recorder, 1)
        monkeypatch.setattr(module, "_GATHER_S", 3600.0)
        made.pod_appeared("b")
        made.pod_changed("a")
        monkeypatch.setattr(module, "_GATHER_S", 0.0)
        made.pod_appeared("c")
        await until(recorder, 2)
        assert recorder.pods == [{"a"}, {"a", "b", "c"}]

    asyncio.run(run())


def test_a_new_pod_takes_along_what_was_gathered_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GATHER_S", 3600.0)

    async def run() -> None:
        made, recorder = passes()
        made.pod_changed("updated")
        made.pod_appeared("new")
        await until(recorder, 1)
        assert recorder.pods == [{"updated", "new"}]

    asyncio.run(run())


def test_changes_in_a_burst_of_new_pods_go_with_them() -> None:
    async def run() -> None:
        made, recorder = passes()
        made.pod_appeared("a")
        await until(recorder, 1)
        made.pod_changed("a")  # its container was created
        made.pod_appeared("b")
        await until(recorder, 2)
        assert recorder.pods == [{"a"}, {"a", "b"}]
        made.pod_appeared("c")
        made.pod_changed("c")
        await until(recorder, 3)
        assert recorder.pods[2] == {"c"}

    asyncio.run(run())


def test_what_can_wait_goes_with_the_next_change() -> None:
    async def run() -> None:
        made, recorder = passes()
        made.pod_changed("ended", can_wait=True)
        made.pod_changed("updated")
        await until(recorder, 1)
        assert recorder.pods == [{"ended", "updated"}]

    asyncio.run(run())


def test_a_container_with_all_its_values_waits_for_the_next_change() -> None:
    async def run() -> None:
        made, recorder = passes()
        made.container_complete("running")
        made.pod_appeared("new")
        await until(recorder, 1)
        assert recorder.pods == [{"running", "new"}]

    asyncio.run(run())


def test_a_container_with_all_its_values_is_looked_at_without_another_change() -> None:
    async def run() -> None:
        made, recorder = passes()
        made.container_complete("running")
        made.pod_changed("ended", can_wait=True)
        await until(recorder, 1)
        assert recorder.pods == [{"running", "ended"}]

    asyncio.run(run())


def test_a_change_does_not_wait_for_a_container_with_all_its_values() -> None:
    async def run() -> None:
        made, recorder = passes()
        loop = asyncio.get_running_loop()
        made.container_complete("running")
        handles = [loop.call_later(0.25, lambda: recorder.pods.append({"late"}))]
        made.pod_changed("updated")
        await until(recorder, 1)
        assert recorder.pods == [{"running", "updated"}]
        handles[0].cancel()

    asyncio.run(run())


def test_what_follows_a_reply_is_done_before_the_reconciler_sees_the_change() -> None:
    async def run() -> None:
        seen: list[int] = []
        made, recorder = passes(lambda: seen.append(len(recorder.pods)))
        made.pod_appeared("a")
        await until(recorder, 1)
        assert (seen, recorder.pods) == ([0], [{"a"}])
        made.snapshot_for_pass()
        assert seen == [0, 1]

    asyncio.run(run())


def test_a_snapshot_has_what_was_to_be_handed_over() -> None:
    async def run() -> None:
        made, recorder = passes()
        made.pod_changed("updated", can_wait=True)
        before = made.snapshot_for_pass()
        assert recorder.emptied == 1
        made.pod_changed("another")
        await until(recorder, 1)
        assert recorder.pods == [{"another"}]
        assert made.snapshot is not before

    asyncio.run(run())


def test_a_look_at_the_snapshot_leaves_changes_for_the_reconciler() -> None:
    """Metrics and `koordctl explain` look at it too, and no pass follows."""

    async def run() -> None:
        made, recorder = passes()
        made.pod_appeared("new")
        made.pod_changed("updated")
        assert made.snapshot is made.snapshot
        await until(recorder, 1)
        assert recorder.pods == [{"new", "updated"}]
        assert recorder.emptied == 0

    asyncio.run(run())


def test_a_change_that_may_concern_all_brings_a_pass() -> None:
    async def run() -> None:
        made, recorder = passes()
        made.state_changed("rules")
        made.state_changed("objects")
        await asyncio.sleep(0)
        assert (recorder.pods, recorder.reasons) == ([], ["objects,rules"])

    asyncio.run(run())


def test_a_gap_begins_with_each_new_pod_and_many_waiting_pods_let_nothing_rest() -> None:
    async def run() -> None:
        made, recorder = passes()
        clock = [100.0]
        made._gaps = Gaps(clock=lambda: clock[0])
        assert not made._rest()  # no burst
        made.pod_appeared("a")
        await until(recorder, 1)
        clock[0] += 0.01
        assert not made._rest()  # a pod alone
        made.pod_appeared("b")
        await until(recorder, 2)
        assert not made._rest()  # in the gap
        clock[0] += 0.039
        recorder.pods_waiting = 16
        assert not made._rest()
        recorder.pods_waiting = 15
        assert made._rest()

    asyncio.run(run())
