"""The controller of ElasticQuotaProfiles: the root quota of a tree, sized by selected nodes.

A node that joins, leaves or is cordoned counts after a second, a change of its allocatable after
ten. Quantities compare by value, and only what differs is patched. A written object counts as
stored until the cache shows it, so that no patch is computed from an older object. Contents of the
quota: docs/facts/manager.md, "Quota of a profile".
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec

from apis.core import Node
from apis.decode import canonical_json, decode_field, field_decoder, json_decoder, to_plain
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_QUOTA_RESOURCE_KEYS,
    ANNOTATION_QUOTA_TOTAL_RESOURCE,
    ANNOTATION_QUOTA_UNSCHEDULABLE_RESOURCE,
    CPU,
    LABEL_QUOTA_IS_ROOT,
    LABEL_QUOTA_PROFILE,
    LABEL_QUOTA_TREE_ID,
    MEMORY,
)
from apis.meta import ObjectReference, matches, selector_problem
from apis.quantity import Notation, Quantity, ResourceList, add_resources
from apis.quota import ElasticQuota, ElasticQuotaProfile, ElasticQuotaSpec
from cluster.node_reservation import without_reserved
from kube.cache import Cache, Change, Event
from kube.client import ApiError, Client, encode_object
from kube.events import EventRecorder
from kube.own_writes import BELIEVED_SECONDS, OwnWrites
from kube.queue import WorkQueue
from kube.resources import ELASTIC_QUOTAS, QUOTA_PROFILES

MAX_AMOUNT: Final = (2**63 - 1) // 2000
"""Upstream's value of `max` for "no limit". In milli-units, twice the value still fits into
int64."""

_SETTLE_SECONDS: Final = 1.0
"""After a node joined, left or was cordoned. Chosen: nodes often come in groups, and each reconcile
sums up all nodes."""
_AMOUNTS_SETTLE_SECONDS: Final = 10.0
"""After a change of a node's allocatable: upstream's interval. Batch resources of some node change
all the time; with a tenth of the value a large cluster sums up all nodes every second."""
_decode_keys = field_decoder(tuple[str, ...])
_decode_quota = json_decoder(ElasticQuota)
_decode_profile = json_decoder(ElasticQuotaProfile)


def tree_id(namespace: str, name: str) -> str:
    """Return the tree id of a profile, as upstream: decimal FNV-1a (64 bit) of namespace/name.

    Offset basis and prime are those of the hash's definition.
    """
    value = 0xCBF29CE484222325
    for byte in f"{namespace}/{name}".encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return str(value)


def is_ready(node: Node) -> bool:
    """Return whether new pods can be scheduled to a node: not cordoned, and Ready."""
    if node.spec.unschedulable:
        return False
    return any(
        condition.type == "Ready" and condition.status == "True"
        for condition in node.status.conditions
    )


def scaled(resources: ResourceList, ratio: str | None) -> ResourceList:
    """Return amounts times a ratio in (0, 1], truncated: cpu to milli-cores, others to units.

    Any other ratio counts as 1, as upstream. So does a text of more than 32 characters, which keeps
    the arithmetic small.
    """
    if ratio is None:
        return resources
    try:
        factor = Decimal(ratio) if len(ratio) <= 32 else Decimal(1)
    except InvalidOperation:
        factor = Decimal(1)
    if not factor.is_finite() or not 0 < factor <= 1:
        factor = Decimal(1)
    top, bottom = factor.as_integer_ratio()
    result: ResourceList = {}
    for name, amount in resources.items():
        if name == CPU:
            result[name] = Quantity.of_milli(amount.milli_value() * top // bottom)
        else:
            notation = Notation.BINARY_SI if name == MEMORY else Notation.DECIMAL_SI
            result[name] = Quantity.of(amount.value() * top // bottom, notation)
    return result


def _offered(node: Node) -> ResourceList:
    """Return what pods can have of a node: the scheduler counts as much for its trees of quotas."""
    meta = node.metadata
    return without_reserved(node.status.allocatable, meta.annotations, obj=f"Node {meta.name}")


def totals(nodes: Iterable[Node], ratio: str | None) -> tuple[ResourceList, ResourceList]:
    """Return (what all nodes offer, what those offer that take no pods), times the ratio."""
    every = list(nodes)
    total = add_resources(*(_offered(node) for node in every))
    missing = add_resources(*(_offered(node) for node in every if not is_ready(node)))
    return scaled(total, ratio), scaled(missing, ratio)


def wanted_quota(
    profile: ElasticQuotaProfile, nodes: Iterable[Node], *, tree: str, keys: tuple[str, ...]
) -> tuple[ElasticQuotaSpec, dict[str, str], dict[str, str]]:
    """Return the desired (spec, labels, annotations) of the profile's quota."""
    selector = profile.spec.node_selector
    picked = [node for node in nodes if matches(selector, node.metadata.labels)]
    total, missing = totals(picked, profile.spec.resource_ratio)
    spec = ElasticQuotaSpec(
        min={key: total.get(key, Quantity(0)) for key in keys},
        max={key: Quantity.of(MAX_AMOUNT) for key in keys},
    )
    labels = {
        LABEL_QUOTA_PROFILE: profile.metadata.name,
        **profile.spec.quota_labels,
        LABEL_QUOTA_TREE_ID: tree,
        LABEL_QUOTA_IS_ROOT: "true",
    }
    annotations = {
        ANNOTATION_QUOTA_TOTAL_RESOURCE: canonical_json(total),
        ANNOTATION_QUOTA_UNSCHEDULABLE_RESOURCE: canonical_json(missing),
    }
    return spec, labels, annotations


def resource_keys(profile: ElasticQuotaProfile) -> tuple[str, ...]:
    """Return the resources that the profile's quota limits. Raises InputError."""
    text = profile.metadata.annotations.get(ANNOTATION_QUOTA_RESOURCE_KEYS)
    if not text:
        return (CPU, MEMORY)
    return decode_field(
        _decode_keys,
        text,
        obj=f"ElasticQuotaProfile {profile.metadata.namespace}/{profile.metadata.name}",
        field=f'metadata.annotations["{ANNOTATION_QUOTA_RESOURCE_KEYS}"]',
    )


class QuotaProfileController:
    """Keeps one ElasticQuota for each ElasticQuotaProfile."""

    name = "quotaprofile"

    def __init__(
        self,
        client: Client,
        profiles: Cache[ElasticQuotaProfile],
        quotas: Cache[ElasticQuota],
        nodes: Cache[Node],
        events: EventRecorder,
    ) -> None:
        self._client = client
        self._profiles = profiles
        self._quotas = quotas
        self._nodes = nodes
        self._events = events
        self.queue = WorkQueue(self.name)
        self.writes = 0
        self._own_profiles: OwnWrites[ElasticQuotaProfile] = OwnWrites()
        self._own_quotas: OwnWrites[ElasticQuota] = OwnWrites()
        profiles.subscribe(self._own_profiles.seen)
        profiles.subscribe(lambda event: self.queue.add(event.key))
        quotas.subscribe(self._own_quotas.seen)
        quotas.subscribe(self._quota_changed)
        nodes.subscribe(self._node_changed)

    def _quota_changed(self, event: Event[ElasticQuota]) -> None:
        name = event.new.metadata.labels.get(LABEL_QUOTA_PROFILE)
        if name:
            self.queue.add(f"{event.new.metadata.namespace}/{name}")

    def _node_changed(self, event: Event[Node]) -> None:
        old, new = event.old, event.new
        if (
            event.change is not Change.MODIFIED
            or old is None
            or old.metadata.labels != new.metadata.labels
            or is_ready(old) != is_ready(new)
        ):
            pause = _SETTLE_SECONDS
        elif _offered(old) != _offered(new):
            pause = _AMOUNTS_SETTLE_SECONDS
        else:
            return
        for key in self._profiles.items:
            self.queue.add_after(key, pause)

    async def reconcile(self, key: str) -> float | None:
        """Write the quota of one profile if it differs.

        Returns seconds until the next reconcile while the cache does not show an own write: if it
        never does, the cache counts again after that time.
        """
        namespace, _, name = key.partition("/")
        cached = self._profiles.get(name, namespace=namespace)
        if cached is None:
            self._own_profiles.forget(key)
            self.queue.forget(key)
            return None
        profile = self._own_profiles.latest(key, cached) or cached
        about = ObjectReference(
            api_version=QUOTA_PROFILES.api_version,
            kind=QUOTA_PROFILES.kind,
            namespace=namespace,
            name=name,
            uid=profile.metadata.uid,
        )
        selector = profile.spec.node_selector
        problem = selector_problem(selector) if selector is not None else "nodeSelector is missing"
        if problem:
            self._events.warning(about, "UpdateQuotaFailed", f"spec.nodeSelector: {problem}")
            return None
        tree = profile.metadata.labels.get(LABEL_QUOTA_TREE_ID)
        if not tree:
            tree = tree_id(namespace, name)
            body = {"metadata": {"labels": {LABEL_QUOTA_TREE_ID: tree}}}
            stored = await self._client.patch(
                QUOTA_PROFILES, name, msgspec.json.encode(body), namespace=namespace
            )
            self.writes += 1
            self._own_profiles.note(_decode_profile(stored))
        try:
            keys = resource_keys(profile)
        except InputError as error:
            self._events.warning(about, "InvalidResourceKeys", str(error))
            keys = (CPU, MEMORY)
        try:
            await self._write(profile, tree, keys)
        except ApiError as error:
            known = self._quotas.get(profile.spec.quota_name, namespace=namespace) is not None
            reason = "UpdateQuotaFailed" if known else "CreateQuotaFailed"
            self._events.warning(about, reason, str(error))
            raise
        return BELIEVED_SECONDS if self._own_quotas else None

    async def _write(self, profile: ElasticQuotaProfile, tree: str, keys: tuple[str, ...]) -> None:
        namespace, name = profile.metadata.namespace, profile.spec.quota_name
        spec, labels, annotations = wanted_quota(
            profile, self._nodes.items.values(), tree=tree, keys=keys
        )
        key = f"{namespace}/{name}"
        stored = self._own_quotas.latest(key, self._quotas.get(name, namespace=namespace))
        if stored is None:
            body = encode_object(
                ELASTIC_QUOTAS,
                {
                    "metadata": {
                        "name": name,
                        "namespace": namespace,
                        "labels": labels,
                        "annotations": annotations,
                    },
                    "spec": to_plain(spec),
                },
            )
            try:
                made = await self._client.create(ELASTIC_QUOTAS, body, namespace=namespace)
            except ApiError as error:
                # Created by another writer; the event of the quota requeues the profile.
                if not error.already_exists:
                    raise
                return
            self.writes += 1
            self._own_quotas.note(_decode_quota(made))
            return
        patch: dict[str, Any] = {}
        if stored.spec != spec:
            patch["spec"] = _removing(to_plain(stored.spec), to_plain(spec))
        metadata: dict[str, Any] = {}
        for part, wanted, present in (
            ("labels", labels, stored.metadata.labels),
            ("annotations", annotations, stored.metadata.annotations),
        ):
            changed = {key: text for key, text in wanted.items() if present.get(key) != text}
            if changed:
                metadata[part] = changed
        if metadata:
            patch["metadata"] = metadata
        if not patch:
            return
        try:
            made = await self._client.patch(
                ELASTIC_QUOTAS, name, msgspec.json.encode(patch), namespace=namespace
            )
        except ApiError as error:
            if error.not_found:
                self._own_quotas.forget(key)
            raise
        self.writes += 1
        self._own_quotas.note(_decode_quota(made))


def _removing(stored: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return a merge patch of `min` and `max` that also removes keys that are not wanted."""
    return {
        part: {
            **dict.fromkeys(set(stored.get(part, {})) - set(wanted.get(part, {}))),
            **wanted.get(part, {}),
        }
        for part in ("min", "max")
    }
