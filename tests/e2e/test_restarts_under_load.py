"""A real node under real load: its figures, and strategies across restarts of every program.

The node is that of `tests.e2e.node`, with kubelet on containerd and koordlet on NRI. Other
programs of the machine use CPU, memory and disk meanwhile, so no test expects an amount of the
node's; it compares with the kernel's own counters, or waits for a state.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import pytest
import yaml

from apis.quantity import parse_quantity
from koordctl.client import Client
from koordlet.measurement.series import Metric
from koordlet.qos.eviction.past_file import FILE_NAME as EVICTIONS
from kube.client import encode_object
from kube.resources import NODE_METRICS, PODS
from tests.beds.apiserver import api_server
from tests.beds.containerd import containerd
from tests.beds.daemon import NODE_NAME, daemon
from tests.beds.kubelet import RunningPod
from tests.beds.real_kubelet import real_kubelet
from tests.cluster.conftest import install, read
from tests.e2e.manifests import CPUS, Manifest, pod
from tests.e2e.node import (
    Node,
    as_running,
    configure,
    create,
    evictions_of,
    in_touch,
    is_running,
    running,
    sources,
    stored,
    threshold,
)
from tests.e2e.observe import all_values, settled_values
from tests.e2e.samples import Samples, cpu_seconds, disk_bytes, memory_total, memory_used
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.kubelet,
    pytest.mark.containerd,
    pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs: a service takes one of them"),
]

_MIB = 1 << 20
_SPIN = ["/bin/sh", "-c", "while :; do :; done"]
_FILE = 128 * _MIB
_READER = (
    f"dd if=/dev/zero of=/data bs=1M count={_FILE // _MIB} 2> /dev/null;"
    " while :; do cat /data > /dev/null; sleep 0.2; done"
)
_WRITER = (
    "while :; do dd if=/dev/zero of=/dirty bs=1M count=16 conv=fsync 2> /dev/null; sleep 0.2; done"
)
_HELD = 48 * _MIB
_HOG = f"trap '' TERM; x=$(yes | head -c {_HELD}); while :; do sleep 0.2; done"
_PROTECTED = {"koordinator.sh/eviction-policy": "[]"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("busy")
    with ExitStack() as stack:
        server = stack.enter_context(api_server())
        asyncio.run(install(server))
        runtime = stack.enter_context(containerd("2.1"))
        kubelet = stack.enter_context(real_kubelet(runtime, server))
        config = {
            **sources(server, kubelet, folder),
            "cri": {"socket": str(runtime.socket)},
            "qos": {"evictMostPerRound": 1, "memoryEvictCoolDown": "10m"},
        }
        asyncio.run(_prepare(server))
        koordlet = stack.enter_context(
            daemon(runtime, [], gates={"BEMemoryEvict": True}, config=config)
        )
        made = Node(server, runtime, kubelet, koordlet, None)
        wait(lambda: in_touch(made), "koordlet's sources")
        root = runtime.groups.path.rpartition("/")[0]
        # The pods get CPU time on a machine that is busy with other programs.
        runtime.groups.file(root, "cpu.shares").write_text(str(runtime.groups.weight(16_384)))
        yield made


async def _prepare(server: Any) -> None:
    async with server.client() as client:
        await configure(client)
        policy = {"reportIntervalSeconds": 30, "aggregateDurationSeconds": 60}
        body = {"metadata": {"name": NODE_NAME}, "spec": {"metricCollectPolicy": policy}}
        await client.create(NODE_METRICS, encode_object(NODE_METRICS, body))


def wait(condition: Callable[[], object], what: str) -> None:
    wait_until(condition, what, timeout_s=90, every_s=0.1)


def status(here: Node) -> dict[str, Any]:
    answer: dict[str, Any] = Client(str(here.koordlet.run_dir)).get("/status")
    return answer


def measured(here: Node, pod: RunningPod, value: str) -> float:
    """The newest sample of a pod, 0 without one. value: "cpu" (cores) or "memory" (bytes)."""
    pods = Client(str(here.koordlet.run_dir)).get("/top").get("pods", ())
    return next((each[value] or 0.0 for each in pods if each["uid"] == pod.uid), 0.0)


def strategy(here: Node, name: str) -> dict[str, Any]:
    return next(each for each in status(here)["strategies"] if each["name"] == name)


def rounds(here: Node, count: int) -> None:
    """Wait for some more rounds of measurements."""

    def made() -> int:
        return int(status(here)["measuring"]["rounds"])

    before = made()
    wait(lambda: made() >= before + count, "rounds of measurements")


def steps(here: Node, count: int) -> None:
    """Wait for some more steps of the strategies."""

    def made() -> int:
        return min(int(strategy(here, name)["steps"]) for name in ("BECPUSuppress", "memoryEvict"))

    before = made()
    wait(lambda: made() >= before + count, "steps of the strategies")


def collect(here: Node, **policy: Any) -> None:
    """Change how the node reports."""
    body = msgspec.json.encode({"spec": {"metricCollectPolicy": policy}})
    here.ask(lambda client: client.patch(NODE_METRICS, NODE_NAME, body))


def reported(here: Node) -> Any:
    """The NodeMetric's status."""
    return here.ask(lambda client: read(client, NODE_METRICS, NODE_NAME)).get("status") or {}


def reported_memory(here: Node, pod: RunningPod) -> int:
    """Bytes of a pod in the NodeMetric, 0 while it is not there."""
    pods = reported(here).get("podsMetric", ())
    return next(
        (
            parse_quantity(each["podUsage"]["resources"]["memory"]).value()
            for each in pods
            if each["name"] == pod.name
        ),
        0,
    )


@contextmanager
def without_api_server(here: Node) -> Iterator[None]:
    here.server.stop("kube-apiserver", how=signal.SIGKILL)
    try:
        yield
    finally:
        here.server.start_apiserver()


@contextmanager
def without_kubelet(here: Node) -> Iterator[None]:
    here.kubelet.stop(signal.SIGKILL)
    try:
        yield
    finally:
        here.kubelet.start()


def restart_koordlet(here: Node, how: signal.Signals) -> None:
    here.koordlet.stop(how)
    here.koordlet.start()


# --- figures -------------------------------------------------------------------------------------


def cpu_of(here: Node, pod: RunningPod) -> float:
    """CPU seconds of a pod since its start."""
    groups = here.runtime.groups
    if groups.version == 1:
        return int(groups.read(pod.cgroup, "cpuacct.usage")) / 1e9
    return int(groups.read(pod.cgroup, "cpu.stat").split()[1]) / 1e6


def counters(here: Node, pod: RunningPod) -> dict[tuple[Metric, str], float]:
    """The kernel's counters, by the metric and the object of their rates."""
    found = {(Metric.NODE_CPU, ""): cpu_seconds(), (Metric.POD_CPU, pod.uid): cpu_of(here, pod)}
    for name, (read_, written) in disk_bytes().items():
        found[Metric.NODE_DISK_READ, name] = read_
        found[Metric.NODE_DISK_WRITE, name] = written
    return found


def test_figures_of_spinners_readers_writers_and_hogs_are_the_kernels(here: Node) -> None:
    with (
        running(here, pod("reader", command=["/bin/sh", "-c", _READER])) as reader,
        running(here, pod("writer", "BE", command=["/bin/sh", "-c", _WRITER])) as writer,
        running(here, pod("hog", command=["/bin/sh", "-c", _HOG])) as hog,
        running(here, pod("spinner", command=_SPIN)) as spinner,
    ):
        wait(lambda: measured(here, hog, "memory") > _HELD, "the hog has its memory")
        wait(lambda: measured(here, spinner, "cpu") > 0, "rates are known")
        begin, before = time.monotonic(), counters(here, spinner)
        rounds(here, 5)
        after, used, end = counters(here, spinner), memory_used(), time.monotonic()
        rounds(here, 2)
        collect(here, nodeMemoryCollectPolicy="usageWithPageCache")
        here.koordlet.stop()
        samples = Samples(here.koordlet.run_dir)
        here.koordlet.start()
        # The mean of a minute, with the samples from before the end.
        wait(lambda: reported_memory(here, reader) > _FILE / 2, "page cache is reported")
    disks = samples.objects(Metric.NODE_DISK_WRITE)
    for (metric, of), was in before.items():
        if metric not in (Metric.NODE_DISK_READ, Metric.NODE_DISK_WRITE) or of in disks:
            least, most = samples.growth(metric, of, (begin, end))
            grew = after[metric, of] - was
            # A reading lies a moment behind the start of its round, by which it is dated.
            assert least * 0.9 <= grew <= most * 1.1, (metric, of, least, grew, most)
    assert sum(samples.growth(Metric.NODE_DISK_WRITE, of, (begin, end))[1] for of in disks) > _MIB
    of_node = Metric.NODE_MEMORY, Metric.NODE_MEMORY_WITH_PAGE_CACHE
    for metric, kernels in zip(of_node, used, strict=True):
        found = samples.values(metric)[-3:]
        some = memory_total() / 20  # what other programs may take or free within three rounds
        assert min(found) - some <= kernels <= max(found) + some, (metric, found, kernels)
    for each, least, most in ((reader, 0, 16), (writer, 0, 16), (hog, 48, 96)):
        without = samples.values(Metric.POD_MEMORY, each.uid)[-1]
        cached = samples.values(Metric.POD_MEMORY_WITH_PAGE_CACHE, each.uid)[-1] - without
        assert least * _MIB <= without <= most * _MIB, (each.name, without)
        if each is reader:
            assert _FILE <= cached <= _FILE + 16 * _MIB, cached
        if each is hog:
            assert cached <= 16 * _MIB, cached


# --- evictions -----------------------------------------------------------------------------------


@contextmanager
def lingering(here: Node, manifest: Manifest) -> Iterator[RunningPod]:
    """A pod that may take an hour to end."""
    name = create(here, manifest, grace_s=3600)
    try:
        wait(lambda: is_running(here, name), f"{name} runs")
        yield as_running(here, stored(here, name))
    finally:
        at_once = msgspec.json.encode({"gracePeriodSeconds": 0})
        path = PODS.path(name=name, namespace="default")
        here.ask(lambda client: client.request("DELETE", path, body=at_once))
        wait(lambda: stored(here, name) is None, f"{name} ends")


def evictions(here: Node, pod: RunningPod) -> int:
    """How often events say that the pod was evicted."""
    return sum(each.get("count") or 1 for each in evictions_of(here, pod))


def being_deleted(here: Node, pod: RunningPod) -> bool:
    return "deletionTimestamp" in stored(here, pod.name)["metadata"]


def protect(here: Node, pod: RunningPod) -> None:
    body = msgspec.json.encode({"metadata": {"annotations": _PROTECTED}})
    here.ask(lambda client: client.patch(PODS, pod.name, body, namespace="default"))


def charged(here: Node, pod: RunningPod) -> int:
    """Bytes that the kernel charges to a pod, with page cache."""
    groups = here.runtime.groups
    name = "memory.usage_in_bytes" if groups.version == 1 else "memory.current"
    return int(groups.read(pod.cgroup, name))


# --- without the API server ----------------------------------------------------------------------


_POLITE_HOG = f"trap 'exit 0' TERM; x=$(yes | head -c {_HELD}); while :; do sleep 0.2; done"


def set_gates(here: Node, **gates: bool) -> None:
    """Write feature gates into the configuration, which a restart or a reload applies."""
    tree = yaml.safe_load(here.koordlet.config.read_text())
    tree["featureGates"] |= gates
    here.koordlet.config.write_text(yaml.safe_dump(tree))


@contextmanager
def evicting_each_second(here: Node) -> Iterator[None]:
    """No cool-down holds evictions back, and the gate is off until a reload."""
    before = here.koordlet.config.read_text()
    tree = yaml.safe_load(before)
    tree["qos"]["memoryEvictCoolDown"] = "1s"
    here.koordlet.config.write_text(yaml.safe_dump(tree))
    set_gates(here, BEMemoryEvict=False)
    restart_koordlet(here, signal.SIGTERM)
    try:
        yield
    finally:
        here.koordlet.config.write_text(before)
        here.koordlet.stop(signal.SIGTERM)
        # The cool-down after these evictions must not hold others back.
        (here.koordlet.run_dir / EVICTIONS).unlink(missing_ok=True)
        here.koordlet.start()


def starts(here: Node, pod: RunningPod) -> int:
    """How often kubelet has started the pod's container, as far as it is reported."""
    (main,) = stored(here, pod.name)["status"]["containerStatuses"]
    return 1 + int(main["restartCount"])


def evicted(here: Node) -> list[tuple[str, str, str]]:
    """Pod, means and outcome of each line of the history."""
    lines = status(here)["evictions"]["last"]
    return [(each["pod"], each["means"], each["outcome"]) for each in lines]


def test_without_the_api_server_containers_are_stopped_and_not_again_when_it_returns(
    here: Node,
) -> None:
    """Kubelet starts them again, so the node stays short of memory.

    Before the test with a pod that lingers: containerd keeps a plugin waiting while it stops one.
    """
    with (
        evicting_each_second(here),
        running(here, pod("hog", "BE", command=["/bin/sh", "-c", _POLITE_HOG])) as hog,
        threshold(here, **_STRATEGIES),
    ):
        wait(lambda: "cores" in strategy(here, "BECPUSuppress")["summary"], "the NodeSLO is known")
        wait(lambda: measured(here, hog, "memory") > _HELD, "the hog has its memory")
        obj = f"Pod default/{hog.name}"
        with without_api_server(here):
            set_gates(here, BEMemoryEvict=True)
            os.kill(here.koordlet.pid, signal.SIGHUP)
            wait(lambda: (obj, "cri", "evicted") in evicted(here), "its container is stopped")
        wait(lambda: evictions(here, hog) == 1, "the event is written after all")
        wait(lambda: starts(here, hog) == 2, "kubelet started it again")
        wait(lambda: measured(here, hog, "memory") > _HELD, "it has its memory again")
        steps(here, 8)  # it counts as released for 5 s
        assert "no pod is left" in why_short(here)
        assert evicted(here) == [(obj, "api", "failed"), (obj, "cri", "evicted")]
        assert not being_deleted(here, hog)
        assert (starts(here, hog), evictions(here, hog)) == (2, 1)


# --- suppression ---------------------------------------------------------------------------------


_MOST_US = round((len(CPUS) * 0.95 - 0.3) * 100_000)
"""What best-effort pods have at most beside a service that uses 0.3 CPUs."""


def quota(here: Node) -> int:
    """The CFS quota of all best-effort pods in µs, -1 for none."""
    groups = here.runtime.groups
    return int(groups.read(f"{groups.path}/besteffort", "cpu.cfs_quota_us"))


def suppressed(here: Node) -> bool:
    """Whether the daemon sees the service's load, and best-effort pods have what that leaves."""
    found = re.search(r"- LS ([0-9.]+)", strategy(here, "BECPUSuppress")["summary"])
    return found is not None and float(found[1]) > 0.3 and 0 < quota(here) <= _MOST_US


@contextmanager
def watched(here: Node) -> Iterator[set[int]]:
    """Read the quota all the time in a thread, and collect it, until the block ends."""
    seen: set[int] = set()
    over = threading.Event()

    def read() -> None:
        while not over.wait(0.02):
            seen.add(quota(here))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def best_effort_values(values: Mapping[str, bytes]) -> dict[str, bytes]:
    return {path: value for path, value in values.items() if "/besteffort" in path}


def bounded(quotas: set[int]) -> bool:
    return min(quotas) > 0 and max(quotas) <= _MOST_US


def test_strategies_go_on_over_restarts_of_every_program(here: Node) -> None:
    """Best-effort pods stay suppressed, the evicted one is evicted once, and values return."""
    with (
        running(here, pod("batch", "BE", annotations=_PROTECTED, command=_SPIN)),
        running(here, pod("reader", "BE", command=["/bin/sh", "-c", _READER])) as reader,
        lingering(here, pod("hog", "BE", command=["/bin/sh", "-c", _HOG])) as hog,
    ):
        wait(lambda: measured(here, hog, "memory") > _HELD, "the hog has its memory")
        wait(lambda: measured(here, reader, "memory") > 0, "the reader is measured")
        wait(lambda: charged(here, reader) > _FILE > charged(here, hog), "the reader has more")
        original = best_effort_values(settled_values(here.runtime))
        with (
            running(here, pod("web", "LS", requests={"cpu": "500m"}, command=_SPIN)),
            threshold(here, **_STRATEGIES),
        ):
            wait(lambda: being_deleted(here, hog), "the hog is evicted")
            assert not being_deleted(here, reader), "its page cache does not count"
            protect(here, reader)
            wait(lambda: suppressed(here), "suppression begins")
            with watched(here) as quotas:
                with without_kubelet(here):
                    steps(here, 3)
                here.runtime.restart(signal.SIGKILL)
                steps(here, 3)
            assert bounded(quotas), quotas
            reported_at = reported(here)["updateTime"]
            with without_api_server(here):
                with watched(here) as quotas:
                    with without_kubelet(here):
                        restart_koordlet(here, signal.SIGKILL)
                        # Kubelet's list has the hog's end, and the runtime does not know of it;
                        # the daemon that was killed has left its evictions behind.
                        cools = "within 600 s of the last evictions"
                        wait(lambda: cools in why_short(here), "nothing is evicted")
                    wait(lambda: suppressed(here), "suppression goes on")
                    restart_koordlet(here, signal.SIGTERM)
                    wait(lambda: suppressed(here), "suppression goes on")
                assert bounded(quotas), quotas
            wait(lambda: in_touch(here), "koordlet's sources are back")
            wait(lambda: reported(here)["updateTime"] != reported_at, "reports are taken again")
            steps(here, 3)
            assert here.runtime.groups.read(hog.container_cgroup("main"), "cgroup.procs")
            assert (evictions(here, hog), evictions(here, reader)) == (1, 0)
            assert status(here)["evictions"]["evictions"] == 0, "since the last start"
        wait(lambda: quota(here) == -1, "the original quota is back")
        wait(
            lambda: best_effort_values(all_values(here.runtime)) == original,
            "every value is as before",
        )


_STRATEGIES = {
    "cpuSuppressPolicy": "cfsQuota",
    "cpuSuppressThresholdPercent": 95,
    "memoryEvictThresholdPercent": 1,
    "memoryEvictLowerPercent": 0,
}


def why_short(here: Node) -> str:
    """Why no pod goes, though memory is short."""
    return " ".join(each["why"] for each in status(here)["evictions"]["short"])
