"""The least and the greatest number of a field: Go's types and kube-scheduler's bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.scheduler.configuration.bad_files import configured, extender, plugins
from tests.cluster.scheduler.configuration.files import Tree, errors_of, file

INT32, INT64 = 2**31 - 1, 2**63 - 1


def _arguments(plugin: str, member: str) -> Callable[[int], Tree]:
    return lambda number: configured(plugin, **{member: number})


def _of_map(plugin: str, member: str) -> Callable[[int], Tree]:
    return lambda number: configured(plugin, **{member: {"cpu": number}})


def _resource(weight: int) -> Tree:
    strategy = {"type": "MostAllocated", "resources": [{"name": "cpu", "weight": weight}]}
    return configured("NodeNUMAResource", scoringStrategy=strategy)


def _shape(member: str) -> Callable[[int], Tree]:
    def made(number: int) -> Tree:
        point = {"utilization": 0, "score": 0, member: number}
        ratio = {"type": "RequestedToCapacityRatio", "requestedToCapacityRatio": {"shape": [point]}}
        return configured("NodeResourcesFit", scoringStrategy=ratio)

    return made


def _spread(member: str) -> Callable[[int], Tree]:
    def made(number: int) -> Tree:
        one = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        constraints = [{**one, member: number}]
        return configured(
            "PodTopologySpread", defaultingType="List", defaultConstraints=constraints
        )

    return made


@pytest.mark.parametrize(
    ("made", "least", "greatest"),
    [
        (lambda n: file(parallelism=n), 1, INT32),
        (lambda n: file(percentageOfNodesToScore=n), 0, 100),
        (lambda n: file(profiles=[{"percentageOfNodesToScore": n}]), 0, 100),
        (lambda n: file(podMaxBackoffSeconds=n), 1, INT64),
        (lambda n: file(podInitialBackoffSeconds=n, podMaxBackoffSeconds=INT64), 1, INT64),
        (lambda n: file(clientConnection={"burst": n}), 0, INT32),
        (lambda n: file(clientConnection={"qps": n}), -(10**9), 10**9),
        (
            lambda n: plugins(score={"enabled": [{"name": "ImageLocality", "weight": n}]}),
            0,
            INT32,
        ),
        (lambda n: extender(weight=n), 0, INT32),
        (_resource, 0, 100),
        (_shape("utilization"), 0, 100),
        (_shape("score"), 0, 10),
        (_spread("maxSkew"), 1, INT32),
        (_spread("minDomains"), 1, INT32),
        (_arguments("InterPodAffinity", "hardPodAffinityWeight"), 0, 100),
        (_arguments("VolumeBinding", "bindTimeoutSeconds"), 0, INT64),
        (_arguments("DefaultPreemption", "minCandidateNodesPercentage"), 0, 100),
        (_arguments("DefaultPreemption", "minCandidateNodesAbsolute"), 0, INT32),
        (_arguments("LoadAwareScheduling", "nodeMetricExpirationSeconds"), 1, INT64),
        (_arguments("LoadAwareScheduling", "dominantResourceWeight"), 0, 100),
        (_arguments("LoadAwareScheduling", "estimatedSecondsAfterPodScheduled"), 0, INT64),
        (_arguments("LoadAwareScheduling", "estimatedSecondsAfterInitialized"), 0, INT64),
        (_of_map("LoadAwareScheduling", "resourceWeights"), 1, 100),
        (_of_map("LoadAwareScheduling", "usageThresholds"), 0, 100),
        (_of_map("LoadAwareScheduling", "prodUsageThresholds"), 0, 100),
        (_of_map("LoadAwareScheduling", "estimatedScalingFactors"), 1, 100),
        (_arguments("Reservation", "minCandidateNodesAbsolute"), 0, INT32),
        (_arguments("Reservation", "gcDurationSeconds"), 0, INT64),
        (_arguments("Reservation", "gcIntervalSeconds"), 0, INT64),
        (_arguments("Reservation", "resyncIntervalSeconds"), 0, INT64),
        (_arguments("Reservation", "controllerWorkers"), 1, INT32),
        (_arguments("Coscheduling", "controllerWorkers"), 1, INT32),
        (
            lambda n: configured(
                "NodeResourcesFitPlus", resources={"cpu": {"type": "MostAllocated", "weight": n}}
            ),
            1,
            100,
        ),
        (_arguments("SchedulingHint", "maxHintNodes"), 1, INT32),
    ],
)
def test_a_number_has_a_least_and_a_greatest_value(
    made: Callable[[int], Tree], least: int, greatest: int
) -> None:
    assert errors_of(made(least)) == ()
    assert errors_of(made(greatest)) == ()
    for number in (least - 1, greatest + 1):
        assert len(errors_of(made(number))) == 1, number
