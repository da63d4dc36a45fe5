"""Host applications in real groups: measured, reported, and told apart by suppression.

The YARN of a co-located Hadoop runs below the besteffort directory, a web server beside the pods.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from apis.quantity import parse_quantity
from tests.beds.containerd import Containerd
from tests.beds.daemon import Daemon, daemon
from tests.e2e.manifests import Manifest, node, nodeslo
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.containerd,
    # A busy machine would leave the applications too little CPU to be told from nothing.
    pytest.mark.alone,
]

_SPIN = "while :; do :; done"
_HELD = 8 << 20
"""Bytes that each application takes in its group."""


def declared(*, suppress: bool) -> Manifest:
    slo = nodeslo()
    slo["spec"]["hostApplications"] = [
        {
            "name": "yarn",
            "priority": "koord-batch",
            "qos": "BE",
            "cgroupPath": {"base": "KubepodsBesteffort", "relativePath": "hadoop-yarn/"},
        },
        {
            "name": "nginx",
            "priority": "koord-prod",
            "qos": "LS",
            "cgroupPath": {"base": "Kubepods", "relativePath": "nginx"},
        },
    ]
    slo["spec"]["resourceUsedThresholdWithBE"] = {
        "enable": suppress,
        "cpuSuppressPolicy": "cfsQuota",
        "cpuSuppressThresholdPercent": 95,
    }
    return slo


@contextmanager
def spinning(bed: Containerd, group: str) -> Iterator[Callable[[int], None]]:
    """A spinner in a new group; gives what sends it a signal. It is stopped at first."""
    bed.groups.make(group)
    joins = [
        f"echo $$ > {hierarchy / group.lstrip('/') / 'cgroup.procs'}"
        for hierarchy in bed.groups.hierarchies
    ]
    script = "; ".join([*joins, f"x=$(yes | head -c {_HELD})", "kill -STOP $$", _SPIN])
    process = subprocess.Popen(["/bin/sh", "-c", script])

    def stopped() -> bool:
        # "77 (sh) T ...": a signal to go on that comes earlier would be lost.
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] == "T"

    try:
        wait(stopped, "the spinner is in its group, and stopped")
        yield process.send_signal
    finally:
        process.kill()
        process.wait(30)
        wait(lambda: not bed.groups.read(group, "cgroup.procs"), "its end")
        bed.groups.remove(group)


def wait(condition: Any, what: str) -> None:
    wait_until(condition, what, timeout_s=90, every_s=0.1)


def suppression(koordlet: Daemon) -> str:
    strategies = koordlet.query("status")["strategies"]
    return next(str(each["summary"]) for each in strategies if each["name"] == "BECPUSuppress")


def others_use(koordlet: Daemon) -> float:
    """Cores of host applications that suppression takes off; 0 for none."""
    found = re.search(r"host applications ([\d.]+)", suppression(koordlet))
    return float(found[1]) if found else 0.0


def reported(koordlet: Daemon) -> dict[str, dict[str, Any]]:
    """The host applications of the NodeMetric, by name."""
    file = koordlet.run_dir / "reports" / "nodemetric.json"
    if not file.exists():
        return {}
    found = json.loads(file.read_text())["status"].get("hostApplicationMetric") or ()
    return {each["name"]: each for each in found}


@pytest.fixture(autouse=True)
def weighty(bed: Containerd) -> None:
    """Let the applications get CPU time on a machine that is busy with other programs."""
    root = bed.groups.path.rpartition("/")[0]
    bed.groups.file(root, "cpu.shares").write_text(str(bed.groups.weight(16_384)))


def test_host_applications_are_measured_reported_and_told_apart(bed: Containerd) -> None:
    yarn_group = f"{bed.groups.path}/besteffort/hadoop-yarn"
    nginx_group = f"{bed.groups.path}/nginx"
    with ExitStack() as stack:
        to_yarn = stack.enter_context(spinning(bed, yarn_group))
        to_nginx = stack.enter_context(spinning(bed, nginx_group))
        to_nginx(signal.SIGCONT)
        koordlet = stack.enter_context(daemon(bed, [node(), declared(suppress=True)]))
        wait(lambda: others_use(koordlet) > 0.0, "the web server's load is taken off")
        to_nginx(signal.SIGSTOP)
        wait(lambda: others_use(koordlet) == 0.0, "it is idle")
        to_yarn(signal.SIGCONT)
        quota = bed.groups.file(f"{bed.groups.path}/besteffort", "cpu.cfs_quota_us")
        wait(lambda: quota.read_text().strip() != "-1", "best-effort work has a quota")
        wait(lambda: {"yarn", "nginx"} <= reported(koordlet).keys(), "the report has both")
        # What runs below the besteffort directory is best-effort use: it takes nothing off.
        assert others_use(koordlet) == 0.0
        yarn, nginx = (reported(koordlet)[name] for name in ("yarn", "nginx"))
        assert (yarn["priority"], yarn["qos"]) == ("koord-batch", "BE")
        assert (nginx["priority"], nginx["qos"]) == ("koord-prod", "LS")
        for each in (yarn, nginx):
            held = parse_quantity(each["usage"]["resources"]["memory"]).value()
            assert _HELD <= held < 4 * _HELD
        assert parse_quantity(nginx["usage"]["resources"]["cpu"]).milli_value() > 0
        koordlet.put(declared(suppress=False))
        wait(lambda: quota.read_text().strip() == "-1", "the quota is gone")
