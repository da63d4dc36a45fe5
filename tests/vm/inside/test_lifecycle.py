"""A node whose daemon dies, is away, or exists twice, on cgroup v2 with the systemd driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import yaml

from protos.cri.v1 import api_pb2 as cri
from tests.beds.kubelet import container_config, sandbox_config
from tests.e2e.manifests import Manifest, batch_pod, ls_pod, node, pinned_pod
from tests.vm.inside.node import CGROUPS, Node, Pod, run, slice_path
from tests.vm.inside.service import ETC, Service
from tests.waiting import wait_until

KOORDLET = "/opt/koordinator/bin/koordlet"
_SET = (
    "cpu.max", "cpu.weight", "cpu.idle", "cpuset.cpus.effective",
    "memory.min", "memory.low", "memory.high", "memory.max", "memory.oom.group",
)  # fmt: skip
"""What the daemon may change. An emptied cpuset.cpus of a populated group cannot be had again."""


@contextmanager
def _normalised(service: Service) -> Iterator[None]:
    """The node says that its CPUs are a quarter faster than the unit that quotas count in."""
    service.put(node(ratio="1.25"))
    try:
        yield
    finally:
        service.put(node())


def _cpu_max(pod: Pod, value: str) -> None:
    wait_until(lambda: pod.read("main", "cpu.max") == value, f"cpu.max is {value}", timeout_s=60)


def _values() -> dict[str, str]:
    found = {}
    for folder, _, files in os.walk(CGROUPS / "kubepods.slice"):
        for name in set(files) & set(_SET):
            path = Path(folder) / name
            found[str(path.relative_to(CGROUPS))] = path.read_text()
    return found


def test_a_resize_in_place_gets_its_share_of_the_faster_cpu(
    machine: Node, service: Service
) -> None:
    with _normalised(service):
        made = machine.run_pod(ls_pod("resized"))
        _cpu_max(made, "80000 100000")
        asked = cri.LinuxContainerResources(
            cpu_period=100_000, cpu_quota=200_000, cpu_shares=512, memory_limit_in_bytes=160 << 20
        )
        # kubelet raises the pod's own limits before it asks for the container's.
        run("systemctl", "set-property", "--runtime", made.slice, "CPUQuota=200%", "MemoryMax=160M")
        machine.cri.update_resources(made.containers["main"], asked)
        _cpu_max(made, "160000 100000")
        wait_until(
            lambda: made.read("main", "memory.max") == str(160 << 20), "the memory limit moved"
        )
        machine.remove(made)


def test_a_pod_created_while_the_daemon_is_away_is_repaired_on_its_return(
    machine: Node, service: Service
) -> None:
    with _normalised(service):
        run("systemctl", "stop", "koordlet")
        made = machine.run_pod(ls_pod("orphan"))
        assert made.read("main", "cpu.max") == "100000 100000"
        service.start()
        _cpu_max(made, "80000 100000")
        machine.remove(made)


def test_pods_created_while_the_daemon_is_killed_end_up_right(
    machine: Node, service: Service
) -> None:
    manifests = [batch_pod(f"storm-{i}") if i % 2 else ls_pod(f"storm-{i}") for i in range(6)]
    with _normalised(service), ThreadPoolExecutor(2) as pool:
        started = [pool.submit(machine.run_pod, manifest) for manifest in manifests]
        for _ in range(2):
            before = service.pid
            os.kill(before, signal.SIGKILL)
            wait_until(
                lambda before=before: (
                    service.pid not in (0, before) and service.show("ActiveState") == "active"
                ),
                "systemd started it again",
                timeout_s=60,
            )
        pods = [future.result(timeout=180) for future in started]
        for made in pods:
            _cpu_max(made, "80000 100000")
            if "besteffort" in made.cgroup:
                idle = CGROUPS / made.cgroup / "cpu.idle"
                wait_until(lambda idle=idle: idle.read_text() == "1\n", "it idles")
        for made in pods:
            machine.remove(made)


def test_a_second_daemon_refuses_to_start(machine: Node, service: Service) -> None:
    second = subprocess.run(
        [KOORDLET, "run", "--config", str(ETC / "config.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode != 0
    assert str(service.pid) in second.stderr, second.stderr


def test_a_second_daemon_that_shares_nothing_but_the_pods_refuses_too(
    machine: Node, service: Service, tmp_path: Path
) -> None:
    own = {"runDir": str(tmp_path / "run"), "nri": {"enabled": False}, "http": {"address": ""}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load((ETC / "config.yaml").read_text()), **own}))
    second = subprocess.run(
        [KOORDLET, "run", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 1
    assert f"process {service.pid} holds {CGROUPS}/kubepods.slice:" in second.stderr, second.stderr


def test_many_containers_at_once_all_get_their_values(machine: Node, service: Service) -> None:
    """Created, not started: what was answered is in the container's specification."""
    with _normalised(service):
        manifest = ls_pod("many")
        made = machine.run_pod(manifest)
        sandbox = sandbox_config(manifest, f"/{slice_path(made.slice)}", Path("/run/koord-pods"))

        def create(number: int) -> str:
            container = {**manifest["spec"]["containers"][0], "name": f"c{number}"}
            config = container_config(manifest, container, "burstable")
            return machine.cri.create_container(made.sandbox_id, config, sandbox)

        with ThreadPoolExecutor(8) as pool:
            created = list(pool.map(create, range(40)))
        for container_id in created:
            info = json.loads(machine.cri.container_status(container_id).info["info"])
            assert info["runtimeSpec"]["linux"]["resources"]["cpu"]["quota"] == 80_000
        machine.remove(made)


def test_restore_gives_every_value_back(machine: Node, service: Service) -> None:
    run("systemctl", "stop", "koordlet")
    manifests: list[Manifest] = [ls_pod("was-ls"), batch_pod("was-batch"), pinned_pod("was-pinned")]
    pods = [machine.run_pod(manifest) for manifest in manifests]
    before = _values()
    with _normalised(service):
        service.start()
        _cpu_max(pods[0], "80000 100000")
        _cpu_max(pods[1], "80000 100000")
        _cpu_max(pods[2], "max 100000")
        assert _values() != before
        run("systemctl", "stop", "koordlet")
        run(KOORDLET, "restore", "--config", str(ETC / "config.yaml"))
        after = _values()
    assert {path: after[path] for path in before if after.get(path) != before[path]} == {}
    service.start()
    for made in pods:
        machine.remove(made)


def test_a_reload_after_a_switch_off_brings_nothing_back(machine: Node, service: Service) -> None:
    """The container's scope remembers what it was created with, for as long as it lives."""
    with _normalised(service):
        made = machine.run_pod(ls_pod("given-back"))
        _cpu_max(made, "80000 100000")
    _cpu_max(made, "100000 100000")
    run("systemctl", "stop", "koordlet")
    run("systemctl", "daemon-reload")
    _cpu_max(made, "80000 100000")  # else this test shows nothing
    service.start()
    _cpu_max(made, "100000 100000")
    run("systemctl", "daemon-reload")
    time.sleep(2)
    _cpu_max(made, "100000 100000")
    machine.remove(made)
