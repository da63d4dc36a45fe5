"""Policies on cgroup v2 with the systemd driver, on a machine with sockets, nodes and threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.manifests import batch_pod, ls_pod, nodeslo, pinned_pod, pod
from tests.vm.inside.node import CGROUPS, Node, Pod, run
from tests.vm.inside.service import BE_IDLE, LS_PROTECTED, Service
from tests.waiting import wait_until


def _allowed(pid: int) -> str:
    """The CPUs that the kernel lets a process use."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
    return line.split()[1]


def _gets(pod: Pod, file: str, value: str) -> None:
    def there() -> bool:
        return pod.read("main", file) == value

    try:
        wait_until(there, "")
    except AssertionError:
        pytest.fail(f"{file} stays {pod.read('main', file)!r}, not {value!r}", pytrace=False)


NODES = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
CPUS = os.cpu_count() or 1
LAST_NODE_FIRST = CPUS - CPUS // NODES


def test_a_pinned_pod_has_its_core_and_the_thread_beside_it(
    machine: Node, service: Service
) -> None:
    first = LAST_NODE_FIRST
    siblings = Path(f"/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list")
    core = siblings.read_text().strip()
    made = machine.run_pod(pinned_pod("pinned", core))
    _gets(made, "cpuset.cpus", core)
    assert _allowed(made.pids("main")[0]) == core
    _gets(made, "cpu.max", "max 100000")
    machine.remove(made)


def test_a_shared_pod_runs_in_the_pools_only(machine: Node, service: Service) -> None:
    made = machine.run_pod(ls_pod("shared"))
    share = CPUS // NODES
    pools = ",".join(
        f"{node * share + 2}-{node * share + share - 1}" if share > 3 else f"{node * share + 2}"
        for node in range(NODES)
    )
    if share <= 2:
        pytest.skip("this topology leaves no pool beside the reserved core")
    wanted = _canonical(pools)
    _gets(made, "cpuset.cpus.effective", wanted)
    assert _allowed(made.pids("main")[0]) == wanted
    machine.remove(made)


def _canonical(text: str) -> str:
    from tests.simulated.values import bit_list, list_text

    return list_text(bit_list(text, 4096))


def test_a_batch_pod_gets_its_limits(machine: Node, service: Service) -> None:
    made = machine.run_pod(batch_pod("batch", cpu="500", memory="96Mi"))
    _gets(made, "cpu.max", "50000 100000")
    _gets(made, "memory.max", str(96 << 20))
    slice_max = CGROUPS / made.cgroup / "cpu.max"
    wait_until(lambda: slice_max.read_text().strip() == "50000 100000", "the pod's limit too")
    machine.remove(made)


def test_a_best_effort_pod_is_idle_for_the_scheduler(machine: Node, service: Service) -> None:
    made = machine.run_pod(pod("idle", "BE"))
    idle = CGROUPS / made.cgroup / "cpu.idle"
    wait_until(lambda: idle.read_text().strip() == "1", "cpu.idle of the pod is 1")
    besteffort = CGROUPS / "kubepods.slice/kubepods-besteffort.slice/cpu.idle"
    assert besteffort.read_text().strip() == "0", "kubelet must be able to write its weight"
    machine.remove(made)


def test_an_oom_score_reaches_the_process(machine: Node, service: Service) -> None:
    annotations = {"koordinator.sh/oom-score-adj": "777"}
    made = machine.run_pod(ls_pod("scored", annotations=annotations))
    score = Path(f"/proc/{made.pids('main')[0]}/oom_score_adj")
    wait_until(lambda: score.read_text().strip() == "777", "oom_score_adj is 777")
    machine.remove(made)


def test_memory_protection_goes_up_the_whole_way(machine: Node, service: Service) -> None:
    with service.knowing(ls_pod("protected")) as manifest:
        made = machine.run_pod(manifest)
        _gets(made, "memory.min", str(64 << 20))
        for folder in ("kubepods.slice", "kubepods.slice/kubepods-burstable.slice", made.cgroup):
            file = CGROUPS / folder / "memory.min"
            wait_until(lambda file=file: int(file.read_text()) >= 64 << 20, str(file))
        machine.remove(made)


def test_what_a_daemon_reload_reverts_comes_back(machine: Node, service: Service) -> None:
    be = machine.run_pod(batch_pod("reloaded"))
    idle = CGROUPS / be.cgroup / "cpu.idle"
    pod_max = CGROUPS / be.cgroup / "cpu.max"
    with service.knowing(ls_pod("reloaded-ls")) as manifest:
        ls = machine.run_pod(manifest)
        wait_until(lambda: idle.read_text() == "1\n", "idle before the reload")
        _gets(ls, "memory.min", str(64 << 20))
        run("systemctl", "daemon-reload")
        wait_until(lambda: idle.read_text() == "1\n", "cpu.idle is back")
        wait_until(lambda: pod_max.read_text() == "100000 100000\n", "the pod's cpu.max is back")
        _gets(ls, "memory.min", str(64 << 20))
        machine.remove(ls)
    machine.remove(be)


def test_switching_off_restores(machine: Node, service: Service) -> None:
    made = machine.run_pod(batch_pod("restored"))
    idle = CGROUPS / made.cgroup / "cpu.idle"
    wait_until(lambda: idle.read_text() == "1\n", "cpu.idle is set")
    service.put(nodeslo(lsClass=LS_PROTECTED))
    wait_until(lambda: idle.read_text() == "0\n", "cpu.idle is back at 0")
    service.put(nodeslo(beClass=BE_IDLE, lsClass=LS_PROTECTED))
    wait_until(lambda: idle.read_text() == "1\n", "cpu.idle is set again")
    machine.remove(made)
