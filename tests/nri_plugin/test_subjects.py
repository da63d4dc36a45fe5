"""What NRI messages become: pods, sandboxes and containers, and the paths in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.qos import KubeQoS, QoSClass
from hooks.subject import NOTHING_REQUESTED
from linux.cpuset import CpuSet
from linux.resources import UNLIMITED
from nri_plugin.capabilities import RuntimeKind
from nri_plugin.handler import ContainerState
from nri_plugin.subjects import (
    created_container,
    directory_of,
    existing_container,
    place_of,
    sandbox,
    updated_container,
    values,
)
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.nri_plugin.scenes import PARENT, container, pod

UID = "7712555c-ce62-454a-9e18-9ff0217b8941"
SLICE = "kubepods-burstable-pod7712555c_ce62_454a_9e18_9ff0217b8941.slice"


@pytest.mark.parametrize(
    ("parent", "qos"),
    [
        ("/kubepods.slice/kubepods-burstable.slice/" + SLICE, KubeQoS.BURSTABLE),
        (
            "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podx.slice",
            KubeQoS.BESTEFFORT,
        ),
        ("/kubepods.slice/kubepods-podx.slice", KubeQoS.GUARANTEED),
        (f"/kubepods/burstable/pod{UID}", KubeQoS.BURSTABLE),
        (f"/kubepods/besteffort/pod{UID}", KubeQoS.BESTEFFORT),
        (f"/kubepods/pod{UID}", KubeQoS.GUARANTEED),
        (f"/root/kubepods/burstable/pod{UID}", KubeQoS.BURSTABLE),
        ("/own.slice/own-kubepods.slice/own-kubepods-burstable.slice", KubeQoS.BURSTABLE),
        ("", KubeQoS.GUARANTEED),
        ("/kubepods/podburstable", KubeQoS.GUARANTEED),
    ],
)
def test_the_kubernetes_class_is_read_from_the_parent(parent: str, qos: KubeQoS) -> None:
    assert place_of(parent)[1] is qos


@pytest.mark.parametrize(
    ("parent", "cgroups_path", "runtime", "directory"),
    [
        (
            f"/kubepods.slice/kubepods-burstable.slice/{SLICE}",
            f"{SLICE}:cri-containerd:C",
            RuntimeKind.CONTAINERD,
            f"kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-C.scope",
        ),
        (
            f"/kubepods.slice/kubepods-burstable.slice/{SLICE}",
            "",
            RuntimeKind.CONTAINERD,
            f"kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-C.scope",
        ),
        (
            f"/kubepods/burstable/pod{UID}",
            f"/kubepods/burstable/pod{UID}/C",
            RuntimeKind.CONTAINERD,
            f"kubepods/burstable/pod{UID}/C",
        ),
        (f"/kubepods/pod{UID}", "", RuntimeKind.CONTAINERD, f"kubepods/pod{UID}/C"),
        (f"/kubepods/pod{UID}", "", RuntimeKind.CRIO, f"kubepods/pod{UID}/crio-C"),
        (
            "/kubepods.slice/kubepods-podx.slice",
            "kubepods-podx.slice:crio:C",
            RuntimeKind.CRIO,
            "kubepods.slice/kubepods-podx.slice/crio-C.scope",
        ),
        (
            "kubepods-burstable-podx.slice",
            "kubepods-burstable-podx.slice:crio:C",
            RuntimeKind.CRIO,
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice/crio-C.scope",
        ),
        ("", "", RuntimeKind.CONTAINERD, ""),
    ],
)
def test_a_containers_directory(
    parent: str, cgroups_path: str, runtime: RuntimeKind, directory: str
) -> None:
    assert directory_of(cgroups_path, place_of(parent)[0], "C", runtime) == directory


@pytest.mark.parametrize(
    "path",
    ["", "/", "a/../b", "../a", "a//b", "./a", "a/\0", "a/\n", "x" * 5000, "a/" + "y" * 256],
)
def test_a_path_that_could_lead_elsewhere_is_not_known(path: str) -> None:
    assert place_of(path) == ("", KubeQoS.GUARANTEED)
    assert directory_of(path, "", "", RuntimeKind.CONTAINERD) == ""


@pytest.mark.parametrize(
    ("cgroups_path", "container_id"),
    [
        ("s.slice:p:../../x", "C"),
        ("a:b", "C"),
        ("s.slice:../..:x", "C"),
        ("not-a-slice:p:x", "C"),
        ("", "../C"),
        ("", "a/b"),
    ],
)
def test_a_container_that_could_lie_elsewhere_is_nowhere(
    cgroups_path: str, container_id: str
) -> None:
    pod_cgroup = "kubepods.slice/kubepods-podx.slice"
    assert directory_of(cgroups_path, pod_cgroup, container_id, RuntimeKind.CONTAINERD) == ""


@given(path=st.text(max_size=60), pod_cgroup=st.text(max_size=60))
def test_no_path_ever_leaves_its_hierarchy(path: str, pod_cgroup: str) -> None:
    for found in (
        place_of(path)[0],
        directory_of(path, place_of(pod_cgroup)[0], "C", RuntimeKind.CONTAINERD),
        directory_of("", place_of(pod_cgroup)[0], path, RuntimeKind.OTHER),
    ):
        assert not found.startswith("/")
        assert ".." not in found.split("/")
        assert "\0" not in found


def test_a_sandbox_is_read_with_its_pod() -> None:
    message = pod()
    message.pid = 42
    message.linux.cgroups_path = PARENT.rpartition("/")[2] + ":cri-containerd:p"
    message.linux.pod_resources.cpu.shares.value = 512
    message.linux.pod_resources.memory.limit.SetInParent()
    found = sandbox(message)
    assert found.subject.pod.obj == "Pod default/web"
    assert found.subject.pod.qos is QoSClass.LS
    assert found.subject.pod.cgroup == PARENT.strip("/")
    assert found.subject.cgroup == PARENT.strip("/") + "/cri-containerd-p.scope"
    assert (found.pid, found.resources.cpu_shares) == (42, 512)
    assert found.resources.memory_limit_bytes is None


def test_a_pod_whose_fields_are_empty_is_named_by_its_labels() -> None:
    found = sandbox(
        nri.PodSandbox(
            id="p",
            labels={
                "io.kubernetes.pod.name": "n",
                "io.kubernetes.pod.namespace": "ns",
                "io.kubernetes.pod.uid": "u",
            },
        )
    ).subject.pod
    assert (found.namespace, found.name, found.uid, found.cgroup) == ("ns", "n", "u", "")


def test_what_a_creation_requests() -> None:
    message = container()
    message.linux.resources.memory.limit.value = -5
    message.linux.resources.cpu.cpus = "0-3"
    message.linux.resources.cpu.mems = "nonsense"
    message.linux.oom_score_adj.value = -997
    found = created_container(
        nri.CreateContainerRequest(pod=pod(), container=message), RuntimeKind.CONTAINERD
    )
    requested = found.subject.requested
    assert requested.cpu_shares == 512
    assert requested.cfs_quota_us == requested.cfs_period_us == 100000
    assert requested.memory_limit_bytes == UNLIMITED
    assert requested.cpus == CpuSet.parse("0-3")
    assert requested.mems is None
    assert requested.oom_score_adj == -997
    assert found.state is ContainerState.UNKNOWN
    assert found.sandbox_id == "p"


def test_an_update_requests_only_what_it_gives() -> None:
    asked = nri.LinuxResources()
    asked.cpu.shares.SetInParent()
    asked.cpu.quota.value = -1
    asked.memory.limit.SetInParent()
    found = updated_container(
        nri.UpdateContainerRequest(pod=pod(), container=container(), linux_resources=asked),
        RuntimeKind.CONTAINERD,
    )
    assert found.subject.requested == values(asked)
    assert found.subject.requested.cpu_shares is None
    assert found.subject.requested.cfs_quota_us == UNLIMITED
    assert found.current.cpu_shares == 512


def test_an_existing_container_requests_nothing() -> None:
    found = existing_container(pod(), container(), RuntimeKind.CONTAINERD)
    assert found.subject.requested == NOTHING_REQUESTED
    assert found.current.cpu_shares == 512


def test_a_state_of_a_newer_runtime_is_unknown() -> None:
    message = nri.Container.FromString(b"\x20\x63")  # state 99
    found = existing_container(nri.PodSandbox(), message, RuntimeKind.OTHER)
    assert found.state is ContainerState.UNKNOWN
    assert found.subject.pod.uid == ""
