"""The transport against real runtimes: frames of all sizes, restarts, twins, updates in place."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from hooks.decision import Decision
from hooks.observed import Container
from linux.resources import Resource
from nri_plugin.capabilities import Generation
from nri_plugin.options import Options
from nri_plugin.supervisor import Supervisor
from protos.cri.v1 import api_pb2 as cri
from tests.beds.containerd import GENERATIONS, Containerd, containerd
from tests.beds.kubelet import running_pod
from tests.beds.packages import CHECKOUT
from tests.nri_plugin.scenes import QUOTA, SHARES, RecordingHandler, Values, beside, decision

pytestmark = pytest.mark.containerd

LARGE_PODS = 6
LARGE_BYTES = 3 << 20
"""Of one annotation: a list of all these pods is above the 16 MiB that NRI 0.6.1 sends."""

UID = "0f0e0d0c-0000-4000-8000-0000000000%02d"


def manifest(number: int) -> dict[str, Any]:
    return {
        "metadata": {"name": f"web{number}", "uid": UID % number, "labels": {"app": "web"}},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "env": [{"name": "GREETING", "value": "hello"}],
                    "resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "1"}},
                }
            ]
        },
    }


@pytest.fixture(scope="module", params=GENERATIONS)
def bed(request: pytest.FixtureRequest) -> Iterator[Containerd]:
    with containerd(request.param) as running:
        yield running


class Main(RecordingHandler):
    """Decides for the pods' containers only, as one would."""

    def create_container(self, container: Container) -> Decision | None:
        super().create_container(container)
        return None if self.wanted is None else decision(self.wanted)


@contextmanager
def plugin(
    bed: Containerd, folder: Path, wanted: Values | None, *, socket: str = ""
) -> Iterator[tuple[Supervisor, Main]]:
    """A plugin on a loop of its own, synchronized. socket: the bed's when empty."""
    handler = Main(wanted)
    socket = socket or str(bed.nri_socket)
    options = Options(run_dir=str(folder), socket=socket, first_backoff_s=0.1)
    with serving(Supervisor(options, handler)) as supervisor:
        wait(lambda: supervisor.status.protects, "the plugin is synchronized")
        yield supervisor, handler


@contextmanager
def serving(supervisor: Supervisor) -> Iterator[Supervisor]:
    """Run a supervisor on a loop of its own."""
    loop = uvloop.new_event_loop()

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(supervisor.run())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield supervisor
    finally:
        loop.call_soon_threadsafe(supervisor.stop)
        thread.join(20)
        loop.close()


def wait(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s until {what}"
        time.sleep(0.01)


def test_the_runtime_is_recognised(bed: Containerd, tmp_path: Path) -> None:
    with plugin(bed, tmp_path, None) as (supervisor, handler):
        runtime = supervisor.status.runtime
        assert runtime is not None
        assert runtime.name == "containerd"
        assert ".".join(str(n) for n in runtime.version[:2]) == bed.generation
        expected = {"1.7": Generation.A, "2.1": Generation.B}[bed.generation]
        assert runtime.generation is expected
        assert runtime.request_timeout_s == 2.0
        assert handler.methods()[:2] == ["configured", "synchronize"]


@pytest.mark.parametrize("value_bytes", [500, 4000, 8200, 100_000])
def test_adjustments_of_all_sizes_reach_the_container(
    bed: Containerd, tmp_path: Path, value_bytes: int
) -> None:
    wanted: Values = {(Resource.ENV, f"V{n}"): "v" * value_bytes for n in range(5)}
    wanted[SHARES] = 333
    with (
        plugin(bed, tmp_path, wanted) as (supervisor, handler),
        running_pod(bed, manifest(1)) as pod,
    ):
        assert bed.groups.read(pod.container_cgroup("main"), "cpu.shares") == "333"
        count = bed.cri.execute(pod.containers["main"], ["sh", "-c", "echo ${#V4}"])
        assert count.stdout.strip() == str(value_bytes)
        assert supervisor.statistics.disconnections == 0
        assert handler.containers[-1].subject.pod.uid == UID % 1
        found = handler.containers[-1].subject.cgroup
        assert f"/{found}" == pod.container_cgroup("main")


def test_an_update_in_place_keeps_what_was_decided(bed: Containerd, tmp_path: Path) -> None:
    with (
        plugin(bed, tmp_path, {SHARES: 333}) as (supervisor, handler),
        running_pod(bed, manifest(2)) as pod,
    ):
        bed.cri.update_resources(
            pod.containers["main"],
            cri.LinuxContainerResources(cpu_period=100_000, cpu_quota=50_000, cpu_shares=256),
        )
        group = pod.container_cgroup("main")
        assert bed.groups.read(group, "cpu.shares") == "333"
        assert bed.groups.read(group, "cpu.cfs_quota_us") == "50000"
        asked = handler.containers[-1].subject.requested
        assert (asked.cpu_shares, asked.cfs_quota_us) == (256, 50_000)
        assert "container_updated" in handler.methods()
        assert supervisor.statistics.disconnections == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_containerd_is_joined_again(
    bed: Containerd, tmp_path: Path, how: signal.Signals
) -> None:
    with (
        plugin(bed, tmp_path, {SHARES: 333}) as (supervisor, handler),
        running_pod(bed, manifest(3)) as pod,
    ):
        bed.restart(how)
        wait(lambda: handler.methods().count("synchronize") == 2, "it synchronized again")
        wait(lambda: supervisor.status.protects, "the plugin is synchronized")
        known = {container.subject.id for container in handler.containers}
        assert pod.containers["main"] in known
        with running_pod(bed, manifest(4)) as other:
            assert bed.groups.read(other.container_cgroup("main"), "cpu.shares") == "333"


def test_a_container_created_while_away_is_repaired_by_the_synchronize(
    bed: Containerd, tmp_path: Path
) -> None:
    with running_pod(bed, manifest(5)) as pod:
        group = pod.container_cgroup("main")
        assert bed.groups.read(group, "cpu.cfs_quota_us") == "100000"
        gpu = (Resource.ENV, "GPU")
        with plugin(bed, tmp_path, {QUOTA: 70_000, gpu: "1"}) as (_, handler):
            wait(
                lambda: bed.groups.read(group, "cpu.cfs_quota_us") == "70000",
                "the quota is repaired",
            )
            assert handler.lacking[pod.containers["main"]] == (gpu,)


def test_two_plugins_with_one_identity_do_not_conflict(bed: Containerd, tmp_path: Path) -> None:
    wanted: Values = {SHARES: 333, (Resource.ENV, "E"): "1"}
    twin = tmp_path / "twin"
    twin.mkdir()
    with (
        plugin(bed, tmp_path, wanted),
        plugin(bed, twin, wanted, socket=beside(str(bed.nri_socket), "twin")) as (_, second),
        running_pod(bed, manifest(6)) as pod,
    ):
        assert bed.groups.read(pod.container_cgroup("main"), "cpu.shares") == "333"
        assert "create_container" in second.methods()


LAUNCHED = """\
#!/bin/sh
"exec" "{python}" "$0"  # a path with a space cannot stand in the first line; Python skips this one
import asyncio, os, sys
sys.path.insert(0, {checkout!r})
from nri_plugin.options import Options, launch_of
from nri_plugin.supervisor import Supervisor
from tests.nri_plugin.scenes import SHARES, RecordingHandler
launch = launch_of(os.environ)
assert launch is not None
supervisor = Supervisor(
    Options(run_dir={folder!r}), RecordingHandler({{SHARES: 444}}), launch=launch
)
asyncio.run(supervisor.run())
"""


def test_a_plugin_that_containerd_launches_serves(bed: Containerd, tmp_path: Path) -> None:
    executable = bed.folder / "nri" / "plugins" / "20-launched"
    executable.write_text(
        LAUNCHED.format(python=sys.executable, checkout=str(CHECKOUT), folder=str(tmp_path))
    )
    executable.chmod(0o755)
    try:
        bed.restart()
        with running_pod(bed, manifest(7)) as pod:
            assert bed.groups.read(pod.container_cgroup("main"), "cpu.shares") == "444"
    finally:
        executable.unlink()
        bed.restart()


def test_a_list_that_the_runtime_cannot_send_is_reported_and_taken_when_it_is_smaller(
    tmp_path: Path,
) -> None:
    with containerd("1.7") as small, ExitStack() as stack:
        for number in range(8, 8 + LARGE_PODS):
            large = manifest(number)
            large["metadata"]["annotations"] = {"large": "x" * LARGE_BYTES}
            stack.enter_context(running_pod(small, large))
        handler = Main({SHARES: 333})
        options = Options(
            run_dir=str(tmp_path),
            socket=str(small.nri_socket),
            first_backoff_s=0.1,
            longest_unlisted_backoff_s=0.5,
            list_overdue_s=3.0,
        )
        with serving(Supervisor(options, handler)) as supervisor:
            wait(lambda: "disconnected" in handler.methods(), "the list is given up")
            assert handler.methods()[:3] == ["configured", "list_overdue", "disconnected"]
            assert "sends no list of containers but 4086 of the 18" in supervisor.status.problem
            stack.close()
            wait(lambda: supervisor.status.protects, "the plugin is synchronized")
            with running_pod(small, manifest(7)) as pod:
                assert small.groups.read(pod.container_cgroup("main"), "cpu.shares") == "333"
