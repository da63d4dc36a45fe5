"""`koordctl top`: usage of the node, its classes and pods, and what the strategies do and why.

Live in a terminal, where it fills the screen and looks again every two seconds; printed once where
the output is not a terminal, or with --once.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from apis.cpuset import NO_CPUS, CpuSet
from apis.errors import printable
from koordctl.cpus import owned
from koordctl.tables import heading, table, when

INTERVAL_S: Final = 2.0
"""Between two looks. Chosen: samples come every second, and a person reads a screen in some."""

_CLEAR: Final = "\033[H\033[2J"
_ALTERNATE: Final = "\033[?1049h\033[?25l"
_NORMAL: Final = "\033[?25h\033[?1049l"
_BAR: Final = 24
"""Characters of a bar: one is about 4 %."""

SORTS: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
    "cpu": lambda pod: -(pod["cpu"] or 0.0),
    "memory": lambda pod: -(pod["memory"] or 0.0),
    "throttled": lambda pod: (-(pod["throttled"] or 0.0), -(pod["cpu"] or 0.0)),
    "pressure": lambda pod: (-max(pod["pressure"].values(), default=0.0), -(pod["cpu"] or 0.0)),
    "name": lambda pod: (pod["namespace"], pod["name"]),
}


def follow(
    ask: Callable[[], Mapping[str, Any]], *, sort: str, interval_s: float, rounds: int | None = None
) -> None:
    """Fill the screen again and again, until Ctrl-C or for so many rounds.

    ask: returns the daemon's answer; what it raises ends the loop, with the terminal as it was.
    """
    sys.stdout.write(_ALTERNATE)
    try:
        while rounds is None or rounds > 0:
            size = shutil.get_terminal_size((120, 40))
            lines = screen(ask(), sort=sort, width=size.columns).split("\n")
            sys.stdout.write(_CLEAR + "\n".join(lines[: max(size.lines - 1, 1)]))
            sys.stdout.flush()
            rounds = None if rounds is None else rounds - 1
            if rounds is None or rounds > 0:
                time.sleep(interval_s)
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(_NORMAL)
        sys.stdout.flush()


def screen(answer: Mapping[str, Any], *, sort: str = "cpu", width: int = 120) -> str:
    """Return the text of one look."""
    if not answer.get("measured"):
        return "koordlet has no measurements yet; koordctl status shows what the collectors do"
    node, best_effort = answer["node"], answer["bestEffort"]
    cpu, memory = node["cpu"], node["memory"]
    lines = [
        f"{heading(printable(answer['name']))}  {when(answer['at'])}",
        f"  cpu     {_bar(cpu['used'], cpu['capacity'])} {_cores(cpu['used'])} of"
        f" {_cores(cpu['capacity'])} cores, system {_cores(cpu['system'])}",
        f"  memory  {_bar(memory['used'], memory['capacity'])} {_bytes(memory['used'])} of"
        f" {_bytes(memory['capacity'])}, system {_bytes(memory['system'])}",
    ]
    if node["pressure"]:
        lines.append(f"  stalled {_pressure(node['pressure']) or 'below 1 %'}")
    if best_effort["limit"] is not None:
        lines.append(
            f"  best effort may use {_cores(best_effort['limit'])} cores, uses"
            f" {_cores(best_effort['used'])}, requests {_cores(best_effort['request'])}"
        )
    cpus = owned(answer["topology"])
    apart = [f"{printable(row.owner)} {row.cpus}" for row in cpus if not row.uid]
    if apart:
        lines.append(f"  CPUs    {', '.join(apart)}")
    classes = [
        (row["class"], row["pods"], _cores(row["cpu"]), _bytes(row["memory"]))
        for row in answer["classes"]
        if row["pods"]
    ]
    blocks = ["\n".join(lines)]
    blocks.append(table(("CLASS", "PODS", "CPU", "MEMORY"), classes, width=width))
    strategies = [
        (each["name"], _ago(each), printable(each["problem"] or each["summary"] or "at rest"))
        for each in answer["strategies"]
        if each["on"]
    ]
    blocks.append(table(("STRATEGY", "STEP", "DOES"), strategies, width=width))
    of_pods: dict[str, CpuSet] = {}
    for row in cpus:  # the scheduler and kubelet may both name CPUs of a pod
        if row.uid:
            of_pods[row.uid] = of_pods.get(row.uid, NO_CPUS) | row.cpus
    pods = [
        (
            printable(f"{pod['namespace']}/{pod['name']}"),
            pod["class"],
            _cores(pod["cpu"]),
            _bytes(pod["memory"]),
            "-" if pod["throttled"] is None else f"{pod['throttled']:.0%}",
            of_pods.get(pod["uid"], "-"),
            _pressure(pod["pressure"]) or "-",
        )
        for pod in sorted(answer["pods"], key=SORTS[sort])
    ]
    header = ("POD", "CLASS", "CPU", "MEMORY", "THROTTLED", "CPUS", "STALLED")
    blocks.append(table(header, pods, width=width))
    return "\n\n".join(block for block in blocks if block)


def _bar(used: float | None, capacity: float | None) -> str:
    if used is None or not capacity:
        return "[" + " " * _BAR + "]"
    filled = min(round(_BAR * used / capacity), _BAR)
    return "[" + "#" * filled + " " * (_BAR - filled) + "]"


def _cores(cores: float | None) -> str:
    return "-" if cores is None else f"{cores:.2f}"


def _bytes(amount: float | None) -> str:
    if amount is None:
        return "-"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount / 1024:.0f} KiB"


def _pressure(values: Mapping[str, float]) -> str:
    """Return the shares of time in which tasks waited, over the last 10 seconds."""
    return ", ".join(
        f"{name.removesuffix('.avg10').replace('.', ' ')} {value:.0f} %"
        for name, value in values.items()
        if value >= 1
    )


def _ago(strategy: Mapping[str, Any]) -> str:
    age = strategy["age_s"]
    return "never" if age is None else f"{age:.0f} s ago"
