"""Scripts that the state machine found, kept as they shrank: each was a defect once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from koordlet.state import Source
from tests.koordlet.executor.bed import fill_disk
from tests.properties.cpus import PLANS
from tests.properties.daemon import ALL_GATES, NO_GATES
from tests.properties.listed import listed
from tests.properties.lives import PROFILES, QOS_ON, SLOS
from tests.properties.node import OperatedNode
from tests.properties.pods import KINDS, RunningContainer
from tests.properties.twin import differences
from tests.simulated.kubelet import Limits, quadratic_weight

KIND = {kind.name: kind for kind in KINDS}
GIB = 1 << 30


def boot(profile: str, plan: str = "shared") -> OperatedNode:
    node = OperatedNode(PROFILES[profile], PLANS[plan])
    node.set_slo(QOS_ON)
    node.publish_topology()
    node.synchronize()
    return node


@pytest.fixture(params=["debian-12-v1", "debian-12-v2", "anolis-8"])
def node(request: pytest.FixtureRequest) -> Iterator[OperatedNode]:
    made = boot(request.param)
    yield made
    made.close()


def _one(node: OperatedNode, kind: str, *, hooked: bool = True) -> RunningContainer:
    pod = node.add_pod(KIND[kind])
    assert pod is not None
    assert node.start_container(pod, hooked=hooked)
    return pod.containers[0]


def _switch_off(node: OperatedNode) -> None:
    node.settle()
    node.set_gates(NO_GATES)
    node.settle()


def _as_twin(node: OperatedNode, container: RunningContainer, *files: str) -> None:
    for file in files:
        twin = node.twin.text(node.twin_kubelet.path(container.twin.cgroup, file))
        assert node.text(container.here.cgroup, file) == twin, file


def _limits(node: OperatedNode) -> tuple[str, ...]:
    if node.profile.cgroup == 2:
        return "cpu.weight", "cpu.max", "memory.max", "cpuset.cpus.effective"
    return "cpu.shares", "cpu.cfs_quota_us", "memory.limit_in_bytes", "cpuset.effective_cpus"


def test_what_a_synchronize_had_written_is_restored(node: OperatedNode) -> None:
    """A container created while the daemon was away gets its values from the Synchronize reply."""
    node.connected = False
    container = _one(node, "reserved")
    node.synchronize()
    _switch_off(node)
    _as_twin(node, container, *_limits(node))


def test_a_delivered_value_that_is_reported_back_is_no_request(node: OperatedNode) -> None:
    """Two lists in a row: the second reports what the first one's reply delivered."""
    node.connected = False
    container = _one(node, "batch")
    node.synchronize()
    node.synchronize()
    _switch_off(node)
    _as_twin(node, container, *_limits(node))


def test_the_first_original_survives_later_values_by_the_runtime(node: OperatedNode) -> None:
    """The pool shrinks, and after a restart the runtime writes the new one for us."""
    container = _one(node, "latency")
    node.settle()
    _one(node, "reserved")
    node.publish_topology()
    node.restart()
    _switch_off(node)
    _as_twin(node, container, *_limits(node))


def test_a_resize_moves_the_original(node: OperatedNode) -> None:
    """The last request of kubelet's is restored, not an earlier one."""
    node.set_ratio("1.50")
    container = _one(node, "latency")
    node.settle()
    node.resize(container, Limits(250, 1000, GIB), hooked=True)
    _switch_off(node)
    _as_twin(node, container, *_limits(node))


@pytest.mark.parametrize("listed_first", [True, False], ids=["list first", "runtime first"])
def test_a_resize_without_an_event_moves_the_original(
    node: OperatedNode, listed_first: bool
) -> None:
    """A daemon that was away hears of it by kubelet's list, before the runtime registers or after.

    The runtime has then got our value, based on the old request, in place of the new request.
    """
    node.set_ratio("1.50")
    container = _one(node, "latency")
    node.settle()
    node.resize(container, Limits(250, 1000, GIB), hooked=False)
    if listed_first:
        node.state.pods_list(Source.KUBELET, [listed(container.pod)])
    node.synchronize()
    node.state.pods_list(Source.KUBELET, [listed(container.pod)])
    node.settle()
    quota = "cpu.max" if node.profile.cgroup == 2 else "cpu.cfs_quota_us"
    assert node.text(container.here.cgroup, quota).split()[0] == "66667"
    _switch_off(node)
    _as_twin(node, container, *_limits(node))


def test_an_identity_that_was_handed_down_is_restored() -> None:
    """A group takes its parent's identity at its birth; the parent's was ours."""
    node = boot("anolis-8")
    try:
        node.settle()
        container = _one(node, "spare")
        node.settle()
        assert node.text(container.here.cgroup, "cpu.bvt_warp_ns") == "-1"
        _switch_off(node)
        assert node.text(container.here.cgroup, "cpu.bvt_warp_ns") == "0"
        assert node.text(container.pod.here.cgroup, "cpu.bvt_warp_ns") == "0"
    finally:
        node.close()


def test_switching_one_policy_off_leaves_the_others(node: OperatedNode) -> None:
    container = _one(node, "reserved")
    node.settle()
    node.set_gates(ALL_GATES | {"GroupIdentity": False, "CgroupReconcile": False})
    node.settle()
    cpus = ",".join(map(str, sorted(container.pod.cpus)))
    assert node.text(container.here.cgroup, "cpuset.cpus") == cpus


def test_a_weight_by_the_runtimes_formula_is_left_as_it_is() -> None:
    """Our answer has the runtime write the weight: by its formula, which ours is to follow."""
    node = boot("ubuntu-24.04")
    try:
        container = _one(node, "batch")
        by_runtime = node.text(container.here.cgroup, "cpu.weight")
        assert by_runtime == str(quadratic_weight(512))
        node.settle()
        assert node.text(container.here.cgroup, "cpu.weight") == by_runtime
    finally:
        node.close()


def test_a_value_that_was_delivered_twice_is_no_request(
    node: OperatedNode,
) -> None:
    """No hook saw the creation, so the values first reported count as kubelet's request."""
    node.connected = False
    container = _one(node, "batch")
    node.settle()
    node.set_gates(ALL_GATES | {"BatchResource": False})
    node.settle()
    node.set_gates(ALL_GATES)
    node.settle()
    _switch_off(node)
    _as_twin(node, container, *_limits(node))


def test_what_was_there_at_first_sight_is_remembered_over_a_restart(node: OperatedNode) -> None:
    node.set_ratio("1.50")
    container = _one(node, "latency", hooked=False)
    node.synchronize()
    node.restart()
    _switch_off(node)
    _as_twin(node, container, *_limits(node))


def test_a_full_run_directory_does_not_turn_a_handed_over_value_into_an_original(
    node: OperatedNode,
) -> None:
    """The append fails once, the pool changes in the same pass, and there is room again."""
    reserved = _one(node, "reserved")
    node.publish_topology()
    container = _one(node, "latency")
    node.remove_pod(reserved.pod, times=1, late=False)
    node.publish_topology()
    fill_disk(node.journal)
    node.reconcile()
    _switch_off(node)
    _as_twin(node, container, *_limits(node))


@pytest.mark.parametrize("profile", ["debian-12-v1", "rhel-9"])
def test_cpus_that_kubelet_named_while_koordlet_was_away_come_back(profile: str) -> None:
    node = boot(profile, "static")
    try:
        node.connected = False
        container = _one(node, "reserved")
        node.synchronize()
        assert node.kernel_cpus(container.here.cgroup) == container.pod.cpus
        _switch_off(node)
        assert node.kernel_cpus(container.here.cgroup) == node.twin_cpus(container.twin.cgroup)
    finally:
        node.close()


def test_an_uninstall_finds_values_that_only_the_runtime_has_so_far(node: OperatedNode) -> None:
    """The daemon is killed between its answer and the pass that would have looked."""
    for kind in ("reserved", "batch", "spare"):
        _one(node, kind)
    assert differences(node)
    node.uninstall()
    assert not differences(node)


@pytest.mark.parametrize("profile", ["debian-12-v1", "rhel-9"])
def test_cpus_that_kubelet_names_are_its_own_though_we_had_written_the_same(profile: str) -> None:
    """Kubelet's static policy and the share pools take the same CPUs from everybody else."""
    node = boot(profile, "static")
    try:
        container = _one(node, "latency")
        node.settle()
        _one(node, "guaranteed")
        node.publish_topology()
        node.settle()
        assert node.pin_again(container)
        assert node.kernel_cpus(container.here.cgroup) == node.twin_cpus(container.twin.cgroup)
        _switch_off(node)
        assert node.kernel_cpus(container.here.cgroup) == node.twin_cpus(container.twin.cgroup)
    finally:
        node.close()


def test_identities_from_before_a_restart_wait_while_core_scheduling_has_them_off() -> None:
    """The kernel takes none then; each try would be refused, for as long as that lasts."""
    node = boot("anolis-8")
    try:
        _one(node, "latency")
        node.settle()
        node.set_slo(SLOS["core scheduling"])
        node.restart()
        node.reconcile()
        assert node.kernel.sysctls["kernel.sched_group_identity_enabled"] == 0
        assert not node.settle().failed
        assert not node.refusals
        _switch_off(node)
        assert not differences(node)
        assert node.text(node.kubelet.qos_dir("BestEffort"), "cpu.bvt_warp_ns") == "0"
    finally:
        node.close()


def test_core_scheduling_stays_on_until_its_cookies_are_taken_back() -> None:
    """The kernel shows and takes no cookie once it is off, and after a restart nobody is known."""
    node = boot("anolis-8")
    try:
        node.set_slo(SLOS["core scheduling"])
        container = _one(node, "latency")
        node.settle()
        assert container.here.task.cookie
        node.restart()
        node.set_slo(QOS_ON)
        node.reconcile()
        assert node.kernel.sysctls["kernel.sched_core"] == 1
        assert not node.settle().failed
        assert node.kernel.sysctls["kernel.sched_core"] == 0
        assert not container.here.task.cookie
        _switch_off(node)
        assert not differences(node)
    finally:
        node.close()


@pytest.mark.parametrize("profile", ["debian-12-v1", "debian-12-v2"])
@pytest.mark.parametrize("back", [True, False])
def test_a_cpu_that_goes_offline_is_no_other_writer(profile: str, back: bool) -> None:
    """v1 takes it out of every set for good; what kubelet gave comes back without it."""
    node = boot(profile)
    container = _one(node, "latency")
    _one(node, "reserved")
    node.publish_topology()
    node.settle()
    for kernel in (node.kernel, node.twin):
        kernel.set_online(0, online=False)
    node.settle()
    assert node.kernel_cpus(container.here.cgroup) == {1, 2}
    if back:
        for kernel in (node.kernel, node.twin):
            kernel.set_online(0, online=True)
    node.look_at_cpus()
    younger = _one(node, "latency")
    assert node.kernel_cpus(younger.here.cgroup) == node.twin_cpus(younger.twin.cgroup) - {3}
    _switch_off(node)
    assert not differences(node)
    assert not node.reconciler.restoring()
    for kernel in (node.kernel, node.twin):
        kernel.set_online(0, online=True)
    for each in (container, younger):
        assert node.kernel_cpus(each.here.cgroup) == node.twin_cpus(each.twin.cgroup)
    node.close()


def test_a_set_handed_over_is_known_after_its_cpus_went_offline_before_the_first_look() -> None:
    node = OperatedNode(PROFILES["debian-12-v1"], PLANS["reserved"])
    try:
        container = _one(node, "latency")
        node.set_slo(QOS_ON)
        node.publish_topology()
        node.synchronize()
        assert node.text(container.here.cgroup, "cpuset.cpus") == "1-3"
        node.set_online(3, online=False)
        node.set_online(2, online=False)
        node.look_at_cpus()
        node.reconcile()
        node.uninstall()
        _as_twin(node, container, "cpuset.cpus")
    finally:
        node.close()
