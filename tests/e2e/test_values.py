"""Each policy that a mainline kernel can carry, at creation: kernel values and environment.

The timer of the reconciler is set to an hour, so what is seen comes from the reply to the runtime
or from the write that follows it at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.cri.v1 import api_pb2 as cri
from tests.beds.containerd import Containerd
from tests.beds.daemon import Daemon, daemon
from tests.beds.kubelet import running_pod
from tests.e2e.manifests import (
    BE_IDENTITY,
    FIRST,
    SHARED,
    Manifest,
    batch_pod,
    gpu_pod,
    ls_pod,
    node,
    nodeslo,
    pinned_pod,
    pod,
    topology,
)
from tests.e2e.observe import container_value, eventually, kernel_text
from tests.waiting import wait_until

pytestmark = pytest.mark.containerd

GATES = {
    "CPUNormalization": True,
    "GPUEnvInject": True,
    "HamiCoreVGPUMonitor": True,
    "OOMScoreAdj": True,
}


@pytest.fixture(scope="module")
def koordlet(bed: Containerd) -> Iterator[Daemon]:
    objects = [node(ratio="1.25"), nodeslo(beClass=BE_IDENTITY), topology()]
    config = {"intervals": {"reconcile": 3600}, "hamiCoreLibrary": str(_hami_library(bed))}
    with daemon(bed, objects, gates=GATES, config=config) as running:
        yield running


def _hami_library(bed: Containerd) -> Path:
    library = bed.folder / "vgpu" / "libvgpu.so"
    library.parent.mkdir(exist_ok=True)
    library.touch()
    return library


# manifest, {container value}, {pod value}
CASES = [
    pytest.param(
        pinned_pod("pinned"),
        {"cpuset.cpus": FIRST, "cpu.cfs_quota_us": "-1"},
        {"cpu.cfs_quota_us": "-1"},
        id="an allocated CPU set is the container's, without a quota",
    ),
    pytest.param(
        ls_pod("shared"),
        {"cpuset.cpus": SHARED, "cpu.cfs_quota_us": "80000", "cpu.shares": "512"},
        {"cpu.cfs_quota_us": "100000"},
        id="an LS pod shares the pool and its quota is divided by the node's ratio",
    ),
    pytest.param(
        batch_pod("batch"),
        {
            "cpu.shares": "512",
            "cpu.cfs_quota_us": "80000",
            "memory.limit_in_bytes": str(128 * 2**20),
        },
        {
            "cpu.shares": None,  # of no effect while cpu.idle is 1
            "cpu.cfs_quota_us": "80000",
            "memory.limit_in_bytes": str(128 * 2**20),
            "cpu.idle": "1",
        },
        id="a BE pod has its batch resources and stays idle",
    ),
    pytest.param(
        pod("plain", requests={"cpu": "100m"}),
        {"cpuset.cpus": SHARED, "cpu.shares": "102", "cpu.cfs_quota_us": "-1"},
        {"cpu.idle": "0"},
        id="a pod without a class stays in the pool and keeps what kubelet gave it",
    ),
]


@pytest.mark.parametrize(("manifest", "of_container", "of_pod"), CASES)
def test_a_created_container_has_its_values(
    bed: Containerd,
    koordlet: Daemon,
    manifest: Manifest,
    of_container: dict[str, str],
    of_pod: dict[str, str | None],
) -> None:
    koordlet.put(manifest)
    with running_pod(bed, manifest) as running:
        for name, value in of_container.items():
            assert container_value(bed, running, name) == kernel_text(bed, name, value), name
        for name, expected in of_pod.items():
            if expected is not None:
                eventually(bed, running, name, expected, level="pod")


def test_the_first_process_already_runs_where_it_should(bed: Containerd, koordlet: Daemon) -> None:
    command = ["sh", "-c", "grep Cpus_allowed_list /proc/self/status > /tmp/cpus; sleep 9999"]
    with running_pod(bed, ls_pod("early", command=command)) as running:
        seen = bed.cri.execute(running.containers["main"], ["cat", "/tmp/cpus"]).stdout
        assert seen.split()[1] == SHARED


def test_a_gpu_allocation_reaches_the_environment(bed: Containerd, koordlet: Daemon) -> None:
    with running_pod(bed, gpu_pod("train", 1, 3)) as running:
        environment = bed.cri.execute(running.containers["main"], ["env"]).stdout.splitlines()
        assert "NVIDIA_VISIBLE_DEVICES=1,3" in environment


def test_a_shared_gpu_gets_its_limits_and_the_library(bed: Containerd, koordlet: Daemon) -> None:
    manifest = gpu_pod("shared-gpu", 0)
    metadata = manifest["metadata"]
    metadata["labels"]["koordinator.sh/gpu-isolation-provider"] = "HAMi-core"
    key = "scheduling.koordinator.sh/device-allocated"
    metadata["annotations"][key] = (
        '{"gpu":[{"minor":0,"resources":{"koordinator.sh/gpu-core":"50",'
        '"koordinator.sh/gpu-memory":"8Gi","koordinator.sh/gpu-memory-ratio":"50"}}]}'
    )
    with _vgpulock(), running_pod(bed, manifest) as running:
        container = running.containers["main"]
        environment = bed.cri.execute(container, ["env"]).stdout.splitlines()
        library = str(_hami_library(bed))
        assert "CUDA_DEVICE_MEMORY_LIMIT=8589934592" in environment
        assert "CUDA_DEVICE_SM_LIMIT=50" in environment
        assert f"LD_PRELOAD={library}" in environment
        mounts = bed.cri.execute(container, ["cat", "/proc/mounts"]).stdout
        mounted = {line.split()[1] for line in mounts.splitlines()}
        assert {library, "/tmp/vgpulock", str(_hami_library(bed).parent)} <= mounted
        # The monitor finds what the container writes into its own directory.
        write = f"test -e {library} && echo 1 > {_hami_library(bed).parent}/usage"
        assert bed.cri.execute(container, ["sh", "-c", write]).exit_code == 0
        [own] = _hami_library(bed).parent.joinpath("containers").iterdir()
        assert own.name.endswith("_main") and (own / "usage").exists()


@contextlib.contextmanager
def _vgpulock() -> Iterator[None]:
    """The host folder that HAMi's device plugin makes."""
    folder = Path("/tmp/vgpulock")
    made = not folder.exists()
    folder.mkdir(exist_ok=True)
    try:
        yield
    finally:
        if made:
            folder.rmdir()


def test_an_oom_score_reaches_the_processes(bed: Containerd, koordlet: Daemon) -> None:
    manifest = pod("oom", "LS", annotations={"koordinator.sh/oom-score-adj": "1000"})
    manifest["spec"]["containers"][0]["resources"] = {"requests": {"memory": "64Mi"}}
    koordlet.put(manifest)
    with running_pod(bed, manifest) as running:
        [pid] = bed.groups.read(running.container_cgroup("main"), "cgroup.procs").split()
        score = Path("/proc", pid, "oom_score_adj")
        wait_until(lambda: score.read_text().strip() == "1000", "oom_score_adj = 1000")


def test_a_bad_annotation_costs_its_own_claim_and_nothing_else(
    bed: Containerd, koordlet: Daemon
) -> None:
    key = "scheduling.koordinator.sh/device-allocated"
    manifest = ls_pod("bad", annotations={key: '{"gpu": "all of them"}'})
    with running_pod(bed, manifest) as running:
        assert container_value(bed, running, "cpuset.cpus") == SHARED
        environment = bed.cri.execute(running.containers["main"], ["env"]).stdout
        assert "NVIDIA_VISIBLE_DEVICES" not in environment
    assert key in koordlet.log.read_text()


def test_a_resize_keeps_what_was_asked_and_what_is_ours(bed: Containerd, koordlet: Daemon) -> None:
    with running_pod(bed, ls_pod("resized")) as running:
        bed.cri.update_resources(
            running.containers["main"],
            cri.LinuxContainerResources(
                cpu_period=100_000,
                cpu_quota=50_000,
                cpu_shares=256,
                memory_limit_in_bytes=96 * 2**20,
            ),
        )
        assert container_value(bed, running, "cpu.cfs_quota_us") == "40000"
        eventually(bed, running, "cpu.shares", "256", level="container")
        assert container_value(bed, running, "memory.limit_in_bytes") == str(96 * 2**20)
        assert container_value(bed, running, "cpuset.cpus") == SHARED


def test_a_pinned_container_stays_without_quota_after_a_resize(
    bed: Containerd, koordlet: Daemon
) -> None:
    with running_pod(bed, pinned_pod("resized-pinned")) as running:
        bed.cri.update_resources(
            running.containers["main"],
            cri.LinuxContainerResources(cpu_period=100_000, cpu_quota=200_000, cpu_shares=2048),
        )
        eventually(bed, running, "cpu.cfs_quota_us", "-1", level="container")
        eventually(bed, running, "cpu.shares", "2048", level="container")
        assert container_value(bed, running, "cpuset.cpus") == FIRST
