"""Paths of pods, containers and host applications: both drivers, three runtimes, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.qos import KubeQoS
from linux.cgroup_paths import (
    Driver,
    Layout,
    PathError,
    Runtime,
    check_relative,
    container_dir,
    default_host_app_dir,
    expand_slice,
    host_app_dir,
    is_below,
    of_runtime_path,
    parse,
    pod_dir,
    qos_dir,
)

UID = "8c2f9c8e-1d0b-4a58-9d5f-0123456789ab"
UID_ = UID.replace("-", "_")
ID = "0123456789abcdef" * 4
SYSTEMD, CGROUPFS = Driver.SYSTEMD, Driver.CGROUPFS


@pytest.mark.parametrize(
    ("driver", "root", "qos", "path"),
    [
        (SYSTEMD, "kubepods.slice", KubeQoS.GUARANTEED, f"kubepods.slice/kubepods-pod{UID_}.slice"),
        (SYSTEMD, "kubepods.slice", KubeQoS.BURSTABLE,
         f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice"),
        (SYSTEMD, "kubelet.slice/kubelet-kubepods.slice", KubeQoS.BESTEFFORT,
         "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
         f"kubelet-kubepods-besteffort-pod{UID_}.slice"),
        (CGROUPFS, "kubepods", KubeQoS.GUARANTEED, f"kubepods/pod{UID}"),
        (CGROUPFS, "kubepods", KubeQoS.BURSTABLE, f"kubepods/burstable/pod{UID}"),
        (CGROUPFS, "kubelet/kubepods", KubeQoS.BESTEFFORT, f"kubelet/kubepods/besteffort/pod{UID}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("runtime", Runtime)
def test_directories_and_back(
    driver: Driver, root: str, qos: KubeQoS, path: str, runtime: Runtime
) -> None:
    pod = pod_dir(driver, root, qos, UID)
    assert pod == path
    parsed = parse(pod)
    assert parsed is not None
    assert (parsed.kubepods, parsed.qos, parsed.pod_uid, parsed.container_id) == (
        root,
        qos,
        UID,
        "",
    )
    container = container_dir(driver, runtime, pod, ID)
    parsed = parse(container)
    assert parsed is not None
    assert (parsed.pod_uid, parsed.container_id, parsed.driver) == (UID, ID, driver)
    if driver is SYSTEMD:
        assert parsed.runtime is runtime
    assert is_below(container, root) and is_below(container, qos_dir(driver, root, qos))


def test_cri_o_keeps_its_prefix_on_cgroupfs() -> None:
    assert container_dir(CGROUPFS, Runtime.CRIO, "kubepods/poda", ID) == f"kubepods/poda/crio-{ID}"
    assert container_dir(SYSTEMD, Runtime.CRIO, "k.slice", ID) == f"k.slice/crio-{ID}.scope"


def test_a_static_pods_hash_is_its_uid() -> None:
    uid = "0123456789abcdef0123456789abcdef"
    parsed = parse(pod_dir(SYSTEMD, "kubepods.slice", KubeQoS.BURSTABLE, uid))
    assert parsed is not None and parsed.pod_uid == uid


@pytest.mark.parametrize(
    "path", ["", "system.slice/containerd.service", "mykubepods/x", "user.slice", "kubepods2/podx"]
)
def test_other_groups_are_no_pods(path: str) -> None:
    assert parse(path) is None


@pytest.mark.parametrize(
    ("given_path", "directory"),
    [
        (f"kubepods-besteffort-pod{UID_}.slice:cri-containerd:{ID}",
         f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_}.slice/"
         f"cri-containerd-{ID}.scope"),
        (f"/kubepods/burstable/pod{UID}/{ID}", f"kubepods/burstable/pod{UID}/{ID}"),
        ("machine.slice:libpod:abc", "machine.slice/libpod-abc.scope"),
        (":crio:abc", "system.slice/crio-abc.scope"),
        ("", ""),
    ],
)  # fmt: skip
def test_what_runtimes_report(given_path: str, directory: str) -> None:
    assert of_runtime_path(given_path) == directory


@pytest.mark.parametrize(
    "path",
    ["../x", "a/../b", "a//b", "a/./b", "a\0b", "a/b\n", "x" * 5000, "/".join("a" * 40), "a:b",
     "a.slice:..:x/../../y", "bad-.slice:x:y", "x:y:z"],
)  # fmt: skip
def test_hostile_paths_are_refused(path: str) -> None:
    with pytest.raises(PathError):
        of_runtime_path(path)


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "a b", "x" * 300, "a\0"])
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(PathError):
        pod_dir(SYSTEMD, "kubepods.slice", KubeQoS.BURSTABLE, name)
    with pytest.raises(PathError):
        container_dir(SYSTEMD, Runtime.CONTAINERD, "kubepods.slice", name)
    with pytest.raises(PathError):
        default_host_app_dir("LS", name)


@given(st.text(max_size=80))
def test_an_accepted_path_stays_below_its_root(text: str) -> None:
    try:
        path = check_relative(text)
    except PathError:
        return
    assert not path.startswith("/") and ".." not in path.split("/")
    parse(path)


def test_slices_nest_by_their_dashes() -> None:
    assert expand_slice("a-b-c.slice") == "a.slice/a-b.slice/a-b-c.slice"
    assert expand_slice("-.slice") == ""


LAYOUT = Layout(2, {"": "/sys/fs/cgroup"}, SYSTEMD, "kubepods.slice")


@pytest.mark.parametrize(
    ("base", "parent", "relative", "path"),
    [
        ("CgroupRoot", "apps", "web", "apps/web"),
        ("CgroupRoot", "/apps/", "/web/", "apps/web"),
        ("Kubepods", "", "x", "kubepods.slice/x"),
        ("KubepodsBesteffort", "p", "x", "kubepods.slice/kubepods-besteffort.slice/p/x"),
        # Tasks of YARN as batch work.
        (
            "KubepodsBesteffort",
            "",
            "hadoop-yarn/",
            "kubepods.slice/kubepods-besteffort.slice/hadoop-yarn",
        ),
    ],
)
def test_a_declared_path_lies_below_its_base(
    base: str, parent: str, relative: str, path: str
) -> None:
    assert host_app_dir(LAYOUT, base=base, parent_dir=parent, relative_path=relative) == path


@pytest.mark.parametrize(
    ("base", "parent", "relative"),
    [("Elsewhere", "a", "b"), ("CgroupRoot", "..", "b"), ("CgroupRoot", "a", "../../etc"),
     ("CgroupRoot", "", ""), ("Kubepods", "/", "/")],
)  # fmt: skip
def test_host_applications_cannot_escape(base: str, parent: str, relative: str) -> None:
    with pytest.raises(PathError):
        host_app_dir(LAYOUT, base=base, parent_dir=parent, relative_path=relative)


def test_the_default_directory_of_a_host_application() -> None:
    assert default_host_app_dir("LSR", "nginx") == "host-latency-sensitive/nginx"
    assert default_host_app_dir("BE", "job") == "host-best-effort/job"
    assert default_host_app_dir("SYSTEM", "agent") == "agent"
