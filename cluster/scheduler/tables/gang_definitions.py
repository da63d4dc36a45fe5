"""What a gang is: read from a PodGroup, or from the annotations of a pod.

A bad optional value costs itself alone: its default holds, and the error names it. Without a usable
minimum there is no definition. Source: Koordinator's gang annotations and the PodGroup of
scheduler-plugins; docs/facts/scheduler.md, "Gangs".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from apis.core import ObjectMeta
from apis.decode import decode_field, field_decoder
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_GANG_GROUPS,
    ANNOTATION_GANG_MATCH_POLICY,
    ANNOTATION_GANG_MIN_AVAILABLE,
    ANNOTATION_GANG_MODE,
    ANNOTATION_GANG_NAME,
    ANNOTATION_GANG_TOTAL_NUMBER,
    ANNOTATION_GANG_WAITING_TIME,
    ANNOTATION_POD_GROUP_MATCH_POLICY,
    LABEL_LIGHTWEIGHT_GANG_MIN_AVAILABLE,
    LABEL_LIGHTWEIGHT_GANG_NAME,
    LABEL_POD_GROUP,
)
from apis.meta import parse_duration
from apis.quota import PodGroup
from cluster.scheduler.configuration.koordinator_arguments import GangMatchPolicy
from cluster.scheduler.tables.gather import Gather, gather_of

_NANOSECONDS: Final = 1_000_000_000
_LARGEST_NUMBER: Final = 2**31 - 1
"""minMember of a PodGroup is an int32; the annotations mean the same."""

_decode_groups = field_decoder(tuple[str, ...])


class GangMode(StrEnum):
    """What becomes of the members that have a node when another member finds none.

    STRICT: they give it back at once. NON_STRICT: they keep it until all members were tried.
    """

    STRICT = "Strict"
    NON_STRICT = "NonStrict"


@dataclass(frozen=True, slots=True)
class GangDefaults:
    """What holds where a gang does not say: from the arguments of Coscheduling.

    gathers: gangs may ask to be gathered in the network; else that is ignored.
    """

    wait_s: float = 600.0
    match_policy: GangMatchPolicy = GangMatchPolicy.ONCE_SATISFIED
    gathers: bool = False


@dataclass(frozen=True, slots=True)
class GangDefinition:
    """A gang as its owner wants it.

    id: namespace/name. min_member: pods that have to be placed together. total: pods that there
    will be. wait_s: how long a placed pod waits for the others. group: ids of the gangs that are
    placed together, this one included, sorted. gather: how the pods are to be gathered in the
    network; None where it does not matter.
    """

    id: str
    min_member: int
    total: int
    mode: GangMode
    wait_s: float
    group: tuple[str, ...]
    match_policy: GangMatchPolicy
    gather: Gather | None = None

    @property
    def group_id(self) -> str:
        """The id of the group, as it stands on bound pods."""
        return ",".join(self.group)


class GangName(NamedTuple):
    """The gang of a pod. by_pod_group: a PodGroup defines it, instead of the pods."""

    id: str
    by_pod_group: bool


class Read(NamedTuple):
    """A definition, None without a usable minimum, and what was bad about its source."""

    definition: GangDefinition | None
    errors: tuple[InputError, ...]


class _Names(Protocol):
    """The metadata of a pod, or its shape."""

    @property
    def namespace(self) -> str: ...

    @property
    def labels(self) -> Mapping[str, str]: ...

    @property
    def annotations(self) -> Mapping[str, str]: ...


def gang_name(meta: _Names) -> GangName | None:
    """Return the gang that a pod belongs to, or None."""
    name = meta.labels.get(LABEL_POD_GROUP, "")
    if name:
        return GangName(f"{meta.namespace}/{name}", by_pod_group=True)
    name = meta.labels.get(LABEL_LIGHTWEIGHT_GANG_NAME) or meta.annotations.get(
        ANNOTATION_GANG_NAME, ""
    )
    return GangName(f"{meta.namespace}/{name}", by_pod_group=False) if name else None


def gang_from_pod(meta: ObjectMeta, defaults: GangDefaults) -> Read:
    """Return the definition on a pod of an annotation gang."""
    name = gang_name(meta)
    if name is None or name.by_pod_group:
        return Read(None, ())
    values = _Values(f"Pod {meta.namespace}/{meta.name}", meta.annotations)
    label = meta.labels.get(LABEL_LIGHTWEIGHT_GANG_MIN_AVAILABLE)
    if label:
        minimum = values.number(label, f'metadata.labels["{LABEL_LIGHTWEIGHT_GANG_MIN_AVAILABLE}"]')
    else:
        text = meta.annotations.get(ANNOTATION_GANG_MIN_AVAILABLE)
        minimum = values.number(text, _field(ANNOTATION_GANG_MIN_AVAILABLE))
    return values.definition(name.id, minimum, values.wait_s(), defaults)


def gang_from_pod_group(group: PodGroup, defaults: GangDefaults) -> Read:
    """Return the definition that a PodGroup is."""
    meta = group.metadata
    values = _Values(f"PodGroup {meta.namespace}/{meta.name}", meta.annotations)
    minimum: int | None = group.spec.min_member
    if group.spec.min_member < 0:
        values.bad("spec.minMember", group.spec.min_member, "must not be negative")
        minimum = None
    timeout = group.spec.schedule_timeout_seconds
    wait_s = float(timeout) if timeout is not None and timeout > 0 else None
    return values.definition(f"{meta.namespace}/{meta.name}", minimum, wait_s, defaults)


def _field(annotation: str) -> str:
    return f'metadata.annotations["{annotation}"]'


class _Values:
    """Reads the annotations of one object and collects what is bad."""

    def __init__(self, obj: str, annotations: Mapping[str, str]) -> None:
        self._obj = obj
        self._annotations = annotations
        self._errors: list[InputError] = []

    def bad(self, field: str, value: object, problem: str) -> None:
        self._errors.append(InputError(obj=self._obj, field=field, value=value, problem=problem))

    def number(self, text: str | None, field: str) -> int | None:
        """Return a count; None where it is absent or bad, which is reported."""
        if not text:
            return None
        if len(text) <= 10 and text.isascii() and text.isdigit() and int(text) <= _LARGEST_NUMBER:
            return int(text)
        self.bad(field, text, "expected a number of pods, such as 3")
        return None

    def wait_s(self) -> float | None:
        text = self._annotations.get(ANNOTATION_GANG_WAITING_TIME)
        if not text:
            return None
        try:
            nanoseconds = parse_duration(text)
        except ValueError as error:
            self.bad(_field(ANNOTATION_GANG_WAITING_TIME), text, str(error))
            return None
        if nanoseconds <= 0:
            self.bad(_field(ANNOTATION_GANG_WAITING_TIME), text, "must be above 0")
            return None
        return nanoseconds / _NANOSECONDS

    def definition(
        self, gang: str, minimum: int | None, wait_s: float | None, defaults: GangDefaults
    ) -> Read:
        if minimum is None:
            return Read(None, tuple(self._errors))
        definition = GangDefinition(
            id=gang,
            min_member=minimum,
            total=self._total(minimum),
            mode=self._mode(),
            wait_s=defaults.wait_s if wait_s is None else wait_s,
            group=self._group(gang),
            match_policy=self._match_policy(defaults.match_policy),
            gather=self._gather() if defaults.gathers else None,
        )
        return Read(definition, tuple(self._errors))

    def _total(self, minimum: int) -> int:
        text = self._annotations.get(ANNOTATION_GANG_TOTAL_NUMBER)
        total = self.number(text, _field(ANNOTATION_GANG_TOTAL_NUMBER))
        if total is not None and total < minimum:
            self.bad(
                _field(ANNOTATION_GANG_TOTAL_NUMBER), text, f"is below the minimum, {minimum} pods"
            )
            return minimum
        return minimum if total is None else total

    def _mode(self) -> GangMode:
        text = self._annotations.get(ANNOTATION_GANG_MODE)
        if text:
            try:
                return GangMode(text)
            except ValueError:
                self.bad(_field(ANNOTATION_GANG_MODE), text, "expected Strict or NonStrict")
        return GangMode.STRICT

    def _match_policy(self, default: GangMatchPolicy) -> GangMatchPolicy:
        for key in (ANNOTATION_GANG_MATCH_POLICY, ANNOTATION_POD_GROUP_MATCH_POLICY):
            text = self._annotations.get(key)
            if text:
                try:
                    return GangMatchPolicy(text)
                except ValueError:
                    self.bad(_field(key), text, f"expected one of {', '.join(GangMatchPolicy)}")
        return default

    def _gather(self) -> Gather | None:
        try:
            return gather_of(self._annotations, obj=self._obj)
        except InputError as error:
            self._errors.append(error)
            return None

    def _group(self, gang: str) -> tuple[str, ...]:
        text = self._annotations.get(ANNOTATION_GANG_GROUPS)
        if not text:
            return (gang,)
        field = _field(ANNOTATION_GANG_GROUPS)
        try:
            names = decode_field(_decode_groups, text, obj=self._obj, field=field)
        except InputError as error:
            self._errors.append(error)
            return (gang,)
        for name in names:
            namespace, _, rest = name.partition("/")
            if not namespace or not rest or "/" in rest or "," in rest:
                self.bad(field, name, "expected the id of a gang, such as default/name")
                return (gang,)
        return tuple(sorted({gang, *names}))
