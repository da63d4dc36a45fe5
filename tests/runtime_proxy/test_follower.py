"""An end is reported once, in whatever order a call, an event and a list show it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy import follower
from runtime_proxy.checkpoint import Recorded
from runtime_proxy.follower import Follower
from runtime_proxy.hooks import Hooks
from runtime_proxy.http2.grpc import add_prefix
from runtime_proxy.http2.held import RequestHeld
from runtime_proxy.intercept import CriInterceptor
from runtime_proxy.model import Container, Pod
from runtime_proxy.recovery import Recovery
from runtime_proxy.runtime import RuntimeAway
from runtime_proxy.stages import Stage
from runtime_proxy.store import NoJournal, Store
from tests.runtime_proxy.processes import echo
from tests.runtime_proxy.scripted import ScriptedServer, ScriptedServers
from tests.waiting import until

STOPPED, DELETED = cri.CONTAINER_STOPPED_EVENT, cri.CONTAINER_DELETED_EVENT
_AFTER = (Stage.POST_START_CONTAINER, Stage.POST_STOP_CONTAINER, Stage.POST_STOP_POD_SANDBOX)


class ScriptedRuntime:
    """Stands for `runtime.Runtime`: lists that a test changes, events that a test sends."""

    def __init__(self) -> None:
        self.version = cri.VersionResponse(runtime_name="containerd", runtime_version="v2.1.4")
        self.states: dict[str, int] = {}
        self.subscriptions = 0
        self.subscribed: asyncio.Queue[cri.ContainerEventResponse | None] | None = None
        self.lists = 0
        self.away = False
        self.refuses_lists = 0
        """How many lists fail before one is answered."""
        self.while_listing: Callable[[], None] = lambda: None
        """What happens after a list was made and before the proxy reads it."""

    async def identify(self) -> cri.VersionResponse:
        return self.version

    async def pods(self) -> list[cri.PodSandbox]:
        self.lists += 1
        if self.refuses_lists:
            self.refuses_lists -= 1
            raise RuntimeAway("no list")
        return [
            cri.PodSandbox(id=i, state=cast(Any, state))
            for i, state in self.states.items()
            if i.startswith("p")
        ]

    async def containers(self) -> list[cri.Container]:
        listed = [
            cri.Container(id=i, pod_sandbox_id="p", state=cast(Any, state))
            for i, state in self.states.items()
            if i.startswith("c")
        ]
        self.while_listing()
        return listed

    async def pod(self, identifier: str) -> Pod | None:
        state = self.states.get(identifier)
        stopped = state == cri.SANDBOX_NOTREADY
        return None if state is None else Pod(id=identifier, stopped=stopped)

    async def container(self, identifier: str) -> Container | None:
        state = self.states.get(identifier)
        stopped = state == cri.CONTAINER_EXITED
        return None if state is None else Container(id=identifier, pod_id="p", stopped=stopped)

    async def listed_container(self, listed: cri.Container) -> Container | None:
        return await self.container(listed.id)

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[cri.ContainerEventResponse]]:
        if self.away:
            raise RuntimeAway("no connection")
        queue = self.subscribed = asyncio.Queue()
        self.subscriptions += 1

        async def sent() -> AsyncIterator[cri.ContainerEventResponse]:
            while (event := await queue.get()) is not None:
                yield event
            raise RuntimeAway("the stream was cut")

        yield sent()
        self.subscribed = None

    def send(self, identifier: str, kind: int) -> None:
        """Send an event to the subscriber; without one it is lost."""
        if self.subscribed is not None:
            self.subscribed.put_nowait(
                cri.ContainerEventResponse(
                    container_id=identifier, container_event_type=cast(Any, kind)
                )
            )

    def cut(self) -> None:
        """End the stream. The proxy learns of it later than the next events are sent."""
        assert self.subscribed is not None
        self.subscribed.put_nowait(None)
        self.subscribed = None


class Bed:
    """A proxy's store, hooks and calls around a follower, before a scripted runtime."""

    def __init__(self) -> None:
        self.runtime = ScriptedRuntime()
        self.server = ScriptedServer(dict.fromkeys(_AFTER, echo))
        self.store = Store(NoJournal())
        self.journal = Recorded()
        self.journal_reads = 0
        self.caught_up = 0
        recovery = Recovery(cast(Any, self.runtime), self.store, self.journal, self.read_journal)
        self.hooks = Hooks(
            servers=cast(Any, ScriptedServers(self.server)),
            store=self.store,
            recovery=recovery,
            skip_label=("skip", "true"),
        )
        self.interceptor = CriInterceptor(self.hooks, max_message_bytes=1 << 20)

        def catch_up() -> None:
            self.caught_up += 1

        self.follower = Follower(cast(Any, self.runtime), recovery, self.hooks, catch_up=catch_up)

    def read_journal(self) -> Recorded:
        self.journal_reads += 1
        return self.journal

    def call(self, method: str, request: Any, answer: Any) -> None:
        """Make a call that the runtime answers."""
        path = f"/runtime.v1.RuntimeService/{method}".encode()
        body = add_prefix(request.SerializeToString())
        opened = self.interceptor.open(RequestHeld(1, path, body, None, b"identity"))
        opened.decide()
        opened.answered(add_prefix(answer.SerializeToString()))

    def make(self, identifier: str, *, answered: bool = True) -> None:
        """Create and start a container in sandbox `p`. answered: whether the start is, yet."""
        if self.store.pod("p") is None:
            self.runtime.states["p"] = cri.SANDBOX_READY
            self.call(
                "RunPodSandbox",
                cri.RunPodSandboxRequest(),
                cri.RunPodSandboxResponse(pod_sandbox_id="p"),
            )
        self.runtime.states[identifier] = cri.CONTAINER_CREATED
        self.call(
            "CreateContainer",
            cri.CreateContainerRequest(pod_sandbox_id="p"),
            cri.CreateContainerResponse(container_id=identifier),
        )
        self.runtime.states[identifier] = cri.CONTAINER_RUNNING
        if answered:
            self.answer_start(identifier)

    def answer_start(self, identifier: str) -> None:
        request = cri.StartContainerRequest(container_id=identifier)
        self.call("StartContainer", request, cri.StartContainerResponse())

    def stop(self, identifier: str) -> None:
        self.runtime.states[identifier] = cri.CONTAINER_EXITED
        request = cri.StopContainerRequest(container_id=identifier)
        self.call("StopContainer", request, cri.StopContainerResponse())

    def end(self, identifier: str) -> None:
        """The container ends by itself."""
        self.runtime.states[identifier] = cri.CONTAINER_EXITED
        self.runtime.send(identifier, STOPPED)

    def ends(self) -> list[str]:
        """The objects whose ends were reported, in order."""
        return [
            "pod" if stage is Stage.POST_STOP_POD_SANDBOX else request.container_meta.id
            for stage, request in self.server.asked
            if stage is not Stage.POST_START_CONTAINER
        ]

    async def subscribed(self) -> None:
        await until(lambda: self.runtime.subscribed is not None, "a subscription")


Scenario = Callable[[Bed], Awaitable[None]]


def play(scenario: Scenario, *, before: Callable[[Bed], None] = lambda bed: None) -> Bed:
    """Run a scenario beside a running follower. All that is missed by then is looked for twice."""

    async def main() -> Bed:
        bed = Bed()
        before(bed)
        async with asyncio.timeout(30):
            bed.follower.start()
            try:
                await scenario(bed)
                for _ in range(2):
                    await bed.follower.sweep()
                    await bed.hooks.settle(5)
            finally:
                await bed.follower.close()
        return bed

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_RETRY_S", 0.01)
    monkeypatch.setattr(follower, "_SWEEP_REST_S", 0.01)


async def an_event_comes_after_the_start(bed: Bed) -> None:
    await bed.subscribed()
    bed.make("c")
    bed.end("c")
    await until(bed.ends)


async def a_container_ends_before_the_subscription(bed: Bed) -> None:
    bed.runtime.away = True
    await until(lambda: bed.runtime.lists, "recovery")
    bed.make("c")
    bed.end("c")
    bed.runtime.away = False
    await until(bed.ends)


async def a_stream_is_cut_before_the_event(bed: Bed) -> None:
    await bed.subscribed()
    bed.make("c")
    bed.runtime.cut()
    bed.end("c")
    await until(bed.ends)
    assert bed.runtime.subscriptions == 2


async def a_list_fails_after_the_stream_was_cut(bed: Bed) -> None:
    await bed.subscribed()
    await until(lambda: bed.caught_up, "the first comparison")
    bed.make("c")
    bed.runtime.cut()
    bed.runtime.refuses_lists = 2
    bed.end("c")
    await until(bed.ends)


async def a_list_shows_the_end_before_the_event(bed: Bed) -> None:
    await bed.subscribed()
    bed.make("c")
    bed.runtime.states["c"] = cri.CONTAINER_EXITED
    await bed.follower.sweep()
    bed.runtime.send("c", STOPPED)
    bed.runtime.send("c", DELETED)
    await until(lambda: bed.store.container("c") is None)


async def an_event_comes_before_kubelet_stops_the_container(bed: Bed) -> None:
    await bed.subscribed()
    bed.make("c")
    bed.end("c")
    await until(bed.ends)
    bed.stop("c")
    bed.stop("c")


async def kubelet_stops_the_container_before_the_event(bed: Bed) -> None:
    await bed.subscribed()
    bed.make("c")
    bed.stop("c")
    bed.runtime.send("c", STOPPED)
    await until(lambda: bed.runtime.subscribed is not None and bed.runtime.subscribed.empty())


async def only_the_removal_has_an_event(bed: Bed) -> None:
    await bed.subscribed()
    bed.make("c")
    del bed.runtime.states["c"]
    bed.runtime.send("c", DELETED)
    await until(bed.ends)
    assert bed.store.container("c") is None


async def a_container_is_gone_without_an_event(bed: Bed) -> None:
    await bed.subscribed()
    await until(lambda: bed.caught_up, "the first comparison")
    bed.make("c")
    del bed.runtime.states["c"]
    bed.runtime.cut()
    await until(bed.ends)


@pytest.mark.parametrize(
    "scenario",
    [
        an_event_comes_after_the_start,
        a_container_ends_before_the_subscription,
        a_stream_is_cut_before_the_event,
        a_list_fails_after_the_stream_was_cut,
        a_list_shows_the_end_before_the_event,
        an_event_comes_before_kubelet_stops_the_container,
        kubelet_stops_the_container_before_the_event,
        only_the_removal_has_an_event,
        a_container_is_gone_without_an_event,
    ],
)
def test_an_end_is_reported_once_in_every_order_of_events(scenario: Scenario) -> None:
    bed = play(scenario)
    assert bed.ends() == ["c"]
    assert len(bed.server.requests(Stage.POST_START_CONTAINER)) == 1


def test_no_start_is_reported_after_the_containers_end() -> None:
    async def the_event_comes_before_the_answer_to_the_start(bed: Bed) -> None:
        await bed.subscribed()
        bed.make("c", answered=False)
        bed.end("c")
        await until(bed.ends)
        bed.answer_start("c")

    bed = play(the_event_comes_before_the_answer_to_the_start)
    assert [stage for stage, _ in bed.server.asked] == [Stage.POST_STOP_CONTAINER]


@pytest.mark.parametrize("by_event", [True, False])
def test_a_sandbox_that_ends_by_itself_ends_with_its_containers(by_event: bool) -> None:
    async def scenario(bed: Bed) -> None:
        await bed.subscribed()
        await until(lambda: bed.caught_up, "the first comparison")
        bed.make("c1")
        bed.make("c2")
        bed.runtime.states["p"] = cri.SANDBOX_NOTREADY
        if not by_event:
            bed.runtime.cut()
        bed.runtime.send("p", STOPPED)
        await until(lambda: "pod" in bed.ends())
        bed.runtime.states["c1"] = bed.runtime.states["c2"] = cri.CONTAINER_EXITED

    assert play(scenario).ends() == ["c1", "c2", "pod"]


@pytest.mark.parametrize("removed", [True, False])
def test_an_end_that_was_reported_is_not_repeated_with_its_sandboxs(removed: bool) -> None:
    async def scenario(bed: Bed) -> None:
        await bed.subscribed()
        bed.make("c1")
        bed.make("c2")
        bed.end("c1")
        await until(bed.ends)
        for identifier in ("c2", "p"):
            if removed:
                del bed.runtime.states[identifier]
        bed.runtime.send("p", DELETED if removed else STOPPED)
        await until(lambda: "pod" in bed.ends())
        assert (bed.store.pod("p") is None) is removed
        assert (bed.store.container("c2") is None) is removed

    assert play(scenario).ends() == ["c1", "c2", "pod"]


def test_a_list_from_before_an_object_was_added_says_nothing_of_its_end() -> None:
    """containerd lists a sandbox that it is still making as not ready."""

    async def scenario(bed: Bed) -> None:
        await bed.subscribed()
        await until(lambda: bed.caught_up, "the first comparison")
        bed.runtime.states["p"] = cri.SANDBOX_NOTREADY
        bed.runtime.while_listing = lambda: bed.make("c") if "c" not in bed.runtime.states else None
        await bed.follower.sweep()
        assert bed.store.pod("p") is not None
        await bed.hooks.settle(5)
        assert bed.ends() == []
        bed.runtime.states["p"] = cri.SANDBOX_READY

    assert play(scenario).ends() == []


@pytest.mark.parametrize(
    ("name", "version", "subscribes"),
    [
        ("containerd", "v2.1.4", True),
        ("containerd", "2.0.0", True),
        ("containerd", "v10.0", True),
        ("containerd", "1.7.27", False),
        ("containerd", "unknown", False),
        ("cri-o", "2.1.0", False),
    ],
)
def test_what_ended_while_no_proxy_ran_is_reported_at_the_start(
    name: str, version: str, subscribes: bool
) -> None:
    """Also from a runtime whose events are kubelet's alone: by the first comparison."""

    def before(bed: Bed) -> None:
        bed.runtime.version = cri.VersionResponse(runtime_name=name, runtime_version=version)
        bed.runtime.states |= {
            "p": cri.SANDBOX_READY,
            "c1": cri.CONTAINER_EXITED,
            "c2": cri.CONTAINER_EXITED,
            "c3": cri.CONTAINER_RUNNING,
        }
        # c2 had no call through the proxy.
        bed.journal.containers["c1"] = Container(id="c1", pod_id="p")

    async def scenario(bed: Bed) -> None:
        await until(bed.ends)

    bed = play(scenario, before=before)
    assert bed.ends() == ["c1"]
    assert bool(bed.runtime.subscriptions) is subscribes


@pytest.mark.parametrize("reported", [True, False])
def test_an_end_in_the_last_calls_of_a_predecessor_is_reported_by_one_of_the_two(
    reported: bool,
) -> None:
    """Both the object and its end may reach the journal after this process has read it."""

    async def scenario(bed: Bed) -> None:
        await bed.subscribed()
        bed.make("c1")
        bed.runtime.states["c2"] = cri.CONTAINER_EXITED
        bed.journal.containers.update(
            {i: Container(id=i, pod_id="p", stopped=reported) for i in ("c1", "c2")}
        )
        bed.runtime.states["c1"] = cri.CONTAINER_EXITED
        bed.runtime.send("c2", STOPPED)
        await until(lambda: stopped(bed, "c1") and (reported or len(bed.ends()) == 2))

    assert sorted(play(scenario).ends()) == ([] if reported else ["c1", "c2"])


def stopped(bed: Bed, identifier: str) -> bool:
    entry = bed.store.pod(identifier) or bed.store.container(identifier)
    assert entry is not None
    return entry.stopped


def test_a_process_with_a_successor_leaves_ends_to_it() -> None:
    async def scenario(bed: Bed) -> None:
        await bed.subscribed()
        bed.make("c1")
        bed.make("c2")
        bed.follower.stop()
        bed.hooks.leave_ends()
        bed.stop("c1")
        bed.call(
            "StopPodSandbox",
            cri.StopPodSandboxRequest(pod_sandbox_id="p"),
            cri.StopPodSandboxResponse(),
        )
        # Else the successor would find in the journal that they were reported.
        assert not stopped(bed, "c1")
        assert not stopped(bed, "p")
        # For the successor, which this bed has not.
        bed.store.drop_pod("p")

    assert play(scenario).ends() == []


def test_a_container_that_never_had_a_call_costs_one_look_into_the_journal() -> None:
    """However often it is listed. What follows it in the journal is found."""

    async def scenario(bed: Bed) -> None:
        await bed.subscribed()
        await until(lambda: bed.caught_up, "the first comparison")
        bed.runtime.states["c1"] = cri.CONTAINER_EXITED
        bed.runtime.send("c1", STOPPED)
        await until(lambda: bed.journal_reads)
        await bed.follower.sweep()
        assert bed.journal_reads == 1
        bed.runtime.states["c2"] = cri.CONTAINER_EXITED
        bed.journal.containers["c2"] = Container(id="c2", pod_id="p")
        bed.runtime.states["p"] = cri.SANDBOX_READY
        await bed.follower.sweep()

    bed = play(scenario)
    assert bed.ends() == ["c2"]
    assert bed.store.container("c1") is None


def test_a_runtime_that_ends_every_stream_at_once_is_not_listed_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower, "_SWEEP_REST_S", 60.0)

    async def scenario(bed: Bed) -> None:
        await bed.subscribed()
        await until(lambda: bed.caught_up, "the first comparison")
        while bed.runtime.subscriptions < 5:
            await bed.subscribed()
            bed.runtime.cut()
        assert bed.caught_up == 1

    play(scenario)
