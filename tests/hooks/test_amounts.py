"""Conversions and pod sums: kubelet's formulas, and Kubernetes' rule for init containers."""

from __future__ import annotations

import pytest

from hooks.amounts import (
    limit_of_pod,
    milli_to_quota_us,
    milli_to_shares,
    regular_only,
    request_of_pod,
    sum_of_limits,
    sum_of_requests,
)
from hooks.subject import Amounts, ContainerKind, ContainerSpec
from linux.resources import UNLIMITED
from tests.hooks.making import a_pod

INIT, SIDECAR, REGULAR = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.REGULAR


# docs/facts/kernel.md, "Shares, weights and quotas"
@pytest.mark.parametrize(
    ("milli", "shares", "quota_us"),
    [
        (-5, 2, UNLIMITED),
        (0, 2, UNLIMITED),
        (1, 2, 1000),
        (5, 5, 1000),
        (100, 102, 10000),
        (500, 512, 50000),
        (1000, 1024, 100000),
        (1500, 1536, 150000),
        (4000, 4096, 400000),
        (16000, 16384, 1600000),
        (256000, 262144, 25600000),
        (1000000, 262144, 100000000),
    ],
)
def test_milli_cores_become_shares_and_quota(milli: int, shares: int, quota_us: int) -> None:
    assert milli_to_shares(milli) == shares
    assert milli_to_quota_us(milli) == quota_us


def _specs(*amounts: tuple[ContainerKind, int | None]) -> list[ContainerSpec]:
    return [
        ContainerSpec(name=f"c{index}", kind=kind, amounts=Amounts(cpu_limit_milli=milli))
        for index, (kind, milli) in enumerate(amounts)
    ]


def _pick(amounts: Amounts) -> int | None:
    return amounts.cpu_limit_milli


@pytest.mark.parametrize(
    ("specs", "overhead", "request_milli", "limit_milli"),
    [
        ([(REGULAR, 1000), (REGULAR, 500)], None, 1500, 1500),
        ([(REGULAR, 1000), (REGULAR, 500)], 250, 1750, 1750),
        ([(REGULAR, 1000), (REGULAR, None)], 250, 1250, UNLIMITED),
        ([(REGULAR, 1000), (REGULAR, 0)], None, 1000, UNLIMITED),
        ([(REGULAR, 1000), (REGULAR, -3)], None, 1000, UNLIMITED),
        ([(REGULAR, 1000), (INIT, 800)], None, 1000, 1000),
        ([(REGULAR, 1000), (INIT, 3000)], None, 3000, 3000),
        ([(REGULAR, 1000), (INIT, 3000)], 100, 3100, 3100),
        ([(REGULAR, 1000), (INIT, None)], None, 1000, UNLIMITED),
        ([(REGULAR, 1000), (SIDECAR, 200)], None, 1200, 1200),
        # the init container after a sidecar runs beside it, the one before does not
        ([(REGULAR, 1000), (SIDECAR, 200), (INIT, 1100)], None, 1300, 1300),
        ([(REGULAR, 1000), (INIT, 1100), (SIDECAR, 200)], None, 1200, 1200),
        ([], None, 0, UNLIMITED),
    ],
)
def test_a_pod_counts_what_runs_at_the_same_time(
    specs: list[tuple[ContainerKind, int | None]],
    overhead: int | None,
    request_milli: int,
    limit_milli: int,
) -> None:
    containers = _specs(*specs)
    assert sum_of_requests(containers, _pick, overhead) == request_milli
    assert sum_of_limits(containers, _pick, overhead) == limit_milli


@pytest.mark.parametrize(
    ("whole", "overhead", "request_milli", "limit_milli"),
    [
        (Amounts(), None, 1000, UNLIMITED),
        (Amounts(cpu_request_milli=3000), None, 3000, UNLIMITED),
        (Amounts(cpu_limit_milli=4000), None, 1000, 4000),
        (Amounts(cpu_request_milli=500, cpu_limit_milli=4000), 100, 600, 4100),
        (Amounts(cpu_request_milli=0, cpu_limit_milli=0), 100, 1100, UNLIMITED),
    ],
)
def test_a_pod_as_a_whole_counts_before_its_containers(
    whole: Amounts, overhead: int | None, request_milli: int, limit_milli: int
) -> None:
    specs = (
        ContainerSpec("a", amounts=Amounts(cpu_request_milli=1000, cpu_limit_milli=1000)),
        ContainerSpec("b"),
    )
    pod = a_pod(specs=specs, resources=whole, overhead=Amounts(cpu_request_milli=overhead))
    assert request_of_pod(pod, lambda amounts: amounts.cpu_request_milli) == request_milli
    limit = limit_of_pod(pod, _pick, lambda amounts: amounts.cpu_request_milli)
    assert limit == limit_milli


def test_upstream_sums_regular_containers_only() -> None:
    specs = regular_only(_specs((REGULAR, 1000), (SIDECAR, 200), (INIT, None)))
    assert sum_of_limits(specs, _pick, None) == 1000
