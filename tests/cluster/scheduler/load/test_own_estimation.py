"""Annotations with which a pod says how its own load is estimated."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cluster.scheduler.tables.load import LoadSettings, estimation_problems
from tests.cluster.scheduler.load.making import NOW, LoadNode, make_metric
from tests.cluster.scheduler.reservations.bed import ReservationBed

_PREFIX = "scheduling.koordinator.sh/load-estimated"
_FACTORS = f"{_PREFIX}-scaling-factors"
_AFTER_SCHEDULED = f"{_PREFIX}-seconds-after-pod-scheduled"
_AFTER_INITIALIZED = f"{_PREFIX}-seconds-after-initialized"
_FOUR: dict[str, Any] = {"requests": {"cpu": "4"}}


def _estimate(factors: str, settings: LoadSettings, **spec: Any) -> list[int]:
    node = LoadNode(settings)
    shape = node.shape(annotations={_FACTORS: factors}, **spec)
    return [int(amount) for amount in node.load.estimate(shape)]


@pytest.mark.parametrize(
    ("factors", "spec", "cpu", "memory"),
    [
        ('{"cpu":50}', {"requests": {"cpu": "4", "memory": "1000"}}, 2000, 700),
        ('{"cpu":0,"memory":100}', {"requests": {"cpu": "4", "memory": "1000"}}, 0, 1000),
        ('{"cpu":150}', _FOUR, 6000, 200 * 1024**2),
        ('{"cpu":150}', {"limits": {"cpu": "5"}, **_FOUR}, 5000, 200 * 1024**2),
        ('{"cpu":50,"test.io/other":50}', _FOUR, 2000, 200 * 1024**2),
        ('{"cpu":2147483647}', {"requests": {"cpu": "4000000000000"}}, 2**52, 200 * 1024**2),
        ("{}", _FOUR, 3400, 200 * 1024**2),
        ("null", _FOUR, 3400, 200 * 1024**2),
        ('{"cpu":-1}', _FOUR, 3400, 200 * 1024**2),
        ('{"cpu":50,"memory":"70"}', _FOUR, 3400, 200 * 1024**2),
    ],
)
def test_a_pods_own_factors_replace_those_of_the_profile(
    factors: str, spec: dict[str, Any], cpu: int, memory: int
) -> None:
    assert _estimate(factors, LoadSettings(customized=True), **spec) == [cpu, memory]


def test_annotations_are_not_read_in_a_profile_that_does_not_allow_them() -> None:
    assert _estimate('{"cpu":50}', LoadSettings(), **_FOUR)[0] == 3400
    node = LoadNode(LoadSettings())
    node.place("p", start=NOW - 300, annotations={_AFTER_SCHEDULED: "600"}, **_FOUR)
    node.load.set_report(node.row, make_metric("10", pods={"p": ("1", "koord-prod")}))
    assert node.load.delta[node.row, 0] == 0


def test_batch_pods_name_cpu_for_their_batch_cpu() -> None:
    requests = {"kubernetes.io/batch-cpu": "1000"}
    found = _estimate('{"cpu":40}', LoadSettings(customized=True), priority=5500, requests=requests)
    assert found[0] == 400


@pytest.mark.parametrize(
    ("annotations", "profile", "started", "initialized", "counts"),
    [
        pytest.param({}, {}, 600, 0, False, id="no window"),
        pytest.param({_AFTER_SCHEDULED: "601"}, {}, 600, 0, True, id="within its own"),
        pytest.param({_AFTER_SCHEDULED: "600"}, {}, 600, 0, False, id="at its end"),
        pytest.param(
            {_AFTER_SCHEDULED: "0"}, {"seconds_after_scheduled": 900}, 600, 0, False, id="none"
        ),
        pytest.param(
            {_AFTER_SCHEDULED: "-5"}, {"seconds_after_scheduled": 900}, 600, 0, True, id="negative"
        ),
        pytest.param(
            {_AFTER_SCHEDULED: "5m"}, {"seconds_after_scheduled": 900}, 600, 0, True, id="no number"
        ),
        pytest.param(
            {_AFTER_SCHEDULED: "900"}, {"seconds_after_initialized": 9}, 600, 0, True, id="not yet"
        ),
        pytest.param(
            {_AFTER_SCHEDULED: "900", _AFTER_INITIALIZED: "200"}, {}, 600, 300, False, id="first"
        ),
        pytest.param({_AFTER_INITIALIZED: "+301"}, {}, 600, 300, True, id="after its containers"),
        pytest.param(
            {_AFTER_INITIALIZED: "0"}, {"seconds_after_scheduled": 601}, 600, 300, True, id="other"
        ),
    ],
)
def test_how_long_a_pod_is_estimated_although_the_report_shows_it(
    annotations: dict[str, str],
    profile: dict[str, float],
    started: float,
    initialized: float,
    counts: bool,
) -> None:
    node = LoadNode(LoadSettings(customized=True, **profile))  # type: ignore[arg-type]
    node.place(
        "p",
        start=NOW - started,
        initialized=NOW - initialized if initialized else 0.0,
        annotations=annotations,
        **_FOUR,
    )
    node.load.set_report(node.row, make_metric("10", pods={"p": ("1", "koord-prod")}))
    assert node.load.delta[node.row, 0] == (2400 if counts else 0)


def test_pods_with_other_factors_share_no_verdict() -> None:
    node = LoadNode(LoadSettings(customized=True))
    of = [
        node.shape(annotations={_FACTORS: factors}, **_FOUR) for factors in ('{"cpu":1}', "{}", "")
    ]
    reduced = {node.tables.reduction.of(shape) for shape in of}
    assert len(reduced) == 3


def test_what_cannot_be_read_is_named_with_the_pod_and_the_rest_is_in_force() -> None:
    node = LoadNode(LoadSettings(customized=True))
    shape = node.shape(annotations={_FACTORS: '{"cpu":-3}', _AFTER_SCHEDULED: "5m"}, **_FOUR)
    factors, seconds = map(str, estimation_problems(shape, obj="Pod default/p"))
    assert factors.startswith(f"Pod default/p: metadata.annotations[\"{_FACTORS}\"].cpu = '-3': ")
    assert seconds == (
        f"Pod default/p: metadata.annotations[\"{_AFTER_SCHEDULED}\"] = '5m': expected a whole"
        " number of seconds, 0 or more, of at most 18 digits"
    )
    assert estimation_problems(node.shape(), obj="Pod default/p") == ()


_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    filter: {{enabled: [{{name: LoadAwareScheduling}}]}}
  pluginConfig:
  - name: LoadAwareScheduling
    args: {{allowCustomizeEstimation: {allowed}}}
"""


@pytest.mark.parametrize("allowed", [True, False])
def test_the_log_names_a_bad_annotation_once_and_the_pod_is_placed(
    allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    text = _CONFIGURATION.format(allowed=str(allowed).lower())
    bed = ReservationBed(text)
    caplog.set_level(logging.WARNING)
    bad = {"annotations": {_AFTER_SCHEDULED: "5m"}}
    bed.pod("p", "1", metadata=bad)
    assert bed.placed() == {"p": ""}
    bed.pod("p", "1", metadata=bad, node="n")
    held = bed.core.source.complaints.held
    assert list(held) == (["Pod default/p"] if allowed else [])
    named = [r.getMessage() for r in caplog.records if "5m" in r.getMessage()]
    assert named == [problem for problems in held.values() for problem in problems]
    bed.pod("p", "1", metadata=bad, node="n", kind="DELETED")
    assert not held


def test_the_log_names_the_reservation_whose_annotations_are_bad(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bed = ReservationBed(_CONFIGURATION.format(allowed="true"))
    caplog.set_level(logging.WARNING)
    bad = {_AFTER_SCHEDULED: "5m", "scheduling.koordinator.sh/resource-status": "{"}
    bed.reservation("r", "1", metadata={"annotations": bad})
    named = [r.getMessage().partition(" = ")[0] for r in caplog.records]
    assert sorted(named) == [f'Reservation r: metadata.annotations["{key}"]' for key in sorted(bad)]
    bed.reservation("r", "1", kind="DELETED")
    assert not bed.core.source.complaints.held
