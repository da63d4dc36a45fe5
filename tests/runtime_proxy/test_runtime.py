"""What a runtime's statuses tell, in the ways that runtimes tell it, and what the journal adds."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy.model import Container, Pod, PodChanges, Resources
from runtime_proxy.recovery import container_with_record, with_record
from runtime_proxy.runtime import read_container_status, read_pod_status


def container_answer(info: Any, **resources: Any) -> cri.ContainerStatusResponse:
    status = cri.ContainerStatus(id="c", metadata=cri.ContainerMetadata(name="main", attempt=2))
    if resources:
        status.resources.linux.CopyFrom(cri.LinuxContainerResources(**resources))
    text = info if isinstance(info, str) else json.dumps(info)
    return cri.ContainerStatusResponse(status=status, info={"info": text})


def read(answer: cri.ContainerStatusResponse) -> Container:
    return read_container_status(cri.Container(id="c", pod_sandbox_id="p"), answer)


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("value", "actual", "known"),
    [
        ("hello", "hello", {"E": "hello"}),
        (coded("hello"), "hello", {"E": "hello"}),
        # Text that could be base64 is text if the process has it so.
        ("aGVsbG8=", "aGVsbG8=", {"E": "aGVsbG8="}),
        ("neither", "something else", {}),
        ("", "", {"E": ""}),
    ],
)
def test_an_environment_is_read_as_text_or_base64(
    value: str, actual: str, known: dict[str, str]
) -> None:
    info = {
        "config": {"envs": [{"key": "E", "value": value}]},
        "runtimeSpec": {"process": {"env": ["PATH=/bin", f"E={actual}"]}},
    }
    assert read(container_answer(info)).envs == known


def test_the_status_has_what_is_in_force_and_the_configuration_fills_its_gaps() -> None:
    created = {
        "cpu_shares": 100,
        "cpu_quota": "200000",
        "oom_score_adj": 900,
        "unified": {"a": "1", "b": "1"},
        "hugepage_limits": [{"page_size": "2MB", "limit": "5"}],
    }
    found = read(
        container_answer(
            {"config": {"linux": {"resources": created}}}, cpu_shares=7, unified={"a": "2"}
        )
    ).resources
    assert found == Resources(
        cpu_shares=7,
        cpu_quota=200_000,
        oom_score_adj=900,
        unified={"a": "2", "b": "1"},
        hugepage_limits=(("2MB", 5),),
    )


@pytest.mark.parametrize("info", ["", "{", "[]", '"x"', {"config": 5}, {"config": {"linux": []}}])
def test_an_empty_status_leaves_the_fields_empty(info: Any) -> None:
    found = read(container_answer(info))
    assert (found.resources, found.envs, found.pod_id, found.attempt) == (None, {}, "p", 2)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(value=json_values)
def test_any_json_in_the_place_of_the_configuration_is_survived(value: Any) -> None:
    shaped = {"config": {"envs": value, "linux": {"resources": value}}, "runtimeSpec": value}
    read(container_answer(shaped))
    read_pod_status(cri.PodSandboxStatusResponse(info={"info": json.dumps({"config": value})}))


def test_the_journal_adds_what_only_the_proxy_knew() -> None:
    recorded = Pod(
        id="p",
        cgroup_parent="/recorded",
        resources=Resources(cpu_shares=3),
        changes=PodChanges(cgroup_parent="/moved"),
        stopped=True,
    )
    merged = with_record(Pod(id="p", labels={"now": "1"}), recorded)
    assert merged.labels == {"now": "1"}
    assert merged.cgroup_parent == "/recorded"
    assert merged.changes.cgroup_parent == "/moved"
    assert merged.stopped
    assert with_record(Pod(id="p", cgroup_parent="/told"), recorded).cgroup_parent == "/told"
    container = container_with_record(
        Container(id="c", annotations={"a": "2"}),
        Container(id="c", annotations={"a": "1", "b": "1"}, resources=Resources(cpu_shares=9)),
    )
    assert container.annotations == {"a": "2", "b": "1"}
    assert container.resources == Resources(cpu_shares=9)


def test_each_field_of_a_sandbox_has_one_source_that_wins() -> None:
    """The runtime where it knows a value; the journal for resources, which an update changes."""
    old, new = Resources(cpu_shares=1), Resources(cpu_shares=2)
    recorded = Pod(id="p", cgroup_parent="/r", overhead=old, resources=old, labels={"r": "1"})
    found = Pod(id="p", cgroup_parent="/f", overhead=new, resources=new, stopped=True)
    merged = with_record(found, recorded)
    assert (merged.cgroup_parent, merged.overhead, merged.resources) == ("/f", new, old)
    assert (merged.labels, merged.stopped) == ({}, False)
    merged = with_record(Pod(id="p"), recorded)
    assert (merged.cgroup_parent, merged.overhead, merged.resources) == ("/r", old, old)
    assert with_record(found, Pod(id="p")).resources == new
    assert with_record(found, None) is found


def test_each_field_of_a_container_has_one_source_that_wins() -> None:
    old, new = Resources(cpu_shares=1), Resources(cpu_shares=2)
    recorded = Container(id="c", cgroup_parent="/r", resources=old, envs={"r": "1"})
    found = Container(id="c", pod_id="p", name="n", resources=new, envs={"f": "1"}, stopped=True)
    merged = container_with_record(found, recorded)
    assert (merged.cgroup_parent, merged.resources, merged.stopped) == ("/r", new, False)
    assert (merged.pod_id, merged.name, merged.envs) == ("p", "n", {"f": "1"})
    assert container_with_record(found, None) is found
