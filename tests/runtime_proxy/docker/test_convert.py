"""Docker's names, labels, resources, parents and environments, to a hook's and back."""

from __future__ import annotations

from typing import Any

import pytest

from runtime_proxy.docker import convert
from runtime_proxy.model import Resources


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (
            "k8s_POD_web-0_default_uid_0",
            convert.KubernetesName("POD", "web-0", "default", "uid", 0),
        ),
        ("/k8s_main_p_n_u_3", convert.KubernetesName("main", "p", "n", "u", 3)),
        ("k8s_main_p_n_u_3_a1b2", convert.KubernetesName("main", "p", "n", "u", 3)),
        ("k8s_main_p_n_u_x", convert.KubernetesName("main", "p", "n", "u", 0)),
        ("other_main_p_n_u_3", None),
        ("web", None),
        ("", None),
    ],
)
def test_names_of_kubernetes_are_distinguished_from_others(
    name: str, found: convert.KubernetesName | None
) -> None:
    assert convert.parse_name(name) == found


@pytest.mark.parametrize(
    ("parent", "path"),
    [
        (
            "kubepods-besteffort-pod7712555c_ce62.slice",
            "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod7712555c_ce62.slice",
        ),
        ("kubepods-podX.slice", "/kubepods.slice/kubepods-podX.slice"),
        ("", "/"),
    ],
)
def test_a_slice_becomes_a_path_and_comes_back(parent: str, path: str) -> None:
    assert convert.read_parent({"CgroupParent": parent}, "systemd") == path
    assert convert.write_parent(path, "systemd") == parent
    assert convert.read_parent({"CgroupParent": "/kubepods/x"}, "cgroupfs") == "/kubepods/x"


def test_an_environment_keeps_order_and_what_it_does_not_know() -> None:
    env = ["A=1", "FROM_HOST", "B=2", "A=3"]
    before = {"A": "3", "B": "2"}
    assert convert.merge_env(env, before, {"A": "9", "N": "x"}) == [
        "A=1",
        "FROM_HOST",
        "A=9",
        "N=x",
    ]
    assert convert.merge_env(env, before, before) == env


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("k8s_c_p_n_u_0", 0),
        ("k8s_c_p_n_u_999999999", 999_999_999),
        ("k8s_c_p_n_u_1000000000", 0),
        ("k8s_c_p_n_u_-1", 0),
        ("k8s_c_p_n_u_", 0),
    ],
)
def test_an_attempt_that_is_no_number_is_the_first(name: str, attempt: int) -> None:
    assert convert.parse_name(name) == convert.KubernetesName("c", "p", "n", "u", attempt)


@pytest.mark.parametrize(
    "name", ["k8s_c_p_n_u", "k8s_c_p_n_u_0_x_y", "K8S_c_p_n_u_0", "//k8s_c_p_n_u_0"]
)
def test_other_names_are_not_kubernetes(name: str) -> None:
    assert convert.parse_name(name) is None


NAME = convert.KubernetesName("main", "web-0", "prod", "u-1", 4)


@pytest.mark.parametrize("labels", [None, [], "text", 5])
def test_labels_of_another_type_are_none(labels: Any) -> None:
    config = {"Labels": labels}
    assert not convert.is_sandbox(config)
    assert convert.sandbox_id(config) == ""
    assert convert.labels_and_annotations(config) == ({}, {})


def test_values_of_another_type_are_empty() -> None:
    config = {"Labels": {"annotation.a": 5, "b": None, "io.kubernetes.sandbox.id": 7}}
    assert convert.sandbox_id(config) == ""
    assert convert.labels_and_annotations(config) == (
        {"b": "", "io.kubernetes.sandbox.id": ""},
        {"a": ""},
    )
    host = {"CpuShares": "5", "CpusetCpus": 5, "Memory": 1.5, "CgroupParent": 5}
    assert convert.read_resources(host) == Resources()
    assert convert.read_parent(host, "cgroupfs") == ""
    assert convert.read_parent(host, "systemd") == "/"


def test_an_annotations_prefix_is_taken_off_once() -> None:
    config = {"Labels": {"annotation.annotation.a": "x", "an.annotation.b": "y"}}
    assert convert.labels_and_annotations(config) == (
        {"an.annotation.b": "y"},
        {"annotation.a": "x"},
    )


def test_only_the_sandboxes_own_label_makes_a_sandbox() -> None:
    assert convert.is_sandbox({"Labels": {"io.kubernetes.docker.type": "podsandbox"}})
    for labels in ({"io.kubernetes.docker.type": "container"}, {"type": "podsandbox"}, {}):
        assert not convert.is_sandbox({"Labels": labels})


RESOURCES: dict[str, tuple[str, Any]] = {
    "CpuPeriod": ("cpu_period", 11),
    "CpuQuota": ("cpu_quota", -1),
    "CpuShares": ("cpu_shares", 13),
    "Memory": ("memory_limit_in_bytes", 14),
    "MemorySwap": ("memory_swap_limit_in_bytes", 15),
    "OomScoreAdj": ("oom_score_adj", -16),
    "CpusetCpus": ("cpuset_cpus", "0-3"),
    "CpusetMems": ("cpuset_mems", "1"),
}


@pytest.mark.parametrize("member", RESOURCES)
@pytest.mark.parametrize("at", ["creation", "update"])
def test_each_resource_has_its_member(member: str, at: str) -> None:
    name, value = RESOURCES[member]
    assert convert.read_resources({member: value, "Other": 1}) == Resources(**{name: value})
    members = convert.CREATABLE if at == "creation" else convert.UPDATABLE
    host: dict[str, Any] = {"Other": 1}
    taken = at == "creation" or member != "OomScoreAdj"
    assert convert.patch_resources(host, Resources(), Resources(**{name: value}), members) is taken
    assert host == ({"Other": 1, member: value} if taken else {"Other": 1})
    same = Resources(**{name: value})
    assert convert.patch_resources(host, same, same, members) is False


@pytest.mark.parametrize(
    ("values", "parsed"),
    [
        (None, []),
        ("A=1", []),
        (
            ["A=1", "B", "=x", "C=", 5, "A=2=3"],
            [("A", b"1"), ("", b"x"), ("C", b""), ("A", b"2=3")],
        ),
        (["E=\u00e4", "S=\udc80"], [("E", "\u00e4".encode()), ("S", b"\xed\xb2\x80")]),
    ],
)
def test_an_environment_is_read_in_order(values: Any, parsed: list[tuple[str, bytes]]) -> None:
    assert convert.parse_env(values) == parsed


@pytest.mark.parametrize("values", [None, "A=1", {}])
def test_an_environment_of_another_type_is_replaced(values: Any) -> None:
    assert convert.merge_env(values, {}, {"B": "2", "A": "1"}) == ["A=1", "B=2"]


@pytest.mark.parametrize(
    ("slice_name", "path"),
    [
        (".slice", "/"),
        ("-.slice", "/"),
        ("-", "/"),
        ("a", "/a.slice"),
        ("a-b-c.slice", "/a.slice/a-b.slice/a-b-c.slice"),
    ],
)
def test_each_dash_of_a_slice_is_a_level(slice_name: str, path: str) -> None:
    assert convert.slice_to_path(slice_name) == path


@pytest.mark.parametrize("driver", ["cgroupfs", "systemd", ""])
def test_a_sandbox_and_a_container_are_read_whole(driver: str) -> None:
    host = {"CgroupParent": "kubepods.slice", "CpuShares": 3}
    config = {
        "Labels": {"a": "b", "annotation.c": "d", "io.kubernetes.sandbox.id": "s"},
        "Env": ["E=1"],
    }
    parent = "/kubepods.slice" if driver == "systemd" else "kubepods.slice"
    pod = convert.read_pod("p", NAME, config, host, driver)
    assert (pod.id, pod.meta.name, pod.meta.namespace, pod.meta.uid, pod.meta.attempt) == (
        "p",
        "web-0",
        "prod",
        "u-1",
        4,
    )
    assert pod.runtime_handler == "docker"
    assert pod.labels == {"a": "b", "io.kubernetes.sandbox.id": "s"}
    assert (pod.annotations, pod.cgroup_parent) == ({"c": "d"}, parent)
    assert pod.resources == Resources(cpu_shares=3)
    container = convert.read_container("c", NAME, config, host, driver)
    assert (container.id, container.pod_id, container.name, container.attempt) == (
        "c",
        "s",
        "main",
        4,
    )
    assert (container.annotations, container.envs) == ({"c": "d"}, {"E": "1"})
    assert (container.resources, container.cgroup_parent) == (Resources(cpu_shares=3), parent)


def test_listed_names_lose_their_slash() -> None:
    assert convert.names(["/a", "b", "/c/d", 5]) == ["a", "b", "c/d", ""]
