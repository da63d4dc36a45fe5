"""Policies of a site: claims from a file of the operator, beside the built-in ones.

A file makes one module-level `POLICY` with `site_policy(...)`; its functions return claims made
with `want(...)`. They get the node's inputs (NodeSLO, Node, topology, kernel facts, settings) and a
subject, and like every policy they do no I/O. Every claim is checked before it counts: type, range,
level, rank, number. A claim that fails the check is a defect of the policy and becomes a fault of
the decision; the other policies' claims stay.

Pure: the daemon finds, loads and watches the files, bounds the time of a call and switches a
failing policy off. docs/policies.md, "Site policies", shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, Final

from msgspec.structs import replace

from apis.errors import InputError
from hooks.check import claim_problem
from hooks.claim import Claim, Op, Rank
from hooks.facts import NodeInputs
from hooks.policy import Policy
from hooks.subject import (
    ContainerSubject,
    HostAppSubject,
    Level,
    NodeSubject,
    PodSubject,
    QosSubject,
    SandboxSubject,
    Subject,
)
from linux.resources import Resource, Value

GATE: Final = "SitePolicies"
"""Shown in the table of policies. The daemon's setting `sitePolicies.enabled` is what counts."""
ENTRY_POINT_GROUP: Final = "koordlet.policies"
"""The group of entry points in which an installed package offers a `POLICY`."""
PREFIX: Final = "site/"
"""Begins every site policy's name, so that it differs from every built-in policy's."""
MOST_CLAIMS: Final = 64
"""Claims for one subject. Chosen: about three times as many as there are resources of a container.
Bounds the reply to the runtime and the state kept for each claim."""

_LONGEST_NAME: Final = 63
"""As long as a DNS label, since the name is a metric's label value."""
_NOT_FOR_SITES: Final = frozenset(
    {Resource.SYSCTL, Resource.KERNEL_SETTING, Resource.HOST_DIRECTORY}
)


class SiteClaimError(ValueError):
    """A site policy returned something else than a claim, or a claim that is not allowed."""


def want(
    resource: Resource,
    value: Value,
    *,
    reason: str,
    key: str = "",
    op: Op = Op.SET,
    rank: int = Rank.SITE,
    factor: float = 1.0,
    source: str = "",
    degraded: str = "",
) -> Claim:
    """Return a claim of the calling site policy; see `hooks.claim.Claim` for the fields.

    reason: for the person who runs `koordctl explain`.
    rank: SITE overrules the built-in policies; a rank below DEFAULT only sets what they do not.
    """
    return Claim(
        resource=resource,
        value=value,
        policy="",
        reason=reason,
        source=source,
        key=key,
        op=op,
        rank=rank,
        factor=factor,
        degraded=degraded,
    )


def site_policy(
    *,
    name: str,
    summary: str,
    node: Callable[[NodeInputs, NodeSubject], Iterable[Claim]] | None = None,
    qos: Callable[[NodeInputs, QosSubject], Iterable[Claim]] | None = None,
    pod: Callable[[NodeInputs, PodSubject], Iterable[Claim]] | None = None,
    sandbox: Callable[[NodeInputs, SandboxSubject], Iterable[Claim]] | None = None,
    container: Callable[[NodeInputs, ContainerSubject], Iterable[Claim]] | None = None,
    host_app: Callable[[NodeInputs, HostAppSubject], Iterable[Claim]] | None = None,
) -> Policy:
    """Return a site policy, to be assigned to the module's `POLICY`.

    name: letters, digits and dashes; shown as `site/<name>`. Each function claims for one level.
    Raises ValueError for a bad name, for no function at all, and for an async function.
    """
    if not (0 < len(name) <= _LONGEST_NAME and name.isascii() and name.replace("-", "").isalnum()):
        raise ValueError(
            f"name {name[:64]!r}: expected 1 to {_LONGEST_NAME} letters, digits and dashes"
        )
    given: dict[Level, Callable[[NodeInputs, Any], Iterable[Claim]] | None] = {
        Level.NODE: node,
        Level.QOS: qos,
        Level.POD: pod,
        Level.SANDBOX: sandbox,
        Level.CONTAINER: container,
        Level.HOST_APP: host_app,
    }
    claims: dict[Level, _Checked] = {}
    for level, function in given.items():
        if function is None:
            continue
        if not callable(function) or iscoroutinefunction(function):
            raise ValueError(f"{level}: expected a plain function, not async or {function!r:.64}")
        claims[level] = _Checked(PREFIX + name, level, function)
    if not claims:
        raise ValueError("a policy needs a function for at least one level")
    return Policy(
        name=PREFIX + name,
        gate=GATE,
        gate_default=True,
        summary=summary,
        parse=_all_inputs,
        claims=claims,
    )


def _all_inputs(inputs: NodeInputs) -> NodeInputs:
    return inputs


@dataclass(frozen=True, slots=True)
class _Checked:
    """A site's function with the check of what it returns."""

    policy: str
    level: Level
    function: Callable[[NodeInputs, Any], Iterable[Claim]]

    def __call__(self, inputs: NodeInputs, subject: Subject) -> Iterable[Claim]:
        made: list[Claim] = []
        for claim in self.function(inputs, subject) or ():
            if len(made) >= MOST_CLAIMS:
                raise SiteClaimError(f"more than {MOST_CLAIMS} claims for one {self.level}")
            made.append(self._checked_claim(claim))
        return made

    def _checked_claim(self, claim: object) -> Claim:
        if not isinstance(claim, Claim):
            raise SiteClaimError(f"returned a {type(claim).__name__}; make claims with want()")
        if not isinstance(claim.resource, Resource) or not isinstance(claim.op, Op):
            raise SiteClaimError("resource and op must be members of Resource and Op")
        for field in ("key", "reason", "source", "degraded"):
            if not isinstance(getattr(claim, field), str):
                raise SiteClaimError(f"{claim.resource}: {field} must be a string")
        if not claim.reason:
            raise SiteClaimError(f"{claim.resource}: a claim needs a reason")
        if not isinstance(claim.rank, int) or claim.rank > Rank.SITE:
            raise SiteClaimError(f"{claim.resource}: a site policy's rank is at most Rank.SITE")
        if claim.resource in _NOT_FOR_SITES:
            raise SiteClaimError(f"{claim.resource} cannot be claimed by site policies")
        problem = claim_problem(claim, self.level)
        if problem:
            raise SiteClaimError(problem)
        return replace(
            claim, policy=self.policy, source=claim.source or f"site policy {self.policy}"
        )


def checked_policy(policy: object, *, origin: str, taken: Collection[str] = ()) -> Policy:
    """Return the checked `POLICY` of a file or entry point; raises InputError.

    origin: the file's path or the entry point's name. taken: names of the policies loaded so far.
    """

    def refuse(value: object, problem: str, hint: str | None = None) -> InputError:
        return InputError(obj=origin, field="POLICY", value=value, problem=problem, hint=hint)

    if not isinstance(policy, Policy):
        raise refuse(
            type(policy).__name__,
            "not a policy",
            "end the file with POLICY = site_policy(name=..., summary=..., container=...)",
        )
    if not policy.claims or not all(
        isinstance(function, _Checked) for function in policy.claims.values()
    ):
        raise refuse(
            policy.name,
            "not made by hooks.site.site_policy, so its claims would not be checked",
            "make it with POLICY = site_policy(...)",
        )
    if policy.name in taken:
        raise refuse(policy.name, "another site policy has this name", "rename one of them")
    return policy
