"""`koordctl report`: the node's last hour as one HTML file that needs no network and no script.

Charts are inline SVG; colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from koordctl.cpus import SHARED, owned

_WIDTH: Final = 960
_HEIGHT: Final = 200
_LEFT: Final = 56
_BOTTOM: Final = 22
_LINES_Y: Final = 4
"""Horizontal lines of a chart beside the axis."""
_TIMES_X: Final = 4
"""Times below a chart beside the first. Chosen: a time is 60 units wide, so that the five are far
apart and mark quarters of the hour; twice as many would be 110 units apart and crowded on a small
screen."""

_NO_CLASS: Final = "class not known"

Place = Callable[[float], float]
"""From a time or a value to its place in the drawing."""

_COLOURS: Final[Mapping[str, int]] = {
    "LS": 0, "BE": 1, "LSR": 2, "node": 3, "LSE": 4, "system": 5, "SYSTEM": 5, "uses": 1,
}  # fmt: skip
"""A class has the same colour in every chart; other lines take the colours in turn."""

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #667085; --line: #d7dce5; --paper: #fff;
  --c0: #2563b8; --c1: #b4560f; --c2: #18794e; --c3: #8a3ffc; --c4: #b3261e; --c5: #0f7c8a;
  --c6: #7a6a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --soft: #9aa4b5; --line: #343b48;
  --paper: #14171c; --c0: #7db2ff; --c1: #f2a35e; --c2: #67c99a; --c3: #c3a0ff; --c4: #ff8f87;
  --c5: #6fd3df; --c6: #d6c34a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p, td, th, figcaption { color: var(--ink); } .soft { color: var(--soft); }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top;
  padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); }
.numa { width: 1%; white-space: nowrap; }
figure { margin: 1rem 0; overflow-x: auto; } .wide { overflow-x: auto; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } .axis { stroke: var(--line); }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 1em; }
.cpu { display: inline-block; width: 2.2em; margin: 1px; text-align: center; border-radius: 3px;
  border: 1px solid var(--line); font-size: .8rem; font-variant-numeric: tabular-nums; }
"""


def page(history: Mapping[str, Any], overview: Mapping[str, Any]) -> str:
    """Return the whole page. history, overview: the daemon's answers to /history and /top."""
    times, series = history["times"], history["series"]
    name = html.escape(str(overview["name"]))
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(overview["at"]))
    parts = [
        f"<h1>Node {name}</h1>",
        f'<p class="soft">The last {_minutes(times)} up to {made}, a point every'
        f" {history['step_s']:g} s.</p>",
        *_charts(times, series, overview),
        _cpus(overview.get("topology")),
        _strategies(overview["strategies"]),
        _notes(history["notes"]),
        _pods(overview["pods"]),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Node {name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _charts(
    times: Sequence[float], series: Mapping[str, Any], overview: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the charts; "" for one without values."""
    classes = [row["class"] for row in overview["classes"] if f"cpu.{row['class']}" in series]
    return (
        _chart(
            "CPU used, in cores",
            times,
            [
                *((f"cpu.{each}", each) for each in classes),
                ("cpu.system", "system"),
                ("cpu.node", "node"),
            ],
            series,
            top=overview["node"]["cpu"]["capacity"],
        ),
        _chart(
            "Memory used, without page cache, in GiB",
            times,
            [
                *((f"memory.{each}", each) for each in classes),
                ("memory.system", "system"),
                ("memory.node", "node"),
            ],
            series,
            top=overview["node"]["memory"]["capacity"] / (1 << 30),
            scale=1 / (1 << 30),
        ),
        _chart(
            "Best effort: the cores that it may use, and uses",
            times,
            [
                ("be.limit", "may use"),
                ("cpu.BE", "uses"),
                *_named(series, "be_suppress_cpu_cores", "left by suppression"),
            ],
            series,
        ),
        _chart(
            "CPU burst: containers with a raised quota",
            times,
            [("cpu_burst_raised_quotas", "raised")],
            series,
        ),
        _chart(
            "Pressure: share of time in which tasks waited, in percent",
            times,
            [(each, each.removeprefix("psi.")) for each in series if each.startswith("psi.")],
            series,
        ),
        *_predictions(times, series),
    )


def _predictions(times: Sequence[float], series: Mapping[str, Any]) -> list[str]:
    """Return the charts of what was predicted and what came, if anything was predicted."""
    return [
        _chart(
            f"Prediction: the peak that is predicted for prod, and what prod used, in {unit}",
            times,
            [(f"predicted.{resource}.prod", "predicted"), (f"{resource}.prod", "used")],
            series,
            scale=scale,
        )
        for resource, unit, scale in (("cpu", "cores", 1.0), ("memory", "GiB", 1 / (1 << 30)))
        if f"predicted.{resource}.prod" in series
    ]


def _minutes(times: Sequence[float]) -> str:
    seconds = times[-1] - times[0] if len(times) > 1 else 0.0
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def _named(series: Mapping[str, Any], gauge: str, what: str) -> list[tuple[str, str]]:
    """Return (name, label) of the series of a gauge, which differ in its labels. what: it shows."""
    found = sorted(name for name in series if name.partition("{")[0] == gauge)
    return [(name, _label(name, what)) for name in found]


def _label(name: str, what: str) -> str:
    labels = name.partition("{")[2].rstrip("}").split(",")
    values = ", ".join(each.partition("=")[2] for each in labels)
    return f"{what}: {values}" if values else what


def _chart(
    title: str,
    times: Sequence[float],
    lines: Iterable[tuple[str, str]],
    series: Mapping[str, Sequence[float | None]],
    *,
    top: float | None = None,
    scale: float = 1.0,
) -> str:
    """Return a figure with one line for each series that has values; "" without any."""
    drawn = [
        (label, [None if value is None else value * scale for value in series[name]])
        for name, label in lines
        if name in series
    ]
    if not drawn or len(times) < 2:
        return ""
    largest = max((v for _, values in drawn for v in values if v is not None), default=0.0)
    highest = max(largest, top or 0.0) or 1.0
    begin, span = times[0], (times[-1] - times[0]) or 1.0

    def x(at: float) -> float:
        return _LEFT + (at - begin) / span * (_WIDTH - _LEFT)

    def y(value: float) -> float:
        return (_HEIGHT - _BOTTOM) * (1 - value / highest) + 4

    paths, keys = [], []
    for number, (label, values) in enumerate(drawn):
        colour = f"var(--c{_COLOURS.get(label, number % 6)})"
        dash = ' stroke-dasharray="5 3"' if number >= 6 else ""
        paths.append(
            f'<path d="{_path(times, values, x, y)}" fill="none" stroke="{colour}"'
            f' stroke-width="1.6"{dash}/>'
        )
        keys.append(f'<span class="key" style="background:{colour}"></span>{html.escape(label)}')
    return (
        f"<figure><h2>{html.escape(title)}</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 6}" role="img" aria-label="{html.escape(title)}">'
        f"{_axes(begin, span, highest, x, y)}{''.join(paths)}</svg>"
        f"<figcaption>{''.join(keys)}</figcaption></figure>"
    )


def _axes(begin: float, span: float, highest: float, x: Place, y: Place) -> str:
    """Return the horizontal lines with their values, and the times below them."""
    marks = []
    for step in range(_LINES_Y + 1):
        value = highest * step / _LINES_Y
        at_y = f"{y(value):.1f}"
        marks.append(
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{at_y}" y2="{at_y}"/>'
            f'<text x="{_LEFT - 6}" y="{at_y}" dy="4" text-anchor="end">{value:.4g}</text>'
        )
    for part in range(_TIMES_X + 1):
        at = begin + span * part / _TIMES_X
        anchor = {0: "start", _TIMES_X: "end"}.get(part, "middle")
        marks.append(
            f'<text x="{x(at):.1f}" y="{_HEIGHT}" text-anchor="{anchor}">'
            f"{time.strftime('%H:%M:%S', time.localtime(at))}</text>"
        )
    return "".join(marks)


def _path(times: Sequence[float], values: Sequence[float | None], x: Place, y: Place) -> str:
    """Return an SVG path; a gap where a value is missing."""
    commands, pen = [], "M"
    for at, value in zip(times, values, strict=True):
        if value is None:
            pen = "M"
            continue
        commands.append(f"{pen}{x(at):.1f},{y(value):.1f}")
        pen = "L"
    return "".join(commands)


def _cpus(topology: Mapping[str, Any] | None) -> str:
    """Return the CPUs by NUMA node, each in the colour of its owner, and the owners below."""
    if not topology:
        return ""
    rows, shown = [], {}
    for node in topology["nodes"]:
        cells = []
        for cpu in node["cpus"]:
            owners = cpu.get("owners")
            if owners is None:  # a daemon that is older than koordctl
                name, colour, text = "not known", "line", "owner not known"
            else:
                name, colour = _kind(owners[0]["class"]) if owners else (SHARED, "line")
                text = "; ".join(_owner(owner) for owner in owners) or SHARED
            shown[name] = colour
            cells.append(
                f'<span class="cpu" style="border-color:var(--{colour})" title="CPU {cpu["id"]},'
                f' core {cpu["core"]}: {html.escape(text)}">{cpu["id"]}</span>'
            )
        rows.append(
            f'<tr><td class="numa">NUMA node {node["id"]}</td><td>{"".join(cells)}</td></tr>'
        )
    keys = "".join(
        f'<span class="key" style="background:var(--{shown[name]})"></span>{html.escape(name)}'
        for name in sorted(shown)
    )
    owners = _rows(
        ("CPUs", "owner", "class", "why"),
        ((row.cpus, row.owner, row.class_, row.why) for row in owned(topology)),
    )
    return (
        f"<h2>CPUs and who owns them</h2>{_scrolled(''.join(rows))}<p>{keys}</p>"
        f"{_scrolled(owners) if owners else ''}"
    )


def _kind(class_: str) -> tuple[str, str]:
    """Return the name of a CPU's kind, and its colour. class_: of its first owner."""
    if class_ == "reserved":
        return class_, "c6"
    return class_ or _NO_CLASS, f"c{_COLOURS.get(class_, 1)}"


def _owner(owner: Mapping[str, Any]) -> str:
    return f"{owner['name']} ({owner['class'] or _NO_CLASS})"


def _rows(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the rows of a table with their header; "" without any."""
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    return f"<tr>{head}</tr>{body}" if body else ""


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    shown = _rows(header, rows)
    return f"<h2>{html.escape(title)}</h2>{_scrolled(shown)}" if shown else ""


def _scrolled(rows: str) -> str:
    """Return a table that scrolls by itself where the window is narrower than its words."""
    return f'<div class="wide"><table>{rows}</table></div>'


def _strategies(strategies: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        "Strategies",
        ("strategy", "state", "what it does now, and why"),
        (
            (
                each["name"],
                "on" if each["on"] else "off",
                each["problem"] or each["summary"] or each["why"] or "at rest",
            )
            for each in strategies
        ),
    )


def _notes(notes: Sequence[Mapping[str, Any]]) -> str:
    return _table(
        "What the strategies did",
        ("at", "strategy", "reason", "object", "message"),
        (
            (
                time.strftime("%H:%M:%S", time.localtime(note["at"])),
                note["strategy"],
                note["reason"],
                note["obj"],
                note["message"],
            )
            for note in reversed(notes)
        ),
    )


def _pods(pods: Iterable[Mapping[str, Any]]) -> str:
    ranked = sorted(pods, key=lambda pod: -(pod["cpu"] or 0.0))
    return _table(
        "Pods now",
        ("pod", "class", "CPU, cores", "memory, MiB", "throttled"),
        (
            (
                f"{pod['namespace']}/{pod['name']}",
                pod["class"],
                "-" if pod["cpu"] is None else f"{pod['cpu']:.2f}",
                "-" if pod["memory"] is None else f"{pod['memory'] / (1 << 20):.0f}",
                "-" if pod["throttled"] is None else f"{pod['throttled']:.0%}",
            )
            for pod in ranked
        ),
    )
