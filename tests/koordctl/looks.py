"""Answers of a daemon that has measured: one look, and an hour of a suppressed node."""

from __future__ import annotations

import math
from typing import Any

_GIB = 1 << 30
_DB = {
    "name": "default/db-0",
    "class": "LSR",
    "uid": "uid-default-LSR",
    "why": "annotation scheduling.koordinator.sh/resource-status",
}
_NODE_RESERVATION = {
    "name": "node reservation",
    "class": "reserved",
    "uid": "",
    "why": "annotation node.koordinator.sh/reservation of the Node",
}
_SYSTEM = {
    "name": "system class",
    "class": "SYSTEM",
    "uid": "",
    "why": "annotation node.koordinator.sh/system-qos-resource of the Node: exclusive",
}


def look() -> dict[str, Any]:
    """Return an answer to /top: a node under load, and a pod whose name would be markup."""
    return {
        "name": "worker-1",
        "at": 1_790_000_000.0,
        "measured": True,
        "node": {
            "cpu": {"capacity": 16.0, "used": 9.92, "system": 0.42},
            "memory": {"capacity": 64 * _GIB, "used": 20.0 * _GIB, "system": 1.5 * _GIB},
            "pressure": {"cpu.some.avg10": 12.4, "io.some.avg10": 0.2},
        },
        "bestEffort": {"used": 2.9, "limit": 3.0, "request": 12.0},
        "classes": [
            {"class": "LSE", "pods": 0, "cpu": 0.0, "memory": 0.0},
            {"class": "LSR", "pods": 1, "cpu": 2.0, "memory": 4.0 * _GIB},
            {"class": "LS", "pods": 1, "cpu": 5.1, "memory": 8.0 * _GIB},
            {"class": "BE", "pods": 1, "cpu": 2.9, "memory": 6.0 * _GIB},
        ],
        "pods": [
            _pod("batch", "<script>alert(1)</script>", "BE", cpu=2.9, throttled=0.0, waits=41.0),
            _pod("default", "web-0", "LS", cpu=5.1, throttled=0.25, waits=3.0),
            _pod("default", "db-0", "LSR", cpu=2.0, throttled=None, waits=0.0),
        ],
        "strategies": [
            {
                "name": "BECPUSuppress",
                "on": True,
                "why": "",
                "summary": "suppressed to 3 CPUs: 65 % x 16 - LS 7.1 - system 0.4",
                "problem": "",
                "age_s": 0.6,
            },
            {
                "name": "CPUEvict",
                "on": False,
                "why": "feature gate CPUEvict=false",
                "summary": "",
                "problem": "",
                "age_s": None,
            },
        ],
        "topology": {
            "nodes": [
                {
                    "id": 0,
                    "cpus": [
                        {"id": 0, "core": 0, "owners": [_NODE_RESERVATION]},
                        {"id": 1, "core": 1, "owners": [_DB]},
                        {"id": 2, "core": 2, "owners": []},
                        {"id": 3, "core": 3, "owners": [_DB, _SYSTEM]},
                        {"id": 8, "core": 0, "owners": [_NODE_RESERVATION]},
                        {"id": 9, "core": 1, "owners": []},
                    ],
                }
            ]
        },
    }


def look_at_an_older_daemon() -> dict[str, Any]:
    """Return an answer to /top of a daemon that names one owner of a CPU at most."""
    answer = look()
    for cpu in answer["topology"]["nodes"][0]["cpus"]:
        first = (cpu.pop("owners") or [{"name": "", "class": ""}])[0]
        cpu |= {"owner": first["name"], "class": first["class"]}
    return answer


def _pod(
    namespace: str, name: str, qos: str, *, cpu: float, throttled: float | None, waits: float
) -> dict[str, Any]:
    return {
        "namespace": namespace,
        "name": name,
        "uid": f"uid-{namespace}-{qos}",
        "class": qos,
        "priority": 5500,
        "cpu": cpu,
        "memory": cpu * _GIB,
        "throttled": throttled,
        "pressure": {"cpu.some.avg10": waits},
    }


def hour() -> dict[str, Any]:
    """Return an answer to /history: LS load that rises, and best effort that gives way."""
    times = [1_790_000_000.0 - 3600 + 10 * step for step in range(361)]
    load = [3 + 2 * math.sin(step / 40) for step in range(361)]
    be = [max(10.4 - each - 0.4, 2.0) for each in load]
    gap: list[float | None] = [None if 100 < step < 120 else each for step, each in enumerate(load)]
    return {
        "step_s": 10.0,
        "times": times,
        "series": {
            "cpu.node": [a + b for a, b in zip(load, be, strict=True)],
            "cpu.system": [0.4] * 361,
            "cpu.LS": gap,
            "cpu.BE": be,
            "memory.node": [20.0 * _GIB] * 361,
            "memory.LS": [8.0 * _GIB] * 361,
            "be.limit": be,
            "be_suppress_cpu_cores{type=cpuset}": be,
            "cpu_burst_raised_quotas": [float(step // 120) for step in range(361)],
            "psi.cpu.some.avg10": [each * 2 for each in load],
            "cpu.prod": load,
            "predicted.cpu.prod": [6.2] * 361,
            "memory.prod": [8.0 * _GIB] * 361,
            "predicted.memory.prod": [12.5 * _GIB] * 361,
        },
        "notes": [
            {
                "at": times[-10],
                "strategy": "BECPUSuppress",
                "reason": "AdjustBEByNodeCPUUsage",
                "message": "3 CPUs <because of load>",
                "obj": "",
            }
        ],
    }
