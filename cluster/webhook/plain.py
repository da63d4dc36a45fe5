"""Objects of reviews as plain JSON: decoded once, and of a shape that the mutations can rely on.

Mutations work on plain data, so nothing that a user wrote is lost. The API server checks types only
after admission, so a member of a wrong type is refused here, with its path.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from apis.errors import InputError
from kube.webhook import AdmissionRequest

Plain = dict[str, Any]

_decode: Final = msgspec.json.Decoder(Any).decode


class Shape(msgspec.Struct, rename="camel"):
    """The members that mutations look into; others may have any type, and every one may be null."""


class _Metadata(Shape):
    name: str | None = None
    generate_name: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


_Amounts = dict[str, str | int | float]


class _Resources(Shape):
    requests: _Amounts | None = None
    limits: _Amounts | None = None


class _Container(Shape):
    name: str | None = None
    resources: _Resources | None = None


class _Term(Shape):
    match_expressions: list[Plain] | None = None


class _NodeSelector(Shape):
    node_selector_terms: list[_Term] | None = None


class _NodeAffinity(Shape):
    required: _NodeSelector | None = msgspec.field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )


class _Affinity(Shape):
    node_affinity: _NodeAffinity | None = None


class _PodSpec(Shape):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    overhead: _Amounts | None = None
    affinity: _Affinity | None = None


class PodShape(Shape):
    metadata: _Metadata | None = None
    spec: _PodSpec | None = None


class _Template(Shape):
    metadata: Plain | None = None
    spec: Plain | None = None


class _ReservationSpec(Shape):
    template: _Template | None = None


class ReservationShape(Shape):
    metadata: _Metadata | None = None
    spec: _ReservationSpec | None = None


def plain_object(request: AdmissionRequest) -> Plain:
    """Return the request's object. Raises InputError or msgspec.DecodeError."""
    plain = _decode(request.object)
    if not isinstance(plain, dict):
        raise InputError(obj=request.ref, field="", value=plain, problem="expected an object")
    return plain


def shape_problem(plain: Plain, shape: type[Shape]) -> str | None:
    """Return which member has a type that mutations cannot work on, or None."""
    try:
        msgspec.convert(plain, shape)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        return f"{path.strip('.`')}: {problem}" if path else problem
    return None


def shaped_object(request: AdmissionRequest, shape: type[Shape]) -> Plain:
    """Return the request's object if it has a shape. Raises InputError or msgspec.DecodeError."""
    plain = plain_object(request)
    problem = shape_problem(plain, shape)
    if problem is not None:
        raise InputError(obj=request.ref, field="", value="", problem=problem)
    return plain
