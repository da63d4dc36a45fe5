"""The node's store: events, full lists and updates through the proxy."""

from __future__ import annotations

from typing import Any

import pytest

from apis.cpuset import CpuSet
from hooks.engine import Engine
from hooks.facts import NodeInputs
from hooks.observed import ContainerState
from hooks.subject import Requested
from koordlet.state import NodeState, Source
from koordlet.state.requests_log import Remembered
from tests.koordlet.builders import (
    LAYOUT,
    container,
    known,
    pod_manifest,
    runtime_pod,
    sandbox,
)
from tests.koordlet.state.states import REQUESTED, running, subjects, the_container


@pytest.mark.parametrize(
    ("status", "addresses"),
    [
        ({}, ()),
        ({"podIP": "10.0.0.1"}, ("10.0.0.1",)),
        (
            {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]},
            ("10.0.0.1", "fd00::1"),
        ),
    ],
)
def test_a_pods_addresses_are_those_of_its_status(
    status: dict[str, Any], addresses: tuple[str, ...]
) -> None:
    state = NodeState()
    running(state)
    state.pods_list(Source.KUBELET, [known(pod_manifest(uid="u1"))])
    state.pods_list(Source.KUBELET, [known(pod_manifest(uid="u1", status=status))])
    assert [view.addresses for view in state.pod_views()] == [addresses]


def test_a_container_is_no_subject_before_it_runs() -> None:
    """Its group appears while it starts, first with the kernel's defaults."""
    now = [100.0]
    state = NodeState(layout=LAYOUT, monotonic=lambda: now[0])
    pod = runtime_pod("u1")
    created = container(pod, "c1", "s1", requested=REQUESTED, state=ContainerState.CREATED)
    state.run_sandbox(sandbox(pod, "s1"))
    assert state.create_container(created) is not None
    state.update_container(created)
    state.observe_container(created)
    state.runtime_list([sandbox(pod, "s1")], [created])
    assert "container/c1" not in subjects(state)
    assert [each.id for each in state.waiting_containers()] == ["c1"]
    state.start_container(created)
    assert "container/c1" in subjects(state)
    assert state.waiting_containers() == []


def test_a_container_without_a_start_event_counts_as_started_after_a_while() -> None:
    now = [100.0]
    state = NodeState(layout=LAYOUT, monotonic=lambda: now[0])
    pod = runtime_pod("u1")
    state.create_container(container(pod, "c1", "s1", state=ContainerState.CREATED))
    assert not state.start_overdue(30)
    now[0] += 31
    assert state.start_overdue(30)
    assert "container/c1" in subjects(state)


def test_a_copy_does_not_change_with_later_reports() -> None:
    """A plan merges pods of a copy in another thread while the runtime goes on."""
    state = NodeState(layout=LAYOUT)
    running(state)
    before = subjects(state)
    copy = state.copy()
    state.create_container(container(runtime_pod("u1"), "c2", "s1", requested=REQUESTED))
    state.update_container(
        container(runtime_pod("u1"), "c1", "s1", requested=Requested(cpu_shares=7))
    )
    object_of_pod = pod_manifest(uid="u1")
    copy.pods_list(Source.OBJECTS, [known(object_of_pod)])
    copy.pods_list(Source.OBJECTS, [])
    assert subjects(copy) == before
    state.remove_container("c1")
    copy.pods_list(Source.OBJECTS, [known(object_of_pod)])
    assert "container/c1" in subjects(copy)


# --- events ------------------------------------------------------------------------------------


def test_a_created_container_is_known_with_what_kubelet_asked_for() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    made = the_container(state, "c1")
    assert made.requested == REQUESTED
    assert made.cgroup == "kubepods/burstable/podu1/c1"


def test_what_a_creation_returns_is_what_the_merged_pod_says() -> None:
    """The answer to a runtime does not wait for merging; it must not differ for that."""
    state = NodeState(layout=LAYOUT)
    running(state)
    assert state.pod("u1") is not None
    made = state.create_container(container(runtime_pod("u1"), "c2", "s1", requested=REQUESTED))
    assert made == state.container("c2")
    resized = Requested(cpu_shares=7)
    made = state.update_container(container(runtime_pod("u1"), "c2", "s1", requested=resized))
    assert made == state.container("c2")


def test_a_creation_in_an_unreported_sandbox_takes_the_pod_from_its_own_message() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    assert state.pod("u1") is not None
    made = state.create_container(container(runtime_pod("u1"), "c2", "s2", requested=REQUESTED))
    assert made == state.container("c2")


def test_a_creation_is_on_record_for_whatever_is_asked_next() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    assert state.pod("u1") is not None
    created = container(runtime_pod("u1"), "c9", "s1", requested=REQUESTED)
    made = state.create_container(created)
    assert made is not None and made.requested == REQUESTED
    assert state.counts[1] == 2
    assert made == state.container("c9")
    remembered = state.remembered("c9")
    assert remembered is not None and remembered.hooked


def test_a_creation_of_a_container_that_ended_before_is_not_taken() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    assert state.pod("u1") is not None
    state.remove_container("c9")
    late = container(runtime_pod("u1"), "c9", "s1", requested=REQUESTED)
    assert state.create_container(late) is None
    assert state.container("c9") is None


def test_an_update_changes_only_what_it_names() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    pod = runtime_pod("u1")
    state.update_container(
        container(pod, "c1", "s1", requested=Requested(cfs_quota_us=80_000, cpus=CpuSet([1])))
    )
    assert the_container(state, "c1").requested == Requested(
        cpu_shares=512, cfs_quota_us=80_000, memory_limit_bytes=1 << 30, cpus=CpuSet([1])
    )


def test_an_update_of_a_container_that_no_hook_saw_leaves_the_rest_as_it_was_found() -> None:
    pod, found = runtime_pod("u1"), Requested(cpu_shares=2, memory_limit_bytes=1 << 30)
    resized = Requested(cpus=CpuSet([1]))
    wanted = Requested(cpu_shares=2, memory_limit_bytes=1 << 30, cpus=CpuSet([1]))
    state = NodeState(layout=LAYOUT)
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1", current=found)])
    state.update_container(container(pod, "c1", "s1", requested=resized))
    assert the_container(state, "c1").requested == wanted
    after = NodeState(layout=LAYOUT, remembered=state.all_remembered())
    ours = Requested(cpu_shares=512)
    after.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1", current=ours)])
    assert the_container(after, "c1").requested == wanted


def test_a_removed_container_does_not_come_back_by_a_late_event() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    state.remove_container("c1")
    state.start_container(container(runtime_pod("u1"), "c1", "s1"))
    assert "container/c1" not in subjects(state)


def test_a_full_list_brings_back_what_an_event_wrongly_removed() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    state.remove_container("c1")
    pod = runtime_pod("u1")
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1")])
    assert "container/c1" in subjects(state)


def test_a_stopped_sandbox_takes_its_pod_and_containers_along() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    state.stop_sandbox("s1")
    assert not {key for key in subjects(state) if key.startswith(("pod/", "container/"))}


def test_a_message_about_a_leftover_with_an_empty_pod_takes_nothing_away() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    state.run_sandbox(sandbox(runtime_pod("", name="", namespace=""), "s1"))
    assert "pod/u1" in subjects(state)


def test_a_container_is_known_although_its_sandbox_was_missed() -> None:
    state = NodeState(layout=LAYOUT)
    state.start_container(container(runtime_pod("u1"), "c1", "s1"))
    assert {"pod/u1", "sandbox/s1", "container/c1"} <= subjects(state).keys()


def test_nothing_is_made_of_ids_and_uids_that_are_empty() -> None:
    state = NodeState(layout=LAYOUT)
    pod = runtime_pod("")
    state.run_sandbox(sandbox(pod, ""))
    state.create_container(container(pod, "", ""))
    assert state.counts == (0, 0)


# --- full lists --------------------------------------------------------------------------------


def test_a_list_removes_what_it_does_not_name() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    state.runtime_list([], [])
    assert state.counts == (0, 0)


def test_a_list_that_was_taken_before_a_creation_does_not_remove_it() -> None:
    state = NodeState(layout=LAYOUT)
    mark = state.now()
    running(state)
    state.runtime_list([], [], taken_at=mark)
    assert "container/c1" in subjects(state)


def test_a_list_that_was_taken_before_a_removal_does_not_undo_it() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    mark = state.now()
    state.remove_container("c1")
    pod = runtime_pod("u1")
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1")], taken_at=mark)
    assert "container/c1" not in subjects(state)


def test_containers_that_no_hook_saw_are_unprotected() -> None:
    state = NodeState(layout=LAYOUT)
    pod = runtime_pod("u1")
    new = state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1")])
    assert new == ("c1",)
    assert [each.id for each in state.unprotected()] == ["c1"]


def test_what_kubelet_asked_for_survives_a_restart() -> None:
    asked = Remembered(REQUESTED, hooked=True)
    state = NodeState(layout=LAYOUT, remembered={"c1": asked, "gone": asked})
    pod = runtime_pod("u1")
    ours = Requested(cpu_shares=2, cfs_quota_us=25_000)
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1", current=ours)])
    assert the_container(state, "c1").requested == REQUESTED
    assert state.unprotected() == []
    kept = state.all_remembered()
    assert [(id_, one.requested, one.hooked) for id_, one in kept.items()] == [
        ("c1", REQUESTED, True)
    ]


@pytest.mark.parametrize(
    ("reported_us", "expected_us"),
    [
        pytest.param(200_000, 200_000, id="resized while not connected"),
        pytest.param(80_000, 100_000, id="ours stands"),
        pytest.param(100_000, 100_000, id="kubelet's stands"),
        pytest.param(70_000, 100_000, id="another plugin's value, reported before"),
    ],
)
def test_a_value_that_is_neither_kubelets_nor_ours_was_asked_for_unheard(
    reported_us: int, expected_us: int
) -> None:
    pod = runtime_pod("u1")
    ours = Requested(cpu_shares=512, cfs_quota_us=80_000)
    before = Remembered(
        Requested(cpu_shares=512, cfs_quota_us=100_000),
        hooked=True,
        delivered=ours,
        reported=Requested(cfs_quota_us=70_000),
    )
    expected = Requested(cpu_shares=512, cfs_quota_us=expected_us)
    state = NodeState(remembered={"c1": before}, layout=LAYOUT)
    reported = Requested(cpu_shares=512, cfs_quota_us=reported_us)
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1", current=reported)])
    assert the_container(state, "c1").requested == expected
    missed = {"c1": Requested(cfs_quota_us=reported_us)} if reported_us == 200_000 else {}
    assert state.take_unseen_requests() == missed
    # Then our value is delivered in its place, and the runtime reports it back.
    state.note_delivered("c1", ours)
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1", current=ours)])
    assert the_container(state, "c1").requested == expected
    assert state.take_unseen_requests() == {}


def test_a_log_of_an_older_version_does_not_say_which_values_are_ours() -> None:
    """So a value that differs is not taken for a request."""
    asked = Requested(cfs_quota_us=100_000)
    state = NodeState(remembered={"c1": Remembered(asked, hooked=True)}, layout=LAYOUT)
    pod, reported = runtime_pod("u1"), Requested(cfs_quota_us=80_000)
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1", current=reported)])
    assert the_container(state, "c1").requested == asked


def test_an_update_that_is_heard_is_not_taken_back_for_what_the_runtime_still_has() -> None:
    state = NodeState(layout=LAYOUT)
    pod = runtime_pod("u1")
    state.run_sandbox(sandbox(pod, "s1"))
    limits = {"resources": {"limits": {"cpu": "1"}}}
    manifest = pod_manifest(uid="u1", spec={"containers": [{"name": "main", **limits}]})
    state.pods_list(Source.KUBELET, [known(manifest)])
    one, two = Requested(cfs_quota_us=100_000), Requested(cfs_quota_us=200_000)
    state.create_container(container(pod, "c1", "s1", requested=one, current=one))
    subject = state.update_container(container(pod, "c1", "s1", requested=two, current=one))
    assert subject is not None and subject.requested.cfs_quota_us == 200_000
    assert the_container(state, "c1").requested.cfs_quota_us == 200_000


def test_values_first_reported_count_as_requested_where_no_hook_saw_the_creation() -> None:
    """What the runtime reports later may have been delivered."""
    state = NodeState(layout=LAYOUT)
    pod = runtime_pod("u1")
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1", current=REQUESTED)])
    ours = Requested(cpu_shares=2, cfs_quota_us=25_000)
    again = [container(pod, "c1", "s1", current=ours)]
    state.runtime_list([sandbox(pod, "s1")], again)
    assert the_container(state, "c1").requested == REQUESTED
    restarted = NodeState(layout=LAYOUT, remembered=state.all_remembered())
    restarted.runtime_list([sandbox(pod, "s1")], again)
    assert the_container(restarted, "c1").requested == REQUESTED
    assert [each.id for each in restarted.unprotected()] == ["c1"]


def test_values_in_force_are_the_last_resort_the_cpu_set_with_them() -> None:
    """Kubelet's static policy names the CPUs once, when it makes the container."""
    state = NodeState(layout=LAYOUT)
    pod = runtime_pod("u1")
    current = Requested(cpu_shares=300, cpus=CpuSet([0]))
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1", current=current)])
    assert the_container(state, "c1").requested == current


def test_the_specification_goes_before_values_in_force() -> None:
    state = NodeState(layout=LAYOUT)
    pod = runtime_pod("u1")
    current = Requested(cfs_quota_us=12_345, oom_score_adj=-5)
    state.runtime_list([sandbox(pod, "s1")], [container(pod, "c1", "s1", current=current)])
    limits = {"resources": {"limits": {"cpu": "500m", "memory": "1Gi"}}}
    manifest = pod_manifest(uid="u1", spec={"containers": [{"name": "main", **limits}]})
    state.pods_list(Source.KUBELET, [known(manifest)])
    requested = the_container(state, "c1").requested
    assert requested == Requested(
        cpu_shares=512, cfs_quota_us=50_000, memory_limit_bytes=1 << 30, oom_score_adj=-5
    )


def listed(state: NodeState, *, cpu: str) -> None:
    """Kubelet's list has the running container c1 with a limit."""
    main = {"name": "main", "resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": cpu}}}
    running = {"name": "main", "containerID": "containerd://c1", "state": {"running": {}}}
    status = {"phase": "Running", "containerStatuses": [running]}
    manifest = pod_manifest(uid="u1", spec={"containers": [main]}, status=status)
    state.pods_list(Source.KUBELET, [known(manifest)])


def quota_us(state: NodeState) -> int | None:
    return the_container(state, "c1").requested.cfs_quota_us


def test_an_update_through_the_proxy_counts_until_kubelets_list_says_something_new() -> None:
    """No runtime event reports it, and kubelet's list is up to an interval old."""
    state = NodeState(layout=LAYOUT)
    listed(state, cpu="2")
    cgroup = state.update_through_proxy("u1", "main", "c1", Requested(cfs_quota_us=60_000))
    assert cgroup == the_container(state, "c1").cgroup != ""
    assert quota_us(state) == 60_000
    assert the_container(state, "c1").requested.cpu_shares == 102
    listed(state, cpu="2")
    assert quota_us(state) == 60_000
    listed(state, cpu="700m")
    assert quota_us(state) == 70_000


def test_an_update_through_the_proxy_of_a_container_that_the_runtime_listed() -> None:
    state = NodeState(layout=LAYOUT)
    running(state)
    state.update_through_proxy("u1", "main", "c1", Requested(cfs_quota_us=60_000))
    assert quota_us(state) == 60_000
    assert the_container(state, "c1").requested.memory_limit_bytes == REQUESTED.memory_limit_bytes


def test_snapshots_count_the_requests_that_they_follow_from() -> None:
    state = NodeState(layout=LAYOUT)
    engine = Engine.build([], NodeInputs())
    assert state.update_through_proxy("u1", "main", "c1", Requested(cfs_quota_us=60_000)) == ""
    running(state)
    assert state.requests == state.snapshot(engine).requests == 1
    pod = runtime_pod("u1")
    state.update_container(container(pod, "c1", "s1", requested=Requested(cfs_quota_us=70_000)))
    assert state.requests == state.snapshot(engine).requests == state.copy().requests == 2
