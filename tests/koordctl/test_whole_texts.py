"""Whole texts of koordctl: every column, heading and number of a daemon's answer at its place."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from koordctl import render
from koordctl.client import Client
from koordctl.main import main
from koordctl.status import status_text
from tests.koordctl.answers import EXPLAINED, LONG_AGO, PLANNED, STATUS

pytestmark = pytest.mark.usefixtures("terminal")

_STATUS = """\
node        n1
koordlet    1.2.3, up 1h2m
ready       no: no pods yet; no NRI
unhealthy   the reconciler hangs
NRI         connected to containerd 2.1.0 (NRI 0.8) for 1m1s; 12 containers adjusted, 3 missed,
            worst reply 7.5 ms
on failure  Fail: creations fail
proxy       on failure Ignore: creations go on
            values of rdt are lost
cgroups     v2, systemd driver, pods below /kubepods
objects     NodeSLO, NodeResourceTopology, Node, Device, 4 pods
pods        5 with 9 containers
kubelet     3 lists read; last answer 4s ago
cri         no socket
reports     NodeMetric: reported 2 times, last 30s ago
            Device: written once
            NodeResourceTopology: not written yet
            Node: refused
prediction  6 models, trained 3 times
network     no device
            tc is missing
values      10 applied, 1 failed
reconciler  21 passes, 22 writes, 23 refused, 24 restored; last at 2001-09-09 01:46 in 1.5 ms
journal     ENOSPC
originals   some are not restored: kept aside
measuring   1 collectors with samples; 100 rounds, 2 left out; last took 12 ms
evictions   3; last Pod default/hog, evicted, at 2001-09-09 01:46 for CPUEvict
            kubelet evicts
            BEMemoryEvict is not covered: no pod is left
memory      62 MB

policies
POLICY         STATE  WHY
BatchResource  on     3 pods
CoreSched      off    gate

strategies
STRATEGY     STATE  STEP    DOES
CPUEvict     on     1s ago  at rest
CPUBurst     on     2s ago  late
CPUSuppress  off    -       gate

collectors without all samples
COLLECTOR  STATE    SAMPLES  WHY
pods       failing  5s ago   EIO
gpu        absent   none     no driver

values that are not in force
WHERE            WHAT                 DESIRED  OBSERVED  STATE    WHY
Pod default/web  cpu.shares           2        -         failed   EINVAL
Pod default/db   resctrl.schemata L3  ff       f         blocked  others

containers that koordlet did not see at creation, or that lack something
POD          CONTAINER  ID            LACKS
default/db   main                     env, cpuset
default/web  main       0123456789ab  -

objects that could not be used
FILE     OBJECT      PROBLEM
a.yaml   -           not YAML
/b.yaml  NodeSLO n1  unknown field
"""

_EXPLAINED = """\
pod  Pod default/web
  class none, Kubernetes class Burstable, priority -, uid u-1
  cgroup kubepods/podu-1
  ! CPUBurst: no limit
  RESOURCE             REQUESTED  DECIDED             OBSERVED    STATE        WHY
  memory.high          -          1073741824 (1 GiB)  1073741824  applied      MemoryQOS
  resctrl.schemata L3  f          ff                  -           unsupported  Resctrl
  memory.high
    from NodeSLO
    shaped by A at most 5: b (from c)
    overruled: D set 6: e (from f)
    original max
    2001-09-09 01:46 written: 1 -> 2
    2001-09-09 01:46 written: 2 -> 3
    2001-09-09 01:46 refused: EBUSY: ? -> 9

container  Container default/web/main
  id c1c1
  no policy claims a value

to be restored
RESOURCE    OBSERVED  ORIGINAL  STATE   DETAIL
cpu.shares  2         1024      failed  EBUSY
"""

_PLANNED = """\
problems
FILE      OBJECT      PROBLEM
-         NodeSLO n1  there is none
bad.yaml  Pod         no name

policies
POLICY    NOW  THEN  WHY
CPUBurst  off  on    NodeSLO
Mine      -    off   gate

2 writes, in this order
WHERE    WHAT        NOW  THEN  WHY
Pod a/b  cpu.shares  2    3     batch-cpu
/q       cpu.idle    -    1     BE
"""


def test_a_status_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert f"{status_text(STATUS)}\n" == _STATUS


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """Return the status with another value at the path."""
    answer = copy.deepcopy(STATUS)
    place: Any = answer
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return answer


_OFF = {"enabled": False}
_WAITING = {"enabled": True, "connected": False, "state": "dialing", "socket": "/nri.sock"}
_NO_OBJECTS = {
    "nodeSLO": False,
    "topology": False,
    "node": False,
    "device": False,
    "pods": 0,
    "directory": "/objects.d",
    "problems": [],
}


@pytest.mark.parametrize(
    ("path", "to", "row"),
    [
        (("ready",), True, "ready       yes"),
        (("nri",), _OFF, "NRI         off"),
        (("nri",), {**_WAITING, "problem": ""}, "NRI         dialing: waiting (/nri.sock)"),
        (("nri",), {**_WAITING, "problem": "no"}, "NRI         dialing: no (/nri.sock)"),
        (
            ("cgroup", "kubepods"),
            None,
            "cgroups     v2, systemd driver, pods below not found yet",
        ),
        (
            ("objects",),
            _NO_OBJECTS,
            "objects     none; no NodeSLO of this node in /objects.d: its defaults apply, with"
            " almost every policy off",
        ),
        (
            ("objects", "topology"),
            False,
            "objects     NodeSLO, Node, Device, 4 pods",
        ),
        (("objects", "pods"), 0, "objects     NodeSLO, NodeResourceTopology, Node, Device"),
        (("sources", 0, "ageSeconds"), 0.0, "kubelet     3 lists read; last answer 0.0s ago"),
        (("reports", "nodeMetric", "enabled"), False, "reports     NodeMetric: off"),
        (
            ("reports", "nodeMetric", "ageSeconds"),
            None,
            "reports     NodeMetric: not reported yet",
        ),
        (("reports", "nodeMetric", "problem"), "refused", "reports     NodeMetric: refused"),
        (
            ("reports", "nodeMetric", "reports"),
            1,
            "reports     NodeMetric: reported once, last 30s ago",
        ),
        (("reports", "prediction", "problem"), "torn", "prediction  torn"),
        (
            ("measuring", "running"),
            False,
            "measuring   nothing: no strategy runs",
        ),
        (
            ("measuring",),
            {"running": False, "enabled": False, "collectors": []},
            "measuring   nothing: no strategy runs (measuring.enabled)",
        ),
        (("reconciler", "values"), {}, "values      none"),
        (
            ("reconciler", "lastFinishedAt"),
            0,
            "reconciler  21 passes, 22 writes, 23 refused, 24 restored; last at never in 1.5 ms",
        ),
    ],
)
def test_a_row_of_the_status_says_what_is_so(path: tuple[Any, ...], to: Any, row: str) -> None:
    lines = status_text(changed(*path, to=to)).splitlines()
    assert row in lines
    assert row not in _STATUS.splitlines()


@pytest.mark.parametrize(
    ("path", "to", "start"),
    [
        (("unhealthy",), "", "unhealthy "),
        (("cgroup",), None, "cgroups "),
        (("reports",), None, "reports "),
        (("networkQos",), None, "network "),
        (("networkQos", "problems"), [], "network "),
        (("measuring",), None, "measuring "),
        (("evictions",), {}, "evictions "),
        (("reconciler", "journalError"), "", "journal "),
        (("reconciler", "journalLost"), "", "originals "),
        (("reconciler",), {}, "values  "),
        (("strategies",), [], "strategies"),
        (("reconciler", "troubled"), [], "values that are not in force"),
        (("unprotected",), [], "containers that koordlet did not see"),
        (("objects", "problems"), [], "objects that could not be used"),
        (("measuring", "collectors"), [], "collectors without all samples"),
        (("nri", "failurePolicy", "configured"), "Ignore", "on failure"),
        (("hookService", "enabled"), False, "proxy "),
    ],
)
def test_what_there_is_nothing_to_say_about_is_left_out(
    path: tuple[Any, ...], to: Any, start: str
) -> None:
    def rows(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(start)]

    assert len(rows(_STATUS)) == 1
    assert rows(status_text(changed(*path, to=to))) == []


def test_network_classes_are_shown_also_while_nothing_is_wrong() -> None:
    network = {**STATUS["networkQos"], "state": "on", "problems": []}
    assert "network     no device" in status_text(changed("networkQos", to=network)).splitlines()


@pytest.mark.parametrize(("rows", "more"), [(20, 0), (21, 1), (45, 25)])
def test_a_table_shows_twenty_rows_and_counts_the_others(rows: int, more: int) -> None:
    problems = [{"file": f"/f{number}", "object": "", "message": "bad"} for number in range(rows)]
    shown = status_text(changed("objects", "problems", to=problems)).splitlines()
    assert sum(line.endswith("bad") for line in shown) == 20
    counted = [f"... and {more} more: koordctl status -o json"] if more else []
    assert [line for line in shown if line.startswith("...")] == counted


@pytest.mark.parametrize(
    ("ready", "unhealthy", "form", "status"),
    [
        (True, "", "table", 0),
        (False, "", "table", 1),
        (True, "it hangs", "table", 1),
        (False, "it hangs", "json", 0),
    ],
)
def test_the_exit_status_says_whether_the_daemon_is_as_it_should_be(
    ready: bool, unhealthy: str, form: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {**STATUS, "ready": ready, "unhealthy": unhealthy}
    monkeypatch.setattr(Client, "get", lambda _, path: {"/status": answer}[path])
    assert main(["status", "-o", form]) == status


def test_an_explanation_is_shown_whole() -> None:
    assert f"{render.explanation(EXPLAINED)}\n" == _EXPLAINED


def test_an_explanation_of_nothing_is_empty() -> None:
    assert render.explanation({}) == ""


def test_a_plan_is_shown_whole() -> None:
    assert f"{render.plan(PLANNED)}\n" == _PLANNED


@pytest.mark.parametrize(
    ("pods", "writes", "last"),
    [
        (0, [], "Nothing would be written: the node already has these values."),
        (
            None,
            [],
            "No pod of this node is known: what pods and containers would get is left out.",
        ),
        (
            None,
            PLANNED["writes"],
            "No pod of this node is known: what pods and containers would get is left out.",
        ),
    ],
)
def test_a_plan_says_when_it_has_nothing_to_write_or_no_pods(
    pods: int | None, writes: list[Any], last: str
) -> None:
    answer = {"problems": [], "policies": [], "writes": writes, "pods": pods}
    *before, shown = render.plan(answer).split("\n\n")
    assert shown == last
    assert len(before) == len(writes) // 2


def test_events_are_a_table() -> None:
    event = {"lastAt": LONG_AGO, "count": 3, "kind": "nri", "object": "n1", "message": "connected"}
    assert render.events([event]).splitlines() == [
        "LAST              COUNT  KIND  OBJECT  MESSAGE",
        "2001-09-09 01:46  3      nri   n1      connected",
    ]
    assert render.events([]) == "No events."


@pytest.mark.parametrize(
    ("resource", "value", "shown"),
    [
        ("memory.high", "1048575", "1048575"),
        ("memory.high", "1048576", "1048576 (1 MiB)"),
        ("memory.high", "1073741823", "1073741823 (1024 MiB)"),
        ("memory.high", "1073741824", "1073741824 (1 GiB)"),
        ("memory.high", "5905580032", "5905580032 (5.5 GiB)"),
        ("cpu.memory.high", "1073741824", "1073741824"),
    ],
)
def test_the_unit_of_memory_is_the_largest_that_fits(resource: str, value: str, shown: str) -> None:
    assert render.with_unit(resource, value) == shown
