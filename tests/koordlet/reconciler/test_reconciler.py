"""The reconciler: decides, repairs, restores, holds on bad input, and costs little."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from hooks.engine import Engine
from hooks.facts import NodeInputs, NodeMeta
from hooks.state import State
from hooks.subject import ContainerSubject, PodSubject
from koordlet.executor.executor import Executor
from koordlet.executor.journal import Journal
from koordlet.reconciler import wishes
from koordlet.reconciler.reconciler import Reconciler
from koordlet.reconciler.wishes import plan_for
from koordlet.state.snapshot import Snapshot
from tests.koordlet.executor.bed import TWO_CORES, fill_disk
from tests.koordlet.reconciler.bed import POLICY, SHARES, Node, make_node
from tests.simulated import DEBIAN_12_V1, DEBIAN_12_V2
from tests.waiting import wait_until


def test_a_second_pass_decides_nothing_and_writes_nothing() -> None:
    node = make_node()
    first = node.reconciler.run_once("start")
    assert (first.decided, first.written) == (3, 3)
    second = node.reconciler.run_once("timer")
    assert (second.decided, second.written, second.failed) == (0, 0, 0)
    assert node.shares(0) == "700"


def test_a_new_rule_reaches_the_kernel_and_off_restores() -> None:
    node = make_node()
    before = node.shares(0)
    node.passes()
    node.mode("900")
    node.passes()
    assert node.shares(0) == "900"
    node.mode("off")
    node.passes()
    assert node.shares(0) == before
    assert not len(node.bed.journal)


def test_an_engine_that_claims_the_same_decides_nothing_again() -> None:
    node = make_node()
    node.passes()
    node.mode("700")  # the value that is in force: another engine with an equal rule
    report = node.reconciler.run_once("NodeSLO")
    assert (report.decided, report.written, report.generation) == (0, 0, 2)
    node.annotate(0, skip="1")
    assert node.reconciler.run_once("object").decided == 1
    node.mode("900")
    assert node.reconciler.run_once("NodeSLO").decided == 3
    node.passes()
    assert node.shares(1) == "900"


def test_what_failed_is_decided_again_by_each_engine() -> None:
    node = make_node()
    node.annotate(0, bad="1")
    node.passes()
    node.mode("700")
    report = node.reconciler.run_once("NodeSLO")
    assert (report.decided, report.faults) == (1, 1)


def test_an_engine_between_two_passes_that_claims_otherwise_changes_nothing_for_good() -> None:
    node = make_node()
    node.passes()
    node.mode("900")
    node.mode("700")
    report = node.reconciler.run_once("NodeSLO")
    assert (report.decided, report.generation) == (0, 3)
    assert node.shares(0) == "700"


def test_a_pod_that_asks_no_more_gets_its_value_back_and_others_keep_theirs() -> None:
    node = make_node()
    before = node.shares(0)
    node.passes()
    node.annotate(0, skip="1")
    node.passes()
    assert (node.shares(0), node.shares(1)) == (before, "700")


def test_bad_input_of_a_pod_keeps_its_last_good_value() -> None:
    node = make_node()
    node.passes()
    node.annotate(0, bad="1")
    report = node.reconciler.run_once("object")
    assert report.faults == 1
    node.passes()
    assert (node.shares(0), node.shares(1)) == ("700", "700")


def test_bad_input_of_the_node_restores_nothing_even_after_a_restart(tmp_path: Path) -> None:
    node = make_node(journal_path=str(tmp_path / "journal"))
    node.passes()
    node.bed.restart()
    node.reconciler = Reconciler(node.bed.executor, node.bed.journal, node.snapshot)
    node.engine = Engine.build([POLICY], NodeInputs(node=NodeMeta(annotations={"mode": "bad"})))
    assert not node.engine.states[0].active
    node.passes()
    assert node.shares(0) == "700"
    node.mode("off")
    node.passes()
    assert node.shares(0) != "700"


def test_the_thread_may_step_aside_at_each_subject() -> None:
    node = make_node(pods=3)
    aside: list[int] = []
    node.reconciler = Reconciler(
        node.bed.executor, node.bed.journal, node.snapshot, step_aside=lambda: aside.append(1)
    )
    node.reconciler.run_once("test")
    assert len(aside) == 3
    changed = node.subjects[0]
    assert isinstance(changed, PodSubject)
    node.reconciler.pods_changed(node.engine, {changed.pod.uid: [changed]})
    assert node.reconciler.update_once() is not None
    assert len(aside) == 4


def test_nothing_is_restored_before_all_sources_have_spoken(tmp_path: Path) -> None:
    node = make_node(journal_path=str(tmp_path / "journal"))
    before = node.shares(0)
    node.passes()
    node.bed.restart()
    node.reconciler = Reconciler(node.bed.executor, node.bed.journal, node.snapshot)
    everything, node.subjects, node.complete = node.subjects, (), False
    node.passes(5)
    node.subjects = everything[:1]
    node.passes()
    assert [node.bed.text(one.cgroup, "cpu.shares") for one in everything] == ["700"] * 3
    node.complete = True
    node.passes()
    found = [node.bed.text(one.cgroup, "cpu.shares") for one in everything]
    assert found == ["700", before, before]


def test_a_subject_that_left_for_good_is_forgotten_in_one_pass() -> None:
    node = make_node()
    node.passes()
    node.bed.kubelet.pods[node.subjects[0].key.removeprefix("pod/")].remove()
    node.subjects = node.subjects[1:]
    node.passes(1)
    assert len(node.bed.journal) == 2
    assert node.reconciler.explain("pod/gone") is None


def test_restore_all_puts_everything_back() -> None:
    for profile in (DEBIAN_12_V1, DEBIAN_12_V2):
        node = make_node(profile)
        before = node.shares(0)
        node.passes()
        assert node.shares(0) != before
        report = node.reconciler.restore_all()
        assert report.restored >= 3 and report.failed == 0
        assert node.shares(0) == before
        assert not len(node.bed.journal)


def test_restore_all_is_not_stopped_by_the_write_budget() -> None:
    node = make_node(pods=6)
    before = node.shares(0)
    node.passes()
    limits = replace(node.bed.limits, writes_per_second=0.0, burst=2)
    executor = Executor(node.bed.kernel, node.bed.layout, node.bed.journal, limits=limits)
    reconciler = Reconciler(executor, node.bed.journal, node.snapshot)
    assert reconciler.restore_all().failed == 0
    assert {node.shares(index) for index in range(6)} == {before}
    reconciler.close()


def test_explain_names_claim_observed_state_and_writes() -> None:
    node = make_node()
    node.passes()
    key = node.subjects[0].key
    view = node.reconciler.explain(key)
    assert view is not None
    (value,) = view.resources  # the environment is the runtime's to set, at creation
    assert value.state is State.APPLIED and value.observed == "700"
    assert value.claim is not None and value.claim.policy == "shares"
    assert value.writes[-1].new == "700"
    ((subject, same),) = node.reconciler.explain_file(value.path)
    assert (subject, same.observed) == (key, "700")


def test_planning_another_rule_writes_nothing() -> None:
    node = make_node()
    node.passes()
    inputs = NodeInputs(node=NodeMeta(annotations={"mode": "900"}))
    other = Snapshot(Engine.build([POLICY], inputs), node.subjects)
    journal: Journal = node.bed.journal.copy_in_memory()
    with node.bed.kernel.recording() as writes:
        planned = plan_for(Executor(node.bed.kernel, node.bed.layout, journal), other)
    assert not writes
    assert [(write.old, write.new) for write in planned] == [("700", "900")] * 3
    off = Snapshot(replace_mode(node, "off"), node.subjects)
    journal = node.bed.journal.copy_in_memory()
    planned = plan_for(Executor(node.bed.kernel, node.bed.layout, journal), off)
    assert {write.why.split(":")[0] for write in planned} == {"restore"}
    assert len(planned) == 3


def replace_mode(node: Node, mode: str) -> Engine:
    inputs = NodeInputs(node=NodeMeta(annotations={"mode": mode}))
    return Engine.build([POLICY], inputs, previous=node.engine)


def test_a_delivery_without_a_claim_is_undone() -> None:
    node = make_node(pods=1)
    with_container(node)
    node.mode("off")
    node.passes()
    assert node.shares(1) == "1024"


def with_container(node: Node) -> str:
    """Start a container that the runtime gave 700 shares instead of 1024; returns its cgroup."""
    pod = next(iter(node.bed.kubelet.pods.values()))
    container = pod.start(TWO_CORES)
    node.bed.set(container.cgroup, "cpu.shares", "700", writer="runtime")
    node.bed.journal.note_delivered("c1", SHARES, 1024, 700)
    subject = node.subjects[0]
    assert isinstance(subject, PodSubject)
    node.subjects = (subject, ContainerSubject(subject.pod, "c", "c1", container.cgroup))
    return container.cgroup


def planned(node: Node) -> list[tuple[str, str, str]]:
    """Return (place, old, new) of what a plan under the rules in force would write."""
    journal = node.bed.journal.copy_in_memory()
    executor = Executor(node.bed.kernel, node.bed.layout, journal)
    with node.bed.kernel.recording() as writes:
        made = plan_for(executor, Snapshot(node.engine, node.subjects))
    assert not writes
    return [(write.slot[0], write.old, write.new) for write in made]


def test_a_delivery_whose_container_never_appears_is_forgotten_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container that failed to start, or one that a runtime's list no longer has."""
    now = [0.0]
    monkeypatch.setattr(wishes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    node = make_node()
    node.bed.journal.note_delivered("gone", SHARES, 1024, 700, policy="shares")
    node.passes(1)
    for now[0], complete, kept in ((599.0, True, True), (700.0, False, True), (701.0, True, False)):
        node.complete = complete
        node.passes(1)
        assert (node.bed.journal.containers_with_deliveries() == ["gone"]) is kept


def test_a_plan_undoes_a_delivery_that_no_pass_has_seen_yet() -> None:
    node = make_node(pods=1)
    cgroup = with_container(node)
    node.mode("off")
    node.bed.journal.update()
    assert planned(node) == [(cgroup, "700", "1024")]
    assert node.bed.journal.containers_with_deliveries() == ["c1"]


def test_a_plan_undoes_what_the_runtime_wrote_again_of_its_creation() -> None:
    node = make_node(pods=1)
    cgroup = with_container(node)
    node.mode("off")
    node.passes()
    assert node.bed.journal.records() == []
    node.bed.set(cgroup, "cpu.shares", "700", writer="runtime")
    assert planned(node) == [(cgroup, "700", "1024")]


# -- the thread ----------------------------------------------------------------------------------


@pytest.fixture
def running() -> Iterable[Node]:
    node = make_node()
    node.reconciler.interval_s = 3600.0
    node.reconciler.start()
    yield node
    assert node.reconciler.stop()
    node.reconciler.close()


def test_it_starts_with_a_pass_and_runs_when_triggered(running: Node) -> None:
    wait_until(lambda: running.reconciler.stats.passes == 1, "what the thread does")
    assert running.shares(0) == "700"
    running.mode("900")
    for _ in range(20):
        running.reconciler.trigger("rules")
    wait_until(lambda: running.shares(0) == "900", "what the thread does")
    wait_until(lambda: running.reconciler.stats.last.reasons == ("rules",), "what the thread does")
    # Twenty triggers in a row are a pass or two.
    assert running.reconciler.stats.passes <= 4


def test_a_pass_that_fails_is_reported_and_the_next_one_runs(running: Node) -> None:
    wait_until(lambda: running.reconciler.stats.passes == 1, "what the thread does")
    good, running.subjects = running.subjects, (None,)  # type: ignore[assignment]
    running.reconciler.trigger("broken")
    wait_until(lambda: running.reconciler.stats.crashed_passes == 1, "what the thread does")
    running.subjects = good
    running.mode("900")
    running.reconciler.trigger("mended")
    wait_until(lambda: running.shares(0) == "900", "what the thread does")


def test_a_pass_that_fails_again_and_again_is_logged_once_and_reported_until_one_is_finished(
    running: Node, caplog: pytest.LogCaptureFixture
) -> None:
    wait_until(lambda: running.reconciler.stats.passes == 1, "what the thread does")
    good, running.subjects = running.subjects, (None,)  # type: ignore[assignment]
    while (crashed := running.reconciler.stats.crashed_passes) < 3:
        running.reconciler.trigger("broken")
        wait_until(partial(_crashed_more, running, crashed), "a crash")
    assert caplog.text.count("Traceback") == 1
    assert "AttributeError: 'NoneType'" in running.reconciler.stats.crash
    running.subjects = good
    running.reconciler.trigger("mended")
    wait_until(lambda: running.reconciler.stats.crash == "", "a pass that is finished")


def _crashed_more(node: Node, than: int) -> bool:
    return node.reconciler.stats.crashed_passes > than


def test_a_slow_kernel_write_does_not_hold_up_triggers(running: Node) -> None:
    wait_until(lambda: running.reconciler.stats.passes == 1, "what the thread does")
    gate = threading.Event()

    def block() -> None:
        gate.wait(5)

    running.bed.kernel.faults.before("write", block)
    running.mode("900")
    started = time.monotonic()
    running.reconciler.trigger("one")
    running.reconciler.trigger("two")
    assert time.monotonic() - started < 1
    gate.set()
    wait_until(lambda: running.shares(2) == "900", "what the thread does")


def test_deferred_writes_are_caught_up_with_soon() -> None:
    node = make_node(pods=6)
    limits = replace(node.bed.limits, writes_per_second=4.0, burst=4)
    executor = Executor(node.bed.kernel, node.bed.layout, node.bed.journal, limits=limits)
    reconciler = Reconciler(executor, node.bed.journal, node.snapshot, interval_s=3600.0)
    reconciler.start()
    try:
        wait_until(
            lambda: all(node.shares(index) == "700" for index in range(6)), "what the thread does"
        )
    finally:
        assert reconciler.stop()
        reconciler.close()


@pytest.mark.parametrize("changed", ["node", "pod"])
def test_values_are_written_once_their_originals_can_be(tmp_path: Path, changed: str) -> None:
    """Without waiting for the timer or for another change."""
    node = make_node()
    journal = Journal(str(tmp_path / "journal"), boot="b1")
    executor = Executor(node.bed.kernel, node.bed.layout, journal)
    reconciler = Reconciler(executor, journal, node.snapshot, interval_s=3600.0)
    reconciler.start()
    try:
        wait_until(lambda: node.shares(0) == "700", "the first pass")
        pod = node.subjects[0]
        assert isinstance(pod, PodSubject)
        fill_disk(journal)
        (tmp_path / "journal.new").mkdir()  # and no new file can take the old one's place
        if changed == "pod":
            node.bed.set(pod.cgroup, "cpu.shares", "701", writer="operator")
            reconciler.pods_changed(node.engine, {pod.pod.uid: [pod]})
        else:
            node.mode("900")
            reconciler.trigger("rules")
        wait_until(lambda: reconciler.stats.failed > 0, "the failure")
        (tmp_path / "journal.new").rmdir()
        wanted = "900" if changed == "node" else "700"
        wait_until(lambda: node.shares(0) == wanted, "the value")
        assert not journal.problem
    finally:
        assert reconciler.stop()
        reconciler.close()
