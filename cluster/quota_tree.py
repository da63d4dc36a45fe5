"""Elastic quotas as a tree, and the rules that a change of a quota must keep.

The tree is computed from the cached objects. Validation does not change it, so a dry run or a later
rejection leaves no quota behind that does not exist. Rules: docs/facts/manager.md, "Rules of
elastic quotas".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from apis.decode import decode_field, field_decoder
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_QUOTA_GUARANTEED,
    ANNOTATION_QUOTA_MAX_STRICT_CHECK_RESOURCE_KEYS,
    ANNOTATION_QUOTA_NAMESPACES,
    ANNOTATION_QUOTA_SHARED_WEIGHT,
    DEFAULT_QUOTA,
    LABEL_QUOTA_ALLOW_FORCE_UPDATE,
    LABEL_QUOTA_ALLOW_LENT_RESOURCE,
    LABEL_QUOTA_IS_PARENT,
    LABEL_QUOTA_IS_ROOT,
    LABEL_QUOTA_PARENT,
    LABEL_QUOTA_TREE_ID,
    ROOT_QUOTA,
    SYSTEM_QUOTA,
)
from apis.quantity import ZERO, Quantity, ResourceList, add_resources
from apis.quota import ElasticQuota

BUILT_IN: Final = frozenset({ROOT_QUOTA, SYSTEM_QUOTA, DEFAULT_QUOTA})

_decode_names = field_decoder(tuple[str, ...])
_decode_resources = field_decoder(ResourceList)


def resource_annotation(quota: ElasticQuota, key: str) -> ResourceList:
    """Return the resource list of an annotation, empty when it is absent. Raises InputError."""
    text = quota.metadata.annotations.get(key)
    if not text:
        return {}
    return decode_field(
        _decode_resources, text, obj=quota_ref(quota), field=f'metadata.annotations["{key}"]'
    )


def names_annotation(quota: ElasticQuota, key: str) -> tuple[str, ...]:
    """Return the list of names of an annotation, empty when it is absent. Raises InputError."""
    text = quota.metadata.annotations.get(key)
    if not text:
        return ()
    return decode_field(
        _decode_names, text, obj=quota_ref(quota), field=f'metadata.annotations["{key}"]'
    )


def quota_ref(quota: ElasticQuota) -> str:
    return f"ElasticQuota {quota.metadata.namespace}/{quota.metadata.name}"


def bound_namespaces(quota: ElasticQuota) -> tuple[str, ...]:
    """Return the namespaces bound to a stored quota; an unreadable annotation binds none."""
    try:
        return names_annotation(quota, ANNOTATION_QUOTA_NAMESPACES)
    except InputError:
        return ()


@dataclass(frozen=True, slots=True)
class QuotaNode:
    """One quota in the tree."""

    name: str
    namespace: str
    parent: str
    is_parent: bool
    is_root: bool
    tree_id: str
    force: bool
    lends: bool
    """Whether other quotas may use what this one does not use (`allow-lent-resource`)."""
    min: ResourceList
    max: ResourceList
    guaranteed: ResourceList = field(default_factory=dict)
    namespaces: tuple[str, ...] = ()


def quota_node(quota: ElasticQuota) -> QuotaNode:
    """Return the tree node of a quota; an unreadable annotation counts as absent."""
    labels = quota.metadata.labels
    name = quota.metadata.name
    try:
        guaranteed = resource_annotation(quota, ANNOTATION_QUOTA_GUARANTEED)
    except InputError:
        guaranteed = {}
    return QuotaNode(
        name=name,
        namespace=quota.metadata.namespace,
        parent="" if name == ROOT_QUOTA else labels.get(LABEL_QUOTA_PARENT) or ROOT_QUOTA,
        is_parent=labels.get(LABEL_QUOTA_IS_PARENT) == "true",
        is_root=labels.get(LABEL_QUOTA_IS_ROOT) == "true",
        tree_id=labels.get(LABEL_QUOTA_TREE_ID, ""),
        force=labels.get(LABEL_QUOTA_ALLOW_FORCE_UPDATE) == "true",
        lends=labels.get(LABEL_QUOTA_ALLOW_LENT_RESOURCE) != "false",
        min=quota.spec.min,
        max=quota.spec.max,
        guaranteed=guaranteed,
        namespaces=bound_namespaces(quota),
    )


class QuotaTree:
    """All quotas by name, with children and bound namespaces."""

    def __init__(self, quotas: Iterable[ElasticQuota]) -> None:
        self.nodes: dict[str, QuotaNode] = {}
        self.children: dict[str, list[QuotaNode]] = {}
        self.of_namespace: dict[str, str] = {}
        self.ambiguous: set[str] = set()
        """Names of quotas in several namespaces, created while the webhook did not run."""
        for quota in sorted(quotas, key=lambda q: (q.metadata.name, q.metadata.namespace)):
            node = quota_node(quota)
            if self.nodes.setdefault(node.name, node) is not node:
                self.ambiguous.add(node.name)
        for node in self.nodes.values():
            self.children.setdefault(node.parent, []).append(node)
            for namespace in node.namespaces:
                self.of_namespace.setdefault(namespace, node.name)

    def siblings(self, node: QuotaNode) -> list[QuotaNode]:
        """Return the other children of the node's parent."""
        return [other for other in self.children.get(node.parent, ()) if other.name != node.name]


@dataclass(frozen=True, slots=True)
class QuotaRules:
    """Which optional rules apply: gates ElasticQuotaGuaranteeUsage and
    ElasticQuotaEnableUpdateResourceKey.
    """

    guarantee_usage: bool = False
    update_resource_key: bool = False


class QuotaRefused(ValueError):
    """The change breaks a rule. The text names the quota, the rule and the amounts."""


def check_self(quota: ElasticQuota) -> None:
    """Check one quota alone. Raises QuotaRefused or InputError."""
    weight = resource_annotation(quota, ANNOTATION_QUOTA_SHARED_WEIGHT)
    for what, resources in (
        ("spec.max", quota.spec.max),
        ("spec.min", quota.spec.min),
        ("shared-weight", weight),
    ):
        negative = sorted(name for name, amount in resources.items() if amount < ZERO)
        if negative:
            raise QuotaRefused(f"{quota_ref(quota)}: {what} of {', '.join(negative)} is negative")
    for name, amount in quota.spec.min.items():
        if name not in quota.spec.max:
            raise QuotaRefused(f"{quota_ref(quota)}: spec.min names {name}, which spec.max lacks")
        if amount > quota.spec.max[name]:
            raise QuotaRefused(
                f"{quota_ref(quota)}: spec.min {name} {amount} is above "
                f"spec.max {quota.spec.max[name]}"
            )
    strict = names_annotation(quota, ANNOTATION_QUOTA_MAX_STRICT_CHECK_RESOURCE_KEYS)
    for name in strict:
        used = quota.status.used.get(name)
        if used is not None and (name not in quota.spec.max or quota.spec.max[name] < used):
            raise QuotaRefused(
                f"{quota_ref(quota)}: spec.max {name} {quota.spec.max.get(name, ZERO)} is below "
                f"status.used {used}"
            )


def check_create(tree: QuotaTree, quota: ElasticQuota, rules: QuotaRules) -> None:
    """Check a new quota against the tree. Raises QuotaRefused or InputError."""
    check_self(quota)
    node = quota_node(quota)
    if node.name in tree.nodes:
        known = tree.nodes[node.name]
        raise QuotaRefused(
            f"{quota_ref(quota)}: quota names must be unique in the cluster, and "
            f"ElasticQuota {known.namespace}/{known.name} exists"
        )
    _check_namespaces(tree, quota, node)
    check_place(tree, node, rules)


def check_update(
    tree: QuotaTree,
    old: ElasticQuota,
    new: ElasticQuota,
    rules: QuotaRules,
    *,
    pods: int,
) -> None:
    """Check a change of a quota.

    pods: number of pods that use the quota. Raises QuotaRefused or InputError.
    """
    if _same(old, new):
        return
    name = new.metadata.name
    if name in (ROOT_QUOTA, SYSTEM_QUOTA):
        raise QuotaRefused(f"{quota_ref(new)}: this quota cannot be modified")
    check_self(new)
    before, node = quota_node(old), quota_node(new)
    _check_namespaces(tree, new, node)
    children = tree.children.get(name, ())
    if before.is_parent and not node.is_parent and children:
        raise QuotaRefused(
            f"{quota_ref(new)}: is-parent cannot become false, the quota has "
            f"{len(children)} children, e.g. {children[0].name}"
        )
    if not before.is_parent and node.is_parent and pods:
        raise QuotaRefused(
            f"{quota_ref(new)}: is-parent cannot become true, {pods} pods use the quota"
        )
    if before.tree_id != node.tree_id:
        raise QuotaRefused(
            f"{quota_ref(new)}: tree-id cannot change from {before.tree_id!r} to {node.tree_id!r}"
        )
    check_place(tree, node, rules)


def check_delete(tree: QuotaTree, quota: ElasticQuota, *, pods: Iterable[str]) -> None:
    """Check a deletion. pods: namespace/name of pods that use the quota. Raises QuotaRefused."""
    name = quota.metadata.name
    if name in BUILT_IN:
        raise QuotaRefused(f"{quota_ref(quota)}: this quota cannot be deleted")
    children = tree.children.get(name, ())
    if children:
        raise QuotaRefused(f"{quota_ref(quota)}: it has children, e.g. {children[0].name}")
    using = sorted(pods)
    if using:
        raise QuotaRefused(
            f"{quota_ref(quota)}: {len(using)} pods use it, e.g. {', '.join(using[:2])}"
        )


def _same(old: ElasticQuota, new: ElasticQuota) -> bool:
    labels = (LABEL_QUOTA_PARENT, LABEL_QUOTA_IS_PARENT, LABEL_QUOTA_TREE_ID)
    return (
        all(old.metadata.labels.get(key) == new.metadata.labels.get(key) for key in labels)
        and old.metadata.annotations.get(ANNOTATION_QUOTA_NAMESPACES)
        == new.metadata.annotations.get(ANNOTATION_QUOTA_NAMESPACES)
        and old.spec == new.spec
    )


def _check_namespaces(tree: QuotaTree, quota: ElasticQuota, node: QuotaNode) -> None:
    for namespace in names_annotation(quota, ANNOTATION_QUOTA_NAMESPACES):
        owner = tree.of_namespace.get(namespace)
        if owner is not None and owner != node.name:
            raise QuotaRefused(
                f"{quota_ref(quota)}: namespace {namespace} is bound to quota {owner}"
            )


def check_place(tree: QuotaTree, node: QuotaNode, rules: QuotaRules) -> None:
    """Check a quota against its parent and its children. Raises QuotaRefused."""
    if node.name == ROOT_QUOTA:
        return
    ref = f"ElasticQuota {node.namespace}/{node.name}"
    children = [child for child in tree.children.get(node.name, ()) if child.name != node.name]
    parent = tree.nodes.get(node.parent)
    top = node.parent == ROOT_QUOTA
    _check_cycle(tree, node, ref)
    if not top and parent is not None and parent.tree_id != node.tree_id:
        raise QuotaRefused(
            f"{ref}: tree-id {node.tree_id!r} differs from parent {parent.name}'s "
            f"{parent.tree_id!r}"
        )
    for child in children:
        if child.tree_id != node.tree_id:
            raise QuotaRefused(
                f"{ref}: tree-id {node.tree_id!r} differs from child {child.name}'s "
                f"{child.tree_id!r}"
            )
    if top and not node.is_parent:
        return
    if not top:
        if parent is None:
            raise QuotaRefused(f"{ref}: parent {node.parent} does not exist")
        if not parent.is_parent:
            raise QuotaRefused(
                f"{ref}: parent {node.parent} is not a parent quota; label it "
                f"{LABEL_QUOTA_IS_PARENT}=true"
            )
        _check_keys(ref, node, parent, rules)
    for child in children:
        _check_keys(f"ElasticQuota {child.namespace}/{child.name}", child, node, rules)
    if not (node.force or node.is_root):
        if not top and parent is not None:
            _check_min_sum(ref, [*tree.siblings(node), node], parent)
        _check_min_sum(ref, children, node)
    if rules.guarantee_usage and not node.force and node.tree_id and not node.is_root:
        _check_guarantee(tree, node, ref)


def _check_cycle(tree: QuotaTree, node: QuotaNode, ref: str) -> None:
    seen = {node.name}
    at = node.parent
    while at and at != ROOT_QUOTA:
        if at in seen:
            raise QuotaRefused(
                f"{ref}: parent {node.parent} leads back to the quota itself (a cycle)"
            )
        seen.add(at)
        above = tree.nodes.get(at)
        if above is None:
            return
        at = above.parent


def _check_keys(ref: str, child: QuotaNode, parent: QuotaNode, rules: QuotaRules) -> None:
    ours, theirs = set(child.max), set(parent.max)
    wrong = ours - theirs if rules.update_resource_key else ours ^ theirs
    if wrong:
        raise QuotaRefused(
            f"{ref}: keys of spec.max differ from those of parent {parent.name}: "
            f"{', '.join(sorted(wrong))}"
        )
    extra = set(child.min) - set(parent.min)
    if extra:
        raise QuotaRefused(
            f"{ref}: spec.min names {', '.join(sorted(extra))}, which spec.min of parent "
            f"{parent.name} lacks"
        )


def _check_min_sum(ref: str, members: Iterable[QuotaNode], parent: QuotaNode) -> None:
    summed = add_resources(*(member.min for member in members))
    for name, amount in sorted(summed.items()):
        limit = parent.min.get(name, ZERO)
        if amount > limit:
            raise QuotaRefused(
                f"{ref}: the children of {parent.name} have spec.min {name} {amount} in all, "
                f"above its own {limit}"
            )


def _check_guarantee(tree: QuotaTree, node: QuotaNode, ref: str) -> None:
    if all(amount <= node.guaranteed.get(name, ZERO) for name, amount in node.min.items()):
        return
    need = _larger(node.min, node.guaranteed)
    at = node
    while True:
        parent = tree.nodes.get(at.parent)
        if parent is None or at.parent == ROOT_QUOTA:
            raise QuotaRefused(f"{ref}: no ancestor guarantees enough for spec.min")
        others = add_resources(*(other.guaranteed for other in tree.siblings(at)))
        need = _larger(parent.min, add_resources(need, others))
        if all(amount <= parent.guaranteed.get(name, ZERO) for name, amount in need.items()):
            return
        at = parent


def _larger(left: Mapping[str, Quantity], right: Mapping[str, Quantity]) -> ResourceList:
    return {name: max(left.get(name, ZERO), right.get(name, ZERO)) for name in {*left, *right}}


def quota_of_pod(
    labels: Mapping[str, str],
    namespace: str,
    *,
    label: str,
    exists: Mapping[str, object],
    of_namespace: Mapping[str, str],
    default: str = DEFAULT_QUOTA,
) -> str:
    """Return the quota that a pod counts against, "" for none.

    exists: quotas by namespace/name. The first of these decides: the label, the quota that has the
    name of the pod's namespace and is in it, the quota that the namespace is bound to, `default`.
    """
    named = labels.get(label)
    if named:
        return named
    if not default:
        return ""
    if f"{namespace}/{namespace}" in exists:
        return namespace
    return of_namespace.get(namespace, default)
