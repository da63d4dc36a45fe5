"""The owners of a node's CPUs, as `koordctl top` and `koordctl report` list them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from apis.cpuset import CpuSet

SHARED: Final = "shared"
_KEYS: Final = ("name", "class", "uid", "why")


class Owned(NamedTuple):
    """CPUs with one owner. class_: a QoS class, "reserved", "" where it is not known, or "-" for
    shared CPUs. uid: of a pod, "" for other owners."""

    cpus: CpuSet
    owner: str
    class_: str
    uid: str
    why: str


def owned(topology: Mapping[str, Any] | None) -> list[Owned]:
    """Return the owners by their first CPU, and the shared CPUs last; [] where no CPU is owned.

    topology: as the daemon answers it. A CPU with several owners is in the row of each. A daemon
    that is older than koordctl may answer no owners; its CPUs are in no row.
    """
    sets: dict[tuple[str, str, str, str], list[int]] = {}
    shared: list[int] = []
    for node in topology["nodes"] if topology else ():
        for cpu in node["cpus"]:
            owners = cpu.get("owners")
            for owner in owners or ():
                name, class_, uid, why = (str(owner[key]) for key in _KEYS)
                sets.setdefault((name, class_, uid, why), []).append(cpu["id"])
            if owners == []:
                shared.append(cpu["id"])
    if not sets:
        return []
    rows = [Owned(CpuSet(cpus), *key) for key, cpus in sets.items()]
    rows.sort(key=lambda row: (min(row.cpus), row.owner))
    if shared:
        rows.append(Owned(CpuSet(shared), SHARED, "-", "", "pods without CPUs of their own"))
    return rows
