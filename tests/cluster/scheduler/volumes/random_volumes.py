"""Random storage for comparisons: JSON of classes, claims, volumes, CSI objects, and pods."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.cluster.scheduler.random_cluster import ZONES
from tests.cluster.scheduler.volumes.making import HOST, ZONE, claim_json, on, volume_json

Tree = dict[str, Any]

DRIVERS = ("csi.a", "csi.b")
CLASSES: tuple[Tree, ...] = (
    {"name": "immediate", "provisioner": "csi.a", "mode": "Immediate"},
    {"name": "zones", "provisioner": "csi.a", "mode": "WaitForFirstConsumer"},
    {"name": "reported", "provisioner": "csi.b", "mode": "WaitForFirstConsumer"},
    {
        "name": "local",
        "provisioner": "kubernetes.io/no-provisioner",
        "mode": "WaitForFirstConsumer",
    },
)
_MODES = ("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod")


def classes(random: Random) -> list[Tree]:
    made = []
    for each in CLASSES:
        body: Tree = {
            "metadata": {"name": each["name"]},
            "provisioner": each["provisioner"],
            "volumeBindingMode": each["mode"],
        }
        if each["name"] == "zones":
            values = random.sample(ZONES, 2)
            body["allowedTopologies"] = [
                {"matchLabelExpressions": [{"key": ZONE, "values": values}]}
            ]
        made.append(body)
    return made


def csi_nodes(random: Random, names: list[str]) -> list[Tree]:
    return [
        {
            "metadata": {"name": name},
            "spec": {
                "drivers": [
                    {
                        "name": driver,
                        "nodeID": name,
                        "topologyKeys": [HOST],
                        "allocatable": {"count": random.randint(1, 3)},
                    }
                    for driver in DRIVERS
                    if random.random() < 0.8
                ]
            },
        }
        for name in names
        if random.random() < 0.8
    ]


def csi_drivers() -> list[Tree]:
    return [
        {"metadata": {"name": driver}, "spec": {"storageCapacity": driver == "csi.b"}}
        for driver in DRIVERS
    ]


def capacities(random: Random, names: list[str]) -> list[Tree]:
    """Return what csi.b has left: for some nodes, and for one zone."""
    reports = [
        ({"matchLabels": {HOST: name}}, f"{random.randint(1, 12)}Gi")
        for name in random.sample(names, len(names) // 2)
    ]
    reports.append(({"matchLabels": {ZONE: random.choice(ZONES)}}, "6Gi"))
    return [
        {
            "metadata": {"name": f"left-{number}"},
            "storageClassName": "reported",
            "nodeTopology": selector,
            "capacity": left,
        }
        for number, (selector, left) in enumerate(reports)
    ]


def _place(random: Random, names: list[str]) -> list[Tree] | None:
    kind = random.random()
    if kind < 0.4:
        return on(HOST, *random.sample(names, random.choice((1, 1, 4))))
    if kind < 0.7:
        return on(ZONE, random.choice(ZONES))
    if kind < 0.8:
        zone = {"key": ZONE, "operator": "NotIn", "values": [random.choice(ZONES)]}
        rank = {"key": "rank", "operator": "Gt", "values": ["4"]}
        return [{"matchExpressions": [zone, rank]}]
    return None


def bound(random: Random, count: int, names: list[str]) -> list[tuple[Tree, Tree | None]]:
    """Return claims that have a volume, each with it; a volume may be gone."""
    pairs: list[tuple[Tree, Tree | None]] = []
    for number in range(count):
        name = f"bound-{number}"
        modes = (random.choice(_MODES),)
        claim = claim_json(name, class_name="immediate", modes=modes, volume=f"pv-{name}")
        labels = {}
        if random.random() < 0.3:
            labels[ZONE] = "__".join(random.sample(ZONES, random.choice((1, 2))))
        csi = (random.choice(DRIVERS), f"handle-{number}")
        volume = volume_json(
            f"pv-{name}",
            class_name="immediate",
            modes=modes,
            claim=name,
            labels=labels,
            terms=_place(random, names),
            csi=csi,
        )
        pairs.append((claim, None if number == 0 else volume))
    return pairs


def free_volumes(random: Random, count: int, names: list[str]) -> list[Tree]:
    """Return volumes of the class "local", no two of one size, so that the smallest is one."""
    sizes = random.sample(range(1, 4 * count), count)
    return [
        volume_json(
            f"free-{number}",
            class_name="local",
            size=f"{size * 300}Mi",
            modes=("ReadWriteOnce", "ReadWriteMany") if number % 3 else ("ReadWriteOnce",),
            terms=_place(random, names),
            csi=("csi.local", f"free-{number}"),
        )
        for number, size in enumerate(sizes)
    ]


def fresh_claim(random: Random, name: str) -> Tree:
    """Return a claim that has no volume yet."""
    class_name = random.choice(("zones", "reported", "reported", "local", "local", "local"))
    if random.random() < 0.06:
        class_name = random.choice(("immediate", "unknown"))
    return claim_json(
        name,
        class_name=class_name,
        size=f"{random.randint(1, 9) * 700}Mi",
        modes=(random.choice(_MODES[:2]),),
    )


def disk(random: Random) -> Tree:
    read_only = random.random() < 0.5
    return random.choice(
        (
            {"gcePersistentDisk": {"pdName": "d", "readOnly": read_only}},
            {"awsElasticBlockStore": {"volumeID": "d", "readOnly": read_only}},
            {"rbd": {"monitors": random.sample("xyz", 2), "image": "i", "readOnly": read_only}},
            {
                "iscsi": {
                    "iqn": "iqn.2001-04.com.example:d",
                    "targetPortal": "10.0.0.1:3260",
                    "lun": 0,
                    "readOnly": read_only,
                }
            },
        )
    )
