"""The answers as tables and paragraphs for people; `-o json` shows them as they are."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Sequence[object]

_GAP = "  "
_BELOW = "    "
_MOST_ROWS = 20
"""Rows of a table in `status`, which fits a screen; `-o json` has all."""
_NARROWEST_LAST = 20
"""Characters of the last column at least, however narrow the terminal."""
_READABLE = 40
"""Characters that the last column should have; with fewer it stands below the others."""


def table(header: Row, rows: Iterable[Row], *, width: int | None = None) -> str:
    """Return aligned columns; the last one wraps within the terminal.

    If the others leave too little room for it, it follows on lines of its own.
    """
    cells = [[_cell(value) for value in row] for row in (header, *rows)]
    if len(cells) == 1:
        return ""
    widths = [max(len(row[column]) for row in cells) for column in range(len(header) - 1)]
    width = width or shutil.get_terminal_size((120, 40)).columns
    left = sum(widths) + len(_GAP) * len(widths)
    below = bool(widths) and width - left < max(_NARROWEST_LAST, min(_READABLE, width // 3))
    lines = []
    for row in cells:
        start = _GAP.join(text.ljust(size) for text, size in zip(row, widths, strict=False))
        if below:
            lines.append(_GAP.join(text for text in row[:-1] if text))
            lines += _wrapped(row[-1], width, indent=_BELOW)
            continue
        start += _GAP if widths else ""
        last = _wrapped(row[-1], width - left) or [""]
        lines.append((start + last[0]).rstrip())
        lines += [(" " * left + more).rstrip() for more in last[1:]]
    return "\n".join(lines)


def _wrapped(text: str, width: int, *, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        max(width, _NARROWEST_LAST),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def heading(text: str) -> str:
    """Return a heading, in bold on a terminal that supports it."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return f"\033[1m{text}\033[0m" if terminal and not plain else text


def when(seconds: float) -> str:
    """Return a time of day, or the date when it is long ago."""
    if not seconds:
        return "never"
    form = "%H:%M:%S" if time.time() - seconds < 86400 else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(seconds))


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units."""
    left, parts = int(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= size:
            parts.append(f"{left // size}{unit}")
            left %= size
    return "".join(parts[:2]) or f"{seconds:.1f}s"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = str(value)
    return text if text.isprintable() else ascii(text)[1:-1]


# --- explain -----------------------------------------------------------------------------------


def explanation(answer: Mapping[str, Any]) -> str:
    """Return what `koordctl explain` shows."""
    blocks = [_subject(subject) for subject in answer.get("subjects", ())]
    restoring = answer.get("restoring", ())
    if restoring:
        blocks.append(
            heading("to be restored")
            + "\n"
            + table(
                ("RESOURCE", "OBSERVED", "ORIGINAL", "STATE", "DETAIL"),
                [
                    (_name(v), v["observed"], v["original"], v["state"], v["detail"])
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
            f" priority {_cell(pod['priority'])}, uid {pod['uid']}"
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
            _name(value),
            value["requested"],
            value["value"],
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
    if value.get("detail"):
        lines.append(f"    {value['state']}: {value['detail']}")
    if value.get("original") is not None:
        lines.append(f"    original {value['original']}")
    for write in value.get("writes", ())[-3:]:
        outcome = f"refused: {write['error']}" if write["error"] else "written"
        lines.append(f"    {when(write['at'])} {outcome}: {write['old'] or '?'} -> {write['new']}")
    return [f"  {_name(value)}", *lines] if lines else []


def _claim(claim: Mapping[str, Any]) -> str:
    return (
        f"{claim['policy']} {claim['op']} {claim['value']}:"
        f" {claim['reason']} (from {claim['source']})"
    )


def _name(value: Mapping[str, Any]) -> str:
    return f"{value['resource']} {value['key']}".strip()


# --- plan, status, events, doctor --------------------------------------------------------------


def plan(answer: Mapping[str, Any]) -> str:
    """Return what `koordctl plan` shows."""
    blocks = []
    if answer["problems"]:
        blocks.append(
            heading("problems")
            + "\n"
            + table(
                ("FILE", "OBJECT", "PROBLEM"),
                [(p["file"] or "-", p["object"], p["message"]) for p in answer["problems"]],
            )
        )
    if answer["policies"]:
        blocks.append(
            heading("policies")
            + "\n"
            + table(
                ("POLICY", "NOW", "THEN", "WHY"),
                [
                    (p["policy"], p["before"] or "-", p["after"], p["why"])
                    for p in answer["policies"]
                ],
            )
        )
    if answer["writes"]:
        blocks.append(
            heading(f"{len(answer['writes'])} writes, in this order")
            + "\n"
            + table(
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


def status(answer: Mapping[str, Any]) -> str:
    """Return what `koordctl status` shows."""
    nri, reconciler, cgroup = answer["nri"], answer["reconciler"], answer["cgroup"]
    facts: list[Row] = [
        ("node", answer["node"]),
        ("koordlet", f"{answer['version']}, up {duration(answer['uptimeSeconds'])}"),
        ("ready", "yes" if answer["ready"] else "no: " + "; ".join(answer["notReady"])),
    ]
    if answer["unhealthy"]:
        facts.append(("unhealthy", answer["unhealthy"]))
    facts.append(("NRI", _nri(nri)))
    if nri.get("failurePolicy", {}).get("configured") == "Fail":
        facts.append(("on failure", f"Fail: {nri['failurePolicy']['inForce']}"))
    if (hooks := answer.get("hookService", {})).get("enabled"):
        policy = hooks["failurePolicy"]
        facts.append(("proxy", f"on failure {policy['configured']}: {policy['inForce']}"))
    if runtime := nri.get("runtime"):
        facts += [("", warning) for warning in runtime["warnings"]]
    if cgroup:
        root = cgroup["kubepods"] or "not found yet"
        facts.append(
            ("cgroups", f"v{cgroup['version']}, {cgroup['driver']} driver, pods below {root}")
        )
    facts.append(("objects", _objects(answer["objects"])))
    facts.append(("pods", f"{answer['pods']} with {answer['containers']} containers"))
    for source in answer["sources"]:
        facts.append((source["name"], source["problem"] or f"{source['fetches']} lists read"))
    # An older daemon during an upgrade does not send it.
    if reports := answer.get("reports"):
        facts += _reports(reports)
    network = answer.get("networkQos")
    if network and (network["state"] == "on" or network["problems"]):
        facts += _network(network)
    if reconciler:
        values = ", ".join(f"{n} {state}" for state, n in sorted(reconciler["values"].items()))
        facts.append(("values", values or "none"))
        facts.append(
            (
                "reconciler",
                f"{reconciler['passes']} passes, {reconciler['written']} writes,"
                f" {reconciler['failed']} refused, {reconciler['restored']} restored;"
                f" last at {when(reconciler['lastFinishedAt'])} in {reconciler['lastCpuMs']} ms",
            )
        )
        if reconciler["journalError"]:
            facts.append(("journal", reconciler["journalError"]))
        # An older daemon during an upgrade does not send it.
        if lost := reconciler.get("journalLost"):
            facts.append(("originals", f"some are not restored: {lost}"))
    # An older daemon during an upgrade sends neither this, nor the strategies, nor evictions.
    if measuring := answer.get("measuring"):
        facts.append(("measuring", _measuring(measuring)))
    facts += _evictions(answer.get("evictions", {}))
    facts.append(("memory", f"{answer['memoryBytes'] / 1e6:.0f} MB"))
    blocks = [table(("", ""), facts).lstrip("\n")]
    blocks.append(
        heading("policies")
        + "\n"
        + table(
            ("POLICY", "STATE", "WHY"),
            [(p["name"], p["state"], p["why"] or p["summary"]) for p in answer["policies"]],
        )
    )
    if strategies := answer.get("strategies"):
        blocks.append(
            heading("strategies")
            + "\n"
            + table(
                ("STRATEGY", "STATE", "STEP", "DOES"), [_strategy_row(each) for each in strategies]
            )
        )
    if measuring and (
        lacking := [_collector_row(c) for c in measuring["collectors"] if c["error"]]
    ):
        blocks.append(
            heading("collectors without all samples")
            + "\n"
            + table(("COLLECTOR", "STATE", "SAMPLES", "WHY"), lacking)
        )
    if troubled := reconciler.get("troubled", ()):
        blocks.append(heading("values that are not in force") + "\n" + _troubled(troubled))
    if answer["unprotected"]:
        blocks.append(
            heading("containers that koordlet did not see at creation, or that lack something")
            + "\n"
            + _first_rows(
                ("POD", "CONTAINER", "ID", "LACKS"),
                [
                    (u["pod"], u["container"], u["id"][:12], ", ".join(u["lacks"]) or "-")
                    for u in sorted(answer["unprotected"], key=lambda u: not u["lacks"])
                ],
            )
        )
    problems = answer["objects"]["problems"]
    directory = f"{answer['objects']['directory']}/"
    if problems:
        blocks.append(
            heading("objects that could not be used")
            + "\n"
            + _first_rows(
                ("FILE", "OBJECT", "PROBLEM"),
                [
                    (p["file"].removeprefix(directory), p["object"] or "-", p["message"])
                    for p in problems
                ],
            )
        )
    return "\n\n".join(blocks)


def _measuring(measuring: Mapping[str, Any]) -> str:
    if not measuring["running"]:
        return "nothing: no strategy runs" + (
            "" if measuring["enabled"] else " (measuring.enabled)"
        )
    ready = sum(each["state"] == "ready" for each in measuring["collectors"])
    rounds = f"{measuring['rounds']} rounds, {measuring['skippedTicks']} left out"
    return f"{ready} collectors; {rounds}; last took {measuring['lastRoundMs']:.0f} ms"


def _strategy_row(strategy: Mapping[str, Any]) -> Row:
    age = strategy["stepAgeSeconds"]
    does = strategy["why"] or strategy["problem"] or strategy["summary"] or "nothing"
    step = "-" if age is None else f"{duration(age)} ago"
    return strategy["name"], strategy["state"], step, does


def _collector_row(collector: Mapping[str, Any]) -> Row:
    age = collector["ageSeconds"]
    samples = "none" if age is None else f"{duration(age)} ago"
    return collector["name"], collector["state"], samples, collector["error"]


def _evictions(evictions: Mapping[str, Any]) -> list[Row]:
    """Return what there is to say about evictions; nothing while no pod had to go."""
    rows: list[Row] = []
    if evictions.get("last"):
        last = evictions["last"][-1]
        rows.append(
            (
                "evictions",
                f"{evictions['evictions']}; last {last['pod']}, {last['outcome']},"
                f" at {when(last['at'])} for {last['gate']}",
            )
        )
    if evictions.get("heldBack"):
        rows.append(("", evictions["heldBack"]))
    rows += [
        ("", f"{short['gate']} is not covered: {short['why']}")
        for short in evictions.get("short", ())
    ]
    return rows


def _reports(reports: Mapping[str, Any]) -> list[Row]:
    """Return a line for the NodeMetric, one for each kept object, and one for the prediction."""
    metric, prediction = reports["nodeMetric"], reports["prediction"]
    age = metric["ageSeconds"]
    said = "off"
    if metric["enabled"]:
        sent = "none sent yet" if age is None else f"the last one {duration(age)} ago"
        said = metric["problem"] or f"{metric['reports']} reports, {sent}"
    rows: list[Row] = [("reports", f"NodeMetric: {said}")]
    for each in reports["objects"]:
        rows.append(("", f"{each['kind']}: {each['problem'] or str(each['writes']) + ' writes'}"))
    learned = f"{prediction['models']} models, {prediction['trainings']} trainings"
    rows.append(("prediction", prediction["problem"] or learned))
    return rows


def _network(network: Mapping[str, Any]) -> list[Row]:
    """Return what is shaped, each class without pods' own ones, and what is not in force."""
    classes = network["classes"]
    said = network["why"]
    if classes:
        own = [each for each in classes if each["name"] == "pod"]
        said = f"{network['device']}, {_bits(network['bitsPerSecond'])}; {len(own)} pods limited"
    rows: list[Row] = [("network", said)]
    rows += [
        (
            "",
            f"{each['name']}: up to {_bits(each['ceilBits'])}, {each['members']} members",
        )
        for each in classes
        if each["name"] != "pod"
    ]
    return rows + [("", problem) for problem in network["problems"]]


def _bits(rate: int) -> str:
    """Return a rate as tc shows it."""
    for unit, size in (("Gbit/s", 10**9), ("Mbit/s", 10**6), ("kbit/s", 10**3)):
        if rate >= size:
            return f"{rate / size:.4g} {unit}"
    return f"{rate} bit/s"


def _troubled(values: Sequence[Mapping[str, Any]]) -> str:
    return _first_rows(
        ("WHERE", "WHAT", "DESIRED", "OBSERVED", "STATE", "WHY"),
        [
            (v["name"], _name(v), v["desired"], v["observed"], v["state"], v["detail"])
            for v in values
        ],
    )


def _first_rows(header: Row, rows: Sequence[Row]) -> str:
    """Return a table of the first rows, and how many more there are."""
    more = len(rows) - _MOST_ROWS
    shown = table(header, rows[:_MOST_ROWS])
    return f"{shown}\n... and {more} more: koordctl status -o json" if more > 0 else shown


def _objects(objects: Mapping[str, Any]) -> str:
    """Return the kinds of objects that the node has, and a note if the NodeSLO is missing."""
    kinds = {
        "NodeSLO": objects["nodeSLO"],
        "NodeResourceTopology": objects["topology"],
        "Node": objects["node"],
        "Device": objects["device"],
    }
    there = [kind for kind, found in kinds.items() if found]
    there += [f"{objects['pods']} pods"] if objects["pods"] else []
    text = ", ".join(there) or "none"
    if not kinds["NodeSLO"]:
        text += (
            f"; no NodeSLO of this node in {objects['directory']}: its defaults apply, with almost"
            " every policy off"
        )
    return text


def _nri(nri: Mapping[str, Any]) -> str:
    if not nri["enabled"]:
        return "off"
    if not nri["connected"]:
        return f"{nri['state']}: {nri['problem'] or 'waiting'} ({nri['socket']})"
    runtime = nri["runtime"]
    missed = sum(nri["missed"].values())
    return (
        f"connected to {runtime['name']} {runtime['version']} (NRI {runtime['nri']}) for"
        f" {duration(nri['inStateSeconds'])}; {nri['adjustments']} containers adjusted,"
        f" {missed} missed, worst reply {nri['worstReplyMs']} ms"
    )


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
