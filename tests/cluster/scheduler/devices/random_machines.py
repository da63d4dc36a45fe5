"""Random machines with devices, pods on them, and requests."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from apis.keys import (
    ANNOTATION_GPU_PARTITIONS,
    LABEL_GPU_MODEL,
    LABEL_GPU_PARTITION_POLICY,
    LABEL_GPU_VENDOR,
)
from cluster.scheduler.tables.reservations.facts import AllocatePolicy
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
_NPUS = st.sampled_from(
    [
        {"gpu.shared": 1, "huawei.com/npu-core": 4, "huawei.com/npu-cpu": 4, "gpu-memory": "8Gi"},
        {"gpu.shared": 1, "huawei.com/npu-core": 2, "huawei.com/npu-cpu": 2, "gpu-memory": "4Gi"},
        {"gpu.shared": 1, "huawei.com/npu-core": 8, "huawei.com/npu-cpu": 8, "gpu-memory": "16Gi"}
        | {"rdma": 1},
    ]
)
_FEW = st.sampled_from([{"gpu": 100}, {"gpu": 200}, {"gpu": 40}, {"gpu": 100, "rdma": 1}])
_LINKED = st.sampled_from([{"gpu": 100}, {"gpu": 200}, {"nvidia.com/gpu": 4}])
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
        "partition": st.sampled_from(
            [{}, {"allocatePolicy": "Restricted"}, {"ringBusBandwidth": "200Gi"}]
        ),
    },
)
NPU = {LABEL_GPU_VENDOR: "huawei", LABEL_GPU_MODEL: "310P"}
_GIB = 1 << 30
TEMPLATES = {
    f"vir0{cores}": {
        "huawei.com/npu-core": cores,
        "huawei.com/npu-cpu": cores,
        "koordinator.sh/gpu-memory": memory * _GIB,
    }
    for cores, memory in ((4, 8), (8, 16))
}
"""Of the model of NPU."""

PARTITIONS = st.dictionaries(
    st.sampled_from([1, 2, 4]),
    st.lists(
        st.tuples(
            st.permutations(range(8)), st.sampled_from([1, 1, 3]), st.sampled_from([100, 400])
        ),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
)
"""Size -> minors, of which the first count, score and bandwidth in GiB/s."""

THEMES: dict[str, st.SearchStrategy[Any]] = {
    "any": AMOUNTS,
    "npu": _NPUS,
    "linked": _LINKED,
    "reserved": _FEW,
}
"""What a case is about -> what its pods request. Rare things meet each other only on purpose."""


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Return machines, and what a pod requests: amounts and annotations."""
    theme = draw(st.sampled_from(list(THEMES)))
    some = draw(st.lists(machines(theme), min_size=1, max_size=3))
    extra = draw(EXTRA) if theme == "any" or draw(st.integers(0, 3)) == 0 else {}
    return some, draw(THEMES[theme]), extra


@st.composite
def machines(draw: st.DrawFn, theme: str = "any") -> dict[str, Any]:
    amounts = THEMES[theme]
    plain = theme != "any"
    extras: st.SearchStrategy[dict[str, Any]] = st.just({}) if plain else EXTRA
    reservations = st.lists(
        st.fixed_dictionaries(
            {
                "amounts": amounts,
                "extra": extras,
                "policy": st.sampled_from(list(AllocatePolicy)),
                "owners": st.lists(st.tuples(amounts, extras), max_size=2),
            }
        ),
        min_size=theme == "reserved",
        max_size=2,
    )
    place = st.one_of(st.none(), st.tuples(st.integers(0, 1), st.sampled_from("AB")))
    topology = plain or draw(st.booleans())

    def device(minor: int, gpu: bool) -> dict[str, Any]:
        at = draw(place) if topology else None
        if topology and at is None and draw(st.booleans()):
            at = (0, "A")
        at = None if at is None else (at[0], f"{at[0]}{at[1]}")
        labels = {"good": "1"} if draw(st.booleans()) else {}
        health = draw(st.integers(0, 5)) > 0 or plain
        if gpu:
            memory = draw(st.sampled_from(["80Gi", "16Gi"]))
            cores = {"huawei.com/npu-core": "8", "huawei.com/npu-cpu": "8"} if npu else {}
            return a_gpu(minor, at=at, labels=labels, health=health, memory=memory, resources=cores)
        functions = [f"{minor}.{number}" for number in range(draw(st.integers(0, 2)))]
        return a_nic(minor, at=at, labels=labels, health=health, functions=functions)

    npu = theme == "npu"
    gpus = draw(st.sets(st.integers(0, 9), min_size=4 if plain else 0, max_size=8))
    if theme == "linked":
        gpus = set(range(8))
    nics = draw(st.integers(0, 4))
    own = draw(PARTITIONS) if draw(st.integers(0, 1 if theme == "linked" else 4)) == 0 else {}
    partitions = [
        (tuple(sorted(minors[:size])), score, bandwidth)
        for size, of_size in own.items()
        for minors, score, bandwidth in of_size
    ]
    policy = {LABEL_GPU_PARTITION_POLICY: "Honor"} if draw(st.booleans()) else {}
    table = {
        str(size): [
            {
                "minors": list(minors),
                "allocationScore": score,
                "ringBusBandwidth": f"{bandwidth}Gi",
            }
            for minors, score, bandwidth in partitions
            if len(minors) == size
        ]
        for size in own
    }
    return {
        "npu": npu,
        "partitions": partitions,
        "device_labels": (NPU if npu else {}) | policy,
        "device_annotations": {ANNOTATION_GPU_PARTITIONS: json.dumps(table)} if own else {},
        "reservations": draw(reservations),
        "devices": [
            *(device(minor, True) for minor in sorted(gpus)),
            *(device(minor, False) for minor in range(nics)),
        ],
        "labels": draw(
            st.sampled_from(
                [
                    {} if theme != "linked" else {LABEL_GPU_MODEL: "H20"},
                    {LABEL_GPU_MODEL: "H20"},
                    {LABEL_GPU_MODEL: "H20", LABEL_GPU_PARTITION_POLICY: "Honor"},
                ]
            )
        ),
        "silent": draw(st.integers(0, 9)),
        "held": draw(st.lists(st.tuples(amounts, extras), max_size=4)),
    }
