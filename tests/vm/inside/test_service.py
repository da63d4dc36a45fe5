"""The unit: verified, sandboxed, watched; restarts, containerd's too, lose nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.e2e.manifests import batch_pod, ls_pod
from tests.vm.inside.node import Node, run
from tests.vm.inside.service import UNIT, Service
from tests.waiting import wait_until

CAPABILITIES = {"CAP_DAC_OVERRIDE": 1, "CAP_SYS_PTRACE": 19, "CAP_SYS_RESOURCE": 24}


def test_systemd_finds_nothing_wrong_with_the_unit(service: Service) -> None:
    said = run("systemd-analyze", "verify", str(UNIT))
    assert "koordlet" not in said


def test_the_exposure_is_below_4(service: Service) -> None:
    said = run("systemd-analyze", "security", "--no-pager", "koordlet")
    exposure = next(line for line in said.splitlines() if "Overall exposure" in line)
    assert float(exposure.split(":")[1].split()[0]) < 4.0, exposure


def test_the_sandbox_is_in_force(service: Service) -> None:
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{service.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert int(status["CapEff"], 16) == sum(1 << bit for bit in CAPABILITIES.values())
    assert int(status["CapBnd"], 16) == int(status["CapEff"], 16)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    mounts = {}
    for line in Path(f"/proc/{service.pid}/mountinfo").read_text().splitlines():
        fields = line.split()
        mounts[fields[4]] = fields[5].split(",")[0]
    assert mounts["/"] == "ro"
    assert mounts["/sys"] == "ro"
    assert mounts.get("/sys/fs/cgroup") == "rw"
    assert mounts["/run/koordlet"] == "rw"
    assert mounts["/var/lib/koordlet"] == "rw"


def test_the_event_loop_may_prefer_itself_in_the_sandbox(service: Service) -> None:
    """LimitNICE= allows it; the unit's filter of system calls does not refuse it."""
    tasks = Path(f"/proc/{service.pid}/task")
    niceness = {
        int(task.name): int((task / "stat").read_text().rpartition(")")[2].split()[16])
        for task in tasks.iterdir()
    }
    assert niceness.pop(service.pid) == -10
    assert -9 in niceness.values()
    assert set(niceness.values()) <= {0, -9}


def test_it_is_connected_to_containerd(service: Service) -> None:
    status = service.status()
    assert "connected" in str(status).lower(), status


def test_a_restart_writes_nothing_and_keeps_every_value(machine: Node, service: Service) -> None:
    pod = machine.run_pod(batch_pod("restarted"))
    wait_until(lambda: pod.read("main", "cpu.max") == "100000 100000", "the batch limit is set")
    before = _values(pod.read)
    service.restart()
    wait_until(lambda: service.show("ActiveState") == "active", "koordlet is back")
    assert _values(pod.read) == before
    machine.remove(pod)


def _values(read: object) -> dict[str, str]:
    assert callable(read)
    return {
        file: read("main", file) for file in ("cpu.weight", "cpu.max", "cpuset.cpus", "memory.max")
    }


def test_a_hung_daemon_is_restarted_by_the_watchdog(service: Service) -> None:
    """The unit as shipped, with nothing but a shorter patience."""
    assert service.show("WatchdogUSec") == "1min"
    dropin = Path("/etc/systemd/system/koordlet.service.d/patience.conf")
    dropin.parent.mkdir(exist_ok=True)
    dropin.write_text("[Service]\nWatchdogSec=10\nTimeoutAbortSec=5\n")
    try:
        run("systemctl", "daemon-reload")
        service.restart()
        before = service.pid
        os.kill(before, signal.SIGSTOP)
        wait_until(
            lambda: service.pid not in (0, before) and service.show("ActiveState") == "active",
            "systemd started another koordlet",
            timeout_s=60,
        )
    finally:
        dropin.unlink()
        run("systemctl", "daemon-reload")
        service.restart()


def test_a_killed_daemon_comes_back(service: Service) -> None:
    before = service.pid
    os.kill(before, signal.SIGKILL)
    wait_until(
        lambda: service.pid not in (0, before) and service.show("ActiveState") == "active",
        "systemd started another koordlet",
        timeout_s=40,
    )


def test_containerd_restarts_under_it(machine: Node, service: Service) -> None:
    old = machine.run_pod(ls_pod("before-restart"))
    run("systemctl", "restart", "containerd", timeout_s=90)
    machine.reconnect()
    pod = machine.run_pod(batch_pod("after-restart"))
    wait_until(
        lambda: pod.read("main", "cpu.max") == "100000 100000",
        "a pod of the new containerd gets its batch limit",
        timeout_s=40,
    )
    machine.remove(pod)
    machine.remove(old)
