"""Settings of the whole host from a NodeSLO, by the shipped unit: written, read back, restored.

The features of the kernel's scheduler are not tried: the machine has no debugfs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.manifests import nodeslo
from tests.vm.inside.service import BE_IDLE, GATES, LS_PROTECTED, Service
from tests.waiting import wait_until

_VM: Final = Path("/proc/sys/vm")
_FACTOR: Final = 200
"""Of 10,000: a fiftieth of the memory, which is above the least value also with 1 GiB."""


def put(service: Service, **strategy: Any) -> None:
    slo = nodeslo(beClass=BE_IDLE, lsClass=LS_PROTECTED)
    if strategy:
        slo["spec"]["systemStrategy"] = strategy
    service.put(slo)


def found() -> Mapping[str, str]:
    """What the kernel has."""
    names = ("min_free_kbytes", "watermark_scale_factor")
    return {name: (_VM / name).read_text().strip() for name in names}


def wait(condition: Callable[[], object], what: str) -> None:
    wait_until(condition, what, timeout_s=120, every_s=0.1)


@pytest.fixture(scope="module")
def configured(service: Service) -> Iterator[Service]:
    service.gates(GATES | {"SystemConfig": True})
    try:
        yield service
    finally:
        service.gates(GATES)
        put(service)


def test_settings_are_written_and_removed_ones_return(configured: Service) -> None:
    before = found()
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    wanted = {
        "min_free_kbytes": str(memory_kib * _FACTOR // 10_000),
        "watermark_scale_factor": "150",
    }
    assert not set(wanted.values()) & set(before.values())
    put(configured, minFreeKbytesFactor=_FACTOR, watermarkScaleFactor=150)
    wait(lambda: found() == wanted, "both settings are in force")
    put(configured, watermarkScaleFactor=150)
    kept = {**before, "watermark_scale_factor": "150"}
    wait(lambda: found() == kept, "what was removed is as before, and the rest stays")
    put(configured, watermarkScaleFactor=5000)
    wait(
        lambda: any(
            "watermarkScaleFactor" in str(each) for each in configured.status()["policies"]
        ),
        "the value out of range is named",
    )
    assert found() == kept
    configured.gates(GATES)
    wait(lambda: found() == before, "everything is as before without the gate")
