"""What kubelet requested, over resizes, restarts and a time without a daemon."""

from __future__ import annotations

import pytest

from koordlet.daemon import passes
from koordlet.state import requests_log
from koordlet.state.requests_log import RequestsLog
from tests.koordlet.daemon.bed import (
    ONE_CPU,
    SLO,
    node,
    node_object,
    run,
    until,
)


def test_an_in_place_resize_is_divided_once() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1")
                final = await n.resize("c1", 50_000)
                assert final.cpu.quota.value == 40_000

    run(test)


def test_the_reconciler_leaves_a_resized_container_alone_until_it_has_the_resize(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running() as daemon:
                await n.run_pod(pod)
                await n.create(pod, "c1")
                await n.runtime.start_container("c1")
                subject = daemon.parts.state.container("c1")
                executor = daemon.parts.passes.executor
                assert subject is not None and executor is not None
                await until("the first look", lambda: not daemon.parts.passes._queueing)
                gathering = passes._GATHER_S
                monkeypatch.setattr(passes, "_GATHER_S", 3600.0)
                await n.resize("c1", 50_000)
                assert subject.cgroup in executor.requests
                daemon.parts.state_changed("test")
                await until("a pass", lambda: not executor.requests)
                assert daemon.parts.passes._queueing is not None
                monkeypatch.setattr(passes, "_GATHER_S", gathering)
                await n.resize("c1", 60_000)  # whether or not the runtime reports its end
                await until("an update of the pod", lambda: not executor.requests)

    run(test)


def test_what_kubelet_asked_for_is_known_after_a_restart() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("2.0"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1")
                await n.runtime.start_container("c1")
            # The runtime now shows 50000, which is ours; halving it again would be wrong.
            n.daemon = n.new_daemon()
            async with n.running():
                state = n.daemon.parts.state.container("c1")
                assert state is not None
                assert state.requested.cfs_quota_us == 100_000
                assert n.daemon.parts.state.unprotected() == []

    run(test)


def test_a_pod_grows_with_its_container_where_only_the_runtime_reports_it() -> None:
    """The runtime reports a pod's own values only at its start."""

    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            path = n.kubelet.path(pod.cgroup, "cpu.max")
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1")
                await n.runtime.start_container("c1")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")
                n.kernel.write_as("kubelet", path, "200000 100000")
                await n.resize("c1", 200_000)
                await until("the new quota", lambda: n.kernel.text(path) == "160000 100000")
                n.put(node_object("1.0"))
                await until("kubelet's", lambda: n.kernel.text(path) == "200000 100000")

    run(test)


def test_a_resize_while_the_daemon_is_away_is_divided_once_and_given_back() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1")
                await n.runtime.start_container("c1")
            await n.resize("c1", 50_000)
            for _ in range(2):  # what was found out is kept over another restart
                n.daemon = n.new_daemon()
                async with n.running():
                    state = n.daemon.parts.state.container("c1")
                    assert state is not None
                    assert state.requested.cfs_quota_us == 50_000
                    cpu = n.runtime.containers["c1"].linux.resources.cpu
                    assert cpu.quota.value == 40_000

    run(test)


@pytest.mark.parametrize("resized", [False, True], ids=["created", "resized"])
def test_a_kill_right_after_a_reply_divides_no_value_twice(resized: bool) -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                if resized:
                    await n.create(pod, "c1")
                    await n.runtime.start_container("c1")
                files = [n.folder / "run" / f"requests.log{end}" for end in ("", ".staged")]
                with pytest.MonkeyPatch.context() as patched:
                    # As in the milliseconds after a reply.
                    patched.setattr(RequestsLog, "write", lambda self: None)
                    if resized:
                        await n.resize("c1", 50_000)
                    else:
                        await n.create(pod, "c1")
                    left = [(file, file.read_bytes()) for file in files if file.exists()]
                if not resized:
                    await n.runtime.start_container("c1")
            for file, content in left:
                file.write_bytes(content)  # what a kill at that moment leaves
            n.daemon = n.new_daemon()
            async with n.running():
                state = n.daemon.parts.state.container("c1")
                assert state is not None
                asked, delivered = (50_000, 40_000) if resized else (100_000, 80_000)
                assert state.requested.cfs_quota_us == asked
                cpu = n.runtime.containers["c1"].linux.resources.cpu
                assert cpu.quota.value == delivered

    run(test)


def test_requests_are_remembered_however_many_there_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests_log, "_REWRITE_BYTES", 800)

    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("2.0"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                for number in range(30):
                    await n.create(pod, f"c{number}")
                    if number:
                        await n.runtime.remove_container(f"c{number - 1}")
                path = n.folder / "run" / "requests.log"
                await until("the last request", lambda: b"c29" in path.read_bytes())
                assert len(path.read_bytes()) < 1600

    run(test)
