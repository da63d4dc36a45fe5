"""Which single change would let a refused pod run, and on how many nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.configuration.reading import default_configuration
from cluster.scheduler.cycle.advice import Advisor
from cluster.scheduler.cycle.evaluation import Evaluator, Profile
from cluster.scheduler.cycle.scheduling import Scheduling, Unplaced
from cluster.scheduler.plugins.contract import Reason, Refusal
from cluster.scheduler.plugins.nodes.node_affinity import NodeAffinity
from cluster.scheduler.plugins.nodes.taints import NodeUnschedulable, TaintToleration
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.reasons.counterfactuals import (
    NONE,
    Constraint,
    Counterfactuals,
    amount_text,
    nearest,
)
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reasons.masks import GivenReasons, mask

_PROFILE = Profile(
    "koord-scheduler",
    filters=(NodeUnschedulable(), TaintToleration(), NodeAffinity(), NodeResourcesFit()),
)
_TAINT = [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]


def _nearest(tables: Tables, shape: PodShape) -> Counterfactuals:
    evaluation = Evaluator(_PROFILE, tables).evaluate(shape)
    assert not len(evaluation.feasible)
    return nearest(shape, tables, evaluation.masks)


def _sentence(tables: Tables, **pod: object) -> str:
    return _nearest(tables, Shapes().of(make_pod("a", **pod))).sentence  # type: ignore[arg-type]


@pytest.fixture
def tables() -> Tables:
    return Tables()


def test_the_missing_amount_is_named_with_the_nodes_that_lack_no_more(tables: Tables) -> None:
    for number, memory in enumerate(("7Gi", "7Gi", "5Gi", "1Gi")):
        tables.upsert_node(make_node(f"n{number}", allocatable={"memory": memory}))
    tables.upsert_node(make_node("both", allocatable={"memory": "7Gi", "cpu": "1"}))
    found = _nearest(tables, Shapes().of(make_pod("a", requests={"memory": "8Gi", "cpu": "2"})))
    assert found.sentence == (
        "One change away: 4 of 5 nodes lack only memory (2 of them 1Gi or less)."
    )
    assert found.changes[0].examples == ("n0", "n1", "n2")
    for name in ("n2", "n3"):
        tables.delete_node(name)
    assert _sentence(tables, requests={"memory": "8Gi", "cpu": "2"}) == (
        "One change away: 2 of 3 nodes lack only 1Gi of memory."
    )


def test_pods_on_a_node_count_for_what_is_missing(tables: Tables) -> None:
    tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    shape = Shapes().of(make_pod("x", requests={"cpu": "3"}))
    tables.place(Booking(key="default/x", uid="x", shape=shape, node="n"))
    assert _sentence(tables, requests={"cpu": "2500m"}) == (
        "One change away: 1 of 1 nodes lack only 1500m of cpu."
    )
    assert _sentence(tables, requests={"cpu": "1001m"}) == (
        "One change away: 1 of 1 nodes lack only 1m of cpu."
    )


def test_a_resource_that_no_node_has_is_missing_whole(tables: Tables) -> None:
    tables.upsert_node(make_node("n"))
    assert _sentence(tables, requests={"example.com/fpga": "2"}) == (
        "One change away: 1 of 1 nodes lack only 2 of example.com/fpga."
    )


def test_cordoned_and_full_nodes_say_so(tables: Tables) -> None:
    tables.upsert_node(make_node("off", unschedulable=True))
    tables.upsert_node(make_node("full", allocatable={"pods": "0"}))
    assert _sentence(tables) == (
        "One change away: 1 of 2 nodes lack only room for one more pod; "
        "1 of 2 nodes pass all but being cordoned (spec.unschedulable)."
    )


def test_no_amount_is_named_where_more_counts_than_the_pods_on_the_node(tables: Tables) -> None:
    tables.upsert_node(make_node("n"))
    shape = Shapes().of(make_pod("a", requests={"cpu": "2"}))
    fit = NodeResourcesFit()
    held = np.array([1 << 1], dtype=np.int64)  # short of cpu, such as for a nominated pod
    found = nearest(shape, tables, ((fit, held),))
    assert found.sentence == "One change away: 1 of 1 nodes lack only cpu."
    tables.upsert_node(make_node("less", allocatable={"cpu": "1"}))
    found = nearest(shape, tables, ((fit, np.array([1 << 1, 1 << 1], dtype=np.int64)),))
    assert found.sentence == "One change away: 2 of 2 nodes lack only cpu."


def test_the_change_that_frees_most_nodes_comes_first(tables: Tables) -> None:
    for number in range(3):
        tables.upsert_node(make_node(f"tainted{number}", taints=_TAINT))
    tables.upsert_node(make_node("off", unschedulable=True))
    tables.upsert_node(make_node("small", allocatable={"cpu": "1500m"}))
    tables.upsert_node(make_node("small2", allocatable={"cpu": "1500m"}))
    assert _sentence(tables, requests={"cpu": "2"}) == (
        "One change away: 3 of 6 nodes pass all but the taint gpu=yes:NoSchedule; "
        "2 of 6 nodes lack only 500m of cpu."
    )


def test_different_taints_are_different_changes(tables: Tables) -> None:
    other = [{"key": "a", "effect": "NoExecute"}]
    soft = [{"key": "s", "effect": "PreferNoSchedule"}]
    tables.upsert_node(make_node("n0", taints=_TAINT))
    tables.upsert_node(make_node("n1", taints=_TAINT + soft))
    tables.upsert_node(make_node("n2", taints=_TAINT + other))
    assert _sentence(tables) == (
        "One change away: 2 of 3 nodes pass all but the taint gpu=yes:NoSchedule; "
        "1 of 3 nodes pass all but the taints a:NoExecute and gpu=yes:NoSchedule."
    )


def test_the_label_that_is_missing_is_named(tables: Tables) -> None:
    tables.upsert_node(make_node("n0", labels={"zone": "a"}))
    tables.upsert_node(make_node("n1", labels={"zone": "a", "disk": "hdd"}))
    tables.upsert_node(make_node("n2", labels={"zone": "b"}))
    found = _nearest(tables, Shapes().of(make_pod("a", nodeSelector={"zone": "a", "disk": "ssd"})))
    assert found.sentence == (
        "One change away: 2 of 3 nodes pass all but nodeSelector disk=ssd; "
        "1 of 3 nodes pass all but several labels of nodeSelector."
    )
    # No node lacks the zone alone.
    assert [change.nodes for change in found.changes] == [2, 1]


def test_without_a_single_change_the_smallest_set_of_changes_is_named(tables: Tables) -> None:
    for number in range(2):
        tables.upsert_node(make_node(f"n{number}", taints=_TAINT, allocatable={"cpu": "1"}))
    tables.upsert_node(make_node("n2", taints=_TAINT, allocatable={"cpu": "1", "pods": "0"}))
    found = _nearest(tables, Shapes().of(make_pod("a", requests={"cpu": "2"})))
    assert found.changes[0].examples == ("n0", "n1")
    assert found.sentence == (
        "2 changes away: 2 of 3 nodes have only: "
        "node(s) had untolerated taint(s) and Insufficient cpu."
    )


def test_nodes_that_refuse_the_exact_allocation_count(tables: Tables) -> None:
    tables.upsert_node(make_node("n0"))
    tables.upsert_node(make_node("n1"))
    found = nearest(
        Shapes().of(make_pod("a")),
        tables,
        (),
        refused_rows={1: ("DeviceShare", Reason("no whole, healthy GPU"))},
    )
    # Without the comma at which tools split.
    assert found.sentence == (
        "One change away: 1 of 2 nodes pass all but DeviceShare (no whole and healthy GPU)."
    )


def test_of_many_constraints_the_last_count_as_one(tables: Tables) -> None:
    for number in range(70):
        tables.upsert_node(make_node(f"n{number}"))
    masks = []
    for first in (0, 35):
        reasons = tuple(Reason(f"reason {first + number}") for number in range(35))
        bits = [1 << row - first if first <= row < first + 35 else 0 for row in range(70)]
        masks.append((GivenReasons(f"P{first}", reasons), mask(*bits)))
    found = nearest(Shapes().of(make_pod("a")), tables, masks)
    assert found.constraints == 1
    # The 62nd stands for itself and the eight after it.
    assert (found.changes[0].nodes, found.changes[0].constraints) == (
        9,
        (Constraint("P35", "reason 61"),),
    )
    assert found.changes[1].nodes == 1


def test_of_several_constraints_three_are_named_and_the_others_counted(tables: Tables) -> None:
    tables.upsert_node(make_node("n"))
    for count, text in ((3, "r0 and r1 and r2."), (4, "r0 and r1 and r2 and 1 more.")):
        given = GivenReasons("P", tuple(Reason(f"r{number}") for number in range(count)))
        found = nearest(Shapes().of(make_pod("a")), tables, ((given, mask((1 << count) - 1)),))
        assert found.constraints == count
        assert found.sentence == f"{count} changes away: 1 of 1 nodes have only: {text}"


def test_without_nodes_there_is_nothing_to_say(tables: Tables) -> None:
    assert nearest(Shapes().of(make_pod("a")), tables, ()) is NONE
    assert NONE.sentence == ""


@pytest.mark.parametrize(
    ("name", "amount", "text"),
    [
        ("cpu", 500, "500m"),
        ("cpu", 2000, "2"),
        ("memory", 1 << 30, "1Gi"),
        ("memory", (1 << 30) + 1, "1025Mi"),
        ("memory", 25 * (1 << 30) + 1, "26Gi"),
        ("memory", 700, "700"),
        ("memory", 5 << 10, "5Ki"),
        ("kubernetes.io/batch-cpu", 1500, "1500"),
        ("kubernetes.io/batch-memory", 3 << 20, "3Mi"),
        ("nvidia.com/gpu", 2, "2"),
    ],
)
def test_amounts_are_rounded_up_to_what_people_write(name: str, amount: int, text: str) -> None:
    assert amount_text(name, amount) == text


# --- in the message of a refusal -----------------------------------------------------------------


@dataclass(frozen=True)
class _Closed:
    name: str = "ElasticQuota"

    def check(self, pod: PodShape, tables: Tables) -> None:
        raise Refusal(self.name, "quota q is used up")


def _refusal(tables: Tables, profile: Profile, **pod: object) -> Diagnosis:
    scheduling = Scheduling(tables, {"koord-scheduler": profile}, seed=1)
    shape = Shapes().of(make_pod("a", **pod))  # type: ignore[arg-type]
    outcome = scheduling.schedule(
        key="default/a", uid="u", shape=shape, profile="koord-scheduler", now=5.0
    )
    assert isinstance(outcome, Unplaced)
    return outcome.diagnosis


def test_the_text_begins_with_what_kube_scheduler_would_say(tables: Tables) -> None:
    tables.upsert_node(make_node("n", allocatable={"cpu": "1"}))
    diagnosis = _refusal(tables, _PROFILE, requests={"cpu": "2"})
    assert diagnosis.message == "0/1 nodes are available: 1 Insufficient cpu."
    assert (
        diagnosis.text == f"{diagnosis.message} One change away: 1 of 1 nodes lack only 1 of cpu."
    )
    # Tools split at the comma between reasons.
    assert diagnosis.text.split(", ") == [diagnosis.text]
    remarked = replace(diagnosis, remarks=("preemption: 0/1 nodes are available.",))
    assert remarked.text.startswith(f"{diagnosis.message} preemption: 0/1 nodes")


@pytest.mark.parametrize(
    ("cpu", "text"),
    [
        ("2", "Without ElasticQuota 2 of 3 nodes would take the pod."),
        ("64", "Without ElasticQuota no node would take the pod."),
    ],
)
def test_a_pod_held_by_its_quota_learns_how_many_nodes_would_take_it(
    tables: Tables, cpu: str, text: str
) -> None:
    for name, has in (("a", "1"), ("b", "4"), ("c", "4")):
        tables.upsert_node(make_node(name, allocatable={"cpu": has}))
    profile = replace(_PROFILE, admissions=(_Closed(),))
    diagnosis = _refusal(tables, profile, requests={"cpu": cpu})
    assert diagnosis.text == f"0/3 nodes are available: quota q is used up. {text}"
    assert not tables.bookings
    (change,) = diagnosis.counterfactuals.changes
    assert change.constraints == (Constraint("ElasticQuota", "quota q is used up"),)


# --- for equal pods once --------------------------------------------------------------------------


@dataclass
class _Advised:
    shape: PodShape
    advisor: Advisor = field(default_factory=Advisor)
    works: int = 0

    def advise(self, now: float, version: int, counts: dict[str, int], nodes: int = 5) -> None:
        def work() -> Counterfactuals:
            self.works += 1
            return NONE

        self.advisor.advise(
            ("s", self.shape), Diagnosis(nodes, counts), work, version=version, now=now
        )


def test_equal_refusals_are_looked_at_once_until_counts_change_or_time_passes() -> None:
    advised = _Advised(Shapes().of(make_pod("a")))
    for now, version, counts, works in (
        (0.0, 1, {"x": 5}, 1),
        (1.0, 1, {"x": 5}, 1),
        (2.0, 2, {"x": 5}, 1),  # another row changed
        (3.0, 3, {"x": 4, "y": 1}, 2),
        (12.0, 4, {"x": 4, "y": 1}, 2),
        (13.1, 5, {"x": 4, "y": 1}, 3),  # ten seconds are over
        (99.0, 5, {"x": 4, "y": 1}, 3),  # nothing changed since
        (99.0, 5, {"x": 5}, 4),  # something changed apart from nodes
        (99.0, 5, {"x": 4, "y": 1}, 5),
    ):
        advised.advise(now, version, counts)
        assert advised.works == works, now
    advised.advise(99.0, 5, {"x": 4, "y": 1}, nodes=6)
    assert advised.works == 6


# --- against counting node by node ---------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_counts_are_those_of_looking_at_each_node(seed: int) -> None:
    random = Random(seed)
    tables = Tables()
    profile = next(iter(make_plugins(default_configuration(), tables).profiles.values()))
    for number in range(random.randrange(1, 25)):
        tables.upsert_node(
            make_node(
                f"n{number}",
                labels={"disk": random.choice(["ssd", "hdd"])},
                taints=_TAINT if random.random() < 0.4 else [],
                unschedulable=random.random() < 0.2,
                allocatable={
                    "cpu": str(random.randrange(1, 5)),
                    "memory": f"{random.randrange(1, 5)}Gi",
                    "pods": random.choice(["0", "9"]),
                },
            )
        )
    for name in random.sample(range(25), 3):
        tables.delete_node(f"n{name}")
    pod = make_pod("a", requests={"cpu": "4", "memory": "4Gi"}, nodeSelector={"disk": "ssd"})
    shape = Shapes().of(pod)
    evaluation = Evaluator(profile, tables).evaluate(shape)
    expected: Counter[frozenset[str]] = Counter()
    for row in range(len(tables.nodes)):
        if tables.nodes.alive[row]:
            texts = frozenset(
                reason.text
                for plugin, mask in evaluation.masks
                for bit, reason in enumerate(plugin.reasons(shape))
                if int(mask[row]) >> bit & 1
            )
            expected[texts] += bool(texts)
    fewest = min((len(texts) for texts in expected if texts), default=0)
    found = nearest(shape, tables, evaluation.masks)
    assert found.constraints == fewest
    counts: Counter[frozenset[str]] = Counter()
    for change in found.changes:
        counts[frozenset(each.reason for each in change.constraints)] += change.nodes
    most = sorted((n for texts, n in expected.items() if len(texts) == fewest and n), reverse=True)
    assert sorted(counts.values(), reverse=True) == most[:3]
    assert all(expected[texts] == n for texts, n in counts.items())
