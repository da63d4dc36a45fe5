"""slo-controller-config at admission: what would not load, or would not mean what it says.

All keys are read exactly as the controllers read them; on top come the ranges and pairs that make
sense only to a person's eye, and entries that would compete for a node. Pairs are judged after the
merge, so a value may rely on the cluster's.

A refusal is upstream's text `___{"reason":...,"message":...}___` with one of four reasons.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from apis.core import ConfigMap, Node
from apis.decode import decode_object
from apis.meta import LabelSelector, matches
from apis.nodeslo import bandwidth_bits
from apis.quantity import parse_quantity
from apis.slo_config import MEMBERS, Effect, SLOConfig, Strategies, load_slo_config
from cluster.webhook.node import reason_text
from kube.webhook import ALLOWED, AdmissionRequest, Verdict, denied

PARSE_FAIL: Final = "ParseConfigFail"
INVALID: Final = "ConfigParamInvalid"
OVERLAP: Final = "NodeStrategiesOverlap"
CONFLICT: Final = "ExistNodeConfict"

Range = tuple[float | None, float | None]

_NORMALIZATION: Final = (1.0, 5.0)
"""Upstream's bounds."""
_AMPLIFICATION: Final = (0.0, 1000.0)
"""A ratio below 1 may be meant to be multiplied with a CPU normalisation ratio; the product counts,
and is at least 1. 1000 is the bound that the node webhook holds a ratio to."""

# Bounds are upstream's, both edges included; None is not a bound.
_RANGES: Final[Mapping[str, Mapping[str, Range]]] = {
    "colocation": {
        "resourceDiffThreshold": (None, 1.0),
        "midStaticCPUReservedPercent": (0, 100),
        "midStaticMemoryReservedPercent": (0, 100),
    },
    "threshold": {
        "cpuEvictTimeWindowSeconds": (1, None),
        "allocatableEvictPriorityThreshold": (0, 7999),
    },
    "cpu_burst": {
        "cpuBurstPercent": (1, 10000),
        "cfsQuotaBurstPercent": (100, None),
        "cfsQuotaBurstPeriodSeconds": (-1, None),
        "sharePoolThresholdPercent": (0, 100),
    },
    "cpu_normalization": {"defaultRatio": _NORMALIZATION},
    "system": {
        "minFreeKbytesFactor": (1, None),
        "watermarkScaleFactor": (1, 400),
        "memcgReapBackGround": (0, 1),
        "pageCacheLimitEnabled": (0, 1),
    },
}

_MEMORY_RANGES: Final[Mapping[str, Range]] = {
    "minLimitPercent": (0, 100),
    "lowLimitPercent": (0, 100),
    "throttlingPercent": (0, 100),
}

_PAIRS: Final = (
    ("memoryEvictLowerPercent", "memoryEvictThresholdPercent"),
    ("memoryAllocatableEvictLowerPercent", "memoryAllocatableEvictThresholdPercent"),
    ("cpuEvictBESatisfactionLowerPercent", "cpuEvictBESatisfactionUpperPercent"),
    ("cpuEvictLowerPercent", "cpuEvictThresholdPercent"),
    ("cpuAllocatableEvictLowerPercent", "cpuAllocatableEvictThresholdPercent"),
)
_DEFAULTED_LOWERS: Final = frozenset({"memoryEvictLowerPercent", "cpuEvictLowerPercent"})
"""Without them a node stops two percent below the threshold."""
_CLASSES: Final = ("lsrClass", "lsClass", "beClass", "systemClass", "cgroupRoot")
_MOST_VIRTUAL_NODES: Final = 4096
"""Label sets that are tried for one entry. Chosen: twelve keys with two values each."""
_MOST_MATCHES: Final = 400_000
"""Evaluations of selectors in one review. Measured: 0.1 s with three requirements each; with twice
the value a ConfigMap with hundreds of entries delays other reviews twice as long."""


class ConfigMapAdmission:
    """Judges changes of the one config map."""

    def __init__(
        self,
        *,
        namespace: str,
        name: str,
        nodes: Callable[[], Iterable[Node]],
        names_required: bool,
    ) -> None:
        self._namespace = namespace
        self._name = name
        self._nodes = nodes
        self._names_required = names_required

    def validate(self, request: AdmissionRequest) -> Verdict:
        if request.resource.resource != "configmaps":
            return ALLOWED
        if (request.namespace, request.name) != (self._namespace, self._name):
            return ALLOWED
        if request.operation not in ("CREATE", "UPDATE"):
            return ALLOWED
        new = decode_object(bytes(request.object), ConfigMap, obj=request.ref)
        before: Mapping[str, str] = {}
        if request.operation == "UPDATE":
            before = decode_object(bytes(request.old_object), ConfigMap, obj=request.ref).data
        changed = [key for key in MEMBERS if new.data.get(key) != before.get(key)]
        problem = self.problem(new.data, changed)
        return denied(problem, code=400) if problem else ALLOWED

    def problem(self, data: Mapping[str, str], changed: Iterable[str]) -> str | None:
        """Return the error text for the first problem in the changed keys, or None."""
        keys = set(changed)
        config, problems = load_slo_config(
            data, old=SLOConfig(), obj=f"ConfigMap {self._namespace}/{self._name}"
        )
        for found in problems:
            if found.key in keys and found.effect is not Effect.IGNORED:
                reason = PARSE_FAIL if "not valid JSON" in found.message else INVALID
                return reason_text(reason, found.message)
        for key, member in MEMBERS.items():
            if key not in keys or not data.get(key):
                continue
            strategies: Strategies[dict[str, Any]] = getattr(config, member)
            wrong = self._wrong(member, strategies, config)
            if wrong:
                return reason_text(INVALID, wrong)
            overlap = overlapping(strategies)
            if overlap:
                return reason_text(OVERLAP, {"config": key, "strategies": overlap})
        return self._conflict(config, keys)

    def _wrong(
        self, member: str, strategies: Strategies[dict[str, Any]], config: SLOConfig
    ) -> dict[str, str]:
        wrong: dict[str, str] = {}
        names = [entry.name for entry in strategies.entries]
        for index, entry in enumerate(strategies.entries):
            if entry.selector is None or entry.selector.is_empty():
                wrong[f"entry {entry.name or index}: nodeSelector"] = (
                    "selects nothing in particular"
                )
            if self._names_required and (not entry.name or names.count(entry.name) > 1):
                wrong[f"entry {entry.name or index}: name"] = "must be given once"
        bandwidth = config.system.cluster.get("totalNetworkBandwidth", "0")
        places = [("cluster", strategies.cluster, bandwidth)]
        for entry in strategies.entries:
            own = next(
                (
                    other.strategy.get("totalNetworkBandwidth", "0")
                    for other in config.system.entries
                    if other.selector == entry.selector
                ),
                bandwidth,
            )
            places.append((f"entry {entry.name}", entry.strategy, own))
        for where, strategy, total in places:
            for field, text in strategy_problems(member, strategy, total):
                wrong[f"{where}: {field}"] = text
        return wrong

    def _conflict(self, config: SLOConfig, keys: set[str]) -> str | None:
        several = [
            (key, getattr(config, member))
            for key, member in MEMBERS.items()
            if key in keys and len(getattr(config, member).entries) > 1
        ]
        if not several:
            return None
        for node in self._nodes():
            labels = node.metadata.labels
            for key, strategies in several:
                names = [e.name for e in strategies.entries if matches(e.selector, labels)]
                if len(names) > 1:
                    return reason_text(
                        CONFLICT,
                        {
                            "config": key,
                            "strategies": names,
                            "exampleNodes": [node.metadata.name],
                        },
                    )
        return None


def strategy_problems(
    member: str, strategy: Mapping[str, Any], total_bandwidth: str
) -> list[tuple[str, str]]:
    """Return (field, what is wrong) of one merged strategy."""
    wrong = _out_of_range(strategy, _RANGES.get(member, {}))
    if member == "cpu_normalization":
        for model, ratios in (strategy.get("ratioModel") or {}).items():
            for field, text in _out_of_range(ratios, dict.fromkeys(ratios, _NORMALIZATION)):
                wrong.append((f"ratioModel[{model}].{field}", text))
    if member == "resource_amplification":
        ratios = strategy.get("resourceAmplificationRatio") or {}
        for field, text in _out_of_range(ratios, dict.fromkeys(ratios, _AMPLIFICATION)):
            wrong.append((f"resourceAmplificationRatio.{field}", text))
    if member == "threshold":
        for lower, upper in _PAIRS:
            low, high = strategy.get(lower), strategy.get(upper)
            if low is not None and high is not None and low >= high:
                wrong.append((lower, f"{low} is not below {upper} {high}"))
            # These two have no default: a node could not act on one alone.
            if (low is None) != (high is None) and lower not in _DEFAULTED_LOWERS:
                wrong.append((lower, f"goes together with {upper}"))
    if member == "resource_qos":
        for name in _CLASSES:
            block = strategy.get(name) or {}
            for field, text in _out_of_range(block.get("memoryQOS") or {}, _MEMORY_RANGES):
                wrong.append((f"{name}.memoryQOS.{field}", text))
            cache = block.get("resctrlQOS") or {}
            start = cache.get("catRangeStartPercent", 0)
            end = cache.get("catRangeEndPercent", 100)
            if start >= end:
                wrong.append(
                    (f"{name}.resctrlQOS.catRangeStartPercent", f"{start} is not below {end}")
                )
        wrong += _network_problems(strategy, total_bandwidth)
    return wrong


def _out_of_range(
    strategy: Mapping[str, Any], ranges: Mapping[str, Range]
) -> list[tuple[str, str]]:
    wrong = []
    for field, (low, high) in ranges.items():
        value = strategy.get(field)
        if not isinstance(value, int | float):
            continue
        if (low is not None and value < low) or (high is not None and value > high):
            shown = f"{'' if low is None else low}..{'' if high is None else high}"
            wrong.append((field, f"{value} is outside {shown}"))
    return wrong


def _network_problems(strategy: Mapping[str, Any], total: str) -> list[tuple[str, str]]:
    wrong: list[tuple[str, str]] = []
    total_bits = parse_quantity(total).value()
    for member in ("ingressRequest", "egressRequest"):
        percent = 0
        bits = 0
        for name in ("lsrClass", "lsClass", "beClass"):
            network = (strategy.get(name) or {}).get("networkQOS") or {}
            rate = network.get(member, 0)
            try:
                if isinstance(rate, int):
                    bandwidth_bits(rate, total_bits=0)
                    percent += rate
                else:
                    bits += bandwidth_bits(rate, total_bits=0)
            except ValueError as error:
                wrong.append((f"{name}.networkQOS.{member}", str(error)))
        # LSR pods share LS's class: requests add up over what the link can carry.
        if percent > 100:
            wrong.append((member, f"requests of all classes sum up to {percent} percent"))
        elif total_bits and bits + total_bits * percent // 100 > total_bits:
            wrong.append((member, f"requests of all classes exceed the bandwidth {total}"))
    return wrong


def overlapping(strategies: Strategies[dict[str, Any]]) -> list[str]:
    """Return the names of entries that one node, made for one of them, would match; else []."""
    # Reviews wait for each other: many entries get fewer nodes each. Real nodes are judged besides.
    share = max(1, min(_MOST_VIRTUAL_NODES, _MOST_MATCHES // max(1, len(strategies.entries)) ** 2))
    for entry in strategies.entries:
        if entry.selector is None:
            continue
        for labels in itertools.islice(virtual_nodes(entry.selector), share):
            names = [other.name for other in strategies.entries if matches(other.selector, labels)]
            if len(names) > 1:
                return names
    return []


def virtual_nodes(selector: LabelSelector) -> Iterable[dict[str, str]]:
    """Yield label sets that satisfy a selector: every combination of the values that it names."""
    choices: dict[str, list[str | None]] = {
        key: [value] for key, value in selector.match_labels.items()
    }
    for requirement in selector.match_expressions:
        if requirement.key in choices:
            continue
        match requirement.operator:
            case "In":
                choices[requirement.key] = list(requirement.values)
            case "NotIn":
                choices[requirement.key] = [None, _other_than(requirement.values)]
            case "Exists":
                choices[requirement.key] = ["any"]
            case _:
                choices[requirement.key] = [None]
    combinations = itertools.product(*choices.values())
    for values in itertools.islice(combinations, _MOST_VIRTUAL_NODES):
        labels = {
            key: value for key, value in zip(choices, values, strict=True) if value is not None
        }
        if matches(selector, labels):
            yield labels


def _other_than(values: Iterable[str]) -> str:
    taken = set(values)
    return next(f"other{n}" for n in itertools.count() if f"other{n}" not in taken)
