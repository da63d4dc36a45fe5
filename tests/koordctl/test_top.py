"""`koordctl top`: what one look shows, and how the terminal is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from koordctl.client import Unreachable
from koordctl.top import SORTS, follow, screen
from tests.koordctl.looks import look, look_at_an_older_daemon


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
