"""ClusterColocationProfile: which pods join co-location, and how."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire
from apis.meta import AnyJson, Int32, LabelSelector


class ClusterColocationProfileSpec(Wire, frozen=True):
    """Which pods join co-location, and what they get at admission.

    namespace_selector: Labels of the namespaces whose pods are meant; all namespaces if not set.
    selector: Labels of the pods that are meant.
    probability: Share of the pods that get the settings, as a percentage such as 50%.
    qos_class: QoS class that the pods get: LSE, LSR, LS, BE or SYSTEM.
    priority_class_name: Priority class that the pods get, with its value and preemption policy.
    koordinator_priority: Value of the label koordinator.sh/priority.
    labels: Labels that the pods get, over their own.
    annotations: Annotations that the pods get, over their own.
    label_keys_mapping: Copies label values: from the key on the left to the key on the right.
    annotation_keys_mapping: Copies annotation values: from the key on the left to the key on the
        right.
    label_suffixes: Text that is appended to the value of a label, by label key.
    scheduler_name: Scheduler that the pods get.
    patch: Strategic merge patch of the pods, applied last.
    """

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
    """Reserved; it has no members."""


class ClusterColocationProfile(Wire, frozen=True):
    """Selects pods for co-location when they are created, and says what they get.

    spec: Which pods join co-location, and what they get at admission.
    status: Reserved; it has no members.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: ClusterColocationProfileSpec = ClusterColocationProfileSpec()
    status: ClusterColocationProfileStatus = ClusterColocationProfileStatus()
