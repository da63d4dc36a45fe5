"""Why a node offers what it offers: the terms of a formula, their values, sources and ages.

The manager writes it beside the numbers, `koordctl explain node` and kubectl show it. It is an
addition of this project; nothing upstream reads the annotation.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from msgspec import field

from apis.decode import Embedded, canonical_json, decode_field, field_decoder
from apis.meta import parse_time

ANNOTATION_RESOURCE_EXPLANATION: Final = "node.koordinator.sh/resource-explanation"


class Term(Embedded, frozen=True):
    """One summand or bound. value: milli-cores or bytes; at: when its source last changed."""

    name: str
    value: int
    source: str = ""
    at: str | None = None


class Explanation(Embedded, frozen=True):
    """How one resource of a node came about."""

    formula: str
    result: int
    terms: tuple[Term, ...] = ()
    note: str = ""


class NodeExplanation(Embedded, frozen=True):
    """Resource name -> explanation."""

    resources: dict[str, Explanation] = field(default_factory=dict)


_decode = field_decoder(NodeExplanation)


def parse_explanation(text: str, *, obj: str) -> NodeExplanation:
    """Return the explanation of a node's annotation. Raises InputError."""
    where = f'metadata.annotations["{ANNOTATION_RESOURCE_EXPLANATION}"]'
    return decode_field(_decode, text, obj=obj, field=where)


def explanation_text(explanation: NodeExplanation) -> str:
    """Return the annotation's text."""
    return canonical_json(explanation)


def render(resource: str, explanation: Explanation, *, now: datetime | None = None) -> str:
    """Return lines for a person: the formula, each term with source and age, the result."""
    moment = now or datetime.now(UTC)
    width = max([len(term.name) for term in explanation.terms] + [6])
    lines = [f"{resource} = {explanation.formula}"]
    for term in explanation.terms:
        lines.append(
            f"  {term.name:<{width}}  {term.value:>16}  {term.source}{_age(term.at, moment)}"
        )
    lines.append(f"  {'result':<{width}}  {explanation.result:>16}")
    if explanation.note:
        lines.append(f"  note: {explanation.note}")
    return "\n".join(lines)


def _age(at: str | None, now: datetime) -> str:
    if at is None:
        return ""
    try:
        seconds = int((now - parse_time(at)).total_seconds())
    except ValueError:
        return f" (at {at})"
    return f" ({seconds} s ago)"
