"""Extenders choose among the nodes that a preemption could free, and name the victims there."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from cluster.scheduler.binding.placement import Placement
from cluster.scheduler.configuration.extenders import Extender, ExtenderManagedResource
from cluster.scheduler.cycle import node_search, preemption
from cluster.scheduler.cycle.opinions import Opinion
from cluster.scheduler.cycle.proposals import NeedsRoom
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.extenders import consulting
from cluster.scheduler.extenders.consulting import Extenders
from cluster.scheduler.plugins.contract import Reason
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.amounts import ResourceNames
from cluster.scheduler.tables.nodes import NodeTable
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from kube.client import ApiError, Client
from tests.beds.apiserver import eventually
from tests.cluster.scheduler.beds.core import Bed
from tests.cluster.scheduler.extenders.serving import Serving, Tree, serving
from tests.cluster.scheduler.making import make_node, make_pod


class _Client:
    """Reads pods from those of a bed."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed

    async def request(self, method: str, path: str, **_: Any) -> bytes:
        found = self._bed.pods.get(path.rpartition("/")[2])
        if found is None:
            raise ApiError(status=404, reason="NotFound", message="no such pod", what=path)
        return msgspec.json.encode(found)


_WITH_PORT = {"name": "c", "ports": [{"containerPort": 80, "hostPort": 80}]}
Play = Callable[[Bed, Serving, Extenders], Awaitable[None]]


def _play(answer: Callable[[Tree], Any], scenario: Play, **configured: Any) -> None:
    """Run a scenario with two full nodes: n0 with "cheap" and "kept", n1 with "dear".

    answer: what the extender replies to a preempt request.
    """

    async def run() -> None:
        bed = Bed()
        for node in ("n0", "n1"):
            bed.node(node, 4)
        bed.pod("cheap", 3, 1, node="n0")
        labels = {"scheduling.koordinator.sh/disable-preemptible": "true"}
        bed.pod("kept", 1, 0, node="n0")
        bed.pods["kept"]["metadata"]["labels"] = labels
        bed.change("kept")
        bed.pod("dear", 3, 5, node="n1")
        bed.pod("beside", 1, 2, node="n1")
        bed.pod("equal", 0, 9, node="n1")
        async with serving({"preempt": answer}) as extender:
            configuration = Extender(
                url_prefix=extender.url,
                preempt_verb="preempt",
                **{"node_cache_capable": True, **configured},
            )
            extenders = Extenders(
                cast(Client, _Client(bed)),
                [configuration],
                bed.core.attempts,
                bed.core.attempts.preemptions,
                nodes={},
                decided=lambda: None,
            )
            bed.core.attempts.consultant = extenders
            extenders.open()
            try:
                bed.pod("new", 3, 9)
                bed.run()
                await scenario(bed, extender, extenders)
                assert not extenders.faults.count
            finally:
                await extenders.stop_asking()
                await extenders.close()

    asyncio.run(run())


@asynccontextmanager
async def _while_asked(extender: Serving) -> AsyncIterator[None]:
    """The block runs between the first question and its answer."""
    extender.open.clear()
    await eventually(lambda: extender.asked)
    yield
    extender.open.set()


async def _answered(bed: Bed) -> None:
    await eventually(lambda: bed.core.queue.state_of("u-new") is not QueueState.IN_FLIGHT)


def _metas(**nodes: list[str]) -> Tree:
    return {
        "NodeNameToMetaVictims": {
            node: {"Pods": [{"UID": f"u-{name}"} for name in names], "NumPDBViolations": 0}
            for node, names in nodes.items()
        }
    }


def _as_proposed(body: Tree) -> Tree:
    proposed = body["NodeNameToMetaVictims"]
    if proposed is None:
        proposed = {
            node: {
                "Pods": [{"UID": pod["metadata"]["uid"]} for pod in victims["Pods"]],
                "NumPDBViolations": victims["NumPDBViolations"],
            }
            for node, victims in body["NodeNameToVictims"].items()
        }
    return {"NodeNameToMetaVictims": proposed}


@pytest.mark.parametrize("capable", [True, False])
def test_what_is_proposed_and_the_cheapest_that_is_agreed_to(capable: bool) -> None:
    async def scenario(bed: Bed, extender: Serving, _: Extenders) -> None:
        assert bed.evicted() == []
        await _answered(bed)
        (body,) = extender.bodies("preempt")
        assert body["Pod"]["metadata"]["name"] == "new"
        victims = {"n0": ["u-cheap"], "n1": ["u-dear"]}
        given, none = "NodeNameToMetaVictims", "NodeNameToVictims"
        if not capable:
            given, none = none, given
        assert body[none] is None
        found = {
            node: [pod["UID"] if capable else pod["metadata"]["uid"] for pod in each.pop("Pods")]
            for node, each in body[given].items()
        }
        assert found == victims
        assert list(body[given].values()) == [{"NumPDBViolations": 0}] * 2
        if not capable:
            # Whole pods, as the API server has them.
            assert body["Pod"]["spec"]["containers"]
        assert bed.evicted() == ["cheap"]
        assert bed.nominated["new"] == "n0"

    _play(_as_proposed, scenario, node_cache_capable=capable)


@pytest.mark.parametrize(
    ("answer", "evicted", "node"),
    [
        # Fewer nodes: the cheapest of those that are left.
        (_metas(n1=["dear"]), ["dear"], "n1"),
        # Other victims, which the extender needs gone as well.
        (_metas(n1=["dear", "beside"]), ["beside", "dear"], "n1"),
        (
            {"nodenametometavictims": {"n1": {"pods": [{"uid": "u-dear"}], "numPDBViolations": 1}}},
            ["dear"],
            "n1",
        ),
    ],
)
def test_an_extender_drops_nodes_and_names_other_victims(
    answer: Tree, evicted: list[str], node: str
) -> None:
    async def scenario(bed: Bed, _: Serving, __: Extenders) -> None:
        await _answered(bed)
        assert bed.evicted() == evicted
        assert bed.nominated["new"] == node

    _play(lambda _: answer, scenario)


def test_budget_violations_that_an_extender_counts_make_a_node_dearer() -> None:
    both = _metas(n0=["cheap"], n1=["dear"])
    both["NodeNameToMetaVictims"]["n0"]["NumPDBViolations"] = 1

    async def scenario(bed: Bed, _: Serving, __: Extenders) -> None:
        await _answered(bed)
        assert bed.evicted() == ["dear"]

    _play(lambda _: both, scenario)


@pytest.mark.parametrize("answer", [{}, {"NodeNameToMetaVictims": None}, _metas()])
def test_without_a_node_that_an_extender_agrees_to_no_pod_is_evicted(answer: Tree) -> None:
    async def scenario(bed: Bed, extender: Serving, _: Extenders) -> None:
        await _answered(bed)
        assert bed.evicted() == []
        assert bed.core.queue.state_of("u-new") is QueueState.UNSCHEDULABLE
        assert bed.messages["new"].startswith("0/2 nodes are available: 2 Insufficient cpu.")
        text = "preemption: extenders agree to none of the nodes that could be freed."
        assert text in bed.messages["new"]

    _play(lambda _: answer, scenario)


_BAD: dict[str, Any] = {
    "a node that was not proposed: 'n7'": _metas(n7=["dear"]),
    "no victims on node 'n1'": _metas(n1=[]),
    # Victims that the rules of preemption protect, that are elsewhere, or nowhere.
    "pod on node n0 that may not be evicted for this one: UID 'u-kept'": _metas(
        n0=["cheap", "kept"]
    ),
    "pod on node n1 that may not be evicted for this one: UID 'u-equal'": _metas(
        n1=["dear", "equal"]
    ),
    "pod on node n1 that may not be evicted for this one: UID 'u-cheap'": _metas(n1=["cheap"]),
    "pod on node n1 that may not be evicted for this one: UID ''": {
        "NodeNameToMetaVictims": {"n1": {"Pods": [{}]}}
    },
    "cannot be read": {"NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": 3}]}}},
    "cannot be read: Expected `int` >= 0": {
        "NodeNameToMetaVictims": {"n1": {"NumPDBViolations": -1, "Pods": []}}
    },
}


@pytest.mark.parametrize("problem", _BAD)
@pytest.mark.parametrize("ignorable", [True, False])
def test_an_answer_beyond_the_rules_evicts_no_pod(problem: str, ignorable: bool) -> None:
    async def scenario(bed: Bed, extender: Serving, _: Extenders) -> None:
        await _answered(bed)
        if ignorable:
            # As if it had not been asked; a node without victims alone is taken as dropped.
            assert bed.evicted() == ([] if problem.startswith("no victims") else ["cheap"])
            return
        assert bed.evicted() == []
        message = bed.messages["new"]
        assert message.startswith("0/2 nodes are available: 2 Insufficient cpu.")
        assert f"preemption: extender {extender.url}: the answer to preempt " in message
        assert problem in message
        # Unlike a pod that no change helps, it is tried again after its back-off.
        assert bed.core.queue.state_of("u-new") is QueueState.BACKOFF
        extender.answers["preempt"] = _as_proposed
        bed.run(20.0)
        await _answered(bed)
        assert bed.evicted() == ["cheap"]

    _play(lambda _: _BAD[problem], scenario, ignorable=ignorable)


@pytest.mark.parametrize("status", [500, 200])
def test_what_changes_while_an_extender_is_asked(status: int) -> None:
    """The pod is deleted: its answer, good or bad, is nobody's."""

    async def scenario(bed: Bed, extender: Serving, extenders: Extenders) -> None:
        extender.status = status
        bed.gone("new")
        await eventually(lambda: not extenders._tasks)
        assert bed.evicted() == []
        assert bed.core.attempts.preemptions.proposed("u-new") is None
        assert len(bed.core.queue) == 0

    _play(_as_proposed, scenario)


@pytest.mark.parametrize("asked", [False, True])
def test_room_that_becomes_free_meanwhile_is_taken_and_no_pod_is_evicted(asked: bool) -> None:
    """asked: whether it becomes free while the extender is asked, or before that."""

    async def scenario(bed: Bed, extender: Serving, _: Extenders) -> None:
        async with _while_asked(extender) if asked else nullcontext():
            bed.gone("dear")
        await _answered(bed)
        assert bool(extender.asked) == asked
        assert bed.evicted() == []
        bed.run(20.0)
        assert bed.node_of("new") == "n1"

    _play(_as_proposed, scenario)


def test_a_pod_that_is_edited_meanwhile_evicts_no_pod_for_what_it_was() -> None:
    async def scenario(bed: Bed, extender: Serving, _: Extenders) -> None:
        bed.pods["new"]["spec"]["nodeSelector"] = {"disk": "none"}
        bed.change("new")
        await _answered(bed)
        assert bed.evicted() == []
        assert bed.core.queue.state_of("u-new") is QueueState.ACTIVE

    _play(_as_proposed, scenario)


def test_a_less_important_pod_that_came_meanwhile_makes_a_node_too_full() -> None:
    async def scenario(bed: Bed, extender: Serving, _: Extenders) -> None:
        async with _while_asked(extender):
            bed.gone("cheap")
            bed.pod("late", 3, 8, node="n0")
        await _answered(bed)
        # Its victims there do not suffice any more.
        assert bed.evicted() == []
        text = "preemption: none of the nodes that extenders agreed to can be freed any more."
        assert text in bed.messages["new"]

    _play(lambda _: _metas(n0=["cheap"]), scenario)


class _Asked:
    """An extender that is asked about preemptions of all pods, as soon as there is one."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed

    def concerns(self, *_: object) -> bool:
        return False

    binds = concerns

    def preempts(self, *_: object) -> bool:
        return True

    def ask(self, pod: PendingPod[PodShape]) -> None:
        raise AssertionError("it filters no nodes")

    def ask_victims(self, pod: PendingPod[PodShape]) -> None:
        assert self._bed.core.attempts.preemptions.proposed(pod.uid) is None


class _Refusing(_Asked):
    """An extender that also refuses one node. It is asked about preemptions by the test."""

    def concerns(self, *_: object) -> bool:
        return True

    def ask(self, pod: PendingPod[PodShape]) -> None:
        attempts = self._bed.core.attempts
        asked = frozenset(attempts.candidates(pod.uid) or ())
        failed = {name: Reason("refused") for name in asked & {"refused"}}
        attempts.consulted(pod.uid, Opinion(asked, failed, {}))

    def ask_victims(self, *_: object) -> None: ...


@pytest.mark.parametrize("name", ["other", "refused"])
def test_a_new_node_counts_as_room_where_it_has_the_row_of_one_that_was_refused(name: str) -> None:
    """name: of the new node, which may be that of the node before."""
    bed = Bed()
    bed.core.attempts.consultant = _Refusing(bed)
    for node in ("full", "refused"):
        bed.node(node, 4)
    bed.pod("old", 3, 1, node="full")
    bed.pod("new", 3, 9)
    bed.run()
    row = bed.core.tables.nodes.row("refused")
    proposals = bed.core.attempts.preemptions.proposed("u-new")
    assert proposals is not None
    assert list(proposals) == ["full"]
    bed.show(bed.core.nodes, "DELETED", {"metadata": {"name": "refused"}})
    bed.node(name, 4)
    assert bed.core.tables.nodes.row(name) == row
    # Without it the pod would be evicted for nothing.
    assert bed.core.attempts.preemptions.proposed("u-new") is None
    assert bed.evicted() == []
    bed.run(20.0)
    assert bed.node_of("new") == ("other" if name == "other" else "")


def test_a_fault_after_the_answer_is_shown_and_the_pod_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(preemption.Preemption, "choose", broken)
    bed = Bed()
    bed.core.attempts.consultant = _Refusing(bed)
    bed.node("full", 4)
    bed.pod("old", 3, 1, node="full")
    bed.pod("new", 3, 9)
    bed.run()
    bed.core.attempts.preemptions.agreed("u-new", {})
    assert bed.messages["new"] == "RuntimeError: broken"
    assert bed.core.attempts.faults.count == 1
    assert bed.core.queue.state_of("u-new") is QueueState.BACKOFF
    monkeypatch.undo()
    bed.gone("old")
    bed.run(20.0)
    assert bed.node_of("new") == "full"


def test_a_search_that_finds_no_node_to_propose_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials: list[int] = []
    for module in (preemption, node_search):
        monkeypatch.setattr(module, "by_trial", lambda *_: trials.append(1))
    messages = []
    for asked in (False, True):
        bed = Bed()
        bed.core.attempts.consultant = _Asked(bed) if asked else None
        for number in range(3):
            bed.node(f"n{number}", 4)
            bed.pod(f"old{number}", 1, 1, node=f"n{number}", containers=[_WITH_PORT])
        bed.pod("new", 1, 9, containers=[_WITH_PORT])
        bed.run()
        messages.append(bed.messages["new"])
        assert len(trials) == 3
        trials.clear()
    assert "preemption: 0/3 nodes are available" in messages[0]
    assert messages[0] == messages[1]


def _others(bed: Bed) -> list[str]:
    """Add 40 pods, more than are asked about at once; return their names."""
    names = [f"other{number}" for number in range(40)]
    for name in names:
        bed.pod(name, 3, 9)
    bed.run()
    return names


def test_only_what_is_asked_about_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pod that waits would keep the victims of 32 nodes."""
    searched: list[str] = []
    search = preemption.Preemption.propose

    def propose(self: Any, pod: PendingPod[PodShape], *rest: Any, **more: Any) -> Any:
        searched.append(pod.uid)
        return search(self, pod, *rest, **more)

    monkeypatch.setattr(preemption.Preemption, "propose", propose)

    async def scenario(bed: Bed, extender: Serving, extenders: Extenders) -> None:
        _others(bed)
        assert len(extenders._tasks) == 41
        async with _while_asked(extender):
            await eventually(lambda: len(searched) == consulting._AT_ONCE)
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(searched) == consulting._AT_ONCE
        await eventually(lambda: not extenders._tasks)

    _play(lambda _: _metas(), scenario)


@pytest.mark.parametrize("rest", [0.0, 3600.0])
def test_an_extender_that_does_not_answer_is_not_asked_about_each_pod(
    rest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consulting, "_REST_S", rest)

    async def scenario(bed: Bed, extender: Serving, extenders: Extenders) -> None:
        extender.cuts = True
        names = [*_others(bed), "new"]
        await eventually(lambda: not extenders._tasks)
        for name in names:
            assert bed.core.queue.state_of(f"u-{name}") is QueueState.BACKOFF
            assert "preempt: ServerDisconnectedError" in bed.messages[name]
        assert len(extender.asked) == (consulting._AT_ONCE if rest else len(names))

    _play(_as_proposed, scenario)


def test_a_pod_that_is_not_asked_about_shows_why_after_another_call_succeeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consulting, "_REST_S", 3600.0)

    async def scenario(bed: Bed, extender: Serving, extenders: Extenders) -> None:
        extender.cuts = True
        await _answered(bed)
        extender.cuts = False
        extender.answers["bind"] = lambda _: {}
        assert await extenders.bind(Placement("default", "bound", "u-bound", "n0"))
        bed.pod("other", 3, 9)
        bed.run()
        await eventually(lambda: not extenders._tasks)
        assert len(extender.bodies("preempt")) == 1
        assert f"extender {extender.url}: preempt: Server" in bed.messages["other"]

    _play(_as_proposed, scenario, bind_verb="bind")


@pytest.mark.parametrize("ignorable", [False, True])
def test_an_extender_that_refuses_one_pod_is_asked_about_others(
    ignorable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consulting, "_REST_S", 3600.0)

    async def scenario(bed: Bed, extender: Serving, extenders: Extenders) -> None:
        extender.status = 500
        await _answered(bed)
        assert bed.evicted() == (["cheap"] if ignorable else [])
        extender.status = 200
        bed.pod("other", 3, 9)
        bed.run()
        await eventually(lambda: not extenders._tasks)
        assert len(extender.asked) == 2
        assert bed.evicted() == (["cheap", "dear"] if ignorable else ["cheap"])

    _play(_as_proposed, scenario, ignorable=ignorable)


def test_what_is_kept_of_a_pod_that_waits_is_a_bit_for_each_node() -> None:
    rows = np.arange(0, 5000, 3)
    pod = PendingPod("ns/p", "u", 0, Shapes().of(make_pod("p")), created=0.0)
    diagnosis = Diagnosis(nodes=5000, resolvable=rows)
    nodes = NodeTable(ResourceNames())
    for number in range(5000):
        nodes.upsert(make_node(f"n{number}"))
    needs = NeedsRoom.of(pod, diagnosis, rows[:7], nodes)
    nodes.upsert(make_node("n3", labels={"changed": "yes"}))
    assert needs.diagnosis(nodes).resolvable.tolist() == rows.tolist()
    assert needs.passed(nodes).tolist() == rows[:7].tolist()
    assert len(pickle.dumps((needs._resolvable, needs._passed))) < 1000


def test_only_pods_that_the_extender_manages_are_asked_about() -> None:
    async def scenario(bed: Bed, extender: Serving, _: Extenders) -> None:
        assert bed.evicted() == ["cheap"]
        assert extender.asked == []

    managed = (ExtenderManagedResource(name="example.com/x"),)
    _play(_as_proposed, scenario, managed_resources=managed)
