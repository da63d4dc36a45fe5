"""Answers of a daemon in which every part that koordctl can show is there."""

from __future__ import annotations

from typing import Any, Final

LONG_AGO: Final = 1_000_000_000.0
"""2001-09-09 01:46:40 UTC: a table shows its date on any day."""

STATUS: Final[dict[str, Any]] = {
    "node": "n1",
    "version": "1.2.3",
    "uptimeSeconds": 3725.0,
    "ready": False,
    "notReady": ["no pods yet", "no NRI"],
    "unhealthy": "the reconciler hangs",
    "nri": {
        "enabled": True,
        "connected": True,
        "state": "connected",
        "problem": "",
        "socket": "/run/nri.sock",
        "runtime": {
            "name": "containerd",
            "version": "2.1.0",
            "nri": "0.8",
            "warnings": ["values of rdt are lost"],
        },
        "missed": {"CreateContainer": 2, "RunPodSandbox": 1},
        "inStateSeconds": 61.0,
        "adjustments": 12,
        "worstReplyMs": 7.5,
        "failurePolicy": {"configured": "Fail", "inForce": "creations fail"},
    },
    "hookService": {
        "enabled": True,
        "failurePolicy": {"configured": "Ignore", "inForce": "creations go on"},
    },
    "cgroup": {"kubepods": "/kubepods", "version": 2, "driver": "systemd"},
    "objects": {
        "nodeSLO": True,
        "topology": True,
        "node": True,
        "device": True,
        "pods": 4,
        "directory": "/etc/koordlet/objects.d",
        "problems": [
            {"file": "/etc/koordlet/objects.d/a.yaml", "object": "", "message": "not YAML"},
            {"file": "/b.yaml", "object": "NodeSLO n1", "message": "unknown field"},
        ],
    },
    "pods": 5,
    "containers": 9,
    "sources": [
        {"name": "kubelet", "problem": "", "fetches": 3, "ageSeconds": 4.0},
        {"name": "cri", "problem": "no socket", "fetches": 0},
    ],
    "reports": {
        "nodeMetric": {"enabled": True, "problem": "", "ageSeconds": 30.0, "reports": 2},
        "objects": [
            {"kind": "Device", "problem": "", "writes": 1},
            {"kind": "NodeResourceTopology", "problem": "", "writes": 0},
            {"kind": "Node", "problem": "refused", "writes": 3},
        ],
        "prediction": {"models": 6, "trainings": 3, "problem": ""},
    },
    "networkQos": {
        "state": "off",
        "why": "no device",
        "device": "",
        "bitsPerSecond": 0,
        "classes": [],
        "problems": ["tc is missing"],
    },
    "reconciler": {
        "values": {"applied": 10, "failed": 1},
        "passes": 21,
        "written": 22,
        "failed": 23,
        "restored": 24,
        "lastFinishedAt": LONG_AGO,
        "lastCpuMs": 1.5,
        "journalError": "ENOSPC",
        "journalLost": "kept aside",
        "troubled": [
            {
                "name": "Pod default/web",
                "resource": "cpu.shares",
                "key": "",
                "desired": "2",
                "observed": None,
                "state": "failed",
                "detail": "EINVAL",
            },
            {
                "name": "Pod default/db",
                "resource": "resctrl.schemata",
                "key": "L3",
                "desired": "ff",
                "observed": "f",
                "state": "blocked",
                "detail": "others",
            },
        ],
    },
    "measuring": {
        "running": True,
        "enabled": True,
        "rounds": 100,
        "skippedTicks": 2,
        "lastRoundMs": 12.4,
        "collectors": [
            {"name": "pods", "state": "failing", "ageSeconds": 5.0, "error": "EIO"},
            {"name": "gpu", "state": "absent", "ageSeconds": None, "error": "no driver"},
            {"name": "node", "state": "ready", "ageSeconds": 1.0, "error": ""},
        ],
    },
    "evictions": {
        "evictions": 3,
        "heldBack": "kubelet evicts",
        "last": [
            {"pod": "Pod default/old", "outcome": "kept", "at": 0.0, "gate": "BEMemoryEvict"},
            {"pod": "Pod default/hog", "outcome": "evicted", "at": LONG_AGO, "gate": "CPUEvict"},
        ],
        "short": [{"gate": "BEMemoryEvict", "why": "no pod is left"}],
    },
    "memoryBytes": 61_600_000,
    "policies": [
        {"name": "BatchResource", "state": "on", "why": "", "summary": "3 pods"},
        {"name": "CoreSched", "state": "off", "why": "gate", "summary": "unused"},
    ],
    "strategies": [
        {
            "name": "CPUEvict",
            "state": "on",
            "stepAgeSeconds": 1.0,
            "why": "",
            "problem": "",
            "summary": "",
        },
        {
            "name": "CPUBurst",
            "state": "on",
            "stepAgeSeconds": 2.0,
            "why": "",
            "problem": "late",
            "summary": "3 pods",
        },
        {
            "name": "CPUSuppress",
            "state": "off",
            "stepAgeSeconds": None,
            "why": "gate",
            "problem": "late",
            "summary": "4 CPUs",
        },
    ],
    "unprotected": [
        {"pod": "default/web", "container": "main", "id": "0123456789abcdef", "lacks": []},
        {"pod": "default/db", "container": "main", "id": "", "lacks": ["env", "cpuset"]},
    ],
}

EXPLAINED: Final[dict[str, Any]] = {
    "subjects": [
        {
            "level": "pod",
            "name": "Pod default/web",
            "pod": {"qos": "", "kubeQos": "Burstable", "priority": None, "uid": "u-1"},
            "cgroup": "kubepods/podu-1",
            "faults": [{"policy": "CPUBurst", "message": "no limit"}],
            "values": [
                {
                    "resource": "memory.high",
                    "key": "",
                    "requested": None,
                    "value": "1073741824",
                    "observed": "1073741824",
                    "state": "applied",
                    "why": "MemoryQOS",
                    "winner": {"source": "NodeSLO", "degraded": ""},
                    "modifiers": [
                        {
                            "policy": "A",
                            "op": "at most",
                            "value": "5",
                            "reason": "b",
                            "source": "c",
                        }
                    ],
                    "losers": [
                        {"policy": "D", "op": "set", "value": "6", "reason": "e", "source": "f"}
                    ],
                    "detail": "",
                    "original": "max",
                    "writes": [
                        {"at": LONG_AGO, "error": "", "old": str(old), "new": str(old + 1)}
                        for old in range(3)
                    ]
                    + [{"at": LONG_AGO, "error": "EBUSY", "old": None, "new": "9"}],
                },
                {
                    "resource": "resctrl.schemata",
                    "key": "L3",
                    "requested": "f",
                    "value": "ff",
                    "observed": None,
                    "state": "unsupported",
                    "why": "Resctrl",
                    "winner": None,
                    "modifiers": [],
                    "losers": [],
                },
            ],
        },
        {
            "level": "container",
            "name": "Container default/web/main",
            "pod": {"qos": "LS", "kubeQos": "Burstable", "priority": 9000, "uid": "u-1"},
            "id": "c1c1",
            "cgroup": "",
            "faults": [],
            "values": [],
        },
    ],
    "restoring": [
        {
            "resource": "cpu.shares",
            "key": "",
            "observed": "2",
            "original": "1024",
            "state": "failed",
            "detail": "EBUSY",
        }
    ],
}

PLANNED: Final[dict[str, Any]] = {
    "problems": [
        {"file": "", "object": "NodeSLO n1", "message": "there is none"},
        {"file": "bad.yaml", "object": "Pod", "message": "no name"},
    ],
    "policies": [
        {"policy": "CPUBurst", "before": "off", "after": "on", "why": "NodeSLO"},
        {"policy": "Mine", "before": "", "after": "off", "why": "gate"},
    ],
    "writes": [
        {"name": "Pod a/b", "path": "/p", "resource": "cpu.shares", "old": "2", "new": "3",
         "why": "batch-cpu"},
        {"name": "", "path": "/q", "resource": "cpu.idle", "old": None, "new": "1",
         "why": "BE"},
    ],
    "pods": 1,
}  # fmt: skip
