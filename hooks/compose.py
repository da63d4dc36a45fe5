"""Composition: how several claims on one resource become one value.

Written once, for every resource: the highest-ranking SET claim gives the base (or, when only
modifiers claim, kubelet's request does); then DIVIDE, MULTIPLY, WITHIN and AT_LEAST shape it, in
that order. So a CFS quota is batch limit ÷ normalisation ratio × burst, and 'unlimited' survives
both; a CPU set is an allocation or a share pool, narrowed by suppression, but never to the empty
set.

Values that the kernel does not accept together are settled afterwards: it refuses a weight for a
group with cpu.idle=1, so the claim on one of the two is overruled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from msgspec.structs import replace

from apis.cpuset import CpuSet
from hooks.claim import Claim, Op
from hooks.decision import Outcome, ResourceKey
from linux.cgroup_files import LIMITS, MIN_QUOTA_US
from linux.resctrl import bounded
from linux.resources import UNLIMITED, Resource, Value

_MODIFIER_ORDER = {Op.DIVIDE: 0, Op.MULTIPLY: 1, Op.WITHIN: 2, Op.AT_LEAST: 3}
_IDLE = (Resource.CPU_IDLE, "")
_SHARES = (Resource.CPU_SHARES, "")


def compose(claims: Sequence[Claim], requested: Value | None) -> Outcome | None:
    """Return the outcome of `claims`, all on one resource and key, in the policies' order.

    requested: kubelet's request, the base when no claim sets a value. None, together with modifiers
    alone, gives no outcome: there is nothing to modify. Of CPU sets the base is then all CPUs, so a
    bound WITHIN is the value.
    """
    if len(claims) == 1 and claims[0].op is Op.SET:
        return Outcome(value=claims[0].value, winner=claims[0])
    setters = [claim for claim in claims if claim.op is Op.SET]
    modifiers = sorted(
        (claim for claim in claims if claim.op is not Op.SET),
        key=lambda claim: _MODIFIER_ORDER[claim.op],
    )
    winner: Claim | None = None
    for claim in setters:
        # Strictly greater: among equal ranks the first in the policies' order wins.
        if winner is None or claim.rank > winner.rank:
            winner = claim
    value = requested if winner is None else winner.value
    if value is None:
        value = _bound_of_cpus(modifiers)
    if value is None:
        return None
    effective: list[Claim] = []
    idle: list[Claim] = [claim for claim in setters if claim is not winner]
    for claim in modifiers:
        shaped = _shape(claim, value)
        (idle if shaped == value else effective).append(claim)
        value = shaped
    if winner is None:
        # Modifiers that change nothing own the value too, so that it is restored without them.
        winner, *rest = effective or modifiers
        return Outcome(
            value=value,
            winner=winner,
            modifiers=tuple(claim for claim in rest if claim in effective),
            losers=tuple(claim for claim in idle if claim is not winner),
        )
    return Outcome(value=value, winner=winner, modifiers=tuple(effective), losers=tuple(idle))


def resolve_conflicts(outcomes: Mapping[ResourceKey, Outcome]) -> Mapping[ResourceKey, Outcome]:
    """Return `outcomes` without those that the kernel would refuse beside another outcome.

    cpu.idle=1 and cpu.shares: the higher rank stays, cpu.idle among equal ranks. The claims of the
    other become losers of the outcome that stays, so that a person sees what overruled them.
    """
    idle, shares = outcomes.get(_IDLE), outcomes.get(_SHARES)
    if idle is None or shares is None or idle.value != 1:
        return outcomes
    stays, goes = (_SHARES, _IDLE) if shares.winner.rank > idle.winner.rank else (_IDLE, _SHARES)
    gone = outcomes[goes]
    overruled = (gone.winner, *gone.modifiers, *gone.losers)
    settled = {key: outcome for key, outcome in outcomes.items() if key != goes}
    settled[stays] = replace(settled[stays], losers=settled[stays].losers + overruled)
    return settled


def _bound_of_cpus(modifiers: Sequence[Claim]) -> CpuSet | None:
    """Return the first bound of a CPU set, which the others narrow; None without one."""
    for claim in modifiers:
        if claim.op is Op.WITHIN and isinstance(claim.value, CpuSet):
            return claim.value
    return None


def _shape(claim: Claim, value: Value) -> Value:
    """Apply one modifier to the value so far."""
    if isinstance(value, CpuSet):
        if claim.op is Op.WITHIN and isinstance(claim.value, CpuSet):
            return value & claim.value or value
        if claim.op is Op.AT_LEAST and isinstance(claim.value, CpuSet):
            return value | claim.value
        return value
    if isinstance(value, str) and isinstance(claim.value, str):
        bounds = claim.resource is Resource.RESCTRL_SCHEMATA and claim.op is Op.WITHIN
        return bounded(value, claim.value) if bounds else value
    if not isinstance(value, int):
        return value
    if claim.op is Op.DIVIDE:
        if value <= 0 or claim.factor <= 1.0:
            return value
        return max(ceil(value / claim.factor), MIN_QUOTA_US)
    if claim.op is Op.MULTIPLY:
        return value if value <= 0 or claim.factor <= 1.0 else round(value * claim.factor)
    if not isinstance(claim.value, int):
        return value
    unlimited = claim.resource in LIMITS and UNLIMITED in (value, claim.value)
    if claim.op is Op.WITHIN:
        # UNLIMITED is -1: the other number is the limit.
        return max(value, claim.value) if unlimited else min(value, claim.value)
    return UNLIMITED if unlimited else max(value, claim.value)
