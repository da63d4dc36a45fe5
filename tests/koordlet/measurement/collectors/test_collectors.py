"""The collectors of CPU and memory on simulated kernels of both cgroup versions."""

from __future__ import annotations

import errno
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.measurement.collecting import HostAppTarget, PodTarget, Round, Targets
from koordlet.measurement.collectors.cgroups import memory_of
from koordlet.measurement.collectors.system import SystemCollector
from koordlet.measurement.kernel_files import LocalFiles
from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store
from tests.koordlet.measurement.collectors.simulated_node import GIB, SimulatedNode
from tests.simulated import DEBIAN_12_V1, DEBIAN_12_V2, Topology
from tests.simulated.cpu import CpuState
from tests.simulated.kubelet import Limits

VERSIONS = pytest.mark.parametrize(
    "node",
    [DEBIAN_12_V1, DEBIAN_12_V2],
    ids=["v1", "v2"],
    indirect=True,
)


@pytest.fixture
def node(request: pytest.FixtureRequest) -> SimulatedNode:
    """Two sockets with a NUMA node each, eight CPUs."""
    topology = Topology(sockets=2, cores_per_node=2, threads=2)
    return SimulatedNode(replace(request.param, topology=topology))


@VERSIONS
def test_a_pod_and_its_container_have_cpu_and_memory(node: SimulatedNode) -> None:
    pod = node.kubelet.add_pod(Limits())
    container = pod.start()
    node.retarget()
    node.kernel.use_memory(container.task, GIB)
    node.kernel.use_page_cache(container.cgroup, GIB // 2)
    node.round()
    container.task.cpu_seconds += 3.0
    node.round(2.0)
    assert node.latest(Metric.POD_CPU, pod.uid) == pytest.approx(1.5)
    assert node.latest(Metric.CONTAINER_CPU, container.id) == pytest.approx(1.5)
    for metric, of in ((Metric.POD_MEMORY, pod.uid), (Metric.CONTAINER_MEMORY, container.id)):
        assert node.latest(metric, of) == GIB
    assert node.latest(Metric.POD_MEMORY_WITH_PAGE_CACHE, pod.uid) == GIB + GIB // 2
    assert node.latest(Metric.CONTAINER_MEMORY_WITH_PAGE_CACHE, container.id) == GIB + GIB // 2
    assert not node.errors()


_SIZES = {
    "inactive_anon": 1,
    "active_anon": 20,
    "inactive_file": 300,
    "active_file": 4000,
    "unevictable": 50000,
}


@given(st.permutations(list(_SIZES)), st.sampled_from([1, 2]), st.booleans())
def test_memory_is_the_same_in_whatever_order_the_kernel_writes_it(
    order: list[str], version: int, apart: bool
) -> None:
    prefix = "total_" if version == 1 else ""
    between = "\ntotal_pgfault 7\n" if apart else "\n"
    lines = between.join(f"{prefix}{name} {_SIZES[name]}" for name in order)
    # On v1 the group's own sizes precede those of the subtree.
    stat = f"cache 0\ninactive_anon 9\n{lines}\n" if version == 1 else f"anon 0\n{lines}\n"
    assert memory_of(stat.encode(), version) == (50021, 54321)


def test_memory_without_one_of_its_sizes_is_not_known() -> None:
    with pytest.raises(ValueError, match="no field active_file"):
        memory_of(b"anon 0\ninactive_anon 1\nactive_anon 2\ninactive_file 3\nunevictable 4\n", 2)


@VERSIONS
def test_memory_is_known_from_the_first_reading_and_cpu_from_the_second(
    node: SimulatedNode,
) -> None:
    pod = node.kubelet.add_pod(Limits())
    container = pod.start()
    container.task.cpu_seconds = 5000.0
    node.kernel.use_memory(container.task, GIB)
    node.retarget()
    node.round()
    assert node.latest(Metric.POD_MEMORY, pod.uid) == GIB
    assert node.latest(Metric.POD_CPU, pod.uid) is None
    assert node.latest(Metric.POD_CPU_THROTTLED, pod.uid) is None
    node.round()
    assert node.latest(Metric.POD_CPU, pod.uid) == 0


@VERSIONS
@pytest.mark.parametrize(
    ("periods", "throttled", "ratio"), [(10, 4, 0.4), (10, 0, 0.0), (0, 0, 0.0), (5, 5, 1.0)]
)
def test_the_throttled_ratio_is_of_the_periods_since_the_last_reading(
    node: SimulatedNode, periods: int, throttled: int, ratio: float
) -> None:
    container = node.kubelet.add_pod(Limits()).start()
    state = node.kernel.group(container.cgroup).state(CpuState)
    state.periods, state.throttled = 100, 90
    node.retarget()
    node.round()
    state.periods, state.throttled = 100 + periods, 90 + throttled
    node.round()
    assert node.latest(Metric.CONTAINER_CPU_THROTTLED, container.id) == pytest.approx(ratio)


@VERSIONS
def test_the_node_and_its_numa_nodes_have_cpu_and_memory(node: SimulatedNode) -> None:
    container = node.kubelet.add_pod(Limits()).start()
    node.retarget()
    node.kernel.use_memory(container.task, GIB)
    node.kernel.use_page_cache(container.cgroup, GIB)
    node.round()
    assert node.latest(Metric.NODE_CPU) is None
    container.task.cpu_seconds += 4.0
    node.round()
    assert node.latest(Metric.NODE_CPU) == pytest.approx(4.0, abs=0.02)
    # The simulated kernel books CPU evenly on all CPUs, and memory on the first NUMA node.
    for number in ("0", "1"):
        assert node.latest(Metric.NODE_NUMA_CPU, number) == pytest.approx(2.0, abs=0.05)
    used = node.latest(Metric.NODE_MEMORY)
    assert used is not None and GIB <= used < 2 * GIB
    with_cache = node.latest(Metric.NODE_MEMORY_WITH_PAGE_CACHE)
    assert with_cache == pytest.approx(used + GIB)
    assert node.latest(Metric.NODE_NUMA_MEMORY, "0") == GIB
    assert node.latest(Metric.NODE_NUMA_MEMORY, "1") == 0


@VERSIONS
def test_an_offline_cpu_leaves_its_numa_node_measured(node: SimulatedNode) -> None:
    node.round()
    node.kernel.set_online(7, online=False)
    node.round()
    node.round()
    assert node.latest(Metric.NODE_NUMA_CPU, "1") is not None
    assert not [error for error in node.errors() if error.startswith("node:")]


@VERSIONS
def test_the_system_is_what_neither_pods_nor_host_applications_use(node: SimulatedNode) -> None:
    pod = node.kubelet.add_pod(Limits())
    container = pod.start()
    node.kernel.make("/sys/fs/cgroup" + ("/cpu" * (node.layout.version == 1)) + "/host-ls/app")
    if node.layout.version == 1:
        for controller in ("cpuacct", "memory"):
            node.kernel.make(f"/sys/fs/cgroup/{controller}/host-ls/app")
    else:
        for group in ("", "/host-ls"):
            node.kernel.write_as(
                "operator", f"/sys/fs/cgroup{group}/cgroup.subtree_control", "+cpu +memory"
            )
    app = node.kernel.spawn_process("app", cgroup="host-ls/app")
    other = node.kernel.spawn_process("sshd")
    node.host_apps = (HostAppTarget("app", "host-ls/app"),)
    node.retarget()
    for task, used in ((container.task, GIB), (app, 2 * GIB), (other, GIB // 2)):
        node.kernel.use_memory(task, used)
    node.kernel.use_page_cache(container.cgroup, GIB)
    node.round()
    for task, seconds in ((container.task, 3.0), (app, 1.0), (other, 0.5)):
        task.cpu_seconds += seconds
    node.round()
    assert node.latest(Metric.HOST_APP_CPU, "app") == pytest.approx(1.0)
    assert node.latest(Metric.HOST_APP_MEMORY, "app") == 2 * GIB
    assert node.latest(Metric.HOST_APP_MEMORY_WITH_PAGE_CACHE, "app") == 2 * GIB
    assert node.latest(Metric.SYSTEM_CPU) == pytest.approx(0.5, abs=0.03)
    parts = [node.latest(Metric.SYSTEM_NUMA_CPU, number) or 0.0 for number in ("0", "1")]
    assert sum(parts) == pytest.approx(node.latest(Metric.SYSTEM_CPU))
    node_used = node.latest(Metric.NODE_MEMORY)
    assert node_used is not None
    assert node.latest(Metric.SYSTEM_MEMORY) == node_used - 3 * GIB
    # Page cache of pods counts on both sides or on neither.
    assert node.latest(Metric.SYSTEM_MEMORY_WITH_PAGE_CACHE) == node_used - 3 * GIB


@pytest.mark.parametrize(
    ("node_cores", "pods", "apps", "numa", "system", "parts"),
    [
        (9.0, (6.0, 2.0), (0.5,), (6.0, 3.0), 0.5, (1 / 3, 1 / 6)),
        (9.0, (), (), (6.0, 3.0), 9.0, (6.0, 3.0)),
        (1.0, (2.0,), (), (1.0, 0.0), 0.0, (0.0, 0.0)),  # readings of different moments
        (1.0, (0.5,), (), (0.0, 0.0), 0.5, (0.0, 0.0)),
    ],
)
def test_the_formula_of_the_systems_cpu(
    node_cores: float,
    pods: tuple[float, ...],
    apps: tuple[float, ...],
    numa: tuple[float, ...],
    system: float,
    parts: tuple[float, ...],
) -> None:
    store = Store()
    store.add_table("all", interval_s=1.0, retention_s=60.0)
    store.record(
        "all",
        1.0,
        {Series(Metric.NODE_CPU): node_cores}
        | {Series(Metric.POD_CPU, str(n)): used for n, used in enumerate(pods)}
        | {Series(Metric.POD_CPU, "ended"): 5.0}
        | {Series(Metric.HOST_APP_CPU, str(n)): used for n, used in enumerate(apps)}
        | {Series(Metric.NODE_NUMA_CPU, str(n)): used for n, used in enumerate(numa)},
    )
    targets = Targets(
        pods=tuple(PodTarget(str(n), "p") for n in range(len(pods))),
        host_apps=tuple(HostAppTarget(str(n), "a") for n in range(len(apps))),
    )
    found = SystemCollector().sample(Round(2.0, targets, LocalFiles(), store.view(2.0)))
    assert found.pop(Series(Metric.SYSTEM_CPU)) == pytest.approx(system)
    assert list(found.values()) == pytest.approx(list(parts))


@VERSIONS
def test_numa_memory_of_the_system_leaves_page_cache_of_pods_out(node: SimulatedNode) -> None:
    container = node.kubelet.add_pod(Limits()).start()
    other = node.kernel.spawn_process("sshd")
    node.retarget()
    node.kernel.use_memory(container.task, GIB)
    node.kernel.use_page_cache(container.cgroup, 2 * GIB)
    node.kernel.use_memory(other, GIB // 2)
    node.round()
    assert node.latest(Metric.SYSTEM_NUMA_MEMORY, "0") == GIB // 2
    assert node.latest(Metric.SYSTEM_NUMA_MEMORY, "1") == 0


@VERSIONS
def test_the_system_is_not_computed_from_old_samples(node: SimulatedNode) -> None:
    node.round()
    node.round()
    assert node.latest(Metric.SYSTEM_CPU) is not None
    node.kernel.faults.fail("read", errno.EIO, path="/proc/stat", nth=0)
    for _ in range(10):
        node.round()
    assert node.latest(Metric.SYSTEM_CPU) is not None
    node.round()
    assert node.latest(Metric.SYSTEM_CPU) is None


def be_directory(node: SimulatedNode, controller: str) -> str:
    group = node.kubelet.qos_dir("BestEffort")
    return node.layout.directory(controller, group)


@VERSIONS
def test_best_effort_pods_have_a_sum_of_cpu_and_of_requests(node: SimulatedNode) -> None:
    for milli in (1500, 500, 0):
        pod = node.kubelet.add_pod(Limits(), qos="BestEffort")
        node.batch_cpu_milli[pod.uid] = milli
        pod.start().task.cpu_seconds = 100.0
    node.kubelet.add_pod(Limits(), qos="BestEffort").start()
    node.retarget()
    unlabelled = PodTarget("without-label", "", batch_cpu_request_milli=700)
    node.targets = msgspec.structs.replace(node.targets, pods=(*node.targets.pods, unlabelled))
    node.round()
    assert node.latest(Metric.BE_CPU_USED) is None, "a first reading is no use of zero"
    for pod in node.kubelet.pods.values():
        for container in pod.containers:
            container.task.cpu_seconds += 0.5
    node.round()
    assert node.latest(Metric.BE_CPU_USED) == pytest.approx(2000)
    assert node.latest(Metric.BE_CPU_REQUEST) == 2000
    assert node.latest(Metric.BE_CPU_LIMIT) == 8000


@VERSIONS
@pytest.mark.parametrize(
    ("quota_us", "period_us", "limit"),
    [
        (250_000, 100_000, 2500),
        (-1, 100_000, 8000),
        (50_000, 20_000, 2500),
        (900_000, 100_000, 8000),
    ],
)
def test_the_limit_of_best_effort_pods_follows_their_quota(
    node: SimulatedNode, quota_us: int, period_us: int, limit: int
) -> None:
    node.kubelet.add_pod(Limits(), qos="BestEffort").start()
    node.retarget()
    directory = be_directory(node, "cpu")
    if node.layout.version == 1:
        node.kernel.write_as("operator", f"{directory}/cpu.cfs_period_us", str(period_us))
        node.kernel.write_as("operator", f"{directory}/cpu.cfs_quota_us", str(quota_us))
    else:
        quota = "max" if quota_us < 0 else str(quota_us)
        node.kernel.write_as("operator", f"{directory}/cpu.max", f"{quota} {period_us}")
    node.round()
    assert node.latest(Metric.BE_CPU_LIMIT) == limit


def set_cpus(node: SimulatedNode, cgroup: str, cpus: str) -> None:
    directory = node.layout.directory("cpuset", cgroup)
    node.kernel.write_as("operator", f"{directory}/cpuset.cpus", cpus)


@VERSIONS
def test_one_pinned_container_does_not_shrink_the_limit_of_all(node: SimulatedNode) -> None:
    pinned, free = (
        node.kubelet.add_pod(Limits(), qos="BestEffort").start(Limits(cpus=cpus))
        for cpus in ("0", "2-5")
    )
    node.retarget()
    node.round()
    assert node.latest(Metric.BE_CPU_LIMIT) == 5000
    set_cpus(node, free.cgroup, "0-1")
    node.round()
    assert node.latest(Metric.BE_CPU_LIMIT) == 2000
    node.kubelet.stop_container(free)
    node.round()
    assert node.latest(Metric.BE_CPU_LIMIT) == 1000, "a vanished container fails nothing"
    assert not [error for error in node.errors() if "best-effort" in error]
    node.kubelet.stop_container(pinned)
    node.retarget()
    node.round()
    assert node.latest(Metric.BE_CPU_LIMIT) == 8000
    for pod in list(node.kubelet.pods.values()):
        pod.remove()
    node.retarget()
    set_cpus(node, node.kubelet.qos_dir("BestEffort"), "0-2")
    node.round()
    assert node.latest(Metric.BE_CPU_LIMIT) == 3000


@VERSIONS
def test_a_host_application_that_restarts_in_a_new_group_has_no_spike(
    node: SimulatedNode,
) -> None:
    """The counter of the new group may be above or below the old one's."""
    pod = node.kubelet.add_pod(Limits(), uid="app")
    first = pod.start()
    node.host_apps = (HostAppTarget("app", first.cgroup),)
    node.retarget()
    node.round()
    first.task.cpu_seconds = 2.0
    node.round()
    assert node.latest(Metric.HOST_APP_CPU, "app") == pytest.approx(2.0)
    for seconds in (3.5, 900.0, 0.1):
        node.kernel.remove_group(first.cgroup)
        node.kubelet._make(first.cgroup, 2, -1, 0)
        task = node.kernel.spawn_process("app", cgroup=first.cgroup)
        task.cpu_seconds = seconds
        for _ in range(3):
            node.round()
            assert node.latest(Metric.HOST_APP_CPU, "app") in (None, 0.0)
        task.cpu_seconds += 1.0
        node.round()
        assert node.latest(Metric.HOST_APP_CPU, "app") == pytest.approx(1.0)


@VERSIONS
def test_a_group_that_vanishes_costs_its_own_samples_alone(node: SimulatedNode) -> None:
    gone, stays = (node.kubelet.add_pod(Limits()).start() for _ in range(2))
    node.retarget()
    node.round()
    node.kernel.remove_group(gone.pod.cgroup)
    stays.task.cpu_seconds += 1.0
    node.round()
    assert node.latest(Metric.CONTAINER_CPU, gone.id) is None
    assert node.latest(Metric.POD_MEMORY, gone.pod.uid) is None
    assert node.latest(Metric.CONTAINER_CPU, stays.id) == pytest.approx(1.0)
    assert not node.errors()


@VERSIONS
@pytest.mark.parametrize("error", [errno.ENODEV, errno.EIO, errno.EACCES])
def test_an_unreadable_file_is_reported_and_costs_one_group(
    node: SimulatedNode, error: int
) -> None:
    bad, good = (node.kubelet.add_pod(Limits()).start() for _ in range(2))
    node.retarget()
    node.round()
    node.kernel.faults.fail("read", error, path=f"*{bad.id}*/memory.*stat", nth=0)
    for _ in range(2):
        bad.task.cpu_seconds += 1.0
        good.task.cpu_seconds += 1.0
        node.round()
    assert node.latest(Metric.CONTAINER_CPU, good.id) == pytest.approx(1.0)
    assert node.latest(Metric.CONTAINER_MEMORY, bad.id) is None
    # ENODEV is what a group says whose end has begun; other errors are worth a line.
    assert bool(node.errors()) is (error != errno.ENODEV)
    node.kernel.faults.clear()
    for _ in range(4):
        node.round()
    assert node.latest(Metric.CONTAINER_CPU, bad.id) == 0


@VERSIONS
def test_a_completed_pod_without_a_group_is_looked_for_less_and_less_often(
    node: SimulatedNode,
) -> None:
    pod = node.kubelet.add_pod(Limits())
    node.retarget()
    node.kernel.remove_group(pod.cgroup)
    tries: list[str] = []
    node.kernel.faults.before(
        "read", lambda: tries.append("read"), path=f"*{pod.cgroup.rpartition('/')[2]}/cpu*", nth=0
    )
    for _ in range(60):
        node.round()
    assert 3 <= len(tries) <= 15


def test_a_v2_group_without_the_cpu_controller_has_cpu_but_no_throttling() -> None:
    node = SimulatedNode(DEBIAN_12_V2)
    node.kernel.make("/sys/fs/cgroup/host")
    node.kernel.write_as("operator", "/sys/fs/cgroup/host/cgroup.subtree_control", "+memory")
    node.kernel.make("/sys/fs/cgroup/host/plain")
    task = node.kernel.spawn_process("app", cgroup="host/plain")
    node.host_apps = (HostAppTarget("plain", "host/plain"),)
    node.retarget()
    node.round()
    task.cpu_seconds += 1.0
    node.round()
    assert node.latest(Metric.HOST_APP_CPU, "plain") == pytest.approx(1.0)
    assert not node.errors()


def test_without_a_cgroup_tree_the_node_is_measured_all_the_same() -> None:
    node = SimulatedNode(DEBIAN_12_V2)
    node.targets = Targets()
    node.round()
    node.round()
    assert node.latest(Metric.NODE_CPU) is not None
    states = {one.name: one.state for one in node.sampler.status(0).collectors}
    assert states["pods"] == states["best-effort"] == "unavailable"
    assert states["node"] == states["system"] == "ready"


def test_a_missing_v1_hierarchy_is_named() -> None:
    node = SimulatedNode(DEBIAN_12_V1)
    mounts = {name: path for name, path in node.layout.mounts.items() if name != "cpuacct"}
    node.targets = Targets(replace(node.layout, mounts=mounts))
    node.round()
    for one in node.sampler.status(0).collectors:
        if one.name in ("pods", "host-applications", "best-effort"):
            assert (one.state, "cpuacct" in one.error) == ("unavailable", True)
