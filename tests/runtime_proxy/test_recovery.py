"""What the proxy asks the runtime, and what the store holds after it: at the start and later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy.checkpoint import Checkpoint, Recorded
from runtime_proxy.http2.grpc import Code
from runtime_proxy.model import Container, Pod, PodChanges
from runtime_proxy.recovery import Recovery, Unreported, with_retries
from runtime_proxy.runtime import Runtime, RuntimeAway
from runtime_proxy.store import NoJournal, Store
from tests.runtime_proxy.http2.h2_server import H2Server, Reply
from tests.runtime_proxy.listed import (
    CONTAINER,
    CONTAINER_STATUS,
    LISTED,
    POD,
    POD_STATUS,
    ListingRuntime,
    error,
    ok,
)


def with_runtime(
    folder: Path, fake: ListingRuntime, test: Callable[[Runtime], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), H2Server(folder / "cri.sock") as server:
            server.reply = fake
            runtime = Runtime(str(server.socket))
            try:
                await test(runtime)
            finally:
                runtime.close()

    asyncio.run(main())


@pytest.mark.parametrize("package", ["runtime.v1", "runtime.v1alpha2"])
def test_everything_that_the_runtime_lists_is_stored(tmp_path: Path, package: str) -> None:
    fake = ListingRuntime(package)

    async def test(runtime: Runtime) -> None:
        store = Store(NoJournal())
        recovery = Recovery(runtime, store, Recorded())
        assert not recovery.done
        await recovery.rebuild()
        assert recovery.done
        assert runtime.version is not None
        assert runtime.version.runtime_name == "containerd"
        assert store.sizes == (1, 1)
        assert store.pod("p1") == POD
        assert store.container("c1") == CONTAINER
        statuses = dict(fake.asked)
        asked = cri.PodSandboxStatusRequest.FromString(statuses["PodSandboxStatus"])
        assert asked == cri.PodSandboxStatusRequest(pod_sandbox_id="p1", verbose=True)
        of_container = cri.ContainerStatusRequest.FromString(statuses["ContainerStatus"])
        assert of_container == cri.ContainerStatusRequest(container_id="c1", verbose=True)
        # What is in the store is not asked for again.
        before = len(fake.asked)
        assert await recovery.pod("p1") == POD
        assert await recovery.container("c1") == CONTAINER
        assert len(fake.asked) == before

    with_runtime(tmp_path, fake, test)


def test_objects_that_ended_are_stored_as_stopped(tmp_path: Path) -> None:
    fake = ListingRuntime()
    pod, container = cri.PodSandboxStatusResponse(), cri.ContainerStatusResponse()
    pod.CopyFrom(POD_STATUS)
    pod.status.state = cri.SANDBOX_NOTREADY
    container.CopyFrom(CONTAINER_STATUS)
    container.status.state = cri.CONTAINER_EXITED
    fake.answers["PodSandboxStatus"] = ok(pod)
    fake.answers["ContainerStatus"] = ok(container)

    async def test(runtime: Runtime) -> None:
        found_pod, found = await runtime.pod("p1"), await runtime.container("c1")
        assert found_pod is not None
        assert found is not None
        assert found_pod.stopped
        assert found.stopped

    with_runtime(tmp_path, fake, test)


def test_the_journal_adds_what_the_runtime_does_not_know(tmp_path: Path) -> None:
    """Through a file, as after a restart: also annotations that a hook gave a container."""
    journal = Checkpoint(str(tmp_path / "state"))
    changes = PodChanges(labels={"l": "1"}, annotations={"a": "2"}, cgroup_parent="/moved")
    journal.pod(Pod(id="p1", changes=changes, stopped=True, cgroup_parent="/old"))
    journal.pod(Pod(id="gone"))
    journal.container(
        Container(
            id="c1",
            pod_id="p1",
            annotations={"by-a-hook": "h", "kept": "old"},
            cgroup_parent="/moved",
            stopped=True,
        )
    )
    journal.container(Container(id="gone too"))
    journal.close()
    again = Checkpoint(str(tmp_path / "state"))

    async def test(runtime: Runtime) -> None:
        store = Store(again)
        await Recovery(runtime, store, again.recorded, again.reread).rebuild()
        pod, container = store.pod("p1"), store.container("c1")
        assert pod is not None
        assert container is not None
        assert (pod.changes, pod.stopped) == (changes, True)
        assert (pod.cgroup_parent, pod.labels) == ("/kubepods/pod-u", {"app": "web"})
        assert container.annotations == {"by-a-hook": "h", "kept": "k"}
        assert (container.cgroup_parent, container.stopped) == ("/moved", True)
        assert container.resources == CONTAINER.resources
        assert again.reread().identifiers == {"p1", "c1"}

    with_runtime(tmp_path, ListingRuntime(), test)


def test_what_a_predecessor_adds_after_the_start_counts_for_unknown_objects(tmp_path: Path) -> None:
    fake = ListingRuntime()
    lists = fake.answers["ListPodSandbox"], fake.answers["ListContainers"]
    fake.answers["ListPodSandbox"] = ok(cri.ListPodSandboxResponse())
    fake.answers["ListContainers"] = ok(cri.ListContainersResponse())
    added = Recorded(pods={"p1": Pod(id="p1", changes=PodChanges(cgroup_parent="/late"))})

    async def test(runtime: Runtime) -> None:
        recovery = Recovery(runtime, Store(NoJournal()), Recorded(), lambda: added)
        await recovery.rebuild()
        fake.answers["ListPodSandbox"], fake.answers["ListContainers"] = lists
        pod = await recovery.pod("p1")
        assert pod is not None
        assert pod.changes.cgroup_parent == "/late"

    with_runtime(tmp_path, fake, test)


ABSENT = [Code.NOT_FOUND, Code.UNKNOWN, Code.INTERNAL, Code.RESOURCE_EXHAUSTED]
AWAY = [Code.UNAVAILABLE, Code.CANCELLED, Code.DEADLINE_EXCEEDED]


@pytest.mark.parametrize("code", ABSENT + AWAY)
def test_an_object_without_a_status_is_left_out_unless_the_runtime_is_away(
    tmp_path: Path, code: Code, caplog: pytest.LogCaptureFixture
) -> None:
    fake = ListingRuntime()
    fake.answers["PodSandboxStatus"] = fake.answers["ContainerStatus"] = error(code)

    async def test(runtime: Runtime) -> None:
        store = Store(NoJournal())
        recovery = Recovery(runtime, store, Recorded())
        for look in (recovery.pod("p1"), recovery.container("c1")):
            if code in AWAY:
                with pytest.raises(RuntimeAway, match="the reason"):
                    await look
            else:
                assert await look is None
        if code not in AWAY:
            await recovery.rebuild()
            assert recovery.done
        assert store.sizes == (0, 0)

    with_runtime(tmp_path, fake, test)
    assert ("no status" in caplog.text) is (code in ABSENT and code is not Code.NOT_FOUND)


@pytest.mark.parametrize("method", ["Version", "ListPodSandbox", "ListContainers"])
@pytest.mark.parametrize("reply", [error(Code.INTERNAL), Reply(messages=[b"\xff\xff"])])
def test_without_a_list_recovery_is_not_done(tmp_path: Path, method: str, reply: Reply) -> None:
    fake = ListingRuntime()
    fake.answers[method] = reply

    async def test(runtime: Runtime) -> None:
        recovery = Recovery(runtime, Store(NoJournal()), Recorded())
        with pytest.raises(RuntimeAway):
            await recovery.rebuild()
        assert not recovery.done

    with_runtime(tmp_path, fake, test)


@pytest.mark.parametrize("count", [0, 2])
def test_a_beginning_of_an_id_that_is_not_of_one_container_is_unknown(
    tmp_path: Path, count: int
) -> None:
    fake = ListingRuntime()
    fake.answers["ListContainers"] = ok(cri.ListContainersResponse(containers=[LISTED] * count))

    async def test(runtime: Runtime) -> None:
        assert await runtime.container("c") is None
        ((_, request),) = fake.asked
        assert cri.ListContainersRequest.FromString(request).filter.id == "c"

    with_runtime(tmp_path, fake, test)


def test_a_sweep_returns_what_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fake = ListingRuntime()

    async def test(runtime: Runtime) -> None:
        store = Store(NoJournal())
        recovery = Recovery(runtime, store, Recorded())
        await recovery.rebuild()
        assert await recovery.sweep() == Unreported([], [], [], [])
        assert "ends that no event" not in caplog.text
        fake.answers["ListContainers"] = ok(cri.ListContainersResponse())
        assert await recovery.sweep() == Unreported([], [], [], [CONTAINER])
        fake.answers["ListPodSandbox"] = ok(cri.ListPodSandboxResponse())
        assert await recovery.sweep() == Unreported([], [], [POD], [])
        assert store.sizes == (0, 0)
        logged = [r.__dict__ for r in caplog.records if "ends that no event" in r.message]
        kinds = ("ended_pods", "ended_containers", "gone_pods", "gone_containers")
        assert [[line[kind] for kind in kinds] for line in logged] == [[0, 0, 0, 1], [0, 0, 1, 0]]

    with_runtime(tmp_path, fake, test)


def test_events_come_in_order_and_their_end_is_the_runtimes(tmp_path: Path) -> None:
    fake = ListingRuntime()
    events = [
        cri.ContainerEventResponse(container_id=name, container_event_type=kind)
        for name, kind in (("a", cri.CONTAINER_STOPPED_EVENT), ("b", cri.CONTAINER_DELETED_EVENT))
    ]
    messages = [event.SerializeToString() for event in events]

    async def read(runtime: Runtime) -> list[cri.ContainerEventResponse]:
        async with runtime.events() as coming:
            return [event async for event in coming]

    async def test(runtime: Runtime) -> None:
        fake.answers["GetContainerEvents"] = Reply(messages=messages)
        assert await read(runtime) == events
        fake.answers["GetContainerEvents"] = Reply(
            messages=messages, trailers=[("grpc-status", "14"), ("grpc-message", "ending")]
        )
        found: list[Any] = []
        with pytest.raises(RuntimeAway, match="ending"):
            async with runtime.events() as coming:
                async for event in coming:
                    found.append(event)
        assert found == events
        fake.answers["GetContainerEvents"] = Reply(messages=[b"\xff"])
        with pytest.raises(RuntimeAway):
            await read(runtime)

    with_runtime(tmp_path, fake, test)


def test_a_step_is_tried_until_the_runtime_answers(caplog: pytest.LogCaptureFixture) -> None:
    tries = 0

    async def step() -> None:
        nonlocal tries
        tries += 1
        if tries == 2:
            raise ExceptionGroup("several", [RuntimeAway("still away")])
        if tries < 4:
            raise RuntimeAway("away")

    asyncio.run(with_retries(step, retry_s=0.0))
    assert tries == 4
    assert caplog.text.count("runtime gave no answer") == 1


def test_a_fault_in_a_step_is_not_taken_for_an_absent_runtime() -> None:
    async def step() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(with_retries(step, retry_s=0.0))
