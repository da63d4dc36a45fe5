"""Requests to extenders and their answers as bytes, as kube-scheduler writes and reads them.

Members begin with capital letters; in answers the case does not matter, as in Go. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from apis.errors import printable
from cluster.scheduler.cycle.proposals import Proposals

HIGHEST_TOTAL: Final = 2**31
"""Bound of the score of a node; the sum of all extenders' then fits 64 bits. Extenders are asked
for 0 to 10, and kube-scheduler takes any number."""


class ExtenderError(Exception):
    """A call to an extender failed. The text names the extender and the reason."""


class Unanswered(ExtenderError):
    """The extender did not answer a call, so it would hardly answer one about another pod."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """passing: in the order of the answer. failed, unresolvable: node -> message; of the latter
    preempting pods does not help."""

    passing: tuple[str, ...]
    failed: Mapping[str, str]
    unresolvable: Mapping[str, str]


def arguments(
    pod: bytes, *, names: Sequence[str], nodes: Mapping[str, bytes] | None = None
) -> bytes:
    """Return the body of a filter or prioritize request.

    pod: the Pod as JSON. names: of the nodes. nodes: their JSON, for an extender that does not know
    the nodes itself; a node that is missing there is left out.
    """
    listed, items = b"null", b"null"
    if nodes is None:
        listed = msgspec.json.encode(names)
    else:
        found = [nodes[name] for name in names if name in nodes]
        items = b'{"metadata":{},"items":[' + b",".join(found) + b"]}"
    return b'{"Pod":%b,"Nodes":%b,"NodeNames":%b}' % (pod, items, listed)


def preemption(
    pod: bytes, proposals: Proposals, *, pods: Mapping[str, bytes] | None = None
) -> bytes:
    """Return the body of a preempt request.

    pod: the Pod as JSON. pods: UID -> the JSON of each victim, for an extender that does not know
    pods itself; a victim that is missing there is left out.
    """
    victims, metas = b"null", b"null"
    if pods is None:
        metas = msgspec.json.encode(
            {
                node: {
                    "Pods": [{"UID": uid} for uid in proposal.victims],
                    "NumPDBViolations": proposal.violations,
                }
                for node, proposal in proposals.items()
            }
        )
    else:
        entries = (
            b'%b:{"Pods":[%b],"NumPDBViolations":%d}'
            % (
                msgspec.json.encode(node),
                b",".join(pods[uid] for uid in proposal.victims if uid in pods),
                proposal.violations,
            )
            for node, proposal in proposals.items()
        )
        victims = b"{%b}" % b",".join(entries)
    return b'{"Pod":%b,"NodeNameToVictims":%b,"NodeNameToMetaVictims":%b}' % (pod, victims, metas)


def binding(*, namespace: str, name: str, uid: str, node: str) -> bytes:
    """Return the body of a bind request."""
    return msgspec.json.encode(
        {"PodName": name, "PodNamespace": namespace, "PodUID": uid, "Node": node}
    )


class _Meta(msgspec.Struct):
    name: str = ""


class _Named(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)


class _Items(msgspec.Struct):
    items: list[_Named] | None = None


_decode_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_names: Final = msgspec.json.Decoder(list[str] | None).decode
_decode_nodes: Final = msgspec.json.Decoder(_Items | None).decode
_decode_messages: Final = msgspec.json.Decoder(dict[str, str] | None).decode
_decode_text: Final = msgspec.json.Decoder(str | None).decode
_decode_scores: Final = msgspec.json.Decoder(list[dict[str, Any]] | None).decode
_decode_nodes_by_name: Final = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode
_decode_optional: Final = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode
_decode_pods: Final = msgspec.json.Decoder(list[msgspec.Raw] | None).decode
_decode_count: Final = msgspec.json.Decoder(
    Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None
).decode
_NULL: Final = msgspec.Raw(b"null")


def read_filter(body: bytes, asked: Iterable[str]) -> Filtered:
    """Return what a filter answer means. Raises ExtenderError."""
    try:
        answer = _members(body)
        names = _decode_names(answer.get("nodenames", _NULL))
        nodes = _decode_nodes(answer.get("nodes", _NULL))
        failed = _decode_messages(answer.get("failednodes", _NULL)) or {}
        unresolvable = _decode_messages(answer.get("failedandunresolvablenodes", _NULL)) or {}
        error = _decode_text(answer.get("error", _NULL)) or ""
    except msgspec.MsgspecError as problem:
        raise ExtenderError(f"the answer to filter cannot be read: {problem}") from None
    if error:
        raise ExtenderError(printable(error))
    if names is None:
        names = [node.metadata.name for node in (nodes.items or ())] if nodes is not None else []
    known = frozenset(asked)
    for name in names:
        if name not in known:
            raise ExtenderError(f"the answer to filter has a node that was not asked: {name!r:.80}")
    return Filtered(tuple(dict.fromkeys(names)), failed, unresolvable)


def read_scores(body: bytes) -> dict[str, int]:
    """Return the score of each node in a prioritize answer. Raises ExtenderError."""
    try:
        entries = _decode_scores(body) or []
    except msgspec.MsgspecError as problem:
        raise ExtenderError(f"the answer to prioritize cannot be read: {problem}") from None
    scores: dict[str, int] = {}
    for entry in entries:
        members = {name.lower(): value for name, value in entry.items()}
        host, score = members.get("host", ""), members.get("score", 0)
        if not isinstance(host, str) or type(score) is not int or abs(score) > HIGHEST_TOTAL:
            raise ExtenderError(f"the answer to prioritize has no usable score: {entry!r:.120}")
        scores[host] = score
    return scores


def read_bind(body: bytes) -> str:
    """Return the error of a bind answer, "" for a success. Raises ExtenderError."""
    try:
        return printable(_decode_text(_members(body).get("error", _NULL)) or "")
    except msgspec.MsgspecError as problem:
        raise ExtenderError(f"the answer to bind cannot be read: {problem}") from None


@dataclass(frozen=True, slots=True)
class Answered:
    """What an extender answers about one node. victims: UIDs of pods."""

    victims: tuple[str, ...]
    violations: int


def read_preemption(body: bytes) -> dict[str, Answered]:
    """Return the victims on each node of a preempt answer. Raises ExtenderError."""
    try:
        nodes = _decode_nodes_by_name(_members(body).get("nodenametometavictims", _NULL)) or {}
        return {name: _answered(raw) for name, raw in nodes.items()}
    except msgspec.MsgspecError as problem:
        raise ExtenderError(f"the answer to preempt cannot be read: {problem}") from None


def _answered(raw: msgspec.Raw) -> Answered:
    node = {name.lower(): value for name, value in (_decode_optional(raw) or {}).items()}
    pods = (_members(pod) for pod in _decode_pods(node.get("pods", _NULL)) or ())
    uids = (_decode_text(pod.get("uid", _NULL)) or "" for pod in pods)
    violations = _decode_count(node.get("numpdbviolations", _NULL)) or 0
    return Answered(tuple(dict.fromkeys(uids)), violations)


def _members(body: bytes) -> dict[str, msgspec.Raw]:
    return {name.lower(): raw for name, raw in _decode_object(body).items()}
