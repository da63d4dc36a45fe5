"""Explanations: one subject's decision, its values in the kernel and the last writes, as plain
data.

Only this file converts decisions for `koordctl explain` and for programs. Values are texts: for
files as the kernel writes them, for environment variables their value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from hooks.claim import Claim, Op
from hooks.decision import Decision, Outcome
from hooks.requested import requested_value
from hooks.state import State
from hooks.subject import ContainerSubject, PodSubject, SandboxSubject, Subject
from koordlet.decisions.decider import name_of
from koordlet.executor.slots import ResourceView, WriteNote
from koordlet.reconciler.reports import SubjectView
from koordlet.reconciler.wishes import AT_CREATION_ONLY
from linux.cgroup_files import LIMITS
from linux.resources import UNLIMITED, DeviceNode, Mount, Resource, Value

Plain = dict[str, Any]


def explain(view: SubjectView, *, lacks: Iterable[str] = ()) -> Plain:
    """Return all about one subject. lacks: what a container misses and only creation sets."""
    subject, decision = view.subject, view.decision
    missing = frozenset(lacks)
    by_slot = {(each.resource, each.key): each for each in view.resources}
    values = [
        _value(subject, resource, key, outcome, by_slot.pop((resource, key), None), missing)
        for (resource, key), outcome in decision.outcomes.items()
    ]
    # A policy whose input is bad keeps the values that it had set before.
    values += [_held(each) for each in by_slot.values()]
    made: Plain = {
        "subject": subject.key,
        "level": subject.level.value,
        "name": name_of(subject),
        "cgroup": subject.cgroup,
        "generation": decision.generation,
        "values": sorted(values, key=lambda value: (value["resource"], value["key"])),
        "faults": faults(decision),
    }
    if isinstance(subject, ContainerSubject | PodSubject | SandboxSubject):
        pod = subject.pod
        made["pod"] = {
            "namespace": pod.namespace,
            "name": pod.name,
            "uid": pod.uid,
            "qos": pod.qos.value,
            "kubeQos": pod.kube_qos.value,
            "priority": pod.priority,
            "phase": pod.phase,
        }
    if isinstance(subject, ContainerSubject | SandboxSubject):
        made["id"] = subject.id
    if isinstance(subject, ContainerSubject):
        made["container"] = subject.name
    return made


TROUBLED: Final = frozenset({State.BLOCKED, State.FAILED})
"""States of desired values that the kernel supports and that are not in force."""


def trouble(subject: Subject, view: ResourceView) -> Plain:
    """Return a value that is not in force, and why."""
    return {
        "subject": subject.key,
        "name": name_of(subject),
        "resource": view.resource.value,
        "key": view.key,
        "desired": view.desired,
        "observed": view.observed,
        "state": view.state.value,
        "detail": view.detail,
    }


def faults(decision: Decision) -> list[Plain]:
    """Return the policies that could not claim, and why."""
    return [
        {"policy": fault.policy, "message": fault.message, "inputError": fault.input_error}
        for fault in decision.faults
    ]


def shown(resource: Resource, value: Value | None) -> str | None:
    """Return a canonical value as text."""
    if value is None:
        return None
    if isinstance(value, Mount):
        options = ",".join(value.options)
        return f"{value.source} ({value.type}{', ' + options if options else ''})"
    if isinstance(value, DeviceNode):
        return f"{value.type} {value.major}:{value.minor} {value.file_mode:04o}"
    if value == UNLIMITED and resource in LIMITS:
        return "unlimited"
    return str(value)


_SIGNS: Final = {Op.DIVIDE: "/", Op.MULTIPLY: "x"}


def claim(one: Claim) -> Plain:
    """Return a claim with its reason and source."""
    made: Plain = {
        "policy": one.policy,
        "op": one.op.value,
        "value": f"{_SIGNS[one.op]} {one.factor:g}"
        if one.op in _SIGNS
        else shown(one.resource, one.value),
        "reason": one.reason,
        "source": one.source,
        "rank": int(one.rank),
    }
    if one.degraded:
        made["degraded"] = one.degraded
    return made


def _loser(one: Claim, beside: Resource) -> Plain:
    """Return a losing claim; if it is on another resource (a weight, for cpu.idle), with that."""
    made = claim(one)
    if one.resource is not beside:
        made["value"] = f"{one.resource} {made['value']}"
    return made


def _value(
    subject: Subject,
    resource: Resource,
    key: str,
    outcome: Outcome,
    view: ResourceView | None,
    missing: frozenset[str],
) -> Plain:
    made: Plain = {
        "resource": resource.value,
        "key": key,
        "requested": shown(resource, requested_value(subject, resource)),
        "value": shown(resource, outcome.value),
        "winner": claim(outcome.winner),
        "modifiers": [claim(each) for each in outcome.modifiers],
        "losers": [_loser(each, resource) for each in outcome.losers],
        "why": why(outcome),
    }
    if view is not None:
        made |= _kernel_side(view)
    elif resource in AT_CREATION_ONLY:
        lacking = f"{resource} {key}".strip() in missing
        made |= {
            "state": "missing" if lacking else "at creation",
            "detail": "only a new container can have it" if lacking else "",
            "observed": None,
        }
    else:
        made |= {"state": "pending", "detail": "no pass has looked at it yet", "observed": None}
    return made


def _held(view: ResourceView) -> Plain:
    made: Plain = {
        "resource": view.resource.value,
        "key": view.key,
        "requested": None,
        "value": view.desired,
        "winner": claim(view.claim) if view.claim is not None else None,
        "modifiers": [],
        "losers": [],
        "why": "held from before, because the policy's input is bad now",
    }
    return made | _kernel_side(view)


def _kernel_side(view: ResourceView) -> Plain:
    return {
        "path": view.path,
        "desired": view.desired,
        "observed": view.observed,
        "state": view.state.value,
        "detail": view.detail,
        "original": view.original,
        "retryInSeconds": round(view.retry_in_s, 1),
        "writes": [write(each) for each in view.writes],
    }


def write(note: WriteNote) -> Plain:
    """Return a write that was done or refused."""
    return {
        "at": note.at,
        "path": note.path,
        "old": note.old,
        "new": note.new,
        "why": note.why,
        "error": note.error,
    }


def why(outcome: Outcome) -> str:
    """Return one line with the reasons for a value."""
    parts = [f"{outcome.winner.policy}: {outcome.winner.reason}"]
    parts += [f"then {each.policy}: {each.reason}" for each in outcome.modifiers]
    return "; ".join(parts)


def orphan(view: ResourceView) -> Plain:
    """Return an original that is still to be restored."""
    return {"resource": view.resource.value, "key": view.key} | _kernel_side(view)


def counts(states: Mapping[tuple[Resource, State], int]) -> dict[str, int]:
    """Return state -> count of values."""
    made: dict[str, int] = {}
    for (_, state), count in states.items():
        made[state.value] = made.get(state.value, 0) + count
    return made
