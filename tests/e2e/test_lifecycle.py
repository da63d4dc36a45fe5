"""What happens to a node whose daemon or runtime dies, comes back, or exists twice."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from protos.cri.v1.api_pb2 import LinuxContainerResources
from tests.beds.containerd import Containerd
from tests.beds.daemon import Daemon, daemon
from tests.beds.errors import BedError
from tests.beds.kubelet import (
    container_config,
    remove_pod,
    run_pod,
    running_pod,
)
from tests.e2e.manifests import (
    BE_IDENTITY,
    CPUS,
    SHARED,
    Manifest,
    batch_pod,
    ls_pod,
    node,
    nodeslo,
    pinned_pod,
    topology,
)
from tests.e2e.observe import all_values, container_value, eventually, pod_value, settled_values
from tests.waiting import wait_until

pytestmark = pytest.mark.containerd

GATES = {"CPUNormalization": True}
EVERY_SECOND = {"intervals": {"reconcile": 1}}


def _objects() -> list[Manifest]:
    return [node(ratio="1.25"), nodeslo(beClass=BE_IDENTITY), topology()]


def _connected(running: Daemon) -> bool:
    status = running.query("status")
    return bool(status["nri"]["connected"])


def test_a_pod_created_while_the_daemon_is_away_is_repaired_on_its_return(bed: Containerd) -> None:
    with daemon(bed, _objects(), gates=GATES) as koordlet:
        koordlet.stop(signal.SIGKILL)
        manifest = ls_pod("orphan")
        koordlet.put(manifest)
        with running_pod(bed, manifest) as pod:
            assert container_value(bed, pod, "cpu.cfs_quota_us") == "100000"
            koordlet.start()
            eventually(bed, pod, "cpu.cfs_quota_us", "80000", level="container")
            eventually(bed, pod, "cpuset.cpus", SHARED, level="container")


def test_a_resize_while_the_daemon_is_away_is_kubelets_new_request(bed: Containerd) -> None:
    with (
        daemon(bed, _objects(), gates=GATES) as koordlet,
        running_pod(bed, ls_pod("sized")) as resized,
        running_pod(bed, ls_pod("same")) as same,
    ):
        asked = LinuxContainerResources(cpu_shares=512, cpu_quota=50_000, cpu_period=100_000)
        for resizing in (True, False):
            koordlet.stop(signal.SIGKILL)
            if resizing:
                bed.cri.update_resources(next(iter(resized.containers.values())), asked)
            koordlet.start()
            eventually(bed, resized, "cpu.cfs_quota_us", "40000", level="container")
            eventually(bed, same, "cpu.cfs_quota_us", "80000", level="container")
        koordlet.put(node())
        eventually(bed, resized, "cpu.cfs_quota_us", "50000", level="container")
        eventually(bed, same, "cpu.cfs_quota_us", "100000", level="container")


def test_a_pool_with_cpus_that_are_gone_stops_no_container_from_starting(bed: Containerd) -> None:
    gone = CPUS[-1] + 1
    objects = [node(), nodeslo(), topology(f"{SHARED},{gone}")]
    own = pinned_pod("half-gone", f"{CPUS[0]},{gone}")
    with daemon(bed, objects, config=EVERY_SECOND) as koordlet:
        with running_pod(bed, ls_pod("shared")) as pod:
            assert container_value(bed, pod, "cpuset.cpus") == SHARED
        koordlet.put(own)
        with running_pod(bed, own) as pod:
            assert container_value(bed, pod, "cpuset.cpus") == str(CPUS[0])


def test_a_container_starts_again_while_no_server_answers(bed: Containerd) -> None:
    """On cgroup v1 runc cannot make a container whose quota is above its pod's."""
    manifest = ls_pod("again")
    with daemon(bed, _objects(), gates=GATES) as koordlet, running_pod(bed, manifest) as pod:
        assert container_value(bed, pod, "cpu.cfs_quota_us") == "80000"
        koordlet.stop(signal.SIGKILL)
        config = container_config(manifest, manifest["spec"]["containers"][0], pod.qos)
        config.metadata.attempt = 1
        again = bed.cri.create_container(pod.sandbox_id, config, pod.sandbox_config)
        bed.cri.start_container(again)
        assert bed.cri.execute(again, ["true"]).exit_code == 0


def test_pods_created_while_the_daemon_is_killed_again_and_again_end_up_right(
    bed: Containerd,
) -> None:
    manifests = [batch_pod(f"storm-{i}") if i % 2 else ls_pod(f"storm-{i}") for i in range(16)]
    with daemon(bed, _objects(), gates=GATES, config=EVERY_SECOND) as koordlet:
        koordlet.put(*manifests)
        with ThreadPoolExecutor(4) as pool:
            started = [pool.submit(run_pod, bed, manifest) for manifest in manifests]
            for _ in range(3):
                koordlet.stop(signal.SIGKILL)
                koordlet.start()
            pods = [future.result(timeout=120) for future in started]
        try:
            for pod in pods:
                eventually(bed, pod, "cpu.cfs_quota_us", "80000", level="container")
                if pod.qos == "besteffort":
                    eventually(bed, pod, "cpu.shares", "512", level="container")
                    eventually(bed, pod, "cpu.idle", "1", level="pod")
                else:
                    eventually(bed, pod, "cpuset.cpus", SHARED, level="container")
        finally:
            for pod in pods:
                remove_pod(bed, pod)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_containerd_that_comes_back_finds_the_daemon_waiting(
    bed: Containerd, how: signal.Signals
) -> None:
    with (
        daemon(bed, _objects(), gates=GATES) as koordlet,
        running_pod(bed, ls_pod("before")) as before,
    ):
        bed.restart(how)
        wait_until(lambda: _connected(koordlet), "the daemon to connect again", timeout_s=30)
        assert container_value(bed, before, "cpu.cfs_quota_us") == "80000"
        with running_pod(bed, ls_pod("after")) as after:
            assert container_value(bed, after, "cpu.cfs_quota_us") == "80000"
            assert container_value(bed, after, "cpuset.cpus") == SHARED


def test_a_second_daemon_refuses_to_start(bed: Containerd) -> None:
    with daemon(bed, _objects(), gates=GATES) as koordlet:
        second = koordlet.run_koordlet("run")
        assert second.returncode != 0
        assert str(koordlet.pid) in second.stderr, second.stderr
        with running_pod(bed, ls_pod("still-served")) as pod:
            assert container_value(bed, pod, "cpuset.cpus") == SHARED


def test_a_second_daemon_that_shares_nothing_but_the_pods_refuses_too(bed: Containerd) -> None:
    with daemon(bed, _objects(), gates=GATES) as koordlet:
        alone = {"nri": {"enabled": False}}
        with (
            pytest.raises(BedError, match=f"process {koordlet.pid} holds .*{bed.groups.path}:"),
            daemon(bed, _objects(), name="second", config=alone),
        ):
            pass
        koordlet.stop(signal.SIGKILL)
        with daemon(bed, _objects(), name="second", config=alone):
            pass


def test_a_value_changed_from_outside_is_put_back(bed: Containerd) -> None:
    with (
        daemon(bed, _objects(), gates=GATES, config=EVERY_SECOND),
        running_pod(bed, ls_pod("touched")) as pod,
    ):
        bed.groups.file(pod.container_cgroup("main"), "cpu.cfs_quota_us").write_text("-1")
        eventually(bed, pod, "cpu.cfs_quota_us", "80000", level="container")


def test_a_daemon_that_is_stopped_leaves_the_values_in_force(bed: Containerd) -> None:
    manifest = ls_pod("kept")
    with daemon(bed, _objects(), gates=GATES) as koordlet, running_pod(bed, manifest) as pod:
        assert koordlet.stop() == 0
        assert container_value(bed, pod, "cpu.cfs_quota_us") == "80000"


def test_restore_gives_every_byte_back(bed: Containerd) -> None:
    manifests = [ls_pod("was-ls"), batch_pod("was-batch"), pinned_pod("was-pinned")]
    pods = [run_pod(bed, manifest) for manifest in manifests]
    try:
        before = all_values(bed)
        with daemon(bed, [*_objects(), *manifests], gates=GATES) as koordlet:
            eventually(bed, pods[0], "cpu.cfs_quota_us", "80000", level="container")
            eventually(bed, pods[1], "cpu.idle", "1", level="pod")
            eventually(bed, pods[2], "cpu.cfs_quota_us", "-1", level="pod")
            assert koordlet.stop() == 0
            done = koordlet.run_koordlet("restore")
            assert done.returncode == 0, done.stderr
        assert all_values(bed) == before
    finally:
        for pod in pods:
            remove_pod(bed, pod)


def test_a_batch_limit_follows_its_pod_up_and_down(bed: Containerd) -> None:
    manifest = batch_pod("sized", memory="64Mi")
    with (
        daemon(bed, [*_objects(), manifest], gates=GATES) as koordlet,
        running_pod(bed, manifest) as pod,
    ):
        name = "memory.limit_in_bytes"
        for size in (64, 256, 96):
            resized = batch_pod("sized", memory=f"{size}Mi")
            resized["metadata"]["uid"] = manifest["metadata"]["uid"]
            koordlet.put(resized)
            eventually(bed, pod, name, str(size * 2**20), level="pod")
            eventually(bed, pod, name, str(size * 2**20), level="container")


def test_a_policy_that_is_switched_off_gives_every_byte_back(bed: Containerd) -> None:
    manifests = [ls_pod("was-ls"), batch_pod("was-batch")]
    pods = [run_pod(bed, manifest) for manifest in manifests]
    try:
        off = [node(), nodeslo(), topology(), *manifests]
        with daemon(bed, off, gates=GATES) as koordlet:
            eventually(bed, pods[1], "cpu.shares", "512", level="container")
            before = settled_values(bed)
            koordlet.put(node(ratio="1.25"), nodeslo(beClass=BE_IDENTITY))
            eventually(bed, pods[0], "cpu.cfs_quota_us", "80000", level="container")
            eventually(bed, pods[1], "cpu.idle", "1", level="pod")
            koordlet.put(node(), nodeslo())
            eventually(bed, pods[1], "cpu.idle", "0", level="pod")
            eventually(bed, pods[0], "cpu.cfs_quota_us", "100000", level="pod")
            wait_until(lambda: all_values(bed) == before, "every value to be back")
    finally:
        for pod in pods:
            remove_pod(bed, pod)


def test_a_bad_object_costs_nothing_and_the_last_good_one_stays(bed: Containerd) -> None:
    with daemon(bed, _objects(), gates=GATES) as koordlet, running_pod(bed, ls_pod("a")) as first:
        assert container_value(bed, first, "cpu.cfs_quota_us") == "80000"
        koordlet.put(node(ratio="fast"))
        wait_until(lambda: "fast" in koordlet.log.read_text(), "the error in the log")
        with running_pod(bed, ls_pod("b")) as second:
            assert container_value(bed, second, "cpuset.cpus") == SHARED


def test_three_hundred_containers_at_once_all_get_their_values(bed: Containerd) -> None:
    """Created, not started: what NRI answered is in the container's specification."""
    manifests = [ls_pod(f"many-{i}") for i in range(12)]
    with daemon(bed, _objects(), gates=GATES) as koordlet:
        pods = [run_pod(bed, manifest) for manifest in manifests]
        try:

            def create(number: int) -> str:
                pod, manifest = pods[number % len(pods)], manifests[number % len(pods)]
                container = {**manifest["spec"]["containers"][0], "name": f"c{number}"}
                config = container_config(manifest, container, pod.qos)
                return bed.cri.create_container(pod.sandbox_id, config, pod.sandbox_config)

            with ThreadPoolExecutor(16) as pool:
                created = list(pool.map(create, range(300)))
            for container_id in created:
                info = json.loads(bed.cri.container_status(container_id).info["info"])
                cpu = info["runtimeSpec"]["linux"]["resources"]["cpu"]
                assert (cpu["quota"], cpu["cpus"]) == (80_000, SHARED), container_id
            assert _connected(koordlet)
        finally:
            for pod in pods:
                remove_pod(bed, pod)


def test_nothing_outside_kubepods_is_written(bed: Containerd) -> None:
    """A group beside kubepods, with a pod's name, is none of the daemon's business."""
    manifest = batch_pod("inside")
    outside = f"/{bed.groups.path.split('/')[1]}/pod{manifest['metadata']['uid']}"
    folder = bed.groups.file(outside, "cpu.idle").parent
    folder.mkdir()
    try:
        with daemon(bed, _objects(), gates=GATES), running_pod(bed, manifest) as pod:
            eventually(bed, pod, "cpu.idle", "1", level="pod")
            assert pod_value(bed, pod, "cpu.cfs_quota_us") == "80000"
            assert bed.groups.read(outside, "cpu.idle") == "0"
            assert bed.groups.read(outside, "cpu.cfs_quota_us") == "-1"
    finally:
        folder.rmdir()
