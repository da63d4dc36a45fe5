"""The gauges of Reservations."""

from __future__ import annotations

from cluster.scheduler.controllers.reservation_exposition import reservation_lines
from tests.cluster.scheduler.controllers.test_reservation_lifecycle import plain, read


def test_phases_and_resources() -> None:
    found = plain(
        phase="Available",
        allocatable={"cpu": "500m", "memory": "2Gi", "example.com/x": "0"},
        allocated={"cpu": "125m"},
    )
    lines = [line for line in reservation_lines([read(found)]) if line[0] != "#"]
    phase, resource = "scheduler_reservation_status_phase", "scheduler_reservation_resource"
    assert lines == [
        f'{phase}{{name="r",phase="Pending"}} 0\n',
        f'{phase}{{name="r",phase="Available"}} 1\n',
        f'{phase}{{name="r",phase="Succeeded"}} 0\n',
        f'{phase}{{name="r",phase="Failed"}} 0\n',
        f'{resource}{{type="allocatable",name="r",resource="cpu",unit="core"}} 0.5\n',
        f'{resource}{{type="allocated",name="r",resource="cpu",unit="core"}} 0.125\n',
        f'{resource}{{type="utilization",name="r",resource="cpu",unit="ratio"}} 0.25\n',
        f'{resource}{{type="allocatable",name="r",resource="example.com/x",unit="raw"}} 0\n',
        f'{resource}{{type="allocated",name="r",resource="example.com/x",unit="raw"}} 0\n',
        f'{resource}{{type="allocatable",name="r",resource="memory",unit="Gi"}} 2\n',
        f'{resource}{{type="allocated",name="r",resource="memory",unit="Gi"}} 0\n',
        f'{resource}{{type="utilization",name="r",resource="memory",unit="ratio"}} 0\n',
    ]
