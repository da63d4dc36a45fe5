"""Policies of the site: loaded on change, and no harm to anybody whatever they do."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hooks.claim import Claim
from hooks.subject import NodeSubject, PodSubject
from koordlet.decisions.overtime import Alarm, Interrupter, Overtime
from koordlet.decisions.site_policies import MOST_SUBJECTS_OFF, SiteGuard, SiteLoader
from service.events import Events
from tests.koordlet.builders import runtime_pod

GOOD = """
from hooks.site import site_policy, want
from linux.resources import Resource
def node(inputs, subject):
    return [want(Resource.SYSCTL, "1", key="kernel.x", reason="r")]
POLICY = site_policy(name="{name}", summary="s", node=node)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "policies.d"
    made.mkdir(mode=0o755)
    return made


@pytest.fixture
def loader(folder: Path) -> SiteLoader:
    return SiteLoader(str(folder), Interrupter())


def names(loader: SiteLoader) -> list[str]:
    return [policy.name for policy in loader.load()[0]]


def problems(loader: SiteLoader) -> list[str]:
    return [problem for _, problem in loader.load()[1]]


def test_a_missing_directory_has_no_policies(tmp_path: Path) -> None:
    assert SiteLoader(str(tmp_path / "no"), Interrupter()).load() == ((), ())


def test_files_are_loaded_and_loaded_again_when_they_change(
    folder: Path, loader: SiteLoader
) -> None:
    (folder / "a.py").write_text(GOOD.format(name="one"))
    first = loader.load()
    assert [policy.name for policy in first[0]] == ["site/one"]
    assert loader.load()[0][0] is first[0][0]
    (folder / "a.py").write_text(GOOD.format(name="another"))
    assert names(loader) == ["site/another"]
    (folder / "a.py").unlink()
    assert names(loader) == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def (", "SyntaxError"),
        ("raise ValueError('oops')", "ValueError: oops"),
        ("import sys; sys.exit(1)", "SystemExit"),
        ("x = 1", "POLICY"),
        ("POLICY = 3", "not a policy"),
        ("from hooks.policies import BUILTIN\nPOLICY = BUILTIN[0]", "site_policy"),
    ],
)
def test_a_file_that_cannot_be_loaded_says_why(
    folder: Path, loader: SiteLoader, source: str, words: str
) -> None:
    (folder / "a.py").write_text(source)
    (folder / "b.py").write_text(GOOD.format(name="fine"))
    assert names(loader) == ["site/fine"]
    (problem,) = problems(loader)
    assert words in problem


def test_a_file_that_breaks_keeps_its_last_good_policy(folder: Path, loader: SiteLoader) -> None:
    (folder / "a.py").write_text(GOOD.format(name="one"))
    loader.load()
    (folder / "a.py").write_text("def (")
    assert names(loader) == ["site/one"]
    assert "its last good version stays in force" in problems(loader)[0]


def test_a_file_that_never_ends_is_given_up(
    folder: Path, loader: SiteLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koordlet.decisions.site_policies.LOAD_LIMIT_S", 0.05)
    (folder / "a.py").write_text("while True:\n    pass\n")
    assert names(loader) == []
    assert "longer than" in problems(loader)[0]


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_what_others_can_write_is_not_run(folder: Path, loader: SiteLoader, mode: int) -> None:
    path = folder / "a.py"
    path.write_text(GOOD.format(name="one"))
    path.chmod(mode)
    assert names(loader) == []
    assert "writable by others" in problems(loader)[0]
    path.chmod(0o644)
    folder.chmod(0o777)
    assert names(loader) == []


def test_a_link_is_not_run_wherever_it_leads(folder: Path, loader: SiteLoader) -> None:
    elsewhere = folder.parent / "elsewhere.py"
    elsewhere.write_text(GOOD.format(name="one"))
    (folder / "a.py").symlink_to(elsewhere)
    policies, found = loader.load()
    assert policies == ()
    assert found == ((f"{folder}/a.py", "is a symbolic link: copy the file"),)
    linked = folder.parent / "linked.d"
    linked.symlink_to(folder)
    assert "is a symbolic link" in problems(SiteLoader(str(linked), Interrupter()))[0]


def test_what_is_no_file_is_not_waited_for(folder: Path, loader: SiteLoader) -> None:
    os.mkfifo(folder / "a.py")
    (folder / "b.py").mkdir()
    assert problems(loader) == ["is not a regular file", "Is a directory"]


def test_a_directory_that_others_can_replace_is_not_run(tmp_path: Path) -> None:
    above = tmp_path / "shared"
    directory = above / "policies.d"
    directory.mkdir(parents=True)
    (directory / "a.py").write_text(GOOD.format(name="one"))
    loader = SiteLoader(str(directory), Interrupter())
    above.chmod(0o777)
    assert loader.load() == (
        (),
        ((str(above), "is writable by others, who could replace what lies below it"),),
    )
    above.chmod(0o1777)
    assert names(loader) == ["site/one"]


def test_a_file_that_others_may_write_from_now_on_is_reported(
    folder: Path, loader: SiteLoader
) -> None:
    path = folder / "a.py"
    path.write_text(GOOD.format(name="one"))
    assert problems(loader) == []
    path.chmod(0o666)
    assert problems(loader) == [
        "is writable by others: chmod go-w it; its last good version stays in force"
    ]
    assert names(loader) == ["site/one"]


def test_what_belongs_to_another_user_is_not_run(folder: Path, loader: SiteLoader) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: gives a file away")
    (folder / "a.py").write_text(GOOD.format(name="one"))
    os.chown(folder / "a.py", 12345, 12345)
    assert names(loader) == []
    assert "belongs to another user" in problems(loader)[0]


# --- time --------------------------------------------------------------------------------------


def spin() -> None:
    while True:
        pass


def spin_instead_of_claiming(rule: Any, subject: Any) -> list[Claim]:
    spin()
    return []


def stubborn() -> None:
    """Swallows what is raised inside it, a few times."""
    for _ in range(3):
        try:
            spin()
        except BaseException:  # noqa: BLE001 - that is the point
            continue


def in_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    return results[0]


def ends_in_overtime(run: Callable[[Callable[[], Any], float], Any], call: Any) -> bool:
    try:
        run(call, 0.01)
    except Overtime:
        return True
    return call is stubborn  # it may have come to its end by itself


@pytest.mark.parametrize("call", [spin, stubborn])
def test_a_call_in_the_main_thread_is_bounded(call: Callable[[], None]) -> None:
    assert ends_in_overtime(Alarm().run, call)


@pytest.mark.parametrize("call", [spin, stubborn])
def test_a_call_in_another_thread_is_bounded(call: Callable[[], None]) -> None:
    interrupter = Interrupter()
    assert in_thread(lambda: ends_in_overtime(interrupter.run, call))


def test_no_strike_hits_what_comes_after_the_call() -> None:
    interrupter = Interrupter()

    def work() -> int:
        struck = 0
        for _ in range(300):
            try:
                interrupter.run(lambda: time.sleep(0.0021), 0.002)
            except Overtime:
                struck += 1
            sum(range(100))  # nothing may be raised here
        return struck

    assert 0 <= in_thread(work) <= 300


def test_results_and_errors_pass_through() -> None:
    alarm = Alarm()
    assert alarm.run(lambda: 3, 1.0) == 3
    with pytest.raises(KeyError):
        alarm.run(lambda: os.environ["NO_SUCH_VARIABLE"], 1.0)


# --- the guard ---------------------------------------------------------------------------------


def guard(events: Events) -> SiteGuard:
    return SiteGuard(events, 0.01, Alarm().run)


def fails(rule: Any, subject: Any) -> list[Claim]:
    raise RuntimeError("oops")


def test_a_fault_switches_a_policy_off_for_that_subject_only() -> None:
    events = Events()
    calls: list[str] = []

    def sometimes(rule: Any, subject: Any) -> list[Claim]:
        calls.append(subject.key)
        if subject.key == "node":
            raise RuntimeError("oops")
        return []

    site = guard(events)
    other = PodSubject(pod=runtime_pod("u1"))
    for _ in range(2):
        assert site("site/x", sometimes, None, NodeSubject()) == ()
        site("site/x", sometimes, None, other)
    assert calls == ["node", other.key, other.key]
    (event,) = events.latest()
    assert "RuntimeError: oops" in event.message
    assert "off for this subject" in event.message
    site.forget()
    site("site/x", sometimes, None, NodeSubject())
    assert calls[-1] == "node"


def test_a_policy_that_fails_again_and_again_is_off_everywhere() -> None:
    events = Events()
    site = guard(events)
    for number in range(MOST_SUBJECTS_OFF + 5):
        site("site/x", fails, None, PodSubject(pod=runtime_pod(f"u{number}")))
    assert site.off == {"site/x": MOST_SUBJECTS_OFF}
    assert "off everywhere" in events.latest()[-1].message


def test_a_slow_call_is_cut_short_and_switched_off() -> None:
    events = Events()
    site = guard(events)
    assert site("site/x", spin_instead_of_claiming, None, NodeSubject()) == ()
    assert "took longer than 10 ms" in events.latest()[-1].message
