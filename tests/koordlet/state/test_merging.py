"""What the sources say about one pod is merged, and which of them counts."""

from __future__ import annotations

import pytest

from apis.qos import KubeQoS
from hooks.subject import PodSubject, QosSubject
from koordlet.state import NodeState, Source
from tests.koordlet.builders import (
    LAYOUT,
    container,
    known,
    pod_manifest,
    runtime_pod,
    sandbox,
)
from tests.koordlet.state.states import ENGINE, running, subjects


@pytest.mark.parametrize(
    ("kubelet", "objects", "expected"),
    [
        (None, None, "runtime"),
        (None, "objects", "objects"),
        ("kubelet", None, "kubelet"),
        ("kubelet", "objects", "kubelet"),
    ],
)
def test_metadata_comes_from_the_best_source(
    kubelet: str | None, objects: str | None, expected: str
) -> None:
    state = NodeState(layout=LAYOUT)
    state.run_sandbox(sandbox(runtime_pod("u1", annotations={"from": "runtime"}), "s1"))
    for source, name in ((Source.KUBELET, kubelet), (Source.OBJECTS, objects)):
        if name is not None:
            manifest = pod_manifest(uid="u1", metadata={"annotations": {"from": name}})
            state.pods_list(source, [known(manifest)])
    pod = state.pod("u1")
    assert pod is not None
    assert pod.annotations == {"from": expected}
    assert pod.cgroup == "kubepods/burstable/podu1"


def test_a_pod_is_described_as_long_as_a_list_has_it() -> None:
    def described() -> bool:
        (view,) = state.pod_views()
        return view.described

    state = NodeState(layout=LAYOUT)
    running(state)
    assert not described()
    state.pods_list(Source.KUBELET, [known(pod_manifest(uid="u1"))])
    assert described()
    state.pods_list(Source.KUBELET, [])
    assert not described()


def test_a_manifest_without_uid_is_matched_by_name() -> None:
    state = NodeState(layout=LAYOUT)
    manifest = pod_manifest("web", metadata={"labels": {"a": "b"}})
    state.pods_list(Source.OBJECTS, [known(manifest)])
    state.run_sandbox(sandbox(runtime_pod("u1", name="web"), "s1"))
    pod = state.pod("u1")
    assert pod is not None
    assert pod.labels == {"a": "b"}
    state.pods_list(Source.OBJECTS, [])
    pod = state.pod("u1")
    assert pod is not None
    assert pod.labels == {}


def test_a_static_pod_is_matched_by_its_configuration_hash() -> None:
    state = NodeState(layout=LAYOUT)
    annotations = {"kubernetes.io/config.hash": "hash1"}
    state.pods_list(
        Source.OBJECTS, [known(pod_manifest(uid="mirror", metadata={"annotations": annotations}))]
    )
    state.run_sandbox(sandbox(runtime_pod("hash1"), "s1"))
    pod = state.pod("hash1")
    assert pod is not None
    assert (pod.uid, pod.annotations) == ("hash1", annotations)


def test_the_directory_says_which_qos_class_a_pod_has() -> None:
    state = NodeState(layout=LAYOUT)
    state.pods_list(Source.OBJECTS, [known(pod_manifest(uid="u1"))])  # BestEffort by its spec
    state.run_sandbox(sandbox(runtime_pod("u1", qos="burstable"), "s1"))
    pod = state.pod("u1")
    assert pod is not None
    assert pod.kube_qos is KubeQoS.BURSTABLE


def test_without_a_runtime_a_running_pod_lies_where_the_layout_says() -> None:
    state = NodeState(layout=LAYOUT)
    status = {
        "phase": "Running",
        "containerStatuses": [
            {"name": "main", "containerID": "containerd://c1", "state": {"running": {}}},
            {"name": "evil", "containerID": "containerd://../..", "state": {"running": {}}},
            {"name": "pending", "containerID": ""},
        ],
        "ephemeralContainerStatuses": [
            {"name": "debug", "containerID": "containerd://c2", "state": {"running": {}}},
        ],
    }
    state.pods_list(Source.KUBELET, [known(pod_manifest(uid="u1", status=status))])
    found = subjects(state)
    pod = found["pod/u1"]
    assert isinstance(pod, PodSubject)
    assert pod.cgroup == "kubepods/besteffort/podu1"
    assert found["container/c1"].cgroup == "kubepods/besteffort/podu1/c1"
    assert found["container/c2"].cgroup == "kubepods/besteffort/podu1/c2"
    assert len([key for key in found if key.startswith("container/")]) == 2


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed"])
def test_without_a_runtime_a_pod_that_does_not_run_is_no_subject(phase: str) -> None:
    state = NodeState(layout=LAYOUT)
    state.pods_list(Source.KUBELET, [known(pod_manifest(uid="u1", status={"phase": phase}))])
    assert "pod/u1" not in subjects(state)


def test_qos_directories_list_their_pods_and_the_root_lists_all() -> None:
    state = NodeState(layout=LAYOUT)
    state.run_sandbox(sandbox(runtime_pod("u1", qos="burstable"), "s1"))
    state.run_sandbox(sandbox(runtime_pod("u2", qos="besteffort"), "s2"))
    found = {s.kube_qos: s for s in subjects(state).values() if isinstance(s, QosSubject)}
    uids = {qos: sorted(pod.uid for pod in s.pods) for qos, s in found.items()}
    assert uids == {
        KubeQoS.GUARANTEED: ["u1", "u2"],
        KubeQoS.BURSTABLE: ["u1"],
        KubeQoS.BESTEFFORT: ["u2"],
    }
    assert found[KubeQoS.BESTEFFORT].cgroup == "kubepods/besteffort"


def test_subjects_that_did_not_change_stay_the_same_objects() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    before = subjects(state)
    pod = runtime_pod("u1")
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1")])
    state.run_sandbox(sandbox(runtime_pod("u2", qos="besteffort"), "s2"))
    after = subjects(state)
    for key in ("pod/u1", "sandbox/s1", "container/c1", "kubeqos/Burstable"):
        assert after[key] is before[key], key


def test_the_state_is_complete_when_every_source_has_spoken() -> None:
    state = NodeState(awaited=["runtime", "kubelet"])
    assert not state.snapshot(ENGINE).complete
    state.mark_synced("runtime")
    assert state.awaited == ("kubelet",)
    state.mark_synced("kubelet")
    assert state.snapshot(ENGINE).complete


def test_sandboxes_whose_directories_are_gone_can_be_forgotten() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    state.run_sandbox(sandbox(runtime_pod("u2"), "s2"))
    assert state.stale_candidates() == {"s2": "kubepods/burstable/podu2"}
    state.forget_sandboxes(["s2"])
    assert "pod/u2" not in subjects(state)


def test_what_eviction_reads_of_a_pod_object() -> None:
    listed = known(
        {
            "metadata": {"namespace": "default", "name": "web", "uid": "1"},
            "spec": {
                "restartPolicy": "OnFailure",
                "containers": [
                    {
                        "name": "main",
                        "resources": {
                            "requests": {
                                "kubernetes.io/mid-cpu": "500",
                                "kubernetes.io/mid-memory": "1Gi",
                            },
                            "limits": {
                                "kubernetes.io/mid-cpu": "600",
                                "kubernetes.io/mid-memory": "2Gi",
                            },
                        },
                    }
                ],
            },
            "status": {"phase": "Failed", "reason": "Evicted"},
        }
    ).pod
    assert (listed.restart_policy, listed.status_reason) == ("OnFailure", "Evicted")
    amounts = listed.specs[0].amounts
    assert (amounts.mid_cpu_request_milli, amounts.mid_memory_request_bytes) == (500, 1 << 30)
    assert (amounts.mid_cpu_limit_milli, amounts.mid_memory_limit_bytes) == (600, 2 << 30)
