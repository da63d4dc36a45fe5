"""The answer of `koordctl status` for people: facts, and tables of what is not as it should be.

An older daemon during an upgrade does not send every part; what it does not send is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from koordctl.render import resource_name
from koordctl.tables import Row, duration, heading, section, table, when
from linux.htb import rate_text

_MOST_ROWS = 20
"""Rows of a table, which fit a screen; `-o json` has all."""


def status_text(answer: Mapping[str, Any]) -> str:
    """Return what `koordctl status` shows."""
    facts: list[Row] = [
        ("node", answer["node"]),
        ("koordlet", f"{answer['version']}, up {duration(answer['uptimeSeconds'])}"),
        ("ready", "yes" if answer["ready"] else "no: " + "; ".join(answer["notReady"])),
    ]
    if answer["unhealthy"]:
        facts.append(("unhealthy", answer["unhealthy"]))
    facts += _transports(answer)
    facts += _inputs(answer)
    if reports := answer.get("reports"):
        facts += _reports(reports)
    network = answer.get("networkQos")
    if network and (network["state"] == "on" or network["problems"]):
        facts += network_rows(network)
    if reconciler := answer["reconciler"]:
        facts += _reconciler(reconciler)
    if measuring := answer.get("measuring"):
        facts.append(("measuring", _measuring(measuring)))
    facts += _evictions(answer.get("evictions", {}))
    facts.append(("memory", f"{answer['memoryBytes'] / 1e6:.0f} MB"))
    return "\n\n".join([table(("", ""), facts).lstrip("\n"), *_sections(answer)])


def _transports(answer: Mapping[str, Any]) -> list[Row]:
    """Return how hooks arrive, and what happens to containers while koordlet is away."""
    nri = answer["nri"]
    rows: list[Row] = [("NRI", _nri(nri))]
    if nri.get("failurePolicy", {}).get("configured") == "Fail":
        rows.append(("on failure", f"Fail: {nri['failurePolicy']['inForce']}"))
    if (hooks := answer.get("hookService", {})).get("enabled"):
        policy = hooks["failurePolicy"]
        rows.append(("proxy", f"on failure {policy['configured']}: {policy['inForce']}"))
    if runtime := nri.get("runtime"):
        rows += [("", warning) for warning in runtime["warnings"]]
    return rows


def _inputs(answer: Mapping[str, Any]) -> list[Row]:
    """Return the cgroup tree, the objects, the pods and where they come from."""
    rows: list[Row] = []
    if cgroup := answer["cgroup"]:
        root = cgroup["kubepods"] or "not found yet"
        where = f"v{cgroup['version']}, {cgroup['driver']} driver, pods below {root}"
        rows.append(("cgroups", where))
    rows.append(("objects", _objects(answer["objects"])))
    rows.append(("pods", f"{answer['pods']} with {answer['containers']} containers"))
    for source in answer["sources"]:
        found = source["problem"] or f"{source['fetches']} lists read"
        if (age := source.get("ageSeconds")) is not None:
            found += f"; last answer {duration(age)} ago"
        rows.append((source["name"], found))
    return rows


def _reconciler(reconciler: Mapping[str, Any]) -> list[Row]:
    """Return the states of the values, what the passes did, and what the journal lacks."""
    values = ", ".join(f"{n} {state}" for state, n in sorted(reconciler["values"].items()))
    rows: list[Row] = [
        ("values", values or "none"),
        (
            "reconciler",
            f"{reconciler['passes']} passes, {reconciler['written']} writes,"
            f" {reconciler['failed']} refused, {reconciler['restored']} restored;"
            f" last at {when(reconciler['lastFinishedAt'])} in {reconciler['lastCpuMs']} ms",
        ),
    ]
    if reconciler["journalError"]:
        rows.append(("journal", reconciler["journalError"]))
    if lost := reconciler.get("journalLost"):
        rows.append(("originals", f"some are not restored: {lost}"))
    return rows


def _sections(answer: Mapping[str, Any]) -> list[str]:
    """Return the tables: policies, strategies, and each kind of trouble that there is."""
    blocks = [
        section(
            "policies",
            ("POLICY", "STATE", "WHY"),
            [(p["name"], p["state"], p["why"] or p["summary"]) for p in answer["policies"]],
        )
    ]
    if strategies := answer.get("strategies"):
        rows = [_strategy_row(each) for each in strategies]
        blocks.append(section("strategies", ("STRATEGY", "STATE", "STEP", "DOES"), rows))
    collectors = (answer.get("measuring") or {}).get("collectors", ())
    if lacking := [_collector_row(each) for each in collectors if each["error"]]:
        header = ("COLLECTOR", "STATE", "SAMPLES", "WHY")
        blocks.append(section("collectors without all samples", header, lacking))
    if troubled := answer["reconciler"].get("troubled", ()):
        blocks.append(f"{heading('values that are not in force')}\n{_troubled(troubled)}")
    if unprotected := answer["unprotected"]:
        title = "containers that koordlet did not see at creation, or that lack something"
        blocks.append(f"{heading(title)}\n{_unprotected(unprotected)}")
    if answer["objects"]["problems"]:
        blocks.append(
            f"{heading('objects that could not be used')}\n{_object_problems(answer['objects'])}"
        )
    return blocks


def _unprotected(containers: Sequence[Mapping[str, Any]]) -> str:
    return _first_rows(
        ("POD", "CONTAINER", "ID", "LACKS"),
        [
            (each["pod"], each["container"], each["id"][:12], ", ".join(each["lacks"]) or "-")
            for each in sorted(containers, key=lambda each: not each["lacks"])
        ],
    )


def _object_problems(objects: Mapping[str, Any]) -> str:
    directory = f"{objects['directory']}/"
    return _first_rows(
        ("FILE", "OBJECT", "PROBLEM"),
        [
            (each["file"].removeprefix(directory), each["object"] or "-", each["message"])
            for each in objects["problems"]
        ],
    )


def _measuring(measuring: Mapping[str, Any]) -> str:
    if not measuring["running"]:
        return "nothing: no strategy runs" + (
            "" if measuring["enabled"] else " (measuring.enabled)"
        )
    ready = sum(each["state"] == "ready" for each in measuring["collectors"])
    rounds = f"{measuring['rounds']} rounds, {measuring['skippedTicks']} left out"
    took = f"last took {measuring['lastRoundMs']:.0f} ms"
    return f"{ready} collectors with samples; {rounds}; {took}"


def _strategy_row(strategy: Mapping[str, Any]) -> Row:
    age = strategy["stepAgeSeconds"]
    does = strategy["why"] or strategy["problem"] or strategy["summary"] or "at rest"
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
    said = [evictions["heldBack"]] if evictions.get("heldBack") else []
    said += [
        f"{short['gate']} is not covered: {short['why']}" for short in evictions.get("short", ())
    ]
    for each in said:
        rows.append(("" if rows else "evictions", each))
    return rows


def _reports(reports: Mapping[str, Any]) -> list[Row]:
    """Return a line for the NodeMetric, one for each kept object, and one for the prediction."""
    metric, prediction = reports["nodeMetric"], reports["prediction"]
    age = metric["ageSeconds"]
    said = "off"
    if metric["enabled"]:
        sent = "not reported yet"
        if age is not None:
            sent = f"reported {_times(metric['reports'])}, last {duration(age)} ago"
        said = metric["problem"] or sent
    rows: list[Row] = [("reports", f"NodeMetric: {said}")]
    for each in reports["objects"]:
        written = f"written {_times(each['writes'])}" if each["writes"] else "not written yet"
        rows.append(("", f"{each['kind']}: {each['problem'] or written}"))
    learned = f"{prediction['models']} models, trained {_times(prediction['trainings'])}"
    rows.append(("prediction", prediction["problem"] or learned))
    return rows


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def network_rows(network: Mapping[str, Any]) -> list[Row]:
    """Return what is shaped, each class without pods' own ones, and what is not in force."""
    classes = network["classes"]
    said = network["why"]
    if classes:
        own = [each for each in classes if each["name"] == "pod"]
        said = (
            f"{network['device']}, {rate_text(network['bitsPerSecond'])}; {len(own)} pods limited"
        )
    rows: list[Row] = [("network", said)]
    rows += [
        (
            "",
            f"{each['name']}: {rate_text(each['rateBits'])} guaranteed,"
            f" up to {rate_text(each['ceilBits'])}, {each['members']} members",
        )
        for each in classes
        if each["name"] != "pod"
    ]
    return rows + [("", problem) for problem in network["problems"]]


def _troubled(values: Sequence[Mapping[str, Any]]) -> str:
    return _first_rows(
        ("WHERE", "WHAT", "DESIRED", "OBSERVED", "STATE", "WHY"),
        [
            (v["name"], resource_name(v), v["desired"], v["observed"], v["state"], v["detail"])
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
