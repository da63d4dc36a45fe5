"""Where pods and containers live, from the paths that runtimes name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.qos import KubeQoS
from hooks.places import directory_of, place_of
from linux.cgroup_paths import Runtime

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
            Runtime.CONTAINERD,
            f"kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-C.scope",
        ),
        (
            f"/kubepods.slice/kubepods-burstable.slice/{SLICE}",
            "",
            Runtime.CONTAINERD,
            f"kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-C.scope",
        ),
        (
            f"/kubepods/burstable/pod{UID}",
            f"/kubepods/burstable/pod{UID}/C",
            Runtime.CONTAINERD,
            f"kubepods/burstable/pod{UID}/C",
        ),
        (f"/kubepods/pod{UID}", "", Runtime.CONTAINERD, f"kubepods/pod{UID}/C"),
        (f"/kubepods/pod{UID}", "", Runtime.CRIO, f"kubepods/pod{UID}/crio-C"),
        (
            f"/kubepods/pod{UID}",
            f"/kubepods/pod{UID}/C",
            Runtime.CONTAINERD,
            f"kubepods/pod{UID}/C",
        ),
        (f"/kubepods/pod{UID}", "/kubepods/D", Runtime.CONTAINERD, "kubepods/D"),
        ("", "/kubepods/D", Runtime.CONTAINERD, "kubepods/D"),
        (
            "/kubepods.slice/kubepods-podx.slice",
            "kubepods-podx.slice:crio:C",
            Runtime.CRIO,
            "kubepods.slice/kubepods-podx.slice/crio-C.scope",
        ),
        (
            "kubepods-burstable-podx.slice",
            "kubepods-burstable-podx.slice:crio:C",
            Runtime.CRIO,
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice/crio-C.scope",
        ),
        ("", "", Runtime.CONTAINERD, ""),
    ],
)
def test_a_containers_directory(
    parent: str, cgroups_path: str, runtime: Runtime, directory: str
) -> None:
    assert directory_of(cgroups_path, place_of(parent)[0], "C", runtime) == directory


@pytest.mark.parametrize(
    "path",
    ["", "/", "a/../b", "../a", "a//b", "./a", "a/\0", "a/\n", "x" * 5000, "a/" + "y" * 256],
)
def test_a_path_that_could_leave_its_hierarchy_is_unknown(path: str) -> None:
    assert place_of(path) == ("", KubeQoS.GUARANTEED)
    assert directory_of(path, "", "", Runtime.CONTAINERD) == ""


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
    assert directory_of(cgroups_path, pod_cgroup, container_id, Runtime.CONTAINERD) == ""


@given(path=st.text(max_size=60), pod_cgroup=st.text(max_size=60))
def test_no_path_ever_leaves_its_hierarchy(path: str, pod_cgroup: str) -> None:
    for found in (
        place_of(path)[0],
        directory_of(path, place_of(pod_cgroup)[0], "C", Runtime.CONTAINERD),
        directory_of("", place_of(pod_cgroup)[0], path, Runtime.CONTAINERD),
    ):
        assert not found.startswith("/")
        assert ".." not in found.split("/")
        assert "\0" not in found
