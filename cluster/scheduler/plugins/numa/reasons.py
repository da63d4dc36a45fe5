"""The reasons of NodeNUMAResource, and the bits of its masks."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.exact.cpus import NOT_ENOUGH
from cluster.scheduler.exact.numa import INVALID_TOPOLOGY, MISSING, NO_NUMA_NODES, UNALIGNED
from cluster.scheduler.plugins.contract import Mask, Reason

NOT_INTEGER: Final = "the requested CPUs must be integer"

REASONS: Final = (
    Reason("node(s) NUMA Topology policy not match", resolvable=False),
    Reason(NOT_INTEGER, resolvable=False),
    Reason(INVALID_TOPOLOGY, resolvable=False),
    Reason("node(s) cpu bind policy conflicts with pod's required cpu bind policy", False),
    Reason("node(s) requested cpus not multiple cpus per core", resolvable=False),
    Reason("Insufficient amplified cpu"),
    Reason(NOT_ENOUGH),
    Reason(MISSING, resolvable=False),
    Reason(NO_NUMA_NODES),
    Reason(UNALIGNED),
)
(
    MISMATCH,
    FRACTION,
    INVALID,
    CONFLICT,
    MULTIPLE,
    AMPLIFIED,
    CPUS,
    NO_ZONES,
    NO_ROOM,
    NOT_ALIGNED,
) = range(len(REASONS))

FIRST_RESOURCE: Final = len(REASONS)
"""The bit of the first requested resource; the others follow."""

MOST_RESOURCES: Final = 48
"""Resources of a pod that have a reason of their own; a mask has 62 bits."""


ROOM_BITS: Final = ~((1 << FIRST_RESOURCE) - 1) | 1 << CPUS | 1 << NO_ROOM | 1 << NOT_ALIGNED
"""Bits that more free CPUs and NUMA amounts would clear. Amplified cpu is not one of them: it is a
sum over the whole node."""


def bit(rows: NDArray[np.bool_], reason: int) -> Mask:
    """Return the mask with this reason for the rows that are true."""
    return rows.astype(np.int64) << reason
