"""Which nodes a gang gets in the network, and how near nodes are to a job, as slow plain code.

Written from docs/scheduler.md, "Network topology", and upstream's rules, not from the columns. A
domain is the path to it: () is the cluster, (spine,), (spine, rack) and (spine, rack, node).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Domain = tuple[str, ...]

LAYERS = ("SpineLayer", "RackLayer", "NodeTopologyLayer")
_DEPTH = len(LAYERS)


def path(name: str, spine: str, rack: str) -> Domain | None:
    """Return where a node is, None outside of the network. Without a rack it is one of its own."""
    return (spine, rack or name, name) if spine else None


@dataclass
class Oracle:
    """paths: node -> its path. headroom: pods of the gang that nodes take. existing: pods of the
    job on nodes. multiples: of the number of pods in a domain, by layer."""

    paths: Mapping[str, Domain | None]
    headroom: Mapping[str, int]
    existing: Mapping[str, int]
    scores: Mapping[str, int] = field(default_factory=dict)
    multiples: Mapping[str, int] = field(default_factory=dict)

    def domains(self, depth: int) -> list[Domain]:
        return sorted({each[:depth] for each in self.paths.values() if each is not None})

    def below(self, domain: Domain) -> list[Domain]:
        depth = len(domain)
        return [each for each in self.domains(depth + 1) if each[:depth] == domain]

    def nodes(self, domain: Domain) -> list[str]:
        depth = len(domain)
        return [name for name, each in self.paths.items() if each and each[:depth] == domain]

    def multiple(self, domain: Domain) -> int:
        return self.multiples.get(LAYERS[len(domain) - 1], 1) if domain else 1

    def slots(self, domain: Domain) -> int:
        if len(domain) == _DEPTH:
            found = self.headroom[domain[-1]]
        else:
            found = sum(self.slots(each) for each in self.below(domain))
        return found // self.multiple(domain) * self.multiple(domain)

    def score(self, domain: Domain) -> int:
        return sum(
            self.scores.get(name, 0)
            for name in self.nodes(domain)
            if self.slots(self.paths[name] or ())
        )

    def rank(self, domain: Domain, *, widest: bool = False) -> tuple[object, ...]:
        """Return what sorts domains, the best first: level by level from the domain upwards."""
        upwards = [domain[:depth] for depth in range(len(domain), -1, -1)]
        existing = [-sum(self.existing[name] for name in self.nodes(each)) for each in upwards]
        slots = [self.slots(each) * (-1 if widest else 1) for each in upwards]
        return existing, slots, -self.score(domain), domain[::-1]

    def gather(self, pods: int, must: str = "") -> dict[str, int] | None:
        """Return the pods of each node, in the order of filling. must: the lowest layer that has to
        be gathered."""
        candidates: list[Domain] = []
        for depth in range(LAYERS.index(must) + 1 if must else 0, _DEPTH + 1):
            level = [
                each
                for each in self.domains(depth)
                if self.slots(each) >= pods and (not candidates or each[:-1] in candidates)
            ]
            if not level:
                break
            candidates = level
        for candidate in sorted(candidates, key=self.rank):
            found = self.fill(candidate, pods)
            if sum(found.values()) == pods:
                return found
        return None

    def fill(self, domain: Domain, pods: int) -> dict[str, int]:
        most = min(pods, self.slots(domain)) // self.multiple(domain) * self.multiple(domain)
        if len(domain) == _DEPTH:
            return {domain[-1]: most} if most else {}
        found: dict[str, int] = {}
        for each in sorted(self.below(domain), key=lambda each: self.rank(each, widest=True)):
            found |= self.fill(each, most - sum(found.values()))
        return found if sum(found.values()) % self.multiple(domain) == 0 else {}

    def nearness(self) -> dict[str, int]:
        """Return the scores of the nodes with headroom, which is 1 each: the nearest has 100."""

        def rank(name: str) -> tuple[object, ...]:
            where = self.paths[name]
            return (1, -self.existing[name], name) if where is None else (0, self.rank(where))

        order = sorted((name for name, slots in self.headroom.items() if slots), key=rank)
        last = max(len(order) - 1, 1)
        if len(order) == 1:
            return {order[0]: 100}
        return {name: 100 - position * 100 // last for position, name in enumerate(order)}
