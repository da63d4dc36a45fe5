"""The program that plants faults, on a small checkout whose tests notice one of two."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import mutate

MODULE = """
def limit(value):
    return min(value, 10)


def name(value):
    return value["name"]


def wait(value):
    while value:
        value = False
"""
TESTS = """
from room.module import limit, wait

def test_limit():
    assert limit(20) == 10

def test_wait():
    wait(True)
"""

# What the test files take without a fault.
SECONDS = {"module": 5.0, "aside": 1.0, "slow": 3.0, "slower": 4.0}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "checkout"
    files = {
        "room/__init__.py": "",
        "room/module.py": MODULE,
        "room/wire_pb2.py": "A = 1\n",
        "tests/room/test_aside.py": "def test_aside():\n    assert True\n",
        "tests/room/test_module.py": TESTS,
        ".gitignore": "/.cache\n",
    }
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    monkeypatch.setattr(mutate, "ROOT", root)
    return root


def test_survivors_are_shown_and_the_checkout_stays_as_it_was(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = mutate.main(["room/module.py:3", "room/module.py:7", "--at-least", "100"])
    shown = capsys.readouterr().out
    assert status == 1
    assert "room/module.py:3 other function  by tests/room/test_module.py::test_limit\n" in shown
    assert "survived: room/module.py:7 constant" in shown
    assert "+    return value['nameX']" in shown
    assert "killed 4 of 6 mutants (67 %), 0 of them by running too long" in shown
    assert (checkout / "room/module.py").read_text() == MODULE


def test_a_mutant_that_never_ends_is_killed_by_the_time_limit(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate, "SHORTEST_TIMEOUT_S", 1.0)
    monkeypatch.setattr(mutate, "TIMEOUT_FACTOR", 1)
    assert mutate.main(["room/module.py:12", "--jobs", "2", "--at-least", "100"]) == 0
    assert "1 of them by running too long" in capsys.readouterr().out


def test_the_same_seed_draws_the_same_mutants(checkout: Path) -> None:
    modules = mutate.modules_at(checkout, ["room"])
    first = mutate.sample(checkout, modules, count=3, seed=5)
    assert first == mutate.sample(checkout, modules, count=3, seed=5)
    assert len({(mutant.path, mutant.line, mutant.edit) for mutant in first}) == 3
    assert any(
        mutate.sample(checkout, modules, count=3, seed=seed) != first for seed in range(6, 16)
    )


def test_generated_modules_are_left_out(checkout: Path) -> None:
    assert set(mutate.modules_at(checkout, ["room"])) == {"room/__init__.py", "room/module.py"}


def test_tests_that_import_the_module_run_first_and_quick_ones_before_slow_ones(
    checkout: Path,
) -> None:
    for name in ("slow", "slower"):
        (checkout / f"tests/room/test_{name}.py").write_text("import room\n")
    tests = mutate.test_files(checkout, ["tests/room"])
    pace = mutate.Pace(1.0, {f"tests/room/test_{name}.py": t for name, t in SECONDS.items()})
    assert mutate.stages(checkout, tests, "room/module.py", pace) == (
        ["tests/room/test_module.py"],
        [f"tests/room/test_{name}.py" for name in ("aside", "slow", "slower")],
    )
    assert pace.seconds(tests) == 1.0 + 5.0 + 1.0 + 3.0 + 4.0


def test_a_mutant_that_the_nearest_tests_do_not_notice_is_tried_with_all_others(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here a test of a whole process, which does not import the module."""
    far = """
import subprocess, sys
import pytest

@pytest.mark.parametrize("key", ["a", "name of it"])
def test_process(key):
    code = f"import room.module as m; key = '{key}'; key == 'a' or m.name({{'name': 1}})"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
    (checkout / "tests/room/test_far.py").write_text(far)
    assert mutate.main(["room/module.py:7", "--at-least", "100"]) == 1
    shown = capsys.readouterr().out
    assert (
        "room/module.py:7 constant  by tests/room/test_far.py::test_process[name of it]\n" in shown
    )
    assert "survived: room/module.py:7 result\n" in shown


def test_a_test_that_fails_by_chance_kills_nothing(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It passes without a fault, fails once, and passes from then on."""
    runs = tmp_path / "runs"
    chance = f"""
def test_chance():
    with open({str(runs)!r}, "a+") as file:
        file.write("x")
        file.seek(0)
        assert len(file.read()) != 2
"""
    (checkout / "tests/room/test_chance.py").write_text(chance)
    assert mutate.main(["room/module.py:7", "--sample", "1"]) == 0
    assert "killed 0 of 1 mutants" in capsys.readouterr().out
    assert len(runs.read_text()) == 4, "once more alone, and once more with all others"


def test_a_stage_without_a_test_kills_nothing(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mutate.main(["room/module.py:3", "--", "-k", "aside"]) == 0
    assert "killed 0 of " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no Python modules there"),
        (["room/module.py:x"], "x is not a line number"),
        (["room/module.py:1"], "nothing to mutate at room/module.py:1"),
        (["room", "--tests", "tests/nowhere"], "tests/nowhere: no such tests"),
        (["room", "--sample", "1", "--", "-k", "nothing"], "the tests find no test"),
    ],
)
def test_what_cannot_be_done_is_said(
    checkout: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert mutate.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_tried_while_a_test_fails_without_a_fault(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "tests/room/test_aside.py").write_text("def test_aside():\n    assert False\n")
    assert mutate.main(["room", "--sample", "1"]) == 2
    assert "the tests fail without any fault" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "survives"),
    [
        pytest.param([], True, id="left out unless asked for"),
        pytest.param(["--", "-m", "containerd"], False, id="asked for"),
    ],
)
def test_tests_that_start_a_machine_run_on_request(
    checkout: Path, capsys: pytest.CaptureFixture[str], given: list[str], survives: bool
) -> None:
    slow = "import pytest\nfrom room.module import name\n\n@pytest.mark.containerd\n"
    slow += "def test_name():\n    assert name({'name': 1}) == 1\n"
    (checkout / "tests/room/test_slow.py").write_text(slow)
    assert mutate.main(["room/module.py:7", *given]) == 0
    assert ("survived: " in capsys.readouterr().out) == survives
