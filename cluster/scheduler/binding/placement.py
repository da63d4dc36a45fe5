"""A decided placement as requests, and what a pod as read says about it.

One Binding binds and records: its annotations end up on the pod in the same write. A PATCH goes
before it only for what a Binding does not carry on every supported server: labels, and the removal
of annotations. docs/facts/scheduler.md, "Bindings".
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import msgspec

from cluster.scheduler.tables.booking import NO_VOLUMES, PlannedVolumes

_MOST_ANNOTATION_BYTES: Final = 256 * 1024
"""Keys and values of one object; the API server's limit, which it does not apply to a Binding. A
pod beyond it could be bound, and refused every later write. What is checked is what is added."""
_KEY: Final = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
"""A qualified name of Kubernetes, a little wider than its DNS subdomain prefix."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A pod and the node that it goes to.

    annotations, labels: set on the pod, over what is there. removed_annotations: keys.
    volumes: written, and bound, before the pod. lock: annotation of the node that is taken before
    the pod is bound, "" for none; see `node_locks`. delegated: an extender binds the pod, so the
    annotations are patched before.
    """

    namespace: str
    name: str
    uid: str
    node: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    removed_annotations: tuple[str, ...] = ()
    volumes: PlannedVolumes = NO_VOLUMES
    lock: str = ""
    delegated: bool = False

    @property
    def key(self) -> str:
        """Return namespace/name."""
        return f"{self.namespace}/{self.name}"


class Why(enum.Enum):
    """Why the API server did not bind."""

    DELETED = "deleted"
    """The pod does not exist any more, or is being deleted."""
    OTHER_UID = "another pod of this name"
    BOUND_ELSEWHERE = "bound by another decision"
    """To another node, or to the same one without what this placement records."""
    CONFLICT = "conflict"
    """The pod changed since the decision, or cannot be bound as it is (scheduling gates)."""
    LOCKED = "the node is locked"
    """A device plugin is handing devices of the node to another pod."""
    FORBIDDEN = "forbidden"
    """Rights, a policy or an admission webhook refuse it."""
    INVALID = "invalid"
    """The placement cannot be written: names, keys or sizes."""
    FAILING = "the API server fails"
    """It answers every try with an error of its own (5xx), and the pod is not bound."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The pod is bound as decided, with what the placement records."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The pod is not bound by this placement, and will not be."""

    why: Why
    message: str


Outcome = Bound | Refused


def defect_of(placement: Placement) -> str:
    """Return why a placement must not be sent, "" if nothing speaks against it."""
    for what, text in (
        ("namespace", placement.namespace),
        ("name", placement.name),
        ("uid", placement.uid),
        ("node", placement.node),
    ):
        if not text:
            return f"the placement has no {what}"
    for key in (*placement.annotations, *placement.labels, *placement.removed_annotations):
        if not _is_key(key):
            return f"{key[:100]!r} is not a valid key of an annotation or label"
    size = sum(
        len(key.encode()) + len(value.encode()) for key, value in placement.annotations.items()
    )
    if size > _MOST_ANNOTATION_BYTES:
        return f"the placement has {size} bytes of annotations, of {_MOST_ANNOTATION_BYTES}"
    return ""


@lru_cache(maxsize=1024)
def _is_key(key: str) -> bool:
    return _KEY.fullmatch(key) is not None


def binding_body(placement: Placement) -> bytes:
    """Return the Binding. Its uid is a precondition on the pod."""
    metadata: dict[str, Any] = {
        "name": placement.name,
        "namespace": placement.namespace,
        "uid": placement.uid,
    }
    if placement.annotations:
        metadata["annotations"] = placement.annotations
    return _ENCODER.encode(
        {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"kind": "Node", "name": placement.node},
        }
    )


def patch_body(placement: Placement) -> bytes | None:
    """Return the merge patch that has to go before the Binding, None if there is none."""
    annotations: dict[str, str | None] = dict.fromkeys(placement.removed_annotations)
    if placement.delegated:
        annotations |= placement.annotations
    if not placement.labels and not annotations:
        return None
    metadata: dict[str, Any] = {"uid": placement.uid}
    if placement.labels:
        metadata["labels"] = placement.labels
    if annotations:
        metadata["annotations"] = annotations
    return _ENCODER.encode({"metadata": metadata})


def _mapping(value: object) -> object:
    """Encode mappings that are not dicts."""
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} in a request")


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_mapping)


class _Metadata(msgspec.Struct, rename="camel"):
    uid: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Spec(msgspec.Struct, rename="camel"):
    node_name: str | None = None


class PodAsRead(msgspec.Struct):
    """As much of a pod as an outcome depends on."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)


pod_as_read: Final = msgspec.json.Decoder(PodAsRead).decode


def outcome_of(placement: Placement, pod: PodAsRead | None) -> Outcome | None:
    """Return the outcome that a pod shows; None while it is not bound and still can be.

    pod: as stored, read after the last write; None if there is no pod of the name.
    """
    if pod is None:
        return Refused(Why.DELETED, f"pod {placement.key} does not exist any more")
    if pod.metadata.uid != placement.uid:
        return Refused(
            Why.OTHER_UID,
            f"pod {placement.key} has uid {pod.metadata.uid} now, not {placement.uid}",
        )
    node = pod.spec.node_name
    if node:
        stored = pod.metadata.annotations or {}
        other = [key for key, value in placement.annotations.items() if stored.get(key) != value]
        if node == placement.node and not other:
            return Bound()
        without = f", where {', '.join(other)} differ" if node == placement.node else ""
        return Refused(
            Why.BOUND_ELSEWHERE,
            f"pod {placement.key} is bound to {node}{without}, not to {placement.node} as decided",
        )
    if pod.metadata.deletion_timestamp is not None:
        return Refused(Why.DELETED, f"pod {placement.key} is being deleted")
    return None
