"""Shapes of meta/v1 that several kinds embed: selectors, references, conditions, time, duration.

They follow the Kubernetes API conventions. docs/facts/apis.md, "Text formats".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, field

from apis.decode import Wire

Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
"""RFC 3339 text; see `parse_time`."""

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, extra_json_schema={"format": "int32"})]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, extra_json_schema={"format": "int64"})]

REQUIRED: Final = {"required": True}
"""Marks a field that the CRD requires although a reader can do without it."""

ANY_JSON: Final = {"x-kubernetes-preserve-unknown-fields": True}
AnyJson = Annotated[Any, Meta(extra_json_schema=ANY_JSON, extra={"schemaless": True})]
AnyObject = Annotated[dict[str, Any], Meta(extra_json_schema=ANY_JSON)]


# --- selectors ---------------------------------------------------------------------------------

_ATOMIC_LIST: Final = {"x-kubernetes-list-type": "atomic"}


class LabelSelectorRequirement(Wire, frozen=True):
    """One requirement of a label selector.

    key: Label key.
    operator: In, NotIn, Exists or DoesNotExist.
    values: Values for In and NotIn; empty for the other operators.
    """

    key: str
    operator: str
    values: Annotated[tuple[str, ...], Meta(extra_json_schema=_ATOMIC_LIST)] = ()


class LabelSelector(Wire, frozen=True):
    """Selects by labels. All requirements must hold; an empty selector matches everything.

    match_labels: Labels and the value that each must have.
    match_expressions: Requirements on labels.
    """

    crd: ClassVar[dict[str, Any]] = {"x-kubernetes-map-type": "atomic"}

    match_labels: dict[str, str] = field(default_factory=dict)
    match_expressions: Annotated[
        tuple[LabelSelectorRequirement, ...], Meta(extra_json_schema=_ATOMIC_LIST)
    ] = ()

    def is_empty(self) -> bool:
        return not self.match_labels and not self.match_expressions


_NAME: Final = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z", re.ASCII)
_PREFIX: Final = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?\Z", re.ASCII)


def label_key_problem(key: str) -> str | None:
    """Return why `key` cannot be a label key, or None."""
    prefix, slash, name = key.rpartition("/")
    if slash and not _PREFIX.match(prefix):
        return "the prefix of a label key is a DNS name of at most 253 characters"
    if not _NAME.match(name):
        return "the name of a label key has 1 to 63 letters, digits, - _ or ."
    return None


def label_value_problem(value: str) -> str | None:
    """Return why `value` cannot be a label value, or None."""
    if value and not _NAME.match(value):
        return "a label value has at most 63 letters, digits, - _ or . and starts with a letter"
    return None


def selector_problem(selector: LabelSelector) -> str | None:
    """Return why the API machinery would refuse `selector`, or None."""
    for key, value in selector.match_labels.items():
        problem = label_key_problem(key) or label_value_problem(value)
        if problem:
            return f"matchLabels {key!r}: {problem}"
    for requirement in selector.match_expressions:
        problem = label_key_problem(requirement.key)
        if problem is None:
            match requirement.operator:
                case "In" | "NotIn":
                    if not requirement.values:
                        problem = f"{requirement.operator} needs values"
                case "Exists" | "DoesNotExist":
                    if requirement.values:
                        problem = f"{requirement.operator} takes no values"
                case _:
                    problem = f"{requirement.operator!r} is not an operator"
        if problem is None:
            problem = next(filter(None, map(label_value_problem, requirement.values)), None)
        if problem:
            return f"matchExpressions {requirement.key!r}: {problem}"
    return None


def matches(selector: LabelSelector | None, labels: Mapping[str, str]) -> bool:
    """Return whether `labels` satisfy `selector`; no selector matches nothing.

    The selector must be sound (`selector_problem`); an unknown operator matches nothing.
    """
    if selector is None:
        return False
    for key, value in selector.match_labels.items():
        if labels.get(key) != value:
            return False
    for requirement in selector.match_expressions:
        value_of = labels.get(requirement.key)
        match requirement.operator:
            case "In":
                holds = value_of in requirement.values
            case "NotIn":
                holds = value_of is None or value_of not in requirement.values
            case "Exists":
                holds = value_of is not None
            case "DoesNotExist":
                holds = value_of is None
            case _:
                holds = False
        if not holds:
            return False
    return True


# --- references and conditions -----------------------------------------------------------------


class ObjectReference(Wire, frozen=True):
    """Refers to an object.

    api_version: API version of the object.
    kind: Kind of the object.
    namespace: Namespace of the object.
    name: Name of the object.
    uid: UID of the object.
    resource_version: Version of the object that is meant.
    field_path: Part of the object that is meant.
    """

    crd: ClassVar[dict[str, Any]] = {"x-kubernetes-map-type": "atomic"}

    api_version: str = ""
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    field_path: str = ""


class StatusCondition(Wire, frozen=True):
    """One observation about the state of an object.

    type: What is observed, in CamelCase.
    status: True, False or Unknown.
    observed_generation: Generation of the object that the observation is about.
    last_transition_time: When the status last changed.
    reason: Why the status is what it is, in CamelCase.
    message: The same for people.

    metav1.Condition as CRDs embed it; the API server enforces its patterns.
    """

    type: Annotated[
        str,
        Meta(
            max_length=316,
            extra_json_schema={
                "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
                "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
            },
        ),
    ]
    status: Annotated[str, Meta(extra_json_schema={"enum": ["True", "False", "Unknown"]})]
    observed_generation: (
        Annotated[int, Meta(ge=0, extra_json_schema={"format": "int64"})] | None
    ) = None
    last_transition_time: Annotated[Time | None, Meta(extra=REQUIRED)] = None
    reason: Annotated[
        str,
        Meta(
            max_length=1024,
            extra=REQUIRED,
            extra_json_schema={
                "minLength": 1,
                "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            },
        ),
    ] = ""
    message: Annotated[str, Meta(max_length=32768, extra=REQUIRED)] = ""


# --- time --------------------------------------------------------------------------------------

_TIME: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)\Z", re.ASCII
)


def _is_plain(text: str) -> bool:
    """Return whether a text has the form that Kubernetes writes, 2026-01-31T12:00:00Z.

    Python reads that form five times as fast as the pattern, but it reads others besides.
    """
    return (
        len(text) == 20
        and text[19] == "Z"
        and text[10] == "T"
        and text[4] == text[7] == "-"
        and text[13] == text[16] == ":"
    )


def parse_time(text: str) -> datetime:
    """Return the UTC moment that an RFC 3339 text names. Raises ValueError."""
    if _is_plain(text):
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            pass  # a leap second, or no time at all
    match = _TIME.match(text)
    if match is None:
        raise ValueError("not an RFC 3339 time such as 2026-01-31T12:00:00Z")
    year, month, day, hour, minute, second = (int(match[index]) for index in range(1, 7))
    micro = int(((match[7] or "") + "000000")[:6])
    moment = datetime(year, month, day, hour, minute, min(second, 59), micro, tzinfo=UTC)
    if match[8] != "Z":
        sign = -1 if match[8][0] == "+" else 1
        try:
            moment += sign * timedelta(hours=int(match[8][1:3]), minutes=int(match[8][4:6]))
        except OverflowError:
            raise ValueError("a time outside the years 1 to 9999") from None
    return moment


def unix_seconds(text: str | None) -> float:
    """Return the seconds since 1970 of an RFC 3339 text; 0 for a missing or unreadable one."""
    try:
        return parse_time(text).timestamp() if text else 0.0
    except ValueError:
        return 0.0


def format_time(moment: datetime) -> str:
    """Return metav1.Time's text: UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(moment: datetime) -> str:
    """Return metav1.MicroTime's text: UTC, six digits."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


_NANOSECONDS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "μs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_DURATION_PART: Final = re.compile(r"([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)", re.ASCII)


def parse_duration(text: str) -> int:
    """Return the nanoseconds of a Go duration such as 1h30m, 1.5s, -2m or 0. Raises ValueError."""
    problem = "not a duration such as 30s, 5m or 1h30m"
    if len(text) > 64:
        raise ValueError(problem)
    sign = -1 if text.startswith("-") else 1
    rest = text[1:] if text[:1] in ("-", "+") else text
    if rest == "0":
        return 0
    total = 0
    position = 0
    while position < len(rest):
        match = _DURATION_PART.match(rest, position)
        if match is None or not (match[1] or match[2]):
            raise ValueError(problem)
        fraction = match[2] or ""
        unit = _NANOSECONDS[match[3]]
        total += int(match[1] or 0) * unit + int(fraction or 0) * unit // 10 ** len(fraction)
        position = match.end()
    if position == 0 or total > 2**63 - 1:
        raise ValueError(problem)
    return sign * total


def format_duration(nanoseconds: int) -> str:
    """Return Go's text of a duration: 5m0s, 1.5s, 24h0m0s, 0s."""
    if nanoseconds == 0:
        return "0s"
    sign = "-" if nanoseconds < 0 else ""
    amount = abs(nanoseconds)
    if amount < 1_000_000_000:
        for unit, size in (("ms", 1_000_000), ("µs", 1_000), ("ns", 1)):
            if amount >= size:
                return f"{sign}{_decimal(amount, size)}{unit}"
    minutes, below = divmod(amount, 60_000_000_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{_decimal(below, 1_000_000_000)}s"
    if hours:
        return f"{sign}{hours}h{minutes}m{seconds}"
    return f"{sign}{minutes}m{seconds}" if minutes else sign + seconds


def _decimal(amount: int, size: int) -> str:
    whole, rest = divmod(amount, size)
    if not rest:
        return str(whole)
    digits = str(rest).zfill(len(str(size)) - 1).rstrip("0")
    return f"{whole}.{digits}"
