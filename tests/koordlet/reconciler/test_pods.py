"""Pods that changed are looked at by themselves: of the rest nothing is read or decided."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from apis.qos import KubeQoS
from hooks.state import State
from hooks.subject import PodSubject, QosSubject, Subject
from tests.koordlet.reconciler.bed import Node, make_node
from tests.waiting import wait_until


def uid_of(subject: Subject) -> str:
    assert isinstance(subject, PodSubject)
    return subject.pod.uid


def change(node: Node, *indexes: int) -> None:
    """Queue pods as they are now."""
    pods = {uid_of(node.subjects[index]): (node.subjects[index],) for index in indexes}
    node.reconciler.pods_changed(node.engine, pods)


def test_a_changed_pod_gets_its_value_and_no_other_is_decided_or_written() -> None:
    node = make_node()
    all_of, node.subjects = node.subjects, node.subjects[:1]
    node.passes()
    node.subjects = all_of
    change(node, 1)
    report = node.reconciler.update_once()
    assert report is not None
    assert (report.subjects, report.decided, report.written) == (1, 1, 1)
    assert (node.shares(0), node.shares(1)) == ("700", "700")
    assert node.shares(2) != "700"
    assert node.reconciler.explain(all_of[1].key) is not None
    assert node.reconciler.update_once() is None  # nothing is queued any more


def test_files_of_other_pods_are_not_read() -> None:
    node = make_node()
    node.passes()
    node.bed.kernel.faults.fail("read", errno.EIO, path=f"*{uid_of(node.subjects[0])}*")
    change(node, 1)
    node.reconciler.update_once()
    other = node.reconciler.explain(node.subjects[0].key)
    assert other is not None and [one.state for one in other.resources] == [State.APPLIED]
    node.passes(1)
    other = node.reconciler.explain(node.subjects[0].key)
    assert other is not None and [one.state for one in other.resources] == [State.FAILED]


def test_a_pod_under_a_new_engine_waits_for_the_pass() -> None:
    node = make_node()
    node.passes()
    node.mode("900")
    change(node, 0)
    assert node.reconciler.update_once() is None
    assert node.shares(0) == "700"
    node.passes(1)
    assert node.shares(0) == node.shares(1) == "900"


def test_a_pod_that_asks_no_more_gets_its_value_back() -> None:
    node = make_node()
    before = node.shares(0)
    node.passes()
    node.annotate(0, skip="1")
    change(node, 0)
    node.reconciler.update_once()
    assert (node.shares(0), node.shares(1)) == (before, "700")
    assert len(node.bed.journal) == 2


def test_a_pod_whose_groups_are_gone_is_forgotten_at_once() -> None:
    node = make_node()
    node.passes()
    ended, node.subjects = node.subjects[0], node.subjects[1:]
    node.bed.kubelet.pods[uid_of(ended)].remove()
    node.reconciler.pods_changed(node.engine, {uid_of(ended): ()})
    node.reconciler.update_once()
    assert len(node.bed.journal) == 2
    assert node.reconciler.explain(ended.key) is None


def test_an_ended_pod_whose_groups_are_still_there_is_left_to_the_passes() -> None:
    node = make_node()
    before = node.shares(0)
    node.passes()
    everything, node.subjects = node.subjects, node.subjects[1:]
    node.reconciler.pods_changed(node.engine, {uid_of(everything[0]): ()})
    node.reconciler.update_once()
    assert node.bed.text(everything[0].cgroup, "cpu.shares") == "700"
    node.passes()
    assert node.bed.text(everything[0].cgroup, "cpu.shares") == before


def test_a_snapshot_outdates_what_was_queued_before_it() -> None:
    node = make_node()
    node.passes()
    node.annotate(0, skip="1")
    change(node, 0)
    node.reconciler.snapshot_made()
    assert node.reconciler.update_once() is None


def test_what_the_pods_of_a_class_add_up_to_brings_a_pass(running: Node) -> None:
    wait_until(lambda: running.reconciler.stats.passes == 1, "the first pass")
    qos = QosSubject(kube_qos=KubeQoS.BURSTABLE, cgroup="kubepods/burstable", pods=())
    pods = {uid_of(running.subjects[0]): running.subjects[:1]}
    running.reconciler.pods_changed(running.engine, pods, [qos])
    wait_until(lambda: running.reconciler.stats.last.reasons == ("pods",), "a pass for the class")


def test_the_thread_looks_at_a_changed_pod_without_a_pass(running: Node) -> None:
    wait_until(lambda: running.reconciler.stats.passes == 1, "the first pass")
    running.annotate(0, skip="1")
    change(running, 0)
    wait_until(lambda: running.shares(0) != "700", "a look at the pod")
    assert running.reconciler.stats.passes == 1
    assert running.reconciler.stats.pod_updates == 1


@pytest.fixture
def running() -> Iterator[Node]:
    node = make_node()
    node.reconciler.interval_s = 3600.0
    node.reconciler.start()
    yield node
    assert node.reconciler.stop()
    node.reconciler.close()


def test_an_update_of_several_pods_appends_to_the_journal_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pods have ended, a third one gets its first value: one append before the write."""
    node = make_node(journal_path=str(tmp_path / "journal"))
    all_of, node.subjects = node.subjects, node.subjects[:2]
    node.passes()
    appended: list[tuple[int, int]] = []

    def noted(descriptor: int, data: bytes, real: Callable[..., int] = os.write) -> int:
        appended.append((data.count(b"\n"), len(node.bed.kernel.writes)))
        return real(descriptor, data)

    for ended in all_of[:2]:
        node.bed.kubelet.pods[uid_of(ended)].remove()
    pods: dict[str, tuple[Subject, ...]] = {uid_of(ended): () for ended in all_of[:2]}
    pods[uid_of(all_of[2])] = (all_of[2],)
    node.reconciler.pods_changed(node.engine, pods)
    node.bed.kernel.writes.clear()
    monkeypatch.setattr(os, "write", noted)
    report = node.reconciler.update_once()
    assert report is not None and report.written == 1
    assert appended == [(3, 0)]
    monkeypatch.undo()
    node.bed.restart()
    assert [record.place for record in node.bed.journal.records()] == [all_of[2].cgroup]
