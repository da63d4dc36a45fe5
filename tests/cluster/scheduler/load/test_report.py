"""What of a NodeMetric counts, as vectors."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from apis.decode import json_decoder
from apis.nodemetric import NodeMetric
from cluster.scheduler.tables.amounts import Amounts, Vector
from cluster.scheduler.tables.load_report import LONGEST, Report, read_report

_decode = json_decoder(NodeMetric)


def _vector(amounts: Amounts) -> Vector:
    return np.array([amounts.get(name, 0) for name in ("cpu", "memory")], dtype=np.int64)


def _read(status: dict[str, Any], **spec: Any) -> Report:
    made = {"metadata": {"name": "n"}, "spec": spec, "status": status}
    return read_report(_decode(msgspec.json.encode(made)), _vector)


def _usage(cpu: str) -> dict[str, Any]:
    return {"resources": {"cpu": cpu, "memory": "1"}}


def test_a_whole_report() -> None:
    report = _read(
        {
            "updateTime": "1970-01-01T00:01:40Z",
            "nodeMetric": {
                "nodeUsage": _usage("4"),
                "systemUsage": _usage("1"),
                "aggregatedNodeUsages": [
                    {"duration": "5m", "usage": {"p95": _usage("5"), "p50": _usage("3")}},
                    {"duration": "1h", "usage": {"p50": {}, "p95": _usage("7")}},
                    {"duration": "10m", "usage": {"p95": _usage("6")}},
                    {"duration": "soon", "usage": {"avg": _usage("2"), "p95": _usage("1")}},
                ],
            },
            "podsMetric": [
                {
                    "namespace": "ns",
                    "name": "a",
                    "priority": "koord-prod",
                    "podUsage": _usage("2"),
                },
                {
                    "namespace": "ns",
                    "name": "b",
                    "priority": "koord-batch",
                    "podUsage": _usage("-1"),
                },
            ],
        },
        metricCollectPolicy={"reportIntervalSeconds": 30},
    )
    assert (report.updated, report.interval) == (100.0, 30.0)
    assert report.usage is not None and report.usage.tolist() == [4000, 1]
    assert report.system.tolist() == [1000, 1]
    assert {window: used.tolist() for window, used in report.windows.items()} == {
        ("p95", 300): [5000, 1],
        ("p95", 600): [6000, 1],
        ("p95", 3600): [7000, 1],
        ("p50", 300): [3000, 1],
        # A duration that cannot be read stands for the longest.
        ("avg", 0): [2000, 1],
        ("p95", LONGEST): [7000, 1],
        ("p50", LONGEST): [3000, 1],
    }
    assert {key: used.tolist() for key, used in report.pods.items()} == {
        "ns/a": [2000, 1],
        "ns/b": [0, 1],
    }
    assert report.prod_pods == {"ns/a"}


def test_a_report_without_usage() -> None:
    report = _read({"updateTime": "1970-01-01T00:01:40Z"})
    assert (report.usage, report.windows, report.pods) == (None, {}, {})
    assert (report.interval, report.system.tolist()) == (60.0, [0, 0])
    assert report.prod_pods == frozenset()
