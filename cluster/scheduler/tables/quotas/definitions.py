"""An ElasticQuota as the scheduler uses it, parsed and checked on its own.

Amounts of quotas are Python integers without the bound of `tables.amounts`: "no limit" is commonly
written as a large part of 2^63, and sums of such limits must not overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from apis.errors import InputError
from apis.keys import (
    ANNOTATION_QUOTA_NAMESPACES,
    ANNOTATION_QUOTA_SHARED_WEIGHT,
    ANNOTATION_QUOTA_TOTAL_RESOURCE,
    ANNOTATION_QUOTA_UNSCHEDULABLE_RESOURCE,
    CPU,
    DEPRECATED_RESOURCES,
    LABEL_QUOTA_IGNORE_DEFAULT_TREE,
    MEMORY,
    ROOT_QUOTA,
)
from apis.quantity import Quantity, ResourceList
from apis.quota import ElasticQuota
from cluster.quota_tree import names_annotation, quota_node, quota_ref, resource_annotation
from cluster.scheduler.tables.amounts import Amounts

_BINARY: Final = frozenset({MEMORY, "ephemeral-storage"})
"""Resources whose amounts print with binary suffixes, as users write them."""


@dataclass(frozen=True, slots=True)
class QuotaDefinition:
    """What a user says about a quota.

    parent: name of the quota above it. tree: id of its tree, "" for the default tree. weight: by
    resource name, for each name of `most`. total: the resources of the tree, where the quota is the
    root of a tree; None elsewhere. outside_default: the resources of that tree stay in the default
    tree too. unschedulable: of these, what lies on nodes that take no pods; it is shown and decides
    nothing. created: RFC 3339 text of the API server, which sorts by time.
    """

    name: str
    namespace: str
    parent: str
    is_parent: bool
    tree: str
    lends: bool
    least: Amounts
    most: Amounts
    weight: Amounts
    namespaces: tuple[str, ...] = ()
    total: Amounts | None = None
    outside_default: bool = False
    unschedulable: Amounts = field(default_factory=dict)
    created: str = ""

    @property
    def key(self) -> str:
        """Return namespace/name."""
        return f"{self.namespace}/{self.name}"


def whole_amount(name: str, quantity: Quantity) -> int:
    """Return milli-cores of cpu and whole units of everything else, without a bound."""
    return quantity.milli_value() if name == CPU else quantity.value()


def whole_amounts(resources: ResourceList) -> dict[str, int]:
    """Return the amounts of a resource list under the present names of the resources."""
    result: dict[str, int] = {}
    for name, quantity in resources.items():
        present = DEPRECATED_RESOURCES.get(name, name)
        if present == name or present not in resources:
            result[present] = whole_amount(present, quantity)
    return result


def quantity_of(name: str, amount: int) -> Quantity:
    """Return an amount as a quantity in the notation that users expect of the resource."""
    if name == CPU:
        return Quantity.of_milli(amount)
    return Quantity.of_bytes(amount) if name in _BINARY else Quantity.of(amount)


def define(quota: ElasticQuota) -> QuotaDefinition:
    """Return the definition of a quota. Raises InputError with the field that cannot be used."""
    ref = quota_ref(quota)
    node = quota_node(quota)
    least, most = whole_amounts(quota.spec.min), whole_amounts(quota.spec.max)
    weight_field = f'metadata.annotations["{ANNOTATION_QUOTA_SHARED_WEIGHT}"]'
    weight = whole_amounts(resource_annotation(quota, ANNOTATION_QUOTA_SHARED_WEIGHT))
    for at, amounts in (("spec.min", least), ("spec.max", most), (weight_field, weight)):
        for name, amount in amounts.items():
            if amount < 0:
                raise InputError(
                    obj=ref,
                    field=f"{at}.{name}",
                    value=str(quantity_of(name, amount)),
                    problem="must not be negative",
                )
    for name, amount in least.items():
        if name in most and amount > most[name]:
            raise InputError(
                obj=ref,
                field=f"spec.min.{name}",
                value=str(quantity_of(name, amount)),
                problem=f"must not be above spec.max, which is {quantity_of(name, most[name])}",
            )
    total, unschedulable = None, {}
    if node.is_root and quota.metadata.annotations.get(ANNOTATION_QUOTA_TOTAL_RESOURCE):
        total = whole_amounts(resource_annotation(quota, ANNOTATION_QUOTA_TOTAL_RESOURCE))
        unschedulable = whole_amounts(
            resource_annotation(quota, ANNOTATION_QUOTA_UNSCHEDULABLE_RESOURCE)
        )
    return QuotaDefinition(
        name=node.name,
        namespace=node.namespace,
        parent=node.parent or ROOT_QUOTA,
        is_parent=node.is_parent,
        tree=node.tree_id,
        lends=node.lends,
        least=least,
        most=most,
        weight=_weight(weight, most),
        namespaces=names_annotation(quota, ANNOTATION_QUOTA_NAMESPACES),
        total=total,
        outside_default=quota.metadata.labels.get(LABEL_QUOTA_IGNORE_DEFAULT_TREE) == "true",
        unschedulable=unschedulable,
        created=quota.metadata.creation_timestamp or "",
    )


def _weight(weight: Mapping[str, int], most: Mapping[str, int]) -> dict[str, int]:
    """Return the shared weight: `max`, unless the annotation names an amount other than 0."""
    if not any(weight.values()):
        return dict(most)
    return {name: weight.get(name, 0) for name in most}
