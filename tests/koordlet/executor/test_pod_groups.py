"""systemd writes a QoS slice's own values again with each pod: no other writer at war."""

from __future__ import annotations

import dataclasses

import pytest

from hooks.state import State
from linux.resources import Resource
from tests.koordlet.executor.bed import TWO_CORES, Bed
from tests.simulated import DEBIAN_12_V2
from tests.simulated.kubelet import Pod
from tests.simulated.profiles import Driver

CLASS, MIN = "kubeqos/Burstable", Resource.MEMORY_MIN
PROTECTED = 64 << 20


def _bed(driver: Driver = Driver.SYSTEMD) -> Bed:
    bed = Bed(dataclasses.replace(DEBIAN_12_V2, name=f"v2-{driver}", driver=driver))
    bed.kubelet.add_pod(TWO_CORES)
    bed.want(CLASS, (bed.kubelet.qos_dir("Burstable"), MIN, PROTECTED))
    bed.run()
    return bed


def _protected(bed: Bed) -> bool:
    return bed.text(bed.kubelet.qos_dir("Burstable"), "memory.min") == str(PROTECTED)


def _reset(bed: Bed) -> None:
    bed.set(bed.kubelet.qos_dir("Burstable"), "memory.min", "0", writer="systemd")


def _ten_pods(bed: Bed) -> list[Pod]:
    return [bed.kubelet.add_pod(TWO_CORES) for _ in range(10)]


def test_a_class_is_protected_again_after_each_pod_that_comes_or_goes() -> None:
    bed = _bed()
    for seconds in range(20):
        pod = bed.kubelet.add_pod(TWO_CORES)
        assert not _protected(bed)  # kubelet had systemd set the class's weight
        bed.run()
        assert _protected(bed)
        bed.kubelet.remove_pod(pod)
        assert not _protected(bed)
        bed.run()
        assert _protected(bed), seconds
        bed.kernel.clock.advance(1.0)
    assert bed.view(CLASS, MIN).state is State.APPLIED


@pytest.mark.parametrize("qos", ["Guaranteed", "BestEffort"])
def test_pods_of_other_classes_explain_it_too(qos: str) -> None:
    """kubelet sets the weights of both slices whatever the pod's class is."""
    bed = _bed()
    for _ in range(20):
        bed.kubelet.add_pod(TWO_CORES, qos=qos)  # type: ignore[arg-type]
        assert not _protected(bed)
        bed.run()
        assert _protected(bed)


def test_one_pod_after_another_in_an_empty_class_is_no_fight() -> None:
    """As sequential Jobs: the first group and the end of the last one reset the slice as well."""
    bed = _bed()
    for pod in list(bed.kubelet.pods.values()):
        bed.kubelet.remove_pod(pod)
    bed.run()

    def reset_and_protected(seconds: float) -> None:
        assert not _protected(bed)
        bed.run()
        assert _protected(bed)
        bed.kernel.clock.advance(seconds)

    for _ in range(20):
        pod = bed.kubelet.add_pod(TWO_CORES)
        reset_and_protected(5.0)
        bed.kubelet.kill_pod(pod)  # kubelet sets the weights while the group still exists
        reset_and_protected(1.0)
        bed.kubelet.remove_pod(pod)  # its group is the last one
        reset_and_protected(9.0)
    assert bed.view(CLASS, MIN).state is State.APPLIED


def test_the_first_group_of_a_class_explains_two_resets_of_that_class_only() -> None:
    bed = _bed()
    best_effort = bed.kubelet.qos_dir("BestEffort")
    bed.want("kubeqos/BestEffort", (best_effort, MIN, PROTECTED))
    bed.run()
    bed.kubelet.add_pod(TWO_CORES, qos="BestEffort")
    met = {CLASS: 0, "kubeqos/BestEffort": 0}
    for _ in range(20):
        for subject in met:
            met[subject] += bed.view(subject, MIN).state is not State.BLOCKED
        _reset(bed)
        bed.set(best_effort, "memory.min", "0", writer="systemd")
        bed.run()
        bed.kernel.clock.advance(0.1)
    assert met == {CLASS: 1 + 4, "kubeqos/BestEffort": 2 + 4}


def test_pods_explain_no_reset_of_the_root() -> None:
    """kubelet sets no weight of kubepods.slice when a pod comes or goes."""
    bed = _bed()
    root = bed.kubelet.qos_dir("Guaranteed")
    bed.want("kubeqos/Guaranteed", (root, MIN, PROTECTED))
    bed.run()
    _ten_pods(bed)
    for _ in range(4):
        bed.set(root, "memory.min", "0", writer="agent")
        bed.run()
    assert bed.view("kubeqos/Guaranteed", MIN).state is State.BLOCKED


def test_the_groups_of_another_root_explain_nothing() -> None:
    bed = _bed()
    _ten_pods(bed)
    bed.run()
    bed.kernel.clock.advance(60.0)
    bed.run()
    moved = "kind.slice/kind-kubepods.slice"
    place = f"{moved}/kind-kubepods-burstable.slice"
    for end in range(1, 4):
        bed.kernel.make("/".join(["/sys/fs/cgroup", *place.split("/")[:end]]))
    for end in range(3):
        above = "/".join(["/sys/fs/cgroup", *place.split("/")[:end]])
        bed.kernel.write_as("kubelet", f"{above}/cgroup.subtree_control", "+memory")
    bed.executor.set_layout(dataclasses.replace(bed.layout, kubepods=moved))
    bed.want(CLASS, (place, MIN, PROTECTED))
    bed.run()
    for _ in range(4):
        bed.set(place, "memory.min", "0", writer="systemd")
        bed.run()
    assert bed.view(CLASS, MIN).state is State.BLOCKED


def test_pods_that_come_together_explain_as_many_resets_afterwards() -> None:
    """kubelet makes the groups in parallel, and sets the weights one pod after the other."""
    bed = _bed()
    _ten_pods(bed)
    for _ in range(10):
        _reset(bed)
        bed.run()
        assert _protected(bed)
        bed.kernel.clock.advance(0.1)


def test_the_fourth_reset_that_no_pod_explains_is_a_fight() -> None:
    bed = _bed()
    _ten_pods(bed)
    met = 0
    while bed.view(CLASS, MIN).state is not State.BLOCKED:
        met += 1
        _reset(bed)
        bed.run()
        bed.kernel.clock.advance(0.1)
        assert met < 30, "the fight is never noticed"
    assert met == 10 + 4
    assert "another writer keeps setting 0" in bed.view(CLASS, MIN).detail


def test_pods_explain_no_reset_a_minute_later() -> None:
    bed = _bed()
    _ten_pods(bed)
    bed.run()
    bed.kernel.clock.advance(60.0)
    for _ in range(4):
        _reset(bed)
        bed.run()
    assert bed.view(CLASS, MIN).state is State.BLOCKED


def test_pods_explain_nothing_in_a_pods_own_group() -> None:
    bed = _bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, MIN, PROTECTED))
    bed.run()
    for _ in range(4):
        bed.kubelet.add_pod(TWO_CORES)
        bed.set(pod.cgroup, "memory.min", "0", writer="agent")
        bed.run()
    assert bed.view("pod/a", MIN).state is State.BLOCKED
    assert bed.view(CLASS, MIN).state is State.APPLIED


def test_without_systemd_a_pod_explains_nothing() -> None:
    bed = _bed(Driver.CGROUPFS)
    for _ in range(4):
        bed.kubelet.add_pod(TWO_CORES)
        _reset(bed)
        bed.run()
    assert bed.view(CLASS, MIN).state is State.BLOCKED


def test_groups_are_not_listed_while_no_class_has_a_desired_value() -> None:
    bed = _bed()
    listed: list[str] = []
    bed.kernel.faults.before(
        "listdir", lambda: listed.append("x"), path=f"/sys/fs/cgroup/{bed.kubelet.root}*", nth=0
    )
    bed.run()
    assert listed
    bed.want(CLASS)
    bed.run()
    listed.clear()
    bed.run()
    assert not listed


def test_pods_that_came_while_no_class_had_a_value_explain_nothing_later() -> None:
    bed = _bed()
    bed.want(CLASS)
    bed.run()
    _ten_pods(bed)
    bed.kernel.clock.advance(3600.0)
    bed.want(CLASS, (bed.kubelet.qos_dir("Burstable"), MIN, PROTECTED))
    bed.run()
    for _ in range(4):
        _reset(bed)
        bed.run()
    assert bed.view(CLASS, MIN).state is State.BLOCKED
