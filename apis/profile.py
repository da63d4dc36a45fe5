"""ClusterColocationProfile: which pods join co-location, and how. Source: api.md section 11."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire, json_decoder
from apis.meta import AnyJson, Int32, LabelSelector


class ClusterColocationProfileSpec(Wire, frozen=True):
    namespace_selector: LabelSelector | None = None
    selector: LabelSelector | None = None
    probability: int | str | None = None
    qos_class: Annotated[
        str, Meta(extra_json_schema={"enum": ["LSE", "LSR", "LS", "BE", "SYSTEM"]})
    ] = ""
    priority_class_name: str = ""
    koordinator_priority: Int32 | None = None
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    label_keys_mapping: dict[str, str] = field(default_factory=dict)
    annotation_keys_mapping: dict[str, str] = field(default_factory=dict)
    label_suffixes: dict[str, str] = field(default_factory=dict)
    scheduler_name: str = ""
    patch: AnyJson = None


class ClusterColocationProfileStatus(Wire, frozen=True):
    """Always empty."""


class ClusterColocationProfile(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: ClusterColocationProfileSpec = ClusterColocationProfileSpec()
    status: ClusterColocationProfileStatus = ClusterColocationProfileStatus()


decode_profile: Final = json_decoder(ClusterColocationProfile)
