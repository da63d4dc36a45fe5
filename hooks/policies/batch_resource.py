"""BatchResource: CPU weight, CPU quota and memory limit of best-effort pods with batch resources.

kubelet ignores `kubernetes.io/batch-cpu` (milli-cores) and `batch-memory` (bytes): pods with only
these get no weight and no limit. This policy claims both for BE pods whose batch resources are
known: from the specification, else from the annotation that admission made of it.

Pod sums count sidecars, init containers and overhead as Kubernetes does; upstream sums
`spec.containers` alone, which a compatibility switch brings back. The annotation holds
`spec.containers` only, so sums made from it are marked as degraded.

The CPU normalisation ratio divides the quota (`hooks.compose` rounds up). Table and example:
docs/facts/policies.md, "Batch resources". One rule is left out: upstream removes these quotas while
the NodeSLO asks for suppression by quota. Here suppression claims that itself, where the kernel
demands it (koordlet/qos/strategies/cpu_suppress.py); otherwise pods would be unlimited on a node
where suppression does not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

import msgspec
from msgspec.structs import replace

from apis.annotations import (
    ExtendedResources,
    ExtendedResourceSpec,
    parse_extended_resource_spec,
)
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_EXTENDED_RESOURCE_SPEC,
    BATCH_CPU,
    BATCH_MEMORY,
    DEPRECATED_RESOURCES,
)
from apis.qos import QoSClass
from apis.quantity import Quantity
from hooks import compat
from hooks.amounts import (
    milli_to_quota_us,
    milli_to_shares,
    regular_only,
    sum_of_limits,
    sum_of_requests,
)
from hooks.claim import Claim
from hooks.facts import NodeInputs
from hooks.policies.cpu_normalization import division, node_ratio
from hooks.policy import Partial, Policy, never
from hooks.subject import Amounts, ContainerSpec, ContainerSubject, Level, Pod, PodSubject
from linux.resources import UNLIMITED, Resource, Value

NAME: Final = "BatchResource"

_ANNOTATION: Final = f"annotation {ANNOTATION_EXTENDED_RESOURCE_SPEC}"
_SPEC: Final = "spec.containers[].resources"
_LARGEST_CACHED: Final = 4096
"""Characters of an annotation whose parsed form is cached. A container takes about 150, so all
usual pods fit; the 512 entries of the cache hold at most 2 MiB of text."""
_SHORT: Final = "summed from the annotation, which lacks init containers, sidecars and overhead"


class Rule(msgspec.Struct, frozen=True):
    """ratio: of CPU normalisation, 1.0 when there is none. regular_only: upstream's pod sums."""

    ratio: float = 1.0
    regular_only: bool = False


def parse(inputs: NodeInputs) -> Rule | Partial:
    regular = compat.POD_SUMS_OF_REGULAR_CONTAINERS in inputs.settings.compat
    try:
        ratio = node_ratio(inputs.node) or 1.0
    except InputError as error:
        # Limits apply without a ratio too: otherwise best-effort pods would be unlimited.
        without = Rule(regular_only=regular)
        return Partial(without, error, lambda last: replace(without, ratio=last.ratio))
    return Rule(ratio=ratio, regular_only=regular)


def _has_batch(amounts: Amounts) -> bool:
    return (
        amounts.batch_cpu_request_milli is not None
        or amounts.batch_cpu_limit_milli is not None
        or amounts.batch_memory_request_bytes is not None
        or amounts.batch_memory_limit_bytes is not None
    )


def _specs_of_annotation(text: str, obj: str) -> tuple[ContainerSpec, ...]:
    parsed = parse_extended_resource_spec(text, obj=obj)
    return _short_specs(text) if len(text) <= _LARGEST_CACHED else _specs(parsed)


@lru_cache(maxsize=512)
def _short_specs(text: str) -> tuple[ContainerSpec, ...]:
    return _specs(parse_extended_resource_spec(text, obj=""))


def _specs(parsed: ExtendedResourceSpec) -> tuple[ContainerSpec, ...]:
    return tuple(
        ContainerSpec(name=name, amounts=_amounts(resources))
        for name, resources in parsed.containers.items()
    )


def _amounts(resources: ExtendedResources) -> Amounts:
    requests, limits = _current(resources.requests), _current(resources.limits)
    return Amounts(
        batch_cpu_request_milli=_units(requests, BATCH_CPU),
        batch_cpu_limit_milli=_units(limits, BATCH_CPU),
        batch_memory_request_bytes=_units(requests, BATCH_MEMORY),
        batch_memory_limit_bytes=_units(limits, BATCH_MEMORY),
    )


def _current(resources: Mapping[str, Quantity]) -> Mapping[str, Quantity]:
    """Return the amounts under current names; a current name wins over its deprecated one."""
    return {DEPRECATED_RESOURCES.get(name, name): resources[name] for name in resources} | {
        name: amount for name, amount in resources.items() if name not in DEPRECATED_RESOURCES
    }


def _units(resources: Mapping[str, Quantity], name: str) -> int | None:
    amount = resources.get(name)
    return None if amount is None else amount.value()


def _from_annotation(pod: Pod) -> tuple[ContainerSpec, ...]:
    text = pod.annotations.get(ANNOTATION_EXTENDED_RESOURCE_SPEC)
    return _specs_of_annotation(text, pod.obj) if text else ()


def claim_pod(rule: Rule, subject: PodSubject) -> Iterator[Claim]:
    pod = subject.pod
    if pod.qos is not QoSClass.BE:
        return
    specs, overhead, source, short = pod.specs, pod.overhead, _SPEC, ""
    if not any(_has_batch(spec.amounts) for spec in specs):
        specs, overhead, source, short = _from_annotation(pod), Amounts(), _ANNOTATION, _SHORT
        if not specs:
            return
    if rule.regular_only:
        specs, overhead, short = regular_only(specs), Amounts(), ""
    # Admission renames overhead too; pods that bypassed it have plain cpu and memory there.
    cpu = overhead.batch_cpu_request_milli or overhead.cpu_request_milli
    memory = overhead.batch_memory_request_bytes or overhead.memory_request_bytes
    yield from _claims(
        rule,
        shares=milli_to_shares(sum_of_requests(specs, _cpu_request, cpu)),
        limit_milli=sum_of_limits(specs, _cpu_limit, cpu),
        memory_bytes=sum_of_limits(specs, _memory_limit, memory),
        whose="sum of the pod's",
        source=source,
        degraded=short,
    )


def claim_container(rule: Rule, subject: ContainerSubject) -> Iterator[Claim]:
    pod = subject.pod
    if pod.qos is not QoSClass.BE:
        return
    spec, source = pod.spec(subject.name), _SPEC
    if spec is None or not _has_batch(spec.amounts):
        source = _ANNOTATION
        spec = next((spec for spec in _from_annotation(pod) if spec.name == subject.name), None)
        if spec is None:
            return
    yield from _container_claims(rule, spec.amounts, source)


@lru_cache(maxsize=1024)
def _container_claims(rule: Rule, amounts: Amounts, source: str) -> tuple[Claim, ...]:
    """Return the claims of a container, cached: replicas have equal amounts.

    1024 entries, chosen: several times the distinct containers of a node.
    """
    memory = amounts.batch_memory_limit_bytes or 0
    return tuple(
        _claims(
            rule,
            shares=milli_to_shares(amounts.batch_cpu_request_milli or 0),
            limit_milli=amounts.batch_cpu_limit_milli or 0,
            memory_bytes=memory if memory > 0 else UNLIMITED,
            whose="the container's",
            source=source,
            degraded="",
        )
    )


def _cpu_request(amounts: Amounts) -> int | None:
    return amounts.batch_cpu_request_milli


def _cpu_limit(amounts: Amounts) -> int | None:
    return amounts.batch_cpu_limit_milli


def _memory_limit(amounts: Amounts) -> int | None:
    return amounts.batch_memory_limit_bytes


def _claims(
    rule: Rule,
    *,
    shares: int,
    limit_milli: int,
    memory_bytes: int,
    whose: str,
    source: str,
    degraded: str,
) -> Iterator[Claim]:
    def claim(resource: Resource, value: Value, reason: str, where: str) -> Claim:
        return Claim(
            resource=resource,
            value=value,
            policy=NAME,
            reason=reason,
            source=where,
            degraded=degraded,
        )

    yield claim(
        Resource.CPU_SHARES, shares, f"{whose} batch-cpu request", f"{source}.requests.batch-cpu"
    )
    quota = milli_to_quota_us(limit_milli)
    reason = f"{whose} batch-cpu limit"
    if quota == UNLIMITED:
        reason += " is missing"
    yield claim(Resource.CPU_CFS_QUOTA, quota, reason, f"{source}.limits.batch-cpu")
    if rule.ratio > 1.0:
        yield division(rule.ratio, NAME)
    reason = f"{whose} batch-memory limit"
    if memory_bytes == UNLIMITED:
        reason += " is missing"
    yield claim(Resource.MEMORY_LIMIT, memory_bytes, reason, f"{source}.limits.batch-memory")


POLICY: Final = Policy(
    name=NAME,
    gate="BatchResource",
    gate_default=True,
    summary="CPU weight, quota and memory limit of best-effort pods, from their batch resources",
    parse=parse,
    claims={Level.POD: claim_pod, Level.CONTAINER: claim_container},
    individual=never,
)
