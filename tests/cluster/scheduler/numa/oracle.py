"""What NodeNUMAResource decides about one node, as slow plain code: reasons, score, allocation.

Written from the rules of docs/scheduler.md, "NodeNUMAResource", for machines whose cores are all
alike. It sees no columns and no masks: every set of NUMA nodes is looked at one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

from cluster.scheduler.tables.numa.cpu_topology import Cpu
from tests.cluster.scheduler.exact.cpu_oracle import Machine, take

MISMATCH = "node(s) NUMA Topology policy not match"
FRACTION = "the requested CPUs must be integer"
INVALID = "node(s) invalid CPU Topology"
CONFLICT = "node(s) cpu bind policy conflicts with pod's required cpu bind policy"
MULTIPLE = "node(s) requested cpus not multiple cpus per core"
AMPLIFIED = "Insufficient amplified cpu"
NOT_ENOUGH = "not enough cpus available to satisfy request"
NO_ZONES = "node(s) missing NUMA resources"
NO_ROOM = "node(s) Insufficient NUMA Node resources"
UNALIGNED = "Unaligned NUMA Hint"
CONTRADICTIONS = {MISMATCH, FRACTION, INVALID, CONFLICT, MULTIPLE, AMPLIFIED}

Set = tuple[int, ...]
"""Ids of NUMA nodes, ascending."""


@dataclass
class Strategy:
    """How nodes, or sets of NUMA nodes, are scored."""

    most: bool = False
    weights: dict[str, int] = field(default_factory=lambda: {"cpu": 1, "memory": 1})


@dataclass
class Rules:
    """Arguments of the plugin. default: "full" or "spread", or "" for no binding."""

    default: str = "full"
    scoring: Strategy = field(default_factory=Strategy)
    numa_scoring: Strategy = field(default_factory=Strategy)
    wider_restricted: bool = False
    lse_shares_cores: bool = False


@dataclass
class Placed:
    """A pod on the node. numa: NUMA id -> amounts. exclusive: its CPU policy, "" for none."""

    cpus: set[int] = field(default_factory=set)
    numa: dict[int, dict[str, int]] = field(default_factory=dict)
    lse: bool = False
    exclusive: str = ""
    requests: dict[str, int] = field(default_factory=dict)


@dataclass
class Node:
    """machine: None where the node reports no CPUs. ids: of the machine's NUMA nodes, in order.

    zones: NUMA id -> amounts as reported; `amplified` says that the report has ratios of its own
    and so has its amounts amplified already. ratio: of cpu, in hundredths. bind: "", "full!" or
    "spread!". policy, strategy: "" for none. allocatable: without what the node reserves.
    """

    machine: Machine | None
    ids: Sequence[int]
    zones: dict[int, dict[str, int]]
    reserved: set[int] = field(default_factory=set)
    ratio: int = 100
    amplified: bool = False
    pods: list[Placed] = field(default_factory=list)
    policy: str = ""
    bind: str = ""
    strategy: str = ""
    allocatable: dict[str, int] = field(default_factory=dict)

    @property
    def cpus(self) -> list[Cpu]:
        return _cpus(self.machine, tuple(self.ids)) if self.machine else []

    def amplify(self, milli: int) -> int:
        return -(-milli * self.ratio // 100)


@lru_cache(maxsize=1)
def _cpus(machine: Machine, ids: Set) -> list[Cpu]:
    return [cpu._replace(numa=ids[cpu.numa]) for cpu in machine.cpus()]


@dataclass
class Wish:
    """binding: of the pod alone: "", "default", "full", "full!", "spread" or "spread!"; an
    exclamation mark stands for required. policy, exclusive: as the pod states them."""

    amounts: dict[str, int]
    binding: str = "default"
    qos: str = "LSR"
    policy: str = ""
    exclusive: str = ""
    cpu_exclusive: str = ""


@dataclass
class Verdict:
    """reasons: empty if the node takes the pod; then what it gets, and the node's score."""

    reasons: set[str]
    cpus: set[int] = field(default_factory=set)
    numa: dict[int, dict[str, int]] = field(default_factory=dict)
    score: int = 0


def decide(node: Node, wish: Wish, rules: Rules) -> Verdict:
    """Return the verdict of one node on a pod. One that requests nothing is not looked at."""
    if not any(wish.amounts.values()):
        return Verdict(set())
    return _Case(node, wish, rules).verdict()


class _Case:
    def __init__(self, node: Node, wish: Wish, rules: Rules) -> None:
        self.node, self.wish, self.rules = node, wish, rules
        self.milli = wish.amounts.get("cpu", 0)
        self.count = self.milli // 1000
        own = wish.binding if wish.qos in ("LSE", "LSR") and self.milli else ""
        self.own = rules.default if own == "default" else own
        self.binding = node.bind if node.bind and self.milli else self.own
        self.threads = node.machine.threads if node.machine else 1
        self.policy = wish.policy or node.policy
        self.exclusive = wish.exclusive
        if wish.policy and not wish.exclusive:
            self.exclusive = "Preferred" if wish.policy == "BestEffort" else "Required"
        self.usable = self._usable()
        listed = {name for amounts in node.zones.values() for name in amounts}
        self.needed = {n: a for n, a in wish.amounts.items() if n in listed and a}
        if self.binding:
            self.needed["cpu"] = self.count
        ids = sorted(node.zones)
        self.sets = [c for size in range(1, len(ids) + 1) for c in combinations(ids, size)]
        self.able = [s for s in self.sets if self._fits(s, empty=True)]
        self.good = [s for s in self.sets if self._fits(s)]

    def verdict(self) -> Verdict:
        reasons = self._reasons()
        if reasons:
            return Verdict(reasons)
        if not self.policy or not self.needed:
            cpus = self._take(self._within_limits(), self.count) if self.binding else set()
            return Verdict(set(), cpus, {}, self._score_of_node())
        chosen = self._ranked()[0]
        cpus, numa = self._divided(chosen)
        return Verdict(set(), cpus, numa, self._score_of(chosen, self.rules.scoring))

    # --- reasons ---------------------------------------------------------------------------------

    def _reasons(self) -> set[str]:
        node, wish = self.node, self.wish
        contradictions = {
            MISMATCH: node.policy and wish.policy and node.policy != wish.policy,
            FRACTION: self.binding and self.milli % 1000,
            INVALID: self.binding and node.machine is None,
            CONFLICT: self.milli and {node.bind, self.own} == {"full!", "spread!"},
            MULTIPLE: self.binding == "full!" and self.count % self.threads,
            AMPLIFIED: self._short_of_amplified(),
        }
        found = {reason for reason, holds in contradictions.items() if holds}
        if found:
            return found
        if self.binding and len(self._within_limits()) < self.count:
            return {NOT_ENOUGH}
        if not self.policy:
            return set()
        if not node.zones:
            return {NO_ZONES}
        if not self.needed or self._ranked():
            return set()
        if self.good:
            return {UNALIGNED}
        short = {
            f"Insufficient NUMA {name}"
            for name, amount in self.needed.items()
            if sum(self._room(numa, name) for numa in node.zones) < amount
        }
        return short or {NO_ROOM}

    def _short_of_amplified(self) -> bool:
        if self.node.ratio == 100 or not self.milli:
            return False
        request = self.node.amplify(self.milli) if self.binding else self.milli
        return request > self.node.allocatable["cpu"] - self._requested("cpu")

    def _requested(self, name: str) -> int:
        """Return what the pods of the node request; CPUs of their own count amplified."""
        requested = sum(pod.requests.get(name, 0) for pod in self.node.pods)
        bound = 1000 * len({cpu for pod in self.node.pods for cpu in pod.cpus})
        if name == "cpu" and requested >= bound:
            requested += self.node.amplify(bound) - bound
        return requested

    # --- room ------------------------------------------------------------------------------------

    def _usable(self) -> set[int]:
        """Return the CPUs that the pod may get by its class and by a required bind policy."""
        node, result = self.node, set[int]()
        alone = self.wish.qos == "LSE" and not self.rules.lse_shares_cores
        taken = node.reserved | {cpu for pod in node.pods for cpu in pod.cpus}
        for core in {cpu.core for cpu in node.cpus}:
            cpus = {cpu.id for cpu in node.cpus if cpu.core == core}
            if alone and any(pod.lse and pod.cpus & cpus for pod in node.pods):
                continue
            free = sorted(cpus - taken)
            if self.binding == "full!" and len(free) < len(cpus):
                continue
            result |= set(free[:1] if self.binding == "spread!" else free)
        return result

    def _bindable(self, numa: int) -> int:
        """Return how many more CPUs may be bound, so that pods with amounts of cpu keep theirs."""
        given, bound = 0, 0
        for pod in self.node.pods:
            if pod.cpus:
                bound += len(pod.cpus & self._there(numa) - self.node.reserved)
            else:
                given += pod.numa.get(numa, {}).get("cpu", 0)
        there = len(self._there(numa) - self.node.reserved)
        if not any("cpu" in pod.numa.get(numa, {}) for pod in self.node.pods if not pod.cpus):
            return there
        return max(
            0, (self.node.amplify(1000) * (there - bound) - given) // self.node.amplify(1000)
        )

    def _within_limits(self) -> set[int]:
        """Return the usable CPUs without those beyond what may be bound of each NUMA node."""
        result = set(self.usable)
        for numa in self.node.ids:
            there = self.usable & self._there(numa)
            most = self._bindable(numa)
            if self.binding == "full!":
                most -= most % self.threads
            if len(there) > most:
                result -= there
                result |= self._take(there, most)
        return result

    def _total(self, numa: int, name: str) -> int:
        amount = self.node.zones[numa].get(name, 0)
        if name != "cpu":
            return amount
        reserved = 1000 * len(self._there(numa) & self.node.reserved)
        if self.node.amplified:
            return max(0, amount - self.node.amplify(reserved))
        return self.node.amplify(max(0, amount - reserved))

    def _free(self, numa: int, name: str) -> int:
        used = 0
        for pod in self.node.pods:
            amount = pod.numa.get(numa, {}).get(name, 0)
            if name == "cpu" and pod.cpus:
                # Its CPUs count where they are, and as recorded where that is not known.
                here = 1000 * len(self._there(numa) & pod.cpus)
                amount = self.node.amplify(here if self.node.machine else amount)
            used += amount
        return max(0, self._total(numa, name) - used)

    def _there(self, numa: int) -> set[int]:
        return {cpu.id for cpu in self.node.cpus if cpu.numa == numa}

    def _room(self, numa: int, name: str, *, empty: bool = False) -> int:
        """Return what a NUMA node can give. cpu of bound pods is counted in CPUs."""
        amount = self._total(numa, name) if empty else self._free(numa, name)
        if name != "cpu" or not self.binding:
            return amount
        all_of_it = {cpu.id for cpu in self.node.cpus} - self.node.reserved
        cpus = len(self._there(numa) & (all_of_it if empty else self.usable))
        if any("cpu" in amounts for amounts in self.node.zones.values()):
            cpus = min(cpus, amount // self.node.amplify(1000))
        if not empty:
            cpus = min(cpus, self._bindable(numa))
        return cpus - cpus % self.threads if self.binding == "full!" else cpus

    def _fits(self, numas: Set, *, empty: bool = False) -> bool:
        for name, amount in self.needed.items():
            rooms = [self._room(numa, name, empty=empty) for numa in numas]
            if min(rooms) == 0 or sum(rooms) < amount:
                return False
        return True

    def _mixes(self, numas: Set) -> bool:
        """Return whether pods of one NUMA node and wider ones would meet."""
        if not self.exclusive:
            return False
        widths = [spanned(self.node, pod) for pod in self.node.pods]
        for numa in numas:
            here = [len(span) for span in widths if numa in span]
            if here and ((len(numas) == 1) is (max(here) > 1)):
                return True
        return False

    # --- the choice ------------------------------------------------------------------------------

    def _ranked(self) -> list[Set]:
        """Return the sets that the policy accepts, the best first."""
        narrowest = min((len(s) for s in self.able), default=0)
        wide = self.rules.wider_restricted and self.policy == "Restricted"
        accepted = []
        for numas in self.good:
            preferred = wide or len(numas) == narrowest
            mixed = self._mixes(numas)
            if mixed and self.exclusive == "Required":
                continue
            if self.policy == "SingleNUMANode" and len(numas) > 1:
                continue
            if self.policy == "Restricted" and not preferred:
                continue
            score = self._score_of(numas, self.rules.numa_scoring)
            value = sum(1 << numa for numa in numas)
            accepted.append(((not preferred, mixed, len(numas), -score, value), numas))
        result = [numas for _, numas in sorted(accepted)]
        everything = tuple(sorted(self.node.zones))
        if self.policy == "BestEffort" and everything not in result:
            enough = all(
                sum(self._room(numa, name) for numa in everything) >= amount
                for name, amount in self.needed.items()
            )
            if enough and not (self.exclusive == "Required" and self._mixes(everything)):
                result.append(everything)
        return result

    def _divided(self, numas: Set) -> tuple[set[int], dict[int, dict[str, int]]]:
        """Return the CPUs and the amounts of each NUMA node."""
        cpus, numa = set[int](), dict[int, dict[str, int]]()
        for name, amount in self.needed.items():
            rooms = {one: self._room(one, name) for one in numas}
            bound = name == "cpu" and self.binding
            step = self.threads if bound and self.binding == "full!" else 1
            for one, share in evenly(amount, rooms, step).items():
                if bound:
                    cpus |= self._take(self.usable & self._there(one), share)
                if share:
                    numa.setdefault(one, {})[name] = 1000 * share if bound else share
        return cpus, numa

    def _take(self, available: set[int], count: int) -> set[int]:
        node = self.node
        assert node.machine is not None
        kind = self.wish.cpu_exclusive
        held = {cpu for pod in node.pods if pod.exclusive == kind for cpu in pod.cpus if kind}
        full = self.binding.startswith("full")
        strategy = node.strategy or ("MostAllocated" if self.rules.numa_scoring.most else "")

        def plain(cpus: set[int], number: int) -> set[int]:
            assert node.machine is not None
            most = strategy == "MostAllocated"
            return (
                take(node.machine, cpus, held, number, full=full, exclusive=kind, most=most)
                if number
                else set()
            )

        if strategy != "DistributeEvenly":
            return plain(available, count)
        pool, step = available, 1
        if full:
            pool, step = self._whole_cores(available), self.threads
        if len(pool) < count or count % step:
            pool, step = available, 1
        sizes = {numa: len(pool & self._there(numa)) for numa in node.ids}
        if max(sizes.values()) >= count:
            return plain(available, count)
        fewest: dict[int, int] = {}
        for numa in sorted(sizes, key=lambda numa: (-sizes[numa], numa)):
            if sum(fewest.values()) < count:
                fewest[numa] = sizes[numa]
        shares = evenly(count, fewest, step)
        return {
            cpu for numa, share in shares.items() for cpu in plain(pool & self._there(numa), share)
        }

    def _whole_cores(self, available: Iterable[int]) -> set[int]:
        cores = [cpu.core for cpu in self.node.cpus if cpu.id in available]
        return {cpu.id for cpu in self.node.cpus if cores.count(cpu.core) == self.threads}

    # --- score -----------------------------------------------------------------------------------

    def _score_of_node(self) -> int:
        total = {name: self.node.allocatable.get(name, 0) for name in self.rules.scoring.weights}
        used = {name: self._requested(name) + self._request(name) for name in total}
        return self._mean(self.rules.scoring, total, used)

    def _score_of(self, numas: Iterable[int], strategy: Strategy) -> int:
        total: dict[str, int] = {}
        used: dict[str, int] = {}
        for name in strategy.weights:
            total[name] = sum(self._total(numa, name) for numa in numas)
            free = sum(self._free(numa, name) for numa in numas)
            used[name] = total[name] - free + self._request(name)
        return self._mean(strategy, total, used)

    def _request(self, name: str) -> int:
        amount = self.wish.amounts.get(name, 0)
        return self.node.amplify(amount) if name == "cpu" and self.binding else amount

    def _mean(self, strategy: Strategy, total: Mapping[str, int], used: Mapping[str, int]) -> int:
        weighted = weights = 0
        for name, weight in strategy.weights.items():
            cap, req = total[name], used[name]
            if cap == 0 or ("/" in name and not self.wish.amounts.get(name)):
                continue
            share = min(req, cap) if strategy.most else max(0, cap - req)
            weighted += weight * (share * 100 // cap)
            weights += weight
        return weighted // weights if weights else 0


def evenly(amount: int, available: Mapping[int, int], step: int) -> dict[int, int]:
    """Divide an amount: the i-th of k takes remaining / (k - i), the one with the least first."""
    shares: dict[int, int] = {}
    for numa in sorted(available, key=lambda numa: (available[numa], numa)):
        fair = (amount - sum(shares.values())) // step // (len(available) - len(shares)) * step
        if len(shares) == len(available) - 1:
            fair = amount - sum(shares.values())
        shares[numa] = min(available[numa], fair)
    return shares


def spanned(node: Node, pod: Placed) -> set[int]:
    """Return the NUMA nodes on which a pod has CPUs, or amounts."""
    there = {cpu.numa for cpu in node.cpus if cpu.id in pod.cpus}
    for numa, amounts in pod.numa.items():
        if any(amount for name, amount in amounts.items() if not (name == "cpu" and pod.cpus)):
            there.add(numa)
    return there
