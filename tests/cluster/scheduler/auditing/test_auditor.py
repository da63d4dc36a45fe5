"""What the workload auditor counts, event by event: docs/facts/scheduler.md, "Workload auditor"."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import pytest

from cluster.exposition import Registry
from cluster.scheduler.auditing import metrics as auditing
from cluster.scheduler.auditing.auditor import WorkloadAuditor
from cluster.scheduler.auditing.events import EVENTS, OUTCOMES, SCHEDULE_FAILURE
from cluster.scheduler.auditing.metrics import OVERFLOW, AuditorMetrics
from cluster.scheduler.configuration.auditing import AuditorSettings, MetricLabel
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from tests.beds.packages import CHECKOUT
from tests.cluster.scheduler.making import make_pod

_LINE = re.compile(r"scheduler_workload_auditor_(\w+?)(_count|_sum|)\{(.*)\} (\S+)")


class Bed:
    """An auditor, its clock and its metrics."""

    def __init__(self, *labels: MetricLabel) -> None:
        self.now = 1000.0
        self.registry = Registry()
        self.metrics = AuditorMetrics(self.registry, labels)
        self.auditor = WorkloadAuditor(
            self.metrics, AuditorSettings(labels), clock=lambda: self.now
        )

    def pod(
        self, name: str, labels: Mapping[str, str], priority: int | None = None
    ) -> PendingPod[PodShape]:
        shape = Shapes().of(make_pod(name, labels=dict(labels), priority=priority))
        return PendingPod(f"default/{name}", name, shape.priority, shape, 0.0)

    def add(self, name: str, *, gang: bool = False, **labels: str) -> None:
        self.auditor.add(name, name, self.pod(name, labels), gang=gang)

    def play(self, steps: Sequence[str]) -> None:
        """Do what words say: `+5` lets 5 s pass."""
        auditor = self.auditor
        for step in steps:
            match step.split(":"):
                case [word] if word[0] == "+":
                    self.now += float(word)
                case ["gated" | "free" as word]:
                    auditor.gate("p", word == "gated")
                case ["complete"]:
                    auditor.complete("p")
                case ["try"]:
                    auditor.attempt("p")
                case ["preempt", victims]:
                    auditor.preempted("p", victims.split(","))
                case ["preempt"]:
                    auditor.preempted("p", ())
                case ["search", event]:
                    auditor.searched("p", event)
                case ["fail"]:
                    auditor.result("p", SCHEDULE_FAILURE)
                case ["gone", victim]:
                    auditor.gone(victim)
                case ["stays", victim]:
                    auditor.stays(victim)
                case ["scheduled"]:
                    auditor.scheduled("p")
                case ["deleted"]:
                    auditor.delete("p")
                case other:
                    raise AssertionError(other)

    def shown(self) -> dict[str, float]:
        """Return sums of histograms with `#` and their counts, and counters, that are not 0.

        Without priority, and without what methods took.
        """
        found = {}
        for line in "".join(self.registry.slices()).splitlines():
            match = _LINE.fullmatch(line)
            if match is None or match[1].endswith("_bucket") or "method=" in match[3]:
                continue
            values = re.findall(r'(\w+)="([^"]*)"', match[3])
            more = [value for label, value in values if label != "priority"]
            name = ":".join((match[1] + {"_count": "#"}.get(match[2], ""), *more))
            if float(match[4]):
                found[name] = float(match[4])
        return found

    def only(self, *names: str) -> dict[str, float]:
        """Return what is shown of some metrics, by the begin of their names."""
        return {name: value for name, value in self.shown().items() if name.startswith(names)}


_PREEMPTION = (
    "repeated",
    "preemption",
    "victim",
)


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        pytest.param(("try", "scheduled"), {}, id="no preemption"),
        pytest.param(
            ("try", "preempt:a,b", "+5", "gone:a", "+2", "gone:b", "+3", "try", "scheduled"),
            {
                "preemption_to_victim_deleted_seconds#": 1,
                "preemption_to_victim_deleted_seconds": 7,
                "preemption_victim_deleting_retries#": 1,
                "victim_reschedule_duration_seconds#": 1,
                "victim_reschedule_duration_seconds": 3,
            },
            id="as it should be",
        ),
        pytest.param(
            ("try", "preempt", "+4", "try", "scheduled"),
            {
                "preemption_to_victim_deleted_seconds#": 1,
                "preemption_victim_deleting_retries#": 1,
                "victim_reschedule_duration_seconds#": 1,
                "victim_reschedule_duration_seconds": 4,
            },
            id="victims that give their nodes back at once",
        ),
        pytest.param(
            (
                *("try", "preempt:a", "try", "search:preemptVictimDeleting", "fail", "+1"),
                *("try", "search:preemptVictimDeleting", "fail", "gone:a", "try", "scheduled"),
            ),
            {
                "preemption_to_victim_deleted_seconds#": 1,
                "preemption_to_victim_deleted_seconds": 1,
                "preemption_victim_deleting_retries#": 1,
                "preemption_victim_deleting_retries": 2,
                "victim_reschedule_duration_seconds#": 1,
            },
            id="tried while its victim ends",
        ),
        pytest.param(
            ("try", "preempt:a", "+6", "try", "scheduled", "gone:a"),
            {
                "preemption_cycle_interrupted_seconds#": 1,
                "preemption_cycle_interrupted_seconds": 6,
                "preemption_victim_deleting_retries#": 1,
            },
            id="scheduled elsewhere",
        ),
        pytest.param(
            ("try", "preempt:a", "+6", "deleted", "gone:a"),
            {
                "preemption_cycle_interrupted_seconds#": 1,
                "preemption_cycle_interrupted_seconds": 6,
                "preemption_victim_deleting_retries#": 1,
            },
            id="deleted while its victim ends",
        ),
        pytest.param(
            ("try", "preempt:a", "gone:a", "+2", "try", "fail", "+1", "try", "fail"),
            {
                "preemption_to_victim_deleted_seconds#": 1,
                "preemption_victim_deleting_retries#": 1,
                "preemption_invalidations_total": 1,
                "victim_reschedule_duration_seconds#": 1,
                "victim_reschedule_duration_seconds": 2,
            },
            id="victims for nothing, counted once",
        ),
        pytest.param(
            (
                *("try", "preempt:a", "+2", "try", "search:preemptFailure", "fail"),
                *("gone:a", "+3", "try", "fail"),
            ),
            {
                "preemption_cycle_interrupted_seconds#": 1,
                "preemption_cycle_interrupted_seconds": 2,
                "preemption_victim_deleting_retries#": 1,
                "preemption_invalidations_total": 1,
                "victim_reschedule_duration_seconds#": 1,
                "victim_reschedule_duration_seconds": 3,
            },
            id="the node is lost while its victim ends",
        ),
        pytest.param(
            ("try", "preempt:a", "+2", "try", "preempt:b", "gone:a", "+1", "gone:b"),
            {
                "preemption_cycle_interrupted_seconds#": 1,
                "preemption_cycle_interrupted_seconds": 2,
                "preemption_to_victim_deleted_seconds#": 1,
                "preemption_to_victim_deleted_seconds": 1,
                "preemption_victim_deleting_retries#": 2,
                "preemption_invalidations_total": 1,
                "repeated_preemptions_total": 1,
            },
            id="preempts again, and waits for the new victims alone",
        ),
        pytest.param(
            (
                *("try", "preempt:a", "try", "search:preemptVictimDeleting", "+2", "try"),
                *("preempt:b", "+1", "gone:b"),
            ),
            {
                "preemption_cycle_interrupted_seconds#": 1,
                "preemption_cycle_interrupted_seconds": 2,
                "preemption_to_victim_deleted_seconds#": 1,
                "preemption_to_victim_deleted_seconds": 1,
                "preemption_victim_deleting_retries#": 2,
                "preemption_victim_deleting_retries": 1,
                "preemption_invalidations_total": 1,
                "repeated_preemptions_total": 1,
            },
            id="attempts count for the preemption that they wait for",
        ),
        pytest.param(
            ("try", "preempt:a,b", "stays:a", "gone:b", "+9", "try", "preempt:c"),
            {
                "preemption_cycle_interrupted_seconds#": 1,
                "preemption_cycle_interrupted_seconds": 9,
                "preemption_victim_deleting_retries#": 1,
                "preemption_invalidations_total": 1,
                "repeated_preemptions_total": 1,
            },
            id="a victim is not evicted",
        ),
        pytest.param(
            ("try", "preempt:a", "gone:a", "gated", "+60", "free", "try", "scheduled"),
            {
                "preemption_to_victim_deleted_seconds#": 1,
                "preemption_victim_deleting_retries#": 1,
            },
            id="gates hold it once its victim is gone",
        ),
    ],
)
def test_preemptions(steps: Sequence[str], shown: dict[str, float]) -> None:
    bed = Bed()
    bed.add("p")
    bed.play(steps)
    assert bed.only(*_PREEMPTION) == shown


@pytest.mark.parametrize(
    ("steps", "count", "seconds"),
    [
        pytest.param(("+9", "try", "fail"), 0, 0, id="the first event begins"),
        pytest.param(("try", "fail", "+9", "try", "fail", "+1", "try", "scheduled"), 2, 10, id="2"),
        pytest.param(("try", "fail", "+9", "gated", "+9", "free", "+2", "try", "fail"), 1, 2,
                     id="scheduling gates"),
        pytest.param(("+3", "complete", "+2", "try", "fail", "+1", "complete", "+4", "scheduled"),
                     2, 6, id="a gang becomes complete"),
        pytest.param(("try", "preempt:a", "+4", "gone:a", "+5", "try", "scheduled"), 1, 9,
                     id="the end of victims is no event"),
    ],
)  # fmt: skip
def test_intervals_between_events(steps: Sequence[str], count: int, seconds: float) -> None:
    bed = Bed()
    bed.add("p")
    bed.play(steps)
    shown = bed.shown()
    assert shown.get("scheduling_event_interval_seconds#", 0) == count
    assert shown.get("scheduling_event_interval_seconds", 0) == seconds


def test_events_are_counted_by_outcome_when_the_workload_ends() -> None:
    bed = Bed()
    bed.add("p")
    bed.play(("try", "fail", "fail", "try", "search:preemptFailure", "fail"))
    assert bed.only("scheduling_events") == {}
    bed.play(("try", "fail", "try", "scheduled"))
    name = "scheduling_events_before_outcome"
    counted = {"create": 1, "scheduleFailure": 2, "preemptFailure": 1, "scheduled": 1}
    assert bed.only(name) == {
        **{f"{name}#:{event}:scheduled": 1 for event in counted},
        **{f"{name}:{event}:scheduled": count for event, count in counted.items()},
    }
    for gang, end, outcome in (
        (False, "deleted", "deleted"),
        (True, "scheduled", "gangScheduled"),
        (True, "deleted", "gangDeleted"),
    ):
        bed.add("p", gang=gang)
        bed.play((end, end))
        assert bed.only(f"{name}:create:{outcome}") == {f"{name}:create:{outcome}": 1}
    assert len(bed.auditor) == 0


def test_what_takes_too_long_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    bed = Bed()
    bed.add("p")
    caplog.set_level(logging.INFO)
    bed.play(("try", "preempt:a", "+30", "gone:a", "+10", "try", "scheduled"))
    assert caplog.messages == []
    bed.add("p")
    bed.play(("try", "preempt:a", *("try", "search:preemptVictimDeleting") * 4, "+31", "gone:a"))
    bed.play(("+300", "try", "fail"))
    assert [message.partition("ALERT: ")[2] for message in caplog.messages] == [
        "pod p was tried 4 times beside victims (victimAllDeleted)",
        "pod p waited for its victims for 31.0 s (victimAllDeleted)",
        "pod p had victims evicted without being scheduled (scheduleFailure)",
        "pod p had no result for 300.0 s after its victims (scheduleFailure)",
        "pod p had no scheduling event for 331.0 s (scheduleFailure)",
    ]


def test_unknown_pods_are_ignored() -> None:
    bed = Bed()
    bed.play(("gated", "complete", "try", "preempt:a", "search:preemptFailure", "fail"))
    bed.play(("gone:a", "stays:a", "scheduled", "deleted"))
    assert bed.shown() == {}
    assert bed.auditor.victims == 0


def test_labels_are_the_priority_class_and_those_of_the_flag() -> None:
    bed = Bed(MetricLabel("team", "example.com/team"), MetricLabel("tier", "tier"))
    for name, priority, labels in (
        ("a", 9500, {"example.com/team": 'x"\\\n', "tier": "1"}),
        ("b", 5000, {"koordinator.sh/priority-class": "koord-mid", "tier": "y" * 5000}),
        ("c", 9500, {"koordinator.sh/priority-class": "nonsense"}),
    ):
        bed.auditor.add(name, name, bed.pod(name, labels, priority))
        bed.auditor.delete(name)
    text = "".join(bed.registry.slices())
    found = set(re.findall(r"before_outcome_sum\{(.*),event_type=\"create\"", text))
    assert found == {
        r'priority="koord-prod",team="x\"\\\n",tier="1"',
        f'priority="koord-mid",team="",tier="{"y" * 63}"',
        'priority="",team="",tier=""',
    }


def test_ever_new_values_of_a_label_take_the_place_of_those_that_nobody_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auditing, "MOST_SETS", 3)
    bed = Bed(MetricLabel("team", "team"))
    sizes = []
    for number in range(12):
        bed.add("p", team=f"t{number}")
        bed.play(("try", "preempt:a", "try", "fail", "preempt:b", "gone:b", "try", "scheduled"))
        sizes.append(sum(len(piece) for piece in bed.registry.slices()))
    assert len(bed.metrics) == 3
    # Beside what methods took, and a longer name.
    assert sizes[11] < sizes[3] * 1.1
    text = "".join(bed.registry.slices())
    assert set(re.findall(r'team="(\w+)"', text)) == {"t9", "t10", "t11"}


def test_the_values_that_were_not_used_for_the_longest_time_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auditing, "MOST_SETS", 2)
    bed = Bed(MetricLabel("team", "team"))
    for team in ("a", "b", "a", "c"):
        bed.add("p", team=team)
        bed.play(("scheduled",))
    text = "".join(bed.registry.slices())
    assert set(re.findall(r'team="(\w+)"', text)) == {"a", "c"}


def test_workloads_with_ever_new_values_of_a_label_share_one_series(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auditing, "MOST_SETS", 3)
    bed = Bed(MetricLabel("team", "team"))
    for number in range(9):
        bed.add(f"p{number}", team=f"t{number}")
    for number in range(9):
        bed.auditor.scheduled(f"p{number}")
    assert len(bed.metrics) == 3
    name = "scheduling_events_before_outcome#"
    counts = bed.only(name)
    assert counts[f"{name}:{OVERFLOW}:create:scheduled"] == 6
    assert counts[f"{name}:t0:create:scheduled"] == 1
    # There is room again.
    bed.add("q", team="new")
    bed.auditor.delete("q")
    assert bed.only(f"{name}:new:create") == {f"{name}:new:create:deleted": 1}


def test_names_types_labels_and_buckets_are_those_of_the_table() -> None:
    bed = Bed(MetricLabel("team", "team"))
    for gang in (False, True):
        bed.add("p", gang=gang, team="x")
        bed.play(("gated", "free", "complete", "try", "preempt:a", "try", "fail", "gone:a"))
        bed.play(("try", "fail", "try", "preempt:a", "gone:a", "try", "scheduled"))
        bed.add("p", gang=gang)
        bed.play(("deleted",))
    text = "".join(bed.registry.slices())
    shown = {}
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE):
        series = f"^{name}(?:_bucket)?{{(.*)}} "
        labels = {
            tuple(label for label in re.findall(r'(\w+)="', match) if label != "le")
            for match in re.findall(series, text, re.MULTILINE)
        }
        bounds = re.findall(f'^{name}_bucket{{.*le="([0-9.e+-]+)"}}', text, re.MULTILINE)
        ordered = list(dict.fromkeys(bounds))
        ends = f"{ordered[0]} to {ordered[-1]}, {len(ordered)}" if ordered else ""
        (only,) = labels
        shown[name] = (kind, ", ".join(only).replace("team", "LABELS"), ends)
    page = (CHECKOUT / "docs" / "facts" / "scheduler.md").read_text()
    section = page.partition("\n## Workload auditor\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*?) ?\| (.*?) ?\|", section, re.MULTILINE)
    expected = {f"scheduler_workload_auditor_{name}": tuple(row) for name, *row in rows}
    assert len(expected) == 9
    assert shown == expected
    assert all(f"`{event}`" in section for event in EVENTS)
    assert all(f"`{outcome}`" in section for outcome in OUTCOMES)
    methods = set(re.findall(r'method="(\w+)"', text))
    assert all(f"`{method}`" in section for method in methods)


def test_a_name_from_an_annotation_is_one_short_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bed = Bed()
    name = "default/g\n" + "x" * 100_000
    with caplog.at_level(logging.INFO):
        bed.auditor.add("g", name, bed.pod("p", {}), gang=True)
        bed.auditor.preempted("g", ["victim"])
        bed.auditor.preempted("g", ["other"])
    assert any("preempts for time 2" in message for message in caplog.messages)
    assert all(len(each) < 400 and "\n" not in each for each in caplog.messages)
