"""A claim: one policy's wish for one resource of one subject, with its reason."""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

from apis.errors import InputError
from linux.resources import Resource, Value


class Op(StrEnum):
    """How a claim takes part in the resource's value."""

    SET = "set"
    """The value itself. Among several the highest rank wins."""

    DIVIDE = "divide"
    """Divide a finite quota by `factor`, rounded up; unlimited stays unlimited."""

    MULTIPLY = "multiply"
    """Multiply a finite quota by `factor`, rounded to the nearest; unlimited stays unlimited."""

    WITHIN = "within"
    """At most this: the smaller number; of CPU sets the intersection, unless it is empty; of a
    resctrl schemata the smaller bandwidth of each domain."""

    AT_LEAST = "at-least"
    """At least this: the larger number; of CPU sets the union."""


class Rank(IntEnum):
    """Which of the claims that set one resource wins: the one of highest rank.

    Only the order of the numbers counts; the gaps let a site policy rank in between.
    """

    DEFAULT = 100  # a rule of the class or the node
    POD = 200  # the pod's own annotation or label, or its allocation
    SITE = 300  # a site policy
    EMERGENCY = 400  # dynamic QoS under pressure, with a time to live


class Claim(msgspec.Struct, frozen=True):
    """What `policy` wants, why, and which input field it came from.

    resource, key: what is set; `key` for keyed resources (environment variable, mount
        destination, …).
    value: canonical (see `linux.resources`); for DIVIDE and MULTIPLY it is 0, and `factor` counts.
    reason: short, for a person: "share pool of NUMA node 0".
    source: the input field: 'annotation scheduling.koordinator.sh/resource-status', 'NodeSLO
        spec.resourceQOSStrategy.beClass.cpuQOS.groupIdentity', 'gate CPUSetAllocator'.
    degraded: how the claim falls short of its input (a stand-in on a mainline kernel), "" when it
        does not.
    """

    resource: Resource
    value: Value
    policy: str
    reason: str
    source: str
    key: str = ""
    op: Op = Op.SET
    rank: int = Rank.DEFAULT
    factor: float = 1.0
    degraded: str = ""


Claimed = Claim | InputError
"""What a claiming function yields: a claim, or an error that leaves its other claims in force.

An error that is raised instead discards all claims of the call, so a policy yields an error when it
has other claims to make.
"""
