"""The engine: asks every active policy about a subject and merges the claims into one decision.

An `Engine` is immutable. `Engine.build` parses the rules once, when an object or a fact changes;
`decide` is pure, reads memory only, and is what every effector calls: the NRI reply, the proxy's
hook service, the reconciler, `koordctl plan`. Deciding twice gives the same decision.

A policy that fails loses its own claims for that subject and nothing else. An error that it yields
among its claims leaves these in force. Either is a fault in the decision, which the caller reports.

Outcomes for containers are cached by shape (`hooks.shape`): a deployment's replicas are decided
once. The next engine goes on with that cache if its policies and their rules for containers are the
same: most changes of a NodeSLO are about other things.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from apis.errors import InputError, InputErrors
from hooks.claim import Claim, Claimed
from hooks.compose import compose, resolve_conflicts
from hooks.decision import Decision, Fault, Outcome, ResourceKey
from hooks.facts import NodeInputs
from hooks.policy import ClaimFunction, Off, OffBecause, Partial, Policy, never
from hooks.requested import value_in_request
from hooks.shape import shape_of
from hooks.standing import Claims, under
from hooks.subject import NOTHING_REQUESTED, ContainerSubject, Level, Pod, Subject

_MOST_PODS: Final = 1024
"""Pods whose shape is cached: several times what kubelet runs at most by default (110)."""

_MOST_SHAPES: Final = 2048
"""Shapes whose outcomes are cached; a full cache is emptied. Chosen: a node runs a few hundred
shapes. Measured: a batch container's entry takes 4 KiB, so pods that are all different make the
cache hold 8 MiB at most."""

Guard = Callable[[str, ClaimFunction, Any, Subject], Iterable[Claimed]]
"""Calls (policy name, claiming function, rule, subject); may bound its time or refuse the call."""

Decide = Callable[["Engine", Subject, "Decision | None"], Decision]
"""Decides about a subject from the policies' claims alone; the last argument is the previous such
decision. The caller composes standing claims in (`hooks.standing.under`)."""


def decide(engine: Engine, subject: Subject, before: Decision | None) -> Decision:
    """Return the engine's decision, with nothing noted."""
    return engine.decide(subject, before=before)


@dataclass(frozen=True, slots=True)
class PolicyState:
    """One policy in an engine: its rule, or why it is off, and the error of its input.

    problem: the error of the newest input if a part of it could not be used, else "".
    """

    policy: Policy
    rule: Any
    off: Off | None = None
    problem: str = ""

    @property
    def active(self) -> bool:
        return self.off is None


class Called(NamedTuple):
    """One policy's call. claims: () when it failed."""

    policy: str
    took_s: float
    claims: tuple[Claimed, ...]


class Watch(NamedTuple):
    """What the caller of a decision notes, and how policies are called that may not be trusted.

    calls: filled while deciding, in order. guards: by policy, what calls it for the engine.
    """

    calls: list[Called]
    guards: Mapping[str, Guard]


class Engine:
    """All policies with their rules, at one moment. Immutable."""

    def __init__(self, inputs: NodeInputs, states: Sequence[PolicyState], generation: int) -> None:
        self.inputs = inputs
        self.states: tuple[PolicyState, ...] = tuple(states)
        self.generation = generation
        self._plan: Mapping[Level, tuple[tuple[str, ClaimFunction, Any], ...]] = {
            level: tuple(
                (state.policy.name, state.policy.claims[level], state.rule)
                for state in self.states
                if state.active and level in state.policy.claims
            )
            for level in Level
        }
        self._individual = tuple(
            state.policy.individual
            for state in self.states
            if state.active
            and Level.CONTAINER in state.policy.claims
            and state.policy.individual is not never
        )
        self._by_shape: dict[Hashable, Decision] = {}
        self._numbers: dict[Hashable, int] = {}
        """A number for each pod's shape: it is hashed once and not for each container."""
        self._next_number = itertools.count()
        self._pods: dict[str, tuple[Pod, int | None]] = {}
        """By uid: the pod, and its shape's number; None for one that is decided by itself."""

    @classmethod
    def build(
        cls, policies: Iterable[Policy], inputs: NodeInputs, *, previous: Engine | None = None
    ) -> Engine:
        """Parse every policy's rule from `inputs`.

        If a policy's input is bad, its rule of `previous` stays in force, or that rule's value of
        the bad field. Without a previous rule the field has its default, or the policy is off. The
        other policies get their new rules.
        """
        before = {state.policy.name: state for state in previous.states} if previous else {}
        states = [
            _parse(policy, inputs, before.get(policy.name))
            for policy in sorted(policies, key=lambda policy: policy.name)
        ]
        engine = cls(inputs, states, previous.generation + 1 if previous else 1)
        if previous is not None and engine.claims_as(previous, Level.CONTAINER):
            engine._share_cache(previous)
        return engine

    def claims_as(self, other: Engine, level: Level) -> bool:
        """Return whether both claim the same for every subject of the level.

        They do if the same policies are active there, with equal rules.
        """
        try:
            same = self._plan[level] == other._plan[level]
        except Exception:  # noqa: BLE001 - a site policy's rule may be anything, and refuse it
            return False
        return same and self._individual == other._individual

    def _share_cache(self, other: Engine) -> None:
        """Use one cache with an engine that claims the same for containers."""
        self._by_shape = other._by_shape
        self._numbers = other._numbers
        self._next_number = other._next_number
        self._pods = other._pods

    def prepare(self, pod: Pod) -> None:
        """Work out beforehand what deciding a container of this pod begins with."""
        self._shape_of_pod(pod)

    def _shape_of_pod(self, pod: Pod) -> int | None:
        """Return the number of the pod's shape, None if some policy's claims are the pod's own."""
        known = self._pods.get(pod.uid)
        if known is not None and known[0] is pod:
            return known[1]
        number = None
        if not any(individual(pod) for individual in self._individual):
            shape = shape_of(pod)
            if len(self._numbers) >= _MOST_SHAPES:
                self._numbers.clear()
            # Hooks and passes decide in two threads: no two shapes may get one number.
            number = self._numbers.setdefault(shape, next(self._next_number))
        if len(self._pods) >= _MOST_PODS:
            self._pods.clear()
        self._pods[pod.uid] = pod, number
        return number

    def claims_at(self, level: Level) -> bool:
        """Tell whether any active policy claims something for subjects of this level."""
        return bool(self._plan[level])

    def state(self, policy: str) -> PolicyState | None:
        """Return the named policy's state."""
        return next((state for state in self.states if state.policy.name == policy), None)

    def decide(
        self,
        subject: Subject,
        watch: Watch | None = None,
        *,
        before: Decision | None = None,
        standing: Claims = (),
    ) -> Decision:
        """Return the decision for `subject`; an error of a policy becomes a fault in it.

        watch: notes each policy's call, and calls some in another way. before: the subject's
        previous decision. A claim there that its policy cannot make now,
        because the input has become bad, stays in force and is marked as kept.
        standing: the strategies' claims on the subject (`hooks.standing`). They are composed last,
        and never cached.
        """
        return under(self._decide(subject, watch, before), standing, subject)

    def known(self, subject: Subject) -> Decision | None:
        """Return the cached decision about equal subjects, from the policies' claims alone."""
        shape = self._shape_of(subject)
        return None if shape is None else self._by_shape.get(shape)

    def _shape_of(self, subject: Subject) -> Hashable:
        """Return the key of equal subjects in the cache; None for one that is decided by itself."""
        if isinstance(subject, ContainerSubject):
            of_pod = self._shape_of_pod(subject.pod)
            if of_pod is not None:
                return of_pod, subject.name, subject.requested
        return None

    def _decide(self, subject: Subject, watch: Watch | None, before: Decision | None) -> Decision:
        """Return the decision from the policies' claims alone."""
        shape = self._shape_of(subject)
        if shape is not None and (known := self._by_shape.get(shape)) is not None:
            return known
        by_resource: dict[ResourceKey, list[Claim]] = {}
        faults: list[Fault] = []
        for name, function, rule in self._plan[subject.level]:
            started = perf_counter()
            claims: tuple[Claimed, ...] = ()
            try:
                guard = None if watch is None else watch.guards.get(name)
                # A generator does its work here, and fails here.
                claims = tuple(
                    function(rule, subject)
                    if guard is None
                    else guard(name, function, rule, subject)
                )
            except Exception as error:  # noqa: BLE001 - a policy is isolated, and its fault reported
                faults.append(fault_of(name, error))
            for claim in claims:
                if isinstance(claim, InputError):
                    faults.append(fault_of(name, claim))
                else:
                    by_resource.setdefault((claim.resource, claim.key), []).append(claim)
            if watch is not None:
                watch.calls.append(Called(name, perf_counter() - started, claims))
        if faults and before is not None:
            _keep_claims(
                before, {fault.policy for fault in faults if fault.input_error}, by_resource
            )
        outcomes: dict[ResourceKey, Outcome] = {}
        requested = getattr(subject, "requested", NOTHING_REQUESTED)
        for key, claims_of in by_resource.items():
            outcome = compose(claims_of, value_in_request(requested, key[0]))
            if outcome is not None:
                outcomes[key] = outcome
        decision = Decision(
            outcomes=resolve_conflicts(outcomes),
            faults=tuple(faults),
            generation=self.generation,
        )
        # A fault names its pod and may keep claims of a previous decision: never for the cache.
        if shape is not None and not faults:
            if len(self._by_shape) >= _MOST_SHAPES:
                self._by_shape.clear()
            self._by_shape[shape] = decision
        return decision


def fault_of(policy: str, error: Exception) -> Fault:
    """Return an error of a policy as a fault: bad input, or the policy's own defect."""
    if isinstance(error, InputError | InputErrors):
        return Fault(policy=policy, message=str(error), input_error=True)
    return Fault(policy=policy, message=f"{type(error).__name__}: {error}", input_error=False)


KEPT: Final = "kept from the last good input: the present one is bad"
"""The `degraded` of a claim that stays in force although its input has become bad."""


def _keep_claims(
    before: Decision, policies: Collection[str], by_resource: dict[ResourceKey, list[Claim]]
) -> None:
    """Add claims that `policies` made before and do not make now, in the policies' order."""
    claimed = {(key, claim.policy) for key, claims in by_resource.items() for claim in claims}
    for outcome in before.outcomes.values():
        for claim in (outcome.winner, *outcome.modifiers, *outcome.losers):
            key = (claim.resource, claim.key)
            if claim.policy in policies and (key, claim.policy) not in claimed:
                kept = claim if claim.degraded == KEPT else replace(claim, degraded=KEPT)
                by_resource.setdefault(key, []).append(kept)
                by_resource[key].sort(key=lambda claim: claim.policy)


def _parse(policy: Policy, inputs: NodeInputs, before: PolicyState | None) -> PolicyState:
    if not inputs.settings.gate(policy.gate, default=policy.gate_default):
        return PolicyState(policy, None, Off(OffBecause.GATE, f"feature gate {policy.gate}=false"))
    last = before if before is not None and before.active else None
    try:
        rule = policy.parse(inputs)
        if isinstance(rule, Partial):
            mended = rule.rule if last is None else rule.mend(last.rule)
            return PolicyState(policy, mended, problem=str(rule.error))
    except (InputError, InputErrors) as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - a policy is isolated, and its fault reported
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(rule, Off):
            return PolicyState(policy, None, rule)
        return PolicyState(policy, rule)
    if last is not None:
        return PolicyState(policy, last.rule, problem=problem)
    return PolicyState(policy, None, Off(OffBecause.BAD_INPUT, problem), problem)
