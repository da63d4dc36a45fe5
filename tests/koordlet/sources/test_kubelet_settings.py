"""Kubelet's configuration, and the state of its CPU manager."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from koordlet.sources.kubelet_settings import (
    KubeletSettings,
    parse_settings,
    read_exclusive_cpus,
)


def parse(**fields: object) -> KubeletSettings:
    return parse_settings(json.dumps({"kubeletconfig": fields}).encode())


def test_an_empty_configuration_has_kubelets_defaults() -> None:
    assert parse() == KubeletSettings()
    assert not parse().static


def test_all_fields_are_read() -> None:
    found = parse(
        cpuManagerPolicy="static",
        cpuManagerPolicyOptions={"full-pcpus-only": "true"},
        reservedSystemCPUs="0-1",
        systemReserved={"cpu": "500m", "memory": "1Gi"},
        kubeReserved={"cpu": "1"},
        topologyManagerPolicy="restricted",
        topologyManagerScope="pod",
        logging={"format": 5},
    )
    assert found == KubeletSettings(
        "static", {"full-pcpus-only": "true"}, CpuSet([0, 1]), 1500, "restricted", "pod"
    )
    assert found.static


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"kubeletconfig":{"reservedSystemCPUs":"a"}}']
)
def test_what_is_no_configuration(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_settings(body)


@given(st.binary(max_size=200))
def test_no_bytes_make_the_parser_fail_otherwise(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_settings(body)


def state(folder: Path, text: str) -> dict[str, CpuSet]:
    (folder / "cpu_manager_state").write_text(text)
    return read_exclusive_cpus(str(folder))


def test_the_cpus_of_a_pods_containers_are_joined(tmp_path: Path) -> None:
    entries = {"uid-1": {"a": "2-3", "b": "10"}, "uid-2": {"c": ""}}
    text = json.dumps({"policyName": "static", "defaultCpuSet": "0-1", "entries": entries})
    assert state(tmp_path, text) == {"uid-1": CpuSet([2, 3, 10]), "uid-2": CpuSet()}


def test_a_missing_or_empty_file_has_no_allocations(tmp_path: Path) -> None:
    assert read_exclusive_cpus(str(tmp_path)) == {}
    assert state(tmp_path, "") == {}
    assert state(tmp_path, '{"policyName":"none","defaultCpuSet":"","checksum":1}') == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"entries":{"u":{"c":"x"}}}'])
def test_a_file_that_cannot_be_understood_is_an_error_that_names_it(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(ValueError, match="cpu_manager_state"):
        state(tmp_path, text)
