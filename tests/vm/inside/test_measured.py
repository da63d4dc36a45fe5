"""Not what files say but what the kernel does: CPU time under contention, memory under reclaim."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tests.e2e.manifests import batch_pod, ls_pod, pod
from tests.vm.inside.node import CGROUPS, Node, Pod, run, start_slice
from tests.vm.inside.service import KOORDCTL, Service
from tests.waiting import wait_until

SPIN = ["/bin/sh", "-c", "while true; do :; done"]
MIB = 1 << 20


def _usage_us(pod: Pod) -> int:
    line = pod.read("main", "cpu.stat").splitlines()[0]
    return int(line.split()[1])


def _used_meanwhile(seconds: float, *pods: Pod) -> list[float]:
    """The CPU seconds of each pod during some wall time."""
    before = [_usage_us(each) for each in pods]
    time.sleep(seconds)
    return [(_usage_us(each) - was) / 1e6 for each, was in zip(pods, before, strict=True)]


def test_a_best_effort_spinner_loses_the_cpu_to_a_latency_sensitive_one(
    machine: Node, service: Service
) -> None:
    be = machine.run_pod(pod("spinner-be", "BE", command=SPIN))
    idle = CGROUPS / be.cgroup / "cpu.idle"
    wait_until(lambda: idle.read_text() == "1\n", "cpu.idle of the BE pod")
    ls = machine.run_pod(ls_pod("spinner-ls", command=SPIN))
    cpu = sorted(os.sched_getaffinity(ls.pids("main")[0]))[0]
    for each in (be, ls):
        for pid in each.pids("main"):
            os.sched_setaffinity(pid, {cpu})
    be_used, ls_used = _used_meanwhile(5, be, ls)
    machine.remove(be)
    machine.remove(ls)
    assert ls_used > 5 * be_used, (be_used, ls_used)


def test_a_batch_limit_is_a_limit(machine: Node, service: Service) -> None:
    made = machine.run_pod(batch_pod("limited", cpu="200", command=SPIN))
    wait_until(lambda: made.read("main", "cpu.max") == "20000 100000", "the limit is set")
    (used,) = _used_meanwhile(5, made)
    machine.remove(made)
    assert 0.3 < used < 1.4, used


_UNTIL_GO = "until [ -e /go ]; do sleep 0.1; done"


def _fill(name: str, mebibytes: int) -> list[str]:
    return [
        "/bin/sh",
        "-c",
        f"dd if=/dev/zero of=/{name} bs=1M count={mebibytes} 2>/dev/null; exec sleep 1000",
    ]


def test_a_protected_container_keeps_its_page_cache(machine: Node, service: Service) -> None:
    """Two containers with the same cache; what is short is memory of all pods together."""
    with service.knowing(ls_pod("kept", command=_fill("cache", 48))) as manifest:
        _keeps_its_cache(machine, machine.run_pod(manifest))


def test_a_class_keeps_its_protection_while_pods_come_and_go(
    machine: Node, service: Service
) -> None:
    """kubelet has systemd set the class's weight with each pod, which puts 0 into memory.min."""
    file = CGROUPS / "kubepods.slice/kubepods-burstable.slice/memory.min"
    with service.knowing(ls_pod("steady")) as manifest:
        steady = machine.run_pod(manifest)
        wait_until(lambda: int(file.read_text()) >= 64 * MIB, "the class is protected")
        protected = file.read_text()
        for number in range(4):
            passing = f"kubepods-burstable-podpassing{number}.slice"
            start_slice(passing)
            machine.weigh_burstable()
            wait_until(lambda: file.read_text() == protected, "it is protected again")
            run("systemctl", "stop", passing)
            machine.weigh_burstable()
            wait_until(lambda: file.read_text() == protected, "it is protected again")
        shown = json.loads(run(KOORDCTL, "explain", "subject", "kubeqos/Burstable", "-o", "json"))
        machine.remove(steady)
    (view,) = [
        value
        for subject in shown["subjects"]
        for value in subject["values"]
        if value["resource"] == "memory.min"
    ]
    assert view["state"] == "applied", view
    assert [write["old"] for write in view["writes"]] == ["0"] * 5, view


def _keeps_its_cache(machine: Node, protected: Pod) -> None:
    plain = machine.run_pod(pod("lost", command=_fill("cache", 48)))
    both = (protected, plain)
    for each in both:
        wait_until(lambda each=each: _cache(each) > 40 * MIB, "the cache is there", timeout_s=60)
    # With each pod systemd puts 0 into the class's memory.min, until koordlet has put it back. So
    # the hog is there before its neighbours are measured, and then begins.
    hog = machine.run_pod(
        pod("hog", command=["/bin/sh", "-c", f"{_UNTIL_GO}; {_fill('more', 160)[2]}"])
    )
    os.sync()
    # As kubelet bounds all pods by the node's allocatable memory.
    current = int((CGROUPS / "kubepods.slice/memory.current").read_text())
    run("systemctl", "set-property", "--runtime", "kubepods.slice", f"MemoryHigh={current}")
    try:
        wait_until(lambda: _protection(protected) >= 64 * MIB, "memory.min")
        before = [_cache(each) for each in both]
        assert min(before) > 40 * MIB, before
        for pid in hog.pids("main"):
            Path(f"/proc/{pid}/root/go").touch()
        wait_until(
            lambda: _cache(plain) < before[1] // 2, "the neighbour is reclaimed", timeout_s=90
        )
        after = [_cache(each) for each in both]
    finally:
        run("systemctl", "set-property", "--runtime", "kubepods.slice", "MemoryHigh=infinity")
        machine.remove(hog)
        machine.remove(protected)
        machine.remove(plain)
    assert after[0] > before[0] * 9 // 10, (before, after)


def _protection(pod: Pod) -> int:
    """The memory.min that holds for a container: no group between it and all pods has less."""
    group = CGROUPS / pod.container_cgroup("main")
    below = [each for each in (group, *group.parents) if CGROUPS / "kubepods.slice" in each.parents]
    return min(int((each / "memory.min").read_text()) for each in below)


def _cache(pod: Pod) -> int:
    stat = dict(line.split() for line in pod.read("main", "memory.stat").splitlines())
    return int(stat["file"])
