"""Random machines with devices, pods on them, and requests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from apis.keys import (
    LABEL_GPU_MODEL,
    LABEL_GPU_PARTITION_POLICY,
)
from tests.cluster.scheduler.devices.making import (
    a_gpu,
    a_nic,
)

AMOUNTS = st.sampled_from(
    [
        {"gpu": 100},
        {"gpu": 200},
        {"gpu": 40},
        {"gpu-memory": "9Gi"},
        {"gpu.shared": 2, "gpu-memory-ratio": 80},
        {"nvidia.com/gpu": 4},
        {"gpu": 100, "rdma": 1},
        {"gpu": 200, "rdma": 100},
        {"gpu": 100, "rdma": 200},
        {"rdma": 200},
        {"rdma": 1},
    ]
)
HINTS = st.fixed_dictionaries(
    {},
    optional={
        "gpu": st.fixed_dictionaries(
            {},
            optional={
                "requiredTopologyScope": st.sampled_from(["Device", "PCIe", "NUMANode", "Node"]),
                "selector": st.just({"matchLabels": {"good": "1"}}),
            },
        ),
        "rdma": st.fixed_dictionaries(
            {},
            optional={
                "allocateStrategy": st.sampled_from(["ApplyForAll", "RequestsAsCount"]),
                "requiredTopologyScope": st.sampled_from(["PCIe", "NUMANode"]),
                "vfSelector": st.just({}),
                "exclusivePolicy": st.sampled_from(["DeviceLevel", "PCIeLevel"]),
            },
        ),
    },
)
EXTRA = st.fixed_dictionaries(
    {"hint": HINTS},
    optional={
        "joint": st.sampled_from(
            [
                {"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"},
                {"deviceTypes": ["rdma", "gpu"]},
                {"deviceTypes": ["rdma", "gpu"], "requiredScope": "SamePCIe"},
            ]
        ),
        "partition": st.sampled_from([{}, {"allocatePolicy": "Restricted"}]),
    },
)


@st.composite
def machines(draw: st.DrawFn) -> dict[str, Any]:
    place = st.one_of(st.none(), st.tuples(st.integers(0, 1), st.sampled_from("AB")))
    topology = draw(st.booleans())

    def device(minor: int, gpu: bool) -> dict[str, Any]:
        at = draw(place) if topology else None
        if topology and at is None and draw(st.booleans()):
            at = (0, "A")
        at = None if at is None else (at[0], f"{at[0]}{at[1]}")
        labels = {"good": "1"} if draw(st.booleans()) else {}
        health = draw(st.integers(0, 5)) > 0
        if gpu:
            memory = draw(st.sampled_from(["80Gi", "16Gi"]))
            return a_gpu(minor, at=at, labels=labels, health=health, memory=memory)
        functions = [f"{minor}.{number}" for number in range(draw(st.integers(0, 2)))]
        return a_nic(minor, at=at, labels=labels, health=health, functions=functions)

    gpus = draw(st.sets(st.integers(0, 9), max_size=8))
    nics = draw(st.integers(0, 4))
    return {
        "devices": [
            *(device(minor, True) for minor in sorted(gpus)),
            *(device(minor, False) for minor in range(nics)),
        ],
        "labels": draw(
            st.sampled_from(
                [
                    {},
                    {LABEL_GPU_MODEL: "H20"},
                    {LABEL_GPU_MODEL: "H20", LABEL_GPU_PARTITION_POLICY: "Honor"},
                ]
            )
        ),
        "silent": draw(st.integers(0, 9)),
        "held": draw(st.lists(st.tuples(AMOUNTS, EXTRA), max_size=4)),
    }
