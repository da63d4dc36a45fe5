"""What NRI messages become: pods, sandboxes and containers, and the paths in them."""

from __future__ import annotations

from apis.cpuset import CpuSet
from apis.qos import QoSClass
from hooks.observed import ContainerState
from hooks.subject import NOTHING_REQUESTED
from linux.resources import UNLIMITED
from nri_plugin.capabilities import RuntimeKind
from nri_plugin.subjects import (
    Pods,
    container_of_pod,
    created_container,
    pod_of,
    sandbox,
    updated_container,
    values,
)
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.nri_plugin.scenes import PARENT, container, pod


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
    found = created_container(pod_of(pod()), message, RuntimeKind.CONTAINERD)
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
    requested = nri.LinuxResources()
    requested.cpu.shares.SetInParent()
    requested.cpu.quota.value = -1
    requested.memory.limit.SetInParent()
    found = updated_container(pod_of(pod()), container(), requested, RuntimeKind.CONTAINERD)
    assert found.subject.requested == values(requested)
    assert found.subject.requested.cpu_shares is None
    assert found.subject.requested.cfs_quota_us == UNLIMITED
    assert found.current.cpu_shares == 512


def test_an_existing_container_requests_nothing() -> None:
    found = container_of_pod(pod_of(pod()), container(), RuntimeKind.CONTAINERD)
    assert found.subject.requested == NOTHING_REQUESTED
    assert found.current.cpu_shares == 512


def test_a_state_of_a_newer_runtime_is_unknown() -> None:
    message = nri.Container.FromString(b"\x20\x63")  # state 99
    found = container_of_pod(pod_of(nri.PodSandbox()), message, RuntimeKind.OTHER)
    assert found.state is ContainerState.UNKNOWN
    assert found.subject.pod.uid == ""


def test_a_pod_is_parsed_once_and_again_after_its_sandbox_is_gone() -> None:
    pods = Pods()
    first = pods.read(pod())
    assert pods.of(pod()) is first
    pods.forget(pod().id)
    assert pods.of(pod()) is not first
    assert pods.of(pod()) == first


def test_another_pod_in_a_sandbox_of_the_same_id_is_not_taken_for_the_first() -> None:
    pods = Pods()
    pods.read(pod())
    other = pod()
    other.uid = "another"
    assert pods.of(other).uid == "another"


def test_a_leftover_that_names_no_pod_takes_nothing_away() -> None:
    pods = Pods()
    first = pods.read(pod())
    assert pods.of(nri.PodSandbox(id=pod().id)).uid == ""
    assert pods.of(pod()) is first
