"""The generated modules are what the .proto files give, and the contract has the known numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from protos.nri.v1alpha1 import nri_pb2
from tools.generate_protos import ROOT, differences, generate, generated_files


def test_the_committed_modules_match_their_proto_files(tmp_path: Path) -> None:
    assert differences(generate(ROOT, tmp_path), generated_files(ROOT)) == []


def test_each_kind_of_difference_is_named() -> None:
    found = differences(
        {Path("a_pb2.py"): b"1", Path("b_pb2.py"): b"1"},
        {Path("b_pb2.py"): b"2", Path("c_pb2.py"): b"1"},
    )
    assert found == [
        "a_pb2.py is missing",
        "b_pb2.py differs from what its .proto file gives",
        "c_pb2.py has no .proto file",
    ]


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        ("ConfigureRequest", {"config": 1, "request_timeout": 5, "NRI_version": 6}),
        ("ConfigureResponse", {"events": 2}),
        ("SynchronizeRequest", {"pods": 1, "containers": 2, "more": 3}),
        ("SynchronizeResponse", {"update": 1, "more": 2}),
        ("UpdateContainerRequest", {"pod": 1, "container": 2, "linux_resources": 3}),
        ("PodSandbox", {"annotations": 6, "linux": 8, "pid": 9, "ips": 10}),
        ("LinuxPodSandbox", {"pod_resources": 2, "cgroup_parent": 3, "resources": 6}),
        ("Container", {"env": 8, "linux": 11, "created_at": 14, "CDI_devices": 20, "image": 22}),
        ("LinuxContainer", {"oom_score_adj": 4, "cgroups_path": 5, "rdt": 12}),
        ("LinuxResources", {"memory": 1, "cpu": 2, "rdt_class": 5, "unified": 6, "pids": 8}),
        ("LinuxCPU", {"shares": 1, "quota": 2, "period": 3, "cpus": 6, "mems": 7}),
        ("LinuxMemory", {"limit": 1, "swappiness": 6, "use_hierarchy": 8}),
        ("ContainerAdjustment", {"annotations": 2, "env": 4, "linux": 6, "args": 9}),
        ("LinuxContainerAdjustment", {"devices": 1, "oom_score_adj": 4, "memory_policy": 12}),
        ("ContainerUpdate", {"container_id": 1, "linux": 2, "ignore_failure": 3}),
        ("LinuxDevice", {"path": 1, "major": 3, "file_mode": 5, "gid": 7}),
        ("StateChangeEvent", {"event": 1, "pod": 2, "container": 3}),
    ],
)
def test_field_numbers_are_those_of_the_wire(message: str, numbers: dict[str, int]) -> None:
    descriptor: Descriptor = getattr(nri_pb2, message).DESCRIPTOR
    assert {name: descriptor.fields_by_name[name].number for name in numbers} == numbers


def test_the_plugin_service_has_every_call_up_to_0_12() -> None:
    service = nri_pb2.DESCRIPTOR.services_by_name["Plugin"]
    assert service.full_name == "nri.pkg.api.v1alpha1.Plugin"
    assert len(service.methods) == 18
