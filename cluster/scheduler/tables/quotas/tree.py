"""One quota in its tree: what its pods request and use, and what it may use now (its runtime).

Requests and uses are added up as pods come and go, from the quota to the top. Runtime is worked out
when it is asked for: while the children of a parent request no more than the parent has, each has
what it requests, and nothing needs to be divided; else the division of one resource is kept until
a request, a minimum or the total of that parent changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.quotas.definitions import QuotaDefinition
from cluster.scheduler.tables.quotas.sharing import Claim, Columns, divide, scaled_minimum


@dataclass(frozen=True, slots=True)
class Sharing:
    """How runtime is worked out. scale: minimums are reduced where the total is short.

    guarantee: what a quota uses stays guaranteed to it (ElasticQuotaGuaranteeUsage).
    """

    scale: bool = True
    guarantee: bool = False


@dataclass(slots=True)
class Counts:
    """Amounts by resource name, without those of 0. firm_*: of pods that are not preemptible."""

    request: Counter[str] = field(default_factory=Counter)
    used: Counter[str] = field(default_factory=Counter)
    firm_request: Counter[str] = field(default_factory=Counter)
    firm_used: Counter[str] = field(default_factory=Counter)


class QuotaNode:
    """A quota with its children. The top of a tree is a node without a parent.

    own: counts of its own pods. all: of these and of the pods of all quotas below it; `all.request`
    is the sum of the children's limited requests and the own one.
    """

    __slots__ = (
        "_claims",
        "_columns",
        "_limited",
        "_sharing",
        "_summed",
        "_total",
        "_weightless",
        "all",
        "children",
        "definition",
        "own",
        "parent",
    )

    def __init__(
        self,
        definition: QuotaDefinition,
        parent: QuotaNode | None,
        sharing: Sharing,
        *,
        total: Callable[[str], int] | None = None,
    ) -> None:
        """total: of the top of a tree, the amount of a resource that the tree has. A quota without
        parent and total has its maximum."""
        self.definition = definition
        self.parent = parent
        self.children: dict[str, QuotaNode] = {}
        self.own = Counts()
        self.all = Counts()
        self._sharing = sharing
        self._total = total
        self._columns: dict[str, tuple[int, Mapping[str, int]]] = {}
        """Resource name -> (what was divided, runtime by the child's name)."""
        self._claims: dict[str, Columns | None] = {}
        """Resource name -> the claims of the children, None if they are out of NumPy's bounds."""
        self._weightless: Counter[str] = Counter()
        """Resource name -> how many children have no weight for it."""
        self._limited: dict[str, int] = {}
        self._summed: dict[str, int] = {}
        """Resource name -> sum of the children's minimums."""
        if parent is not None:
            parent.children[definition.name] = self
            parent._weigh(definition, 1)
            parent._forget_claims()
            self._limit(definition.most)

    @property
    def name(self) -> str:
        return self.definition.name

    def path(self) -> Iterator[QuotaNode]:
        """Yield the quota and those above it, without the top of the tree."""
        at: QuotaNode = self
        while at.parent is not None:
            yield at
            at = at.parent

    # --- counting ------------------------------------------------------------------------------

    def add_request(self, requests: Amounts, times: int, *, firm: bool) -> None:
        """Count `times` more pods that want these amounts; negative for fewer."""
        for counter in (self.own.request, self.all.request):
            _add(counter, requests, times)
        if firm:
            _add(self.own.firm_request, requests, times)
            for node in self._and_above():
                _add(node.all.firm_request, requests, times)
        self._limit(requests)

    def add_used(self, requests: Amounts, times: int, *, firm: bool) -> None:
        """Count `times` more pods that have a node; negative for fewer."""
        _add(self.own.used, requests, times)
        if firm:
            _add(self.own.firm_used, requests, times)
        for node in self._and_above():
            _add(node.all.used, requests, times)
            if firm:
                _add(node.all.firm_used, requests, times)
            if self._sharing.guarantee:
                for name in requests:
                    node._columns.pop(name, None)
                    node._claims.pop(name, None)

    def redefine(self, definition: QuotaDefinition) -> None:
        """Take other amounts. Name, parent, tree and the names of resources stay as they are."""
        before, parent = self.definition, self.parent
        self.definition = definition
        for node in self._and_above():
            # A minimum counts in what is guaranteed to all quotas above.
            node._forget_claims()
        if parent is not None:
            parent._weigh(before, -1)
            parent._weigh(definition, 1)
            self._limit(definition.most)

    def _forget_claims(self) -> None:
        self._columns.clear()
        self._claims.clear()
        self._summed.clear()

    def _and_above(self) -> Iterator[QuotaNode]:
        at: QuotaNode | None = self
        while at is not None:
            yield at
            at = at.parent

    def _weigh(self, definition: QuotaDefinition, sign: int) -> None:
        for name, weight in definition.weight.items():
            if weight == 0:
                self._weightless[name] += sign

    def _limit(self, names: Mapping[str, int]) -> None:
        """Hand changes of the limited request of these resources up."""
        parent = self.parent
        if parent is None:
            return
        changed = {}
        for name in names:
            if name not in self.definition.most:
                continue
            limited = min(self.request(name), self.definition.most[name])
            before = self._limited.get(name, 0)
            if limited != before:
                self._limited[name] = limited
                parent._columns.pop(name, None)
                claims = parent._claims.get(name)
                if claims is not None and not claims.set_request(self.name, limited):
                    parent._claims[name] = None
                changed[name] = limited - before
        if changed:
            _add(parent.all.request, changed, 1)
            parent._limit(changed)

    # --- reading -------------------------------------------------------------------------------

    @property
    def lends(self) -> bool:
        return self.definition.lends and not self._sharing.guarantee

    def request(self, name: str) -> int:
        """Return what the quota asks of its parent, before its maximum is applied."""
        wanted = self.all.request[name]
        return wanted if self.lends else max(wanted, self.definition.least.get(name, 0))

    def allocated(self, name: str) -> int:
        """Return what is taken of the guarantee: own use, and the guarantees of the children."""
        return self.own.used[name] + sum(child.guaranteed(name) for child in self.children.values())

    def guaranteed(self, name: str) -> int:
        """Return what no other quota can take away; 0 without ElasticQuotaGuaranteeUsage."""
        if not self._sharing.guarantee:
            return 0
        return max(self.allocated(name), self.definition.least.get(name, 0))

    def runtime(self, name: str) -> int:
        """Return how much of a resource the quota may use now."""
        if self.parent is not None:
            return self.parent._runtime_of(self, name)
        if self._total is not None:
            return self._total(name)
        return self.definition.most.get(name, 0)

    def runtimes(self) -> dict[str, int]:
        """Return the runtime of each resource that the quota limits."""
        return {name: self.runtime(name) for name in self.definition.most}

    def scaled_least(self) -> dict[str, int]:
        """Return the minimum as it counts now, reduced if the parent's total is short."""
        parent, least = self.parent, dict(self.definition.least)
        if parent is None or not self._sharing.scale:
            return least
        return {
            name: scaled_minimum(parent._for_children(name), own, parent._summed_least(name))
            for name, own in least.items()
        }

    def _summed_least(self, name: str) -> int:
        """Return the sum of the children's minimums."""
        summed = self._summed.get(name)
        if summed is None:
            minimums = (child.definition.least.get(name, 0) for child in self.children.values())
            summed = self._summed[name] = sum(minimums)
        return summed

    def _for_children(self, name: str) -> int:
        """Return what the children divide: the runtime less what the quota's own pods use."""
        return self.runtime(name) - self.own.used.get(name, 0)

    def _runtime_of(self, child: QuotaNode, name: str) -> int:
        total = self._for_children(name)
        wanted = self.all.request.get(name, 0) - self.own.request.get(name, 0)
        if wanted <= total and not self._weightless.get(name) and not self._sharing.guarantee:
            return child._limited.get(name, 0)
        column = self._columns.get(name)
        if column is None or column[0] != total:
            column = self._columns[name] = (total, self._divided(name, total))
        return column[1].get(child.name, 0)

    def _divided(self, name: str, total: int) -> Mapping[str, int]:
        scale = self._sharing.scale
        if name not in self._claims:
            self._claims[name] = Columns.of(self._made_claims(name))
        columns = self._claims[name]
        if columns is not None:
            shares = columns.divide(total, scale=scale)
            if shares is not None:
                return dict(zip(columns.names, shares.tolist(), strict=True))
        claims = self._made_claims(name)
        exact = divide(total, claims, scale=scale)
        return {claim.name: share for claim, share in zip(claims, exact, strict=True)}

    def _made_claims(self, name: str) -> list[Claim]:
        return [
            Claim(
                name=child.name,
                request=child._limited.get(name, 0),
                least=child.definition.least.get(name, 0),
                weight=child.definition.weight.get(name, 0),
                lends=child.lends,
                guaranteed=child.guaranteed(name),
            )
            for _, child in sorted(self.children.items())
            if name in child.definition.most
        ]


def _add(counter: Counter[str], amounts: Mapping[str, int], times: int) -> None:
    """Add `times` the amounts; what becomes 0 is left out, so equal counts compare equal."""
    for name, amount in amounts.items():
        if amount and times:
            counter[name] += times * amount
            if not counter[name]:
                del counter[name]
