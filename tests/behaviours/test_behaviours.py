"""Tries the table on the simulated kernel and on this machine's own."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.behaviours.grounds import (
    Ground,
    SimulatedGround,
    machine_version,
    missing_place,
    real_ground,
)
from tests.behaviours.steps import (
    Allocate,
    Behaviour,
    Ends,
    Exists,
    HasLine,
    Make,
    Missing,
    Outgrow,
    ReadFails,
    Reads,
    Remove,
    Start,
    Step,
    Write,
    WriteSoon,
)
from tests.behaviours.table import TABLE
from tests.conftest import require
from tests.simulated.profiles import ANOLIS_8, DEBIAN_12_V1, DEBIAN_12_V2, UBUNTU_24_04, Profile

# The kernels of Debian 12, Debian 13 and a current one: rows may differ between them.
SIMULATED: tuple[Profile, ...] = (
    replace(DEBIAN_12_V1, name="v1-6.1"),
    replace(DEBIAN_12_V1, name="v1-6.18", kernel=(6, 18)),
    replace(DEBIAN_12_V2, name="v2-6.1"),
    replace(UBUNTU_24_04, name="v2-6.12", kernel=(6, 12)),
)


def _applies(behaviour: Behaviour, version: int, kernel: tuple[int, int]) -> bool:
    return behaviour.version == version and behaviour.since <= kernel < behaviour.before


def _id(behaviour: Behaviour) -> str:
    return f"v{behaviour.version}: {behaviour.name}"


@pytest.mark.parametrize(
    ("profile", "behaviour"),
    [
        pytest.param(profile, behaviour, id=f"{profile.name}: {behaviour.name}")
        for profile in SIMULATED
        for behaviour in TABLE
        if _applies(behaviour, profile.cgroup, profile.kernel)
    ],
)
def test_on_the_simulated_kernel(profile: Profile, behaviour: Behaviour) -> None:
    walk(SimulatedGround(profile), behaviour)


HERE = [behaviour for behaviour in TABLE if behaviour.version == machine_version()]


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param(
            behaviour,
            id=_id(behaviour),
            marks=[pytest.mark.cgroups] if behaviour.version == 1 else [],
        )
        for behaviour in HERE
    ],
)
def test_on_this_machine(behaviour: Behaviour) -> None:
    why = missing_place()
    require(why is None, why or "", tier="cgroups" if machine_version() == 1 else "vm")
    with real_ground() as ground:
        if not _applies(behaviour, ground.version, ground.kernel):
            pytest.skip(f"not of kernel {ground.kernel[0]}.{ground.kernel[1]}")
        walk(ground, behaviour)


def test_every_name_is_there_once() -> None:
    names = [(behaviour.version, behaviour.name) for behaviour in TABLE]
    assert len(names) == len(set(names))


def test_an_alibaba_kernel_takes_a_burst_above_the_quota() -> None:
    ground = SimulatedGround(ANOLIS_8)
    (quota,), (burst,) = ground.path("cpu.cfs_quota_us"), ground.path("cpu.cfs_burst_us")
    ground.write(quota, "50000")
    ground.write(burst, "500000")
    assert ground.read(burst) == "500000\n"


def walk(ground: Ground, behaviour: Behaviour) -> None:
    """Go through the steps; the first that differs fails with its number and text."""
    words = {
        "all": f"0-{ground.cpus() - 1}" if ground.cpus() > 1 else "0",
        "first": "0",
        "last": str(ground.cpus() - 1),
        "beyond": str(ground.cpus()),
    }
    for number, step in enumerate(behaviour.steps, 1):
        said = _take(ground, step, words)
        if said is not None:
            pytest.fail(f"step {number}, {step}: {said}", pytrace=False)


def _take(ground: Ground, step: Step, words: dict[str, str]) -> str | None:
    """Do one step; what was not as expected."""
    match step:
        case Make(group, error):
            return _all_answer(ground.path(group), ground.mkdir, error)
        case Remove(group, error):
            return _all_answer(ground.path(group), ground.rmdir, error)
        case Write(path, text, error):
            (file,) = ground.path(path.format_map(words))
            content = text.format_map(words)
            return _answers(lambda: ground.write(file, content), error)
        case WriteSoon(path, text, meanwhile):
            (file,) = ground.path(path.format_map(words))
            content = text.format_map(words)
            deadline = time.monotonic() + 1
            while _answers(lambda: ground.write(file, content), meanwhile) is None:
                if time.monotonic() > deadline:
                    return "refused for a second"
                time.sleep(0.001)
            return _answers(lambda: ground.write(file, content), 0)
        case Reads(path, text):
            (file,) = ground.path(path.format_map(words))
            found = ground.read(file).rstrip("\n")
            expected = text.format_map(words)
            return None if found == expected else f"reads {found!r}, not {expected!r}"
        case ReadFails(path, error):
            (file,) = ground.path(path.format_map(words))
            return _answers(lambda: ground.read(file), error)
        case HasLine(path, line):
            (file,) = ground.path(path.format_map(words))
            lines = ground.read(file).splitlines()
            return None if line in lines else f"has {lines}"
        case Exists(path):
            (file,) = ground.path(path)
            return None if ground.exists(file) else "is missing"
        case Missing(path):
            (file,) = ground.path(path)
            return None if not ground.exists(file) else "exists"
        case Start():
            words["pid"] = str(ground.start())
            return None
        case Allocate(mebibytes):
            return None if ground.allocate(int(words["pid"]), mebibytes) else "was killed"
        case Outgrow(mebibytes):
            return "got it" if ground.allocate(int(words["pid"]), mebibytes) else None
        case Ends():
            return "still runs" if ground.runs(int(words["pid"])) else None


def _all_answer(paths: list[str], act: Callable[[str], None], error: int) -> str | None:
    for path in paths:
        said = _answers(lambda path=path: act(path), error)  # type: ignore[misc]
        if said is not None:
            return f"{path}: {said}"
        # With a process in one hierarchy only, the others' groups are empty: one answer counts.
        if error:
            return None
    return None


def _answers(act: Callable[[], object], error: int) -> str | None:
    try:
        act()
    except OSError as refused:
        if refused.errno == error:
            return None
        wanted = errno.errorcode.get(error, "accepted")
        return f"{errno.errorcode.get(refused.errno or 0)}, not {wanted}"
    return None if error == 0 else f"accepted, not {errno.errorcode[error]}"
