"""What a policy is: a name, a gate, a parser of its rule, and one claiming function per level.

A policy is data (`Policy`) around plain functions, so the engine, `koordctl status` and the
documentation read the same table. A policy module defines its rule as a frozen type, the functions,
and a module-level `POLICY`; `hooks.policies.BUILTIN` lists them.

- `parse(inputs)` returns the rule of an active policy, or an `Off` with the reason of an inactive
  one. It may raise `apis.errors.InputError` (or InputErrors): the engine then keeps the last good
  rule. A rule that works without the bad field is returned as a `Partial`.
- A claiming function gets (rule, subject) and returns claims. When the subject's own input is bad
  it raises `InputError`, and only this policy's claims for this subject are lost; or it yields the
  error among its claims, and keeps the others. The message is shown either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from apis.errors import InputError, InputErrors
from hooks.claim import Claimed
from hooks.facts import NodeInputs
from hooks.subject import Level, Pod


class OffBecause(StrEnum):
    """Why a policy does not claim."""

    GATE = "gate"  # its feature gate is off
    NODESLO = "nodeslo"  # the NodeSLO (or Node) does not switch it on
    UNSUPPORTED = "unsupported"  # the kernel cannot do it
    BAD_INPUT = "bad-input"  # an object is malformed and there was no good one before


@dataclass(frozen=True, slots=True)
class Off:
    """A policy that is not active, and why, for people."""

    because: OffBecause
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Partial:
    """A rule that works without a bad field, so that the policy's other fields count.

    rule: has the default in place of the bad field.
    mend(last): returns the rule with the field's value in `last`, the policy's previous rule.
    error: names the bad field.
    """

    rule: Any
    error: InputError | InputErrors
    mend: Callable[[Any], Any]


ClaimFunction = Callable[[Any, Any], Iterable[Claimed]]
"""(rule, subject of the level) -> claims, and errors that leave the other claims in force."""


def always(pod: Pod) -> bool:
    """For `Policy.individual`: each pod is decided by itself. Always correct, and slower."""
    return True


def never(pod: Pod) -> bool:
    """For `Policy.individual`: pods of one shape (`hooks.shape`) get the same claims."""
    return False


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy. `gate` is the upstream feature gate's name, `gate_default` its default.

    degraded(rule): how an active policy falls short on this kernel, "" when it does not.
    individual(pod): whether the claims for the pod's containers depend on which pod it is (uid,
        name, cgroup), or on labels and annotations outside Koordinator's domain. Such pods are
        decided one by one.
    """

    name: str
    gate: str
    gate_default: bool
    summary: str
    parse: Callable[[NodeInputs], Any]
    claims: Mapping[Level, ClaimFunction]
    degraded: Callable[[Any], str] = field(default=lambda rule: "")
    individual: Callable[[Pod], bool] = always
