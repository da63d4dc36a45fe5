"""The CustomResourceDefinitions, derived from the types: one truth for reader and API server.

Field types give the schema; `Meta(extra_json_schema=...)` adds what only the schema needs (formats,
enums, server-side defaults), `Meta(extra=...)` says where schema and reader differ on purpose:
`required` (the CRD demands it, a reader can do without) and `node_only` (a reader refuses what the
CRD lets pass).

Docstrings give the descriptions, which `kubectl explain` shows: the first paragraph describes the
type, each entry `field_name: text` a field, and other paragraphs are for readers of the code. A
type or a field without a description is an error. docs/facts/apis.md, "Kinds".
"""

from __future__ import annotations

import inspect as inspect_python
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import inspect

from apis.analysis import Recommendation
from apis.decode import Wire
from apis.device import Device
from apis.network_topology import ClusterNetworkTopology
from apis.nodemetric import NodeMetric
from apis.nodeslo import NodeSLO
from apis.profile import ClusterColocationProfile
from apis.quantity import Quantity
from apis.quota import ElasticQuota, ElasticQuotaProfile, PodGroup
from apis.schedule_explanation import ScheduleExplanation
from apis.scheduling import PodMigrationJob, Reservation
from apis.topology import NodeResourceTopology

_INT_OR_STRING: Final[dict[str, Any]] = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
}
_QUANTITY: Final[dict[str, Any]] = {
    **_INT_OR_STRING,
    "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
}
_FORMAT_BOUNDS: Final = frozenset({-(2**31), 2**31 - 1, -(2**63), 2**63 - 1})


@dataclass(frozen=True, slots=True)
class Column:
    """A column that kubectl prints."""

    name: str
    path: str
    type: str = "string"


_AGE: Final = Column("Age", ".metadata.creationTimestamp", "date")


@dataclass(frozen=True, slots=True)
class Version:
    """One served version of a kind; `added` and `required` adjust the top level of its schema."""

    name: str
    storage: bool
    required: tuple[str, ...] = ()
    added: tuple[tuple[str, str, str], ...] = ()
    """(name, path of the property whose schema it has, description)"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind that the project installs."""

    type: type[Wire]
    group: str
    plural: str
    cluster_scoped: bool
    status_subresource: bool
    short_names: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    versions: tuple[Version, ...] = (Version("v1alpha1", storage=True),)
    approval: str = ""

    @property
    def name(self) -> str:
        return self.type.__name__

    @property
    def crd_name(self) -> str:
        return f"{self.plural}.{self.group}"


_SCHEDULER_PLUGINS: Final = "https://github.com/kubernetes-sigs/scheduler-plugins/pull/52"

KINDS: Final[tuple[Kind, ...]] = (
    Kind(NodeSLO, "slo.koordinator.sh", "nodeslos", True, True),
    Kind(NodeMetric, "slo.koordinator.sh", "nodemetrics", True, True),
    Kind(Device, "scheduling.koordinator.sh", "devices", True, False),
    Kind(
        Reservation,
        "scheduling.koordinator.sh",
        "reservations",
        True,
        True,
        columns=(
            Column("Phase", ".status.phase"),
            _AGE,
            Column("Node", ".status.nodeName"),
            Column("TTL", ".spec.ttl"),
            Column("Expires", ".spec.expires"),
        ),
    ),
    Kind(
        PodMigrationJob,
        "scheduling.koordinator.sh",
        "podmigrationjobs",
        True,
        True,
        short_names=("pmj",),
        columns=(
            Column("Phase", ".status.phase"),
            Column("Status", ".status.status"),
            _AGE,
            Column("Node", ".status.nodeName"),
            Column("Reservation", ".spec.reservationOptions.reservationRef.name"),
            Column("PodNamespace", ".spec.podRef.namespace"),
            Column("Pod", ".spec.podRef.name"),
            Column("NewPod", ".status.podRef.name"),
            Column("TTL", ".spec.ttl"),
        ),
    ),
    Kind(
        ClusterNetworkTopology, "scheduling.koordinator.sh", "clusternetworktopologies", True, True
    ),
    Kind(
        ScheduleExplanation,
        "scheduling.koordinator.sh",
        "scheduleexplanations",
        False,
        True,
        short_names=("sched-exp",),
    ),
    Kind(
        ElasticQuota,
        "scheduling.sigs.k8s.io",
        "elasticquotas",
        False,
        False,
        approval=_SCHEDULER_PLUGINS,
    ),
    Kind(
        PodGroup, "scheduling.sigs.k8s.io", "podgroups", False, False, approval=_SCHEDULER_PLUGINS
    ),
    Kind(
        ElasticQuotaProfile,
        "quota.koordinator.sh",
        "elasticquotaprofiles",
        False,
        False,
        short_names=("eqp",),
    ),
    Kind(
        ClusterColocationProfile, "config.koordinator.sh", "clustercolocationprofiles", True, True
    ),
    Kind(
        Recommendation,
        "analysis.koordinator.sh",
        "recommendations",
        False,
        True,
        short_names=("recom",),
        columns=(
            _AGE,
            Column("Type", ".spec.target.type"),
            Column("Kind", ".spec.target.workload.kind"),
            Column("Name", ".spec.target.workload.name"),
            Column("LastUpdateTime", ".status.updateTime", "date"),
        ),
    ),
    Kind(
        NodeResourceTopology,
        "topology.node.k8s.io",
        "noderesourcetopologies",
        True,
        False,
        short_names=("node-res-topo",),
        versions=(
            Version("v1alpha1", storage=False, required=("topologyPolicies", "zones")),
            Version(
                "v1alpha2",
                storage=True,
                required=("zones",),
                added=(
                    (
                        "attributes",
                        "zones.items.properties.attributes",
                        "Further facts about the node.",
                    ),
                ),
            ),
        ),
        approval="https://github.com/kubernetes/enhancements/pull/1870",
    ),
)
"""Every kind that is installed."""


def custom_resource_definition(kind: Kind) -> dict[str, Any]:
    """Return the manifest of `kind`'s CustomResourceDefinition (apiextensions.k8s.io/v1)."""
    lower = kind.name.lower()
    names: dict[str, Any] = {
        "kind": kind.name,
        "listKind": f"{kind.name}List",
        "plural": kind.plural,
        "singular": lower,
    }
    if kind.short_names:
        names["shortNames"] = list(kind.short_names)
    metadata: dict[str, Any] = {"name": kind.crd_name}
    if kind.approval:
        metadata["annotations"] = {"api-approved.kubernetes.io": kind.approval}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": metadata,
        "spec": {
            "group": kind.group,
            "names": names,
            "scope": "Cluster" if kind.cluster_scoped else "Namespaced",
            "versions": [_version(kind, version) for version in kind.versions],
        },
    }


def _version(kind: Kind, version: Version) -> dict[str, Any]:
    schema = _object(kind.type, top=True)
    schema["properties"] = {
        "apiVersion": {
            "description": "API group and version of the object, such as "
            f"{kind.group}/{version.name}.",
            "type": "string",
        },
        "kind": {"description": f"Kind of the object: {kind.name}.", "type": "string"},
        **schema["properties"],
        "metadata": {"type": "object"},
    }
    for name, path, description in version.added:
        found: Any = schema["properties"]
        for step in path.split("."):
            found = found[step]
        schema["properties"][name] = {**found, "description": description}
    if version.required:
        schema["required"] = list(version.required)
    result: dict[str, Any] = {
        "name": version.name,
        "served": True,
        "storage": version.storage,
        "schema": {"openAPIV3Schema": schema},
    }
    if kind.columns:
        result["additionalPrinterColumns"] = [
            {"name": column.name, "jsonPath": column.path, "type": column.type}
            for column in kind.columns
        ]
    if kind.status_subresource:
        result["subresources"] = {"status": {}}
    return result


def _object(type_: type[msgspec.Struct], *, top: bool = False) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    required: list[str] = []
    info = inspect.type_info(type_)
    assert isinstance(info, inspect.StructType)
    described = _descriptions(type_, [member.name for member in info.fields])
    for member in info.fields:
        if top and member.encode_name == "metadata":
            properties["metadata"] = {"type": "object"}
            continue
        schema, demanded = _schema(member.type)
        if member.name not in described:
            raise ValueError(f"the docstring of {type_.__name__} does not describe {member.name}")
        schema.pop("description", "")  # of the field's type, which the field's own replaces
        properties[member.encode_name] = {"description": described[member.name], **schema}
        if demanded or member.required:
            required.append(member.encode_name)
    result: dict[str, Any] = {
        "description": described[""],
        "type": "object",
        **getattr(type_, "crd", {}),
    }
    if properties:
        result["properties"] = properties
    if required:
        result["required"] = sorted(required)
    return result


def _descriptions(type_: type[msgspec.Struct], names: Sequence[str]) -> dict[str, str]:
    """Return what the docstring of a type says of its fields, and under "" of itself."""
    document = inspect_python.cleandoc(type_.__doc__ or "")
    lead, *paragraphs = document.split("\n\n")
    if not lead:
        raise ValueError(f"{type_.__name__} has no docstring")
    described = {"": " ".join(lead.split())}
    for paragraph in paragraphs:
        name = ""
        for line in paragraph.splitlines():
            first, colon, rest = line.partition(": ")
            if colon and first in names:
                name, described[first] = first, rest
            elif name and line.startswith(" "):
                described[name] += " " + line.strip()
            else:
                name = ""
    return described


def _schema(type_: inspect.Type) -> tuple[dict[str, Any], bool]:
    """Return (schema, whether the CRD requires the field)."""
    added: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    while isinstance(type_, inspect.Metadata):
        added = {**(type_.extra_json_schema or {}), **added}
        extra = {**(type_.extra or {}), **extra}
        type_ = type_.type
    if isinstance(type_, inspect.UnionType):
        members = [m for m in type_.types if not isinstance(m, inspect.NoneType)]
        if len(members) == 1:
            schema, demanded = _schema(members[0])
            return {**schema, **added}, demanded or bool(extra.get("required"))
        return {**_INT_OR_STRING, **added}, bool(extra.get("required"))
    bare = bool(extra.get("node_only"))
    schema = {} if extra.get("schemaless") else _bare(type_, unbounded=bare)
    return {**schema, **added}, bool(extra.get("required"))


def _bare(type_: inspect.Type, *, unbounded: bool) -> dict[str, Any]:
    match type_:
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.IntType(ge=low, le=high):
            schema: dict[str, Any] = {"type": "integer"}
            if not unbounded and low is not None and low not in _FORMAT_BOUNDS:
                schema["minimum"] = low
            if not unbounded and high is not None and high not in _FORMAT_BOUNDS:
                schema["maximum"] = high
            return schema
        case inspect.StrType(max_length=longest):
            if unbounded or longest is None:
                return {"type": "string"}
            return {"type": "string", "maxLength": longest}
        case inspect.EnumType():
            return {"type": "string"}
        case inspect.CustomType(cls=cls) if cls is Quantity:
            return dict(_QUANTITY)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return {"type": "array", "items": _schema(item)[0]}
        case inspect.DictType(value_type=value):
            if isinstance(value, inspect.AnyType):
                return {"type": "object"}
            return {"type": "object", "additionalProperties": _schema(value)[0]}
        case inspect.StructType(cls=cls):
            return _object(cls)
    raise msgspec.MsgspecError(f"no CRD schema for {type_}")
