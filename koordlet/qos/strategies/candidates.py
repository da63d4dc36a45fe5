"""Which pods an eviction strategy may name, in which order they go, and what the end of each gives.

Pure, and shared by CPU and memory eviction. Upstream's labels and annotations decide:
docs/facts/koordlet.md, "Eviction".

- Only pods that live count: phase Pending, Running or unknown.
- A pod that neither kubelet's list nor the API server's has does not go, where one of them is a
  source: after a restart of koordlet while it is away, the runtime still has the annotations of the
  pod's creation, and no sign of an eviction since.
- `koordinator.sh/eviction-policy`, a JSON array of gates, names those that may evict the pod. An
  annotation that cannot be read protects the pod from all of them, and is a named fault.
- Best-effort evictions take pods of QoS class BE, unless `koordinator.sh/eviction-enabled` is
  "false". Evictions by priority need that label to be "true".
- The rank is eviction priority, then priority, then (by priority only) sub-priority, each
  ascending. Pods of one rank are in the order that the strategy says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from apis.annotations import (
    parse_eviction_policy,
    parse_eviction_priority,
    parse_extended_resource_spec,
    parse_sub_priority,
)
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_EVICTION_POLICY,
    ANNOTATION_EVICTION_PRIORITY,
    ANNOTATION_EXTENDED_RESOURCE_SPEC,
    BATCH_CPU,
    LABEL_EVICTION_ENABLED,
    LABEL_PRIORITY,
)
from apis.qos import PriorityClass, QoSClass, priority_class_with_default
from hooks import compat
from hooks.amounts import Pick
from hooks.subject import ContainerKind, Pod
from koordlet.qos.strategy import PodOnNode, Situation, Victim

_LIVE: Final = frozenset({"", "Pending", "Running"})
_DEFAULT_PRIORITY: Final = {
    PriorityClass.PROD: 9500,
    PriorityClass.MID: 7500,
    PriorityClass.BATCH: 5500,
    PriorityClass.FREE: 3500,
}
"""Upstream's `spec.priority` for a class whose pod has none."""

Releases = Callable[[Pod], int]
"""What the end of a pod gives back; 0 for nothing."""


def live(pods: Iterable[PodOnNode]) -> tuple[PodOnNode, ...]:
    """Return the pods that have not ended."""
    return tuple(each for each in pods if each.pod.phase in _LIVE)


def class_of(pod: Pod) -> PriorityClass:
    """Return the pod's priority class: label, band of the priority, or what its QoS implies."""
    return priority_class_with_default(pod.labels, pod.priority, pod.kube_qos)


def priority_of(pod: Pod) -> int:
    """Return the pod's priority; without one (or with 0) upstream's value for its class."""
    return pod.priority or _DEFAULT_PRIORITY.get(class_of(pod), 0)


def extended_request(pod: Pod, pick: Pick, resource: str) -> int:
    """Return the pod's request of a batch or mid resource, as upstream's evictions sum it.

    The positive requests of the containers and sidecars; without a specification those of the
    annotation that admission made of it.
    """
    if pod.specs:
        return sum(
            max(pick(spec.amounts) or 0, 0)
            for spec in pod.specs
            if spec.kind is not ContainerKind.INIT
        )
    text = pod.annotations.get(ANNOTATION_EXTENDED_RESOURCE_SPEC)
    if text is None:
        return 0
    try:
        containers = parse_extended_resource_spec(text, obj=pod.obj).containers.values()
    except InputError:
        return 0  # the policy BatchResource reports it
    amounts = (each.requests.get(resource) for each in containers)
    return sum(max(amount.value(), 0) for amount in amounts if amount is not None)


def batch_cpu_request(pod: Pod) -> int:
    """Return the milli-cores of batch-cpu that the pod requests."""
    return extended_request(pod, lambda amounts: amounts.batch_cpu_request_milli, BATCH_CPU)


def best_effort(
    situation: Situation,
    gate: str,
    releases: Releases,
    last: Callable[[Pod], float],
    faults: list[InputError],
) -> tuple[Victim, ...]:
    """Return the BE pods that `gate` may evict, in order; `last` is the order within a rank.

    With the switch EvictBEByPriorityAlone the eviction priority and the label
    `koordinator.sh/eviction-enabled` do not count, as upstream has it.
    """
    alone = compat.EVICT_BE_BY_PRIORITY_ALONE in situation.inputs.settings.compat

    def eligible(pod: Pod) -> bool:
        refused = pod.labels.get(LABEL_EVICTION_ENABLED) == "false" and not alone
        return pod.qos is QoSClass.BE and not refused

    def rank(pod: Pod) -> tuple[float, ...]:
        first = 0 if alone else _eviction_priority(pod, faults)
        return first, priority_of(pod)

    return _ranked(situation.pods, gate, eligible, releases, rank, last, faults)


def by_priority(
    situation: Situation,
    gate: str,
    highest: int,
    releases: Releases,
    faults: list[InputError],
) -> tuple[Victim, ...]:
    """Return the pods up to priority `highest` that agreed to be evicted, in order.

    Within a rank the pod that releases most comes first.
    """

    def agreed(pod: Pod) -> bool:
        return pod.labels.get(LABEL_EVICTION_ENABLED) == "true" and priority_of(pod) <= highest

    def rank(pod: Pod) -> tuple[float, ...]:
        return _eviction_priority(pod, faults), priority_of(pod), _sub_priority(pod, faults)

    def largest(pod: Pod) -> float:
        return -releases(pod)

    return _ranked(situation.pods, gate, agreed, releases, rank, largest, faults)


def others(
    pods: Iterable[PodOnNode], victims: Iterable[Victim], releases: Releases
) -> tuple[Victim, ...]:
    """Return the pods that are no victims and whose end would release some, too."""
    named = {victim.pod.uid for victim in victims}
    rest = (each.pod for each in live(pods) if each.pod.uid not in named)
    return tuple(Victim(pod, amount) for pod in rest if (amount := releases(pod)) > 0)


def _ranked(
    pods: Sequence[PodOnNode],
    gate: str,
    eligible: Callable[[Pod], bool],
    releases: Releases,
    rank: Callable[[Pod], tuple[float, ...]],
    last: Callable[[Pod], float],
    faults: list[InputError],
) -> tuple[Victim, ...]:
    victims = [
        Victim(each.pod, amount, rank(each.pod))
        for each in live(pods)
        if not each.terminating
        and not each.unlisted
        and eligible(each.pod)
        and _allows(each.pod, gate, faults)
        and (amount := releases(each.pod)) > 0
    ]
    # The name makes the order of equals the same in every round.
    victims.sort(
        key=lambda one: (one.rank, last(one.pod), one.pod.namespace, one.pod.name),
    )
    return tuple(victims)


def _allows(pod: Pod, gate: str, faults: list[InputError]) -> bool:
    text = pod.annotations.get(ANNOTATION_EVICTION_POLICY)
    if text is None:
        return True
    try:
        return gate in parse_eviction_policy(text, obj=pod.obj)
    except InputError as error:
        faults.append(error)
        return False


def _eviction_priority(pod: Pod, faults: list[InputError]) -> int:
    text = pod.annotations.get(ANNOTATION_EVICTION_PRIORITY)
    if text is None:
        return 0
    try:
        return parse_eviction_priority(text, obj=pod.obj)
    except InputError as error:
        faults.append(error)
        return 0


def _sub_priority(pod: Pod, faults: list[InputError]) -> int:
    if not pod.labels.get(LABEL_PRIORITY):
        return priority_of(pod)
    try:
        return parse_sub_priority(pod.labels, obj=pod.obj)
    except InputError as error:
        faults.append(error)
        return priority_of(pod)
