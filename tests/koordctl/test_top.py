"""`koordctl top`: what one look shows, and how the terminal is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from koordctl.client import Unreachable
from koordctl.top import SORTS, follow, screen
from tests.koordctl.answers import LONG_AGO
from tests.koordctl.looks import look, look_at_an_older_daemon

_LOOK = """\
worker-1  2001-09-09 01:46
  cpu     [###############         ] 9.92 of 16.00 cores, system 0.42
  memory  [########                ] 20.0 GiB of 64.0 GiB, system 1.5 GiB
  stalled cpu some 12 %
  best effort may use 3.00 cores, uses 2.90, requests 12.00
  CPUs    node reservation 0,8, system class 3, shared 2,9

CLASS  PODS  CPU   MEMORY
LSR    1     2.00  4.0 GiB
LS     1     5.10  8.0 GiB
BE     1     2.90  6.0 GiB

STRATEGY       STEP     DOES
BECPUSuppress  1 s ago  suppressed to 3 CPUs: 65 % x 16 - LS 7.1 - system 0.4

POD                              CLASS  CPU   MEMORY   THROTTLED  CPUS  STALLED
default/web-0                    LS     5.10  5.1 GiB  25%        -     cpu some 3 %
batch/<script>alert(1)</script>  BE     2.90  2.9 GiB  0%         -     cpu some 41 %
default/db-0                     LSR    2.00  2.0 GiB  -          1,3   -
"""


@pytest.mark.usefixtures("terminal")
def test_a_look_is_shown_whole() -> None:
    assert f"{screen(look() | {'at': LONG_AGO})}\n" == _LOOK


@pytest.mark.parametrize(
    ("used", "capacity", "filled"),
    [
        (None, 16.0, 0),
        (4.0, None, 0),
        (4.0, 0.0, 0),
        (0.0, 16.0, 0),
        (0.3, 16.0, 0),
        (0.4, 16.0, 1),
        (8.0, 16.0, 12),
        (15.7, 16.0, 24),
        (16.0, 16.0, 24),
        (40.0, 16.0, 24),
    ],
)
def test_a_bar_has_24_characters_of_which_the_used_share_is_filled(
    used: float | None, capacity: float | None, filled: int
) -> None:
    answer = look()
    answer["node"]["cpu"] |= {"used": used, "capacity": capacity}
    bar = screen(answer, width=140).splitlines()[1].removeprefix("  cpu     ")
    assert bar.startswith(f"[{'#' * filled}{' ' * (24 - filled)}] ")


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (None, "-"),
        (0.0, "0 KiB"),
        (512.0, "0 KiB"),
        (10_240.0, "10 KiB"),
        (1048575.0, "1024 KiB"),
        (1048576.0, "1.0 MiB"),
        (1073741823.0, "1024.0 MiB"),
        (1073741824.0, "1.0 GiB"),
        (2.5 * 1073741824, "2.5 GiB"),
    ],
)
def test_an_amount_of_memory_has_the_largest_unit_that_fits(
    amount: float | None, shown: str
) -> None:
    answer = look()
    answer["node"]["memory"]["system"] = amount
    assert screen(answer, width=140).splitlines()[2].endswith(f", system {shown}")


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("cpu", ["b/two", "a/one", "b/one", "a/two"]),
        ("memory", ["a/two", "b/one", "a/one", "b/two"]),
        ("throttled", ["b/one", "b/two", "a/one", "a/two"]),
        ("pressure", ["a/one", "b/two", "b/one", "a/two"]),
        ("name", ["a/one", "a/two", "b/one", "b/two"]),
    ],
)
def test_the_order_of_pods_is_by_the_largest_then_by_cpu(sort: str, order: list[str]) -> None:
    """What was not measured counts as nothing; pressure is the largest of a pod's."""
    columns = ("namespace", "name", "cpu", "memory", "throttled", "pressure")
    rows: tuple[tuple[Any, ...], ...] = (
        ("a", "two", None, 4e9, None, {}),
        ("b", "one", 0.5, 3e9, 0.2, {"cpu.some.avg10": 3.0, "io.some.avg10": 3.0}),
        ("a", "one", 1.0, 2e9, 0.1, {"cpu.some.avg10": 1.0, "io.some.avg10": 5.0}),
        ("b", "two", 4.0, None, 0.1, {"cpu.some.avg10": 3.0}),
    )
    pods = [dict(zip(columns, row, strict=True)) | {"uid": "", "class": "LS"} for row in rows]
    shown = screen(look() | {"pods": pods}, sort=sort, width=140)
    assert [line.split()[0] for line in shown.split("STALLED\n")[1].splitlines()] == order


@pytest.mark.parametrize(
    ("strategy", "row"),
    [
        ({"problem": "no metric", "summary": "3 CPUs"}, "1 s ago  no metric"),
        ({"problem": "", "summary": ""}, "1 s ago  at rest"),
        ({"problem": "", "summary": "3 CPUs", "age_s": None}, "never  3 CPUs"),
        ({"problem": "", "summary": "3 CPUs", "age_s": 75.4}, "75 s ago  3 CPUs"),
    ],
)
def test_a_strategy_shows_its_problem_first_and_when_it_stepped(
    strategy: dict[str, Any], row: str
) -> None:
    answer = look()
    answer["strategies"][0] |= strategy
    [line] = [each for each in screen(answer).splitlines() if each.startswith("BECPUSuppress")]
    assert line == f"BECPUSuppress  {row}"


def test_a_node_without_pods_and_strategies_has_no_empty_tables() -> None:
    answer = look() | {"pods": [], "strategies": [], "classes": [], "topology": None}
    answer["node"]["pressure"] = {}
    assert len(screen(answer, width=140).splitlines()) == 4


def test_each_pressure_is_named_without_its_window() -> None:
    answer = look()
    answer["node"]["pressure"] = {"cpu.some.avg10": 12.4, "memory.full.avg10": 1.6}
    assert "  stalled cpu some 12 %, memory full 2 %" in screen(answer, width=140).splitlines()


@pytest.mark.parametrize(("rows", "shown"), [("9", 8), ("1", 1), ("60", 19)])
def test_a_small_terminal_shows_the_first_lines_and_keeps_its_last_one_free(
    rows: str,
    shown: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("LINES", rows)
    follow(look, sort="cpu", interval_s=0, rounds=1)
    written = capsys.readouterr().out
    start, end = "\033[?1049h\033[?25l\033[H\033[2J", "\033[?25h\033[?1049l"
    assert written.startswith(start) and written.endswith(end)
    lines = written.removeprefix(start).removesuffix(end).split("\n")
    assert lines == screen(look(), width=140).split("\n")[:shown]
    assert len(lines) == shown


def test_it_looks_again_after_the_interval_but_not_after_the_last_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("koordctl.top.time.sleep", slept.append)
    follow(_answers(look(), look(), look()), sort="cpu", interval_s=7.0, rounds=3)
    assert slept == [7.0, 7.0]
    assert capsys.readouterr().out.count("\033[H\033[2J") == 3


def test_a_look_shows_the_node_its_classes_strategies_and_pods() -> None:
    shown = screen(look(), width=140)
    assert "9.92 of 16.00 cores, system 0.42" in shown
    assert "20.0 GiB of 64.0 GiB, system 1.5 GiB" in shown
    assert "stalled cpu some 12 %\n" in shown  # below 1 % is left out
    assert "best effort may use 3.00 cores, uses 2.90, requests 12.00" in shown
    assert "suppressed to 3 CPUs: 65 % x 16 - LS 7.1 - system 0.4" in shown
    assert "CPUEvict" not in shown  # it is off
    assert "LSE" not in shown  # it has no pods
    [web] = [line for line in shown.splitlines() if "default/web-0" in line]
    assert web.split() == [
        "default/web-0",
        "LS",
        "5.10",
        "5.1",
        "GiB",
        "25%",
        "-",
        "cpu",
        "some",
        "3",
        "%",
    ]


def test_a_look_shows_who_has_the_cpus() -> None:
    shown = screen(look(), width=140)
    assert "  CPUs    node reservation 0,8, system class 3, shared 2,9\n" in shown
    [database] = [line for line in shown.splitlines() if "default/db-0" in line]
    assert database.split() == ["default/db-0", "LSR", "2.00", "2.0", "GiB", "-", "1,3", "-"]


def test_a_pod_has_the_cpus_of_all_its_rows() -> None:
    answer = look()
    cpus = answer["topology"]["nodes"][0]["cpus"]
    of_kubelet = {**cpus[1]["owners"][0], "why": "kubelet's static CPU manager"}
    cpus[5]["owners"] = [of_kubelet]
    [database] = [line for line in screen(answer, width=140).splitlines() if "default/db-0" in line]
    assert database.split()[-2] == "1,3,9"


def test_a_node_without_owned_cpus_has_no_line_for_them() -> None:
    answer = look()
    answer["topology"]["nodes"][0]["cpus"] = [{"id": 0, "core": 0, "owners": []}]
    assert "CPUs  " not in screen(answer, width=140)


def test_an_older_daemon_is_shown_without_owners_of_cpus() -> None:
    shown = screen(look_at_an_older_daemon(), width=140)
    assert "CPUs  " not in shown and "shared" not in shown
    [database] = [line for line in shown.splitlines() if "default/db-0" in line]
    assert database.split()[-2:] == ["-", "-"]


def test_a_node_whose_tasks_hardly_wait_says_so() -> None:
    answer = look()
    answer["node"]["pressure"] = {"cpu.some.avg10": 0.4}
    assert "stalled below 1 %\n" in screen(answer, width=140)
    answer["node"]["pressure"] = {"cpu.some.avg10": 1.0, "io.some.avg10": 0.9}
    assert "stalled cpu some 1 %\n" in screen(answer, width=140)


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        ("cpu", "default/web-0"),
        ("memory", "default/web-0"),
        ("throttled", "default/web-0"),
        ("pressure", "batch/"),
        ("name", "batch/"),
    ],
)
def test_pods_are_sorted_as_asked(sort: str, first: str) -> None:
    assert set(SORTS) == {"cpu", "memory", "throttled", "pressure", "name"}
    shown = screen(look(), sort=sort, width=140)
    assert shown.split("STALLED\n")[1].startswith(first)


def test_what_was_not_measured_is_a_dash() -> None:
    answer = look()
    answer["node"]["cpu"]["used"] = None
    answer["node"]["memory"]["used"] = None
    answer["bestEffort"] = {"used": None, "limit": None, "request": None}
    for pod in answer["pods"]:
        pod.update(cpu=None, memory=None, throttled=None, pressure={})
    shown = screen(answer, width=140)
    assert "- of 16.00 cores" in shown
    assert "best effort may use" not in shown
    assert "None" not in shown and "nan" not in shown


def test_before_the_first_measurement_it_says_where_to_look() -> None:
    assert "koordctl status" in screen({"measured": False})


def test_control_characters_of_names_do_not_reach_the_terminal() -> None:
    answer = look()
    answer["pods"][0]["name"] = "x\x1b[2J"
    assert "\x1b" not in screen(answer, width=140)


def _answers(*made: Any) -> Callable[[], Any]:
    left = list(made)

    def ask() -> Any:
        answer = left.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return ask


@pytest.mark.parametrize("end", [KeyboardInterrupt(), Unreachable("gone"), None], ids=str)
def test_the_terminal_is_as_before_whatever_ends_it(
    end: BaseException | None, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = _answers(look(), end) if end is not None else _answers(look())
    rounds = None if end is not None else 1
    if isinstance(end, Unreachable):
        with pytest.raises(Unreachable):
            follow(ask, sort="cpu", interval_s=0, rounds=rounds)
    else:
        follow(ask, sort="cpu", interval_s=0, rounds=rounds)
    written = capsys.readouterr().out
    assert written.startswith("\033[?1049h\033[?25l") and "worker-1" in written
    assert written.endswith("\033[?25h\033[?1049l")
