"""The bed itself: what later tests stand on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.cri.v1 import api_pb2 as cri
from tests.beds.containerd import (
    GENERATIONS,
    Containerd,
    Generation,
    _shims,
    configuration,
    containerd,
)
from tests.beds.errors import BedError
from tests.beds.groups import layout
from tests.beds.kubelet import cpu_shares, qos_class, run_pod, running_pod
from tests.beds.packages import CHECKOUT

UID = "0f0e0d0c-0000-4000-8000-000000000001"
POD: dict[str, Any] = {
    "metadata": {"name": "web", "uid": UID, "labels": {"app": "web"}},
    "spec": {
        "containers": [
            {
                "name": "main",
                "env": [{"name": "GREETING", "value": "hello"}],
                "resources": {
                    "requests": {"cpu": "500m", "memory": "64Mi"},
                    "limits": {"cpu": "1", "memory": "128Mi"},
                },
            }
        ]
    },
}


@pytest.fixture(scope="module", params=GENERATIONS)
def runtime(request: pytest.FixtureRequest) -> Iterator[Containerd]:
    generation: Generation = request.param
    with containerd(generation) as running:
        yield running


@pytest.mark.containerd
def test_a_pod_runs_with_the_values_of_its_manifest(runtime: Containerd) -> None:
    with running_pod(runtime, POD) as pod:
        group = pod.container_cgroup("main")
        shares = str(runtime.groups.weight(512))
        assert runtime.groups.read(group, "cpu.shares") == shares
        assert runtime.groups.read(group, "cpu.cfs_quota_us") == "100000"
        assert runtime.groups.read(group, "memory.limit_in_bytes") == str(128 * 2**20)
        assert "GREETING=hello" in runtime.cri.execute(pod.containers["main"], ["env"]).stdout
        pod_group = runtime.groups.file(pod.cgroup, "cpu.shares").parent
        assert pod_group.is_dir()
    assert not pod_group.exists()


@pytest.mark.containerd
def test_resources_change_in_place(runtime: Containerd) -> None:
    with running_pod(runtime, POD) as pod:
        runtime.cri.update_resources(
            pod.containers["main"],
            cri.LinuxContainerResources(cpu_period=100_000, cpu_quota=50_000, cpu_shares=256),
        )
        group = pod.container_cgroup("main")
        assert runtime.groups.read(group, "cpu.cfs_quota_us") == "50000"
        assert runtime.groups.read(group, "cpu.shares") == str(runtime.groups.weight(256))


@pytest.mark.containerd
def test_pods_survive_a_killed_containerd(runtime: Containerd) -> None:
    with running_pod(runtime, POD) as pod:
        runtime.restart(signal.SIGKILL)
        assert runtime.cri.execute(pod.containers["main"], ["echo", "here"]).stdout == "here\n"


@pytest.mark.containerd
def test_beds_of_both_generations_stand_side_by_side_and_leave_nothing() -> None:
    with containerd("1.7") as old, containerd("2.1") as new:
        assert old.cri.version().runtime_version.startswith("1.7.")
        assert new.cri.version().runtime_version.startswith("2.1.")
        assert old.nri_socket.is_socket()
        assert new.nri_socket.is_socket()
        folders = [old.folder, new.folder]
        roots = [c.groups.file(c.groups.path, "cpu.shares").parents[1] for c in (old, new)]
        # A pod that nobody removed goes with the bed.
        forgotten = run_pod(new, POD)
        roots.append(new.groups.file(forgotten.cgroup, "memory.limit_in_bytes").parent)
    for path in folders + roots:
        assert not path.exists()
    mounted = Path("/proc/self/mounts").read_text()
    assert not any(str(folder) in mounted for folder in folders)


_DOOMED = """
import json, os, signal, sys
from tests.beds.containerd import containerd
from tests.beds.kubelet import run_pod
with containerd("2.1") as bed:
    run_pod(bed, json.loads(sys.argv[1]))
    print(os.getpid(), bed.folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.containerd
def test_what_a_killed_bed_left_is_removed_by_the_next() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DOOMED, json.dumps(POD)],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pid, folder = done.stdout.split()
    assert Path(folder).exists()
    with containerd("2.1"):
        assert not Path(folder).exists()
        _, hierarchies = layout()
        assert not [g for h in hierarchies for g in h.glob(f"koord-bed-{pid}-*")]
        assert not _shims(Path(folder) / "containerd.sock")


@pytest.mark.containerd
def test_a_containerd_that_ends_at_once_shows_its_log(runtime: Containerd) -> None:
    runtime.stop()
    good = (runtime.folder / "config.toml").read_text()
    try:
        (runtime.folder / "config.toml").write_text("version = 'none'")
        with pytest.raises(BedError, match="its log ends:"):
            runtime.start()
    finally:
        (runtime.folder / "config.toml").write_text(good)
        runtime.start()


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, "besteffort"),
        ({"limits": {"kubernetes.io/batch-cpu": "1000"}}, "besteffort"),
        ({"requests": {"cpu": "1"}}, "burstable"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}}, "guaranteed"),
        (
            {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}},
            "burstable",
        ),
    ],
)
def test_qos_class_is_that_of_a_kubelet(resources: dict[str, Any], expected: str) -> None:
    pod = {"spec": {"containers": [{"name": "main", "resources": resources}]}}
    assert qos_class(pod) == expected


def test_shares_never_go_below_two() -> None:
    assert cpu_shares(0) == 2
    assert cpu_shares(1500) == 1536


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_path_of_a_bed_lies_in_its_folder(tmp_path: Path, generation: Generation) -> None:
    text = configuration(generation, tmp_path, tmp_path / "bin" / "runc")
    paths = [word.strip('"') for line in text.splitlines() for word in line.split()]
    assert all(p.startswith(f"{tmp_path}{os.sep}") for p in paths if p.startswith("/"))
