"""The merge rules as tables: what is held, what a hook answers, what comes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.cri.v1 import api_pb2 as cri
from protos.runtimehook.v1alpha1 import api_pb2 as hook
from runtime_proxy import merge
from runtime_proxy.model import (
    Container,
    Pod,
    PodChanges,
    PodMeta,
    Resources,
    container_request,
    pod_request,
    read_container,
    read_resources,
    write_resources,
)

HELD = Resources(
    cpu_period=100_000,
    cpu_quota=200_000,
    cpu_shares=2048,
    memory_limit_in_bytes=1 << 30,
    oom_score_adj=996,
    cpuset_cpus="0-7",
    cpuset_mems="0",
    hugepage_limits=(("2MB", 0),),
    unified={"memory.oom.group": "1"},
    memory_swap_limit_in_bytes=1 << 31,
)


def changed(**fields: Any) -> Resources:
    return msgspec.structs.replace(HELD, **fields)


def echoed(**fields: Any) -> Resources:
    """An answer that echoes what is held, but for `fields`."""
    return changed(**fields)


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (echoed(), HELD),
        (echoed(cpu_period=0), HELD),
        (echoed(cpu_quota=-1), changed(cpu_quota=-1)),
        (echoed(cpu_quota=0), HELD),
        (echoed(cpu_shares=2), changed(cpu_shares=2)),
        (echoed(memory_limit_in_bytes=-1), HELD),
        (echoed(memory_swap_limit_in_bytes=-1), HELD),
        (echoed(oom_score_adj=0), changed(oom_score_adj=0)),
        (echoed(oom_score_adj=1001), HELD),
        (echoed(oom_score_adj=-1000), changed(oom_score_adj=-1000)),
        (echoed(cpuset_cpus=""), changed(cpuset_cpus="")),
        (echoed(cpuset_cpus="3", cpuset_mems="1"), changed(cpuset_cpus="3", cpuset_mems="1")),
        (echoed(hugepage_limits=(("1GB", 5),)), HELD),
        (
            echoed(unified={"cpu.idle": "1"}),
            changed(unified={"memory.oom.group": "1", "cpu.idle": "1"}),
        ),
        # A minimal answer of a hook that does not echo: documented, not pretty.
        (
            Resources(cpu_shares=512),
            changed(cpu_shares=512, oom_score_adj=0, cpuset_cpus="", cpuset_mems=""),
        ),
    ],
)
def test_rule_r_takes_a_hooks_answer(answer: Resources, result: Resources) -> None:
    assert merge.rule_r(HELD, answer) == result


@pytest.mark.parametrize(
    ("request_", "result"),
    [
        (Resources(), HELD),
        (Resources(cpuset_cpus="1"), changed(cpuset_cpus="1")),
        (Resources(cpu_quota=-1), changed(cpu_quota=-1)),
        (Resources(oom_score_adj=5), HELD),
        (Resources(memory_limit_in_bytes=-1), HELD),
        (Resources(memory_limit_in_bytes=7), changed(memory_limit_in_bytes=7)),
        (Resources(hugepage_limits=(("2MB", 9),)), HELD),
        (
            Resources(unified={"memory.oom.group": "0"}),
            changed(unified={"memory.oom.group": "0"}),
        ),
    ],
)
def test_rule_u_takes_kubelets_update(request_: Resources, result: Resources) -> None:
    assert merge.rule_u(HELD, request_) == result


def test_nothing_is_added_to_absent_resources() -> None:
    assert merge.rule_r(None, HELD) is None
    assert merge.rule_u(None, HELD) is None
    assert merge.rule_r(HELD, None) == HELD


def test_an_echoing_hook_keeps_kubelets_cpuset_out_and_nothing_else() -> None:
    # The worked example: kubelet's CPU manager pins, koordlet answers with an empty cpuset.
    request = cri.UpdateContainerResourcesRequest(
        container_id="c", linux=cri.LinuxContainerResources(cpuset_cpus="0-7")
    )
    stored = changed(cpuset_cpus="")
    seen = merge.rule_u(stored, read_resources(request.linux))
    assert seen is not None
    assert seen.cpuset_cpus == "0-7"
    answered = merge.rule_r(seen, msgspec.structs.replace(seen, cpuset_cpus=""))
    assert answered is not None
    merge.patch_resources(request.linux, seen, answered)
    assert request.linux == cri.LinuxContainerResources()
    assert request.HasField("linux")


def test_a_patch_carries_what_changed_and_keeps_what_it_does_not_know() -> None:
    wire = cri.LinuxContainerResources(
        cpu_shares=2, hugepage_limits=[cri.HugepageLimit(page_size="2MB", limit=1)]
    ).SerializeToString()
    unknown = b"\xfa\x01\x03new"  # field 31, from a later CRI
    message = cri.LinuxContainerResources.FromString(wire + unknown)
    before = read_resources(message)
    after = msgspec.structs.replace(
        before, cpu_shares=99, unified={"cpu.idle": "1"}, hugepage_limits=(("1GB", 3),)
    )
    merge.patch_resources(message, before, after)
    assert message.cpu_shares == 99
    assert dict(message.unified) == {"cpu.idle": "1"}
    assert [(page.page_size, page.limit) for page in message.hugepage_limits] == [("2MB", 1)]
    assert unknown in message.SerializeToString()


ENVS = [("A", b"1"), ("B", b"\xff"), ("A", b"2"), ("C", b"3")]
TOLD = {"A": "2", "C": "3"}


@pytest.mark.parametrize(
    ("after", "result"),
    [
        (TOLD, ENVS),
        ({"A": "9", "C": "3"}, [("A", b"1"), ("B", b"\xff"), ("A", b"9"), ("C", b"3")]),
        ({"C": "3"}, [("B", b"\xff"), ("C", b"3")]),
        (
            {**TOLD, "Z": "z", "D": "d"},
            [*ENVS, ("D", b"d"), ("Z", b"z")],
        ),
        ({**TOLD, "B": "text"}, [("A", b"1"), ("B", b"text"), ("A", b"2"), ("C", b"3")]),
    ],
    ids=["echo", "changed", "removed", "added", "a value nobody could be told"],
)
def test_environments_keep_their_order(
    after: dict[str, str], result: list[tuple[str, bytes]]
) -> None:
    assert merge.merge_envs(ENVS, TOLD, after) == result


def test_an_empty_environment_in_an_answer_means_no_change() -> None:
    container = Container(envs={"A": "1"}, resources=HELD, cgroup_parent="/kubepods/x")
    answered = merge.answered_container(container, hook.ContainerResourceHookResponse())
    assert answered == container


def test_an_answer_without_resources_leaves_them() -> None:
    container = Container(resources=HELD)
    answer = hook.ContainerResourceHookResponse(container_annotations={"a": "b"})
    assert merge.answered_container(container, answer).resources == HELD


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("", "/kubepods/pod1"),
        ("/other", "/other"),
        ("/kubepods/../../etc", "/kubepods/pod1"),
        ("/a\0b", "/kubepods/pod1"),
        ("/" + "x" * 5000, "/kubepods/pod1"),
    ],
)
def test_a_cgroup_parent_is_taken_if_it_is_a_path_below_the_root(answer: str, result: str) -> None:
    pod = Pod(cgroup_parent="/kubepods/pod1")
    answered = merge.answered_pod(pod, hook.PodSandboxHookResponse(cgroup_parent=answer))
    assert answered.cgroup_parent == result


def test_labels_that_kubelet_finds_pods_by_are_not_a_hooks_to_change() -> None:
    pod = Pod(labels={"io.kubernetes.pod.uid": "u", "app": "x"})
    answer = hook.PodSandboxHookResponse(labels={"io.kubernetes.pod.uid": "v", "app": "y", "n": ""})
    assert merge.answered_pod(pod, answer).labels == {
        "io.kubernetes.pod.uid": "u",
        "app": "y",
        "n": "",
    }


def test_a_sandbox_answers_resources_are_ignored_when_it_is_run() -> None:
    pod = Pod(resources=HELD)
    answer = hook.PodSandboxHookResponse(resources=hook.LinuxContainerResources(cpu_shares=7))
    assert merge.answered_pod(pod, answer) == pod
    updated = merge.answered_pod_resources(pod, answer).resources
    assert updated is not None
    assert updated.cpu_shares == 7


def test_a_pods_changes_are_only_the_differences_and_apply_once() -> None:
    before = Pod(labels={"a": "1"}, annotations={"x": "1"}, cgroup_parent="/p")
    after = Pod(labels={"a": "1", "b": "2"}, annotations={"x": "2"}, cgroup_parent="/q")
    changes = merge.pod_changes(before, after)
    assert changes == PodChanges(labels={"b": "2"}, annotations={"x": "2"}, cgroup_parent="/q")
    config = cri.PodSandboxConfig(labels={"a": "1"}, annotations={"x": "1"})
    assert merge.patch_sandbox_config(config, changes)
    assert config.linux.cgroup_parent == "/q"
    assert not merge.patch_sandbox_config(config, changes)


def test_no_changes_do_not_make_a_linux_part() -> None:
    config = cri.PodSandboxConfig(labels={"a": "1"})
    assert not merge.patch_sandbox_config(config, PodChanges())
    assert not config.HasField("linux")


numbers = st.integers(-(2**40), 2**40)
cpusets = st.sampled_from(["", "0", "0-3"])
resources = st.builds(
    Resources,
    cpu_period=numbers,
    cpu_quota=numbers,
    cpu_shares=numbers,
    memory_limit_in_bytes=numbers,
    oom_score_adj=st.integers(-2000, 2000),
    cpuset_cpus=cpusets,
    cpuset_mems=cpusets,
    unified=st.dictionaries(st.sampled_from(["a", "b"]), st.text(max_size=3)),
    memory_swap_limit_in_bytes=numbers,
)


@settings(max_examples=100, deadline=None)
@given(held=resources, answer=resources)
def test_deciding_twice_decides_the_same(held: Resources, answer: Resources) -> None:
    once = merge.rule_r(held, answer)
    assert merge.rule_r(once, answer) == once
    updated = merge.rule_u(held, answer)
    assert merge.rule_u(updated, answer) == updated


@settings(max_examples=100, deadline=None)
@given(value=resources)
def test_resources_survive_the_wire(value: Resources) -> None:
    message = write_resources(value)
    assert read_resources(hook.LinuxContainerResources.FromString(message.SerializeToString())) == (
        value
    )
    # Number for number the same message in CRI.
    assert read_resources(cri.LinuxContainerResources.FromString(message.SerializeToString())) == (
        value
    )


def test_hook_requests_are_octet_for_octet_what_the_protocol_says() -> None:
    meta = PodMeta(name="web-0", uid="u-1", namespace="default")
    parent = "/kubepods/besteffort/podu-1"
    pod = Pod(meta=meta, labels={"koordinator.sh/qosClass": "BE"}, cgroup_parent=parent)
    assert pod_request(pod).SerializeToString().hex() == (
        "0a150a057765622d301203752d311a0764656661756c741a1d0a176b6f6f7264696e61746f722e73682f716f"
        "73436c617373120242452a1b2f6b756265706f64732f626573746566666f72742f706f64752d31"
    )
    container = Container(
        name="main",
        attempt=1,
        resources=Resources(
            cpu_period=100_000,
            cpu_quota=-1,
            cpu_shares=512,
            memory_limit_in_bytes=1 << 30,
            oom_score_adj=996,
            cpuset_cpus="0-3",
        ),
        cgroup_parent=parent,
        envs={"A": "1"},
    )
    request = container_request(container, Pod(meta=meta, cgroup_parent=parent))
    assert request.SerializeToString().hex() == (
        "0a150a057765622d301203752d311a0764656661756c7412080a046d61696e1001222008a08d0610ffffffff"
        "ffffffffff0118800420808080800428e4073203302d33421b2f6b756265706f64732f626573746566666f72"
        "742f706f64752d314a060a0141120131"
    )


def test_a_container_without_a_linux_part_has_all_zero_resources() -> None:
    container = read_container("p", cri.ContainerConfig(), "")
    assert container.resources == Resources()
