"""The answers of explain, plan, events and doctor for people; `-o json` shows them as they are."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from koordctl.tables import cell, heading, section, table, when

# --- explain -----------------------------------------------------------------------------------


def explanation(answer: Mapping[str, Any]) -> str:
    """Return what `koordctl explain` shows."""
    blocks = [_subject(subject) for subject in answer.get("subjects", ())]
    restoring = answer.get("restoring", ())
    if restoring:
        blocks.append(
            section(
                "to be restored",
                ("RESOURCE", "OBSERVED", "ORIGINAL", "STATE", "DETAIL"),
                [
                    (resource_name(v), v["observed"], v["original"], v["state"], v["detail"])
                    for v in restoring
                ],
            )
        )
    return "\n\n".join(blocks)


def _subject(subject: Mapping[str, Any]) -> str:
    lines = [heading(f"{subject['level']}  {subject['name']}")]
    pod = subject.get("pod")
    if pod and subject["level"] == "pod":
        lines.append(
            f"  class {pod['qos'] or 'none'}, Kubernetes class {pod['kubeQos']},"
            f" priority {cell(pod['priority'])}, uid {pod['uid']}"
        )
    if subject.get("id"):
        lines.append(f"  id {subject['id']}")
    if subject["cgroup"]:
        lines.append(f"  cgroup {subject['cgroup']}")
    for fault in subject["faults"]:
        lines.append(f"  ! {fault['policy']}: {fault['message']}")
    if not subject["values"]:
        lines.append("  no policy claims a value")
        return "\n".join(lines)
    rows = [
        (
            resource_name(value),
            value["requested"],
            with_unit(value["resource"], value["value"]),
            value["observed"],
            value["state"],
            value["why"],
        )
        for value in subject["values"]
    ]
    shown = table(("RESOURCE", "REQUESTED", "DECIDED", "OBSERVED", "STATE", "WHY"), rows)
    lines.append(textwrap.indent(shown, "  "))
    for value in subject["values"]:
        lines += _details(value)
    return "\n".join(lines)


def _details(value: Mapping[str, Any]) -> list[str]:
    """Return the lines below the row: source, modifiers, losers, detail, original, writes."""
    lines: list[str] = []
    winner = value["winner"]
    if winner:
        lines.append(f"    from {winner['source']}")
        if winner.get("degraded"):
            lines.append(f"    degraded: {winner['degraded']}")
    for each in value["modifiers"]:
        lines.append(f"    shaped by {_claim(each)}")
    for each in value["losers"]:
        lines.append(f"    overruled: {_claim(each)}")
    if value.get("detail") and not (winner and winner.get("degraded") == value["detail"]):
        lines.append(f"    {value['state']}: {value['detail']}")
    if value.get("original") is not None:
        lines.append(f"    original {value['original']}")
    for write in value.get("writes", ())[-3:]:
        outcome = f"refused: {write['error']}" if write["error"] else "written"
        lines.append(f"    {when(write['at'])} {outcome}: {write['old'] or '?'} -> {write['new']}")
    return [f"  {resource_name(value)}", *lines] if lines else []


def _claim(claim: Mapping[str, Any]) -> str:
    return (
        f"{claim['policy']} {claim['op']} {claim['value']}:"
        f" {claim['reason']} (from {claim['source']})"
    )


def with_unit(resource: str, value: object) -> object:
    """Return a value as a person reads it: bytes of memory also in the unit that fits them."""
    text = str(value)
    if not resource.startswith("memory.") or not text.isdecimal():
        return value
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if int(text) >= size:
            return f"{text} ({int(text) / size:.4g} {unit})"
    return value


def resource_name(value: Mapping[str, Any]) -> str:
    return f"{value['resource']} {value['key']}".strip()


# --- plan, events, doctor ---------------------------------------------------------------------


def plan(answer: Mapping[str, Any]) -> str:
    """Return what `koordctl plan` shows."""
    blocks = []
    if answer["problems"]:
        blocks.append(
            section(
                "problems",
                ("FILE", "OBJECT", "PROBLEM"),
                [(p["file"] or "-", p["object"], p["message"]) for p in answer["problems"]],
            )
        )
    if answer["policies"]:
        blocks.append(
            section(
                "policies",
                ("POLICY", "NOW", "THEN", "WHY"),
                [
                    (p["policy"], p["before"] or "-", p["after"], p["why"])
                    for p in answer["policies"]
                ],
            )
        )
    if answer["writes"]:
        blocks.append(
            section(
                f"{len(answer['writes'])} writes, in this order",
                ("WHERE", "WHAT", "NOW", "THEN", "WHY"),
                [
                    (w["name"] or w["path"], w["resource"], w["old"] or "-", w["new"], w["why"])
                    for w in answer["writes"]
                ],
            )
        )
    elif answer["pods"] is not None:
        blocks.append("Nothing would be written: the node already has these values.")
    if answer["pods"] is None:
        blocks.append(
            "No pod of this node is known: what pods and containers would get is left out."
        )
    return "\n\n".join(blocks)


def events(answer: Sequence[Mapping[str, Any]]) -> str:
    """Return what `koordctl events` shows."""
    shown = table(
        ("LAST", "COUNT", "KIND", "OBJECT", "MESSAGE"),
        [(when(e["lastAt"]), e["count"], e["kind"], e["object"], e["message"]) for e in answer],
    )
    return shown or "No events."


def doctor(findings: Sequence[Mapping[str, Any]]) -> str:
    """Return what `koordctl doctor` shows."""
    marks = {"ok": "ok", "info": "info", "warn": "WARN", "fail": "FAIL"}
    rows = []
    for finding in findings:
        text = finding["found"]
        if finding["fix"]:
            text += f". Fix: {finding['fix']}"
        rows.append((marks[finding["state"]], finding["check"], text))
    return table(("", "CHECK", "FOUND"), rows)
