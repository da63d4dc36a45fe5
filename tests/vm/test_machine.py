"""Boots the machine and runs in it what needs one: the table on cgroup v2, and the daemon as a
unit.

One boot of `2s2c2t` is what CI does. KOORD_VM_TOPOLOGY and KOORD_VM_KERNEL choose others.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from tests.vm.image import CACHE, KERNELS
from tests.vm.machine import (
    BootError,
    Session,
    StoodStillError,
    booted,
    private_disk,
    pytest_session,
)
from tests.vm.topology import TOPOLOGIES, Topology

pytestmark = [pytest.mark.vm, pytest.mark.long]

TOPOLOGY = TOPOLOGIES[os.environ.get("KOORD_VM_TOPOLOGY", "2s2c2t")]
KERNEL = next(k for k in KERNELS if k == os.environ.get("KOORD_VM_KERNEL", "bookworm"))
_TESTS_TIMEOUT_S = 900.0
_PROXY = "tests/vm/inside/test_runtime_proxy.py"


def test_everything_inside_passes(tmp_path: Path) -> None:
    """What the daemon does there, and the table of behaviours on the machine's own kernel."""
    selection = (
        "tests/vm/inside",
        f"--ignore={_PROXY}",
        "tests/behaviours/test_behaviours.py",
    )
    _passes(TOPOLOGY, tmp_path, *selection, "-k", "not simulated")


def test_the_proxys_units_keep_their_word(tmp_path: Path) -> None:
    """The runtime proxy under systemd, which no topology matters to."""
    _passes(TOPOLOGIES["1s2c"], tmp_path, _PROXY)


def _passes(topology: Topology, tmp_path: Path, *selection: str) -> None:
    session = pytest_session(*selection, "-v", "--tb=short")
    try:
        status = _ended(session, topology, tmp_path)
    except StoodStillError as error:
        # No test can stop the emulator itself. Twice in a row is a finding.
        warnings.warn(f"booted once more: {error}", stacklevel=1)
        status = _ended(session, topology, tmp_path)
    output = (tmp_path / "output.txt").read_text(errors="replace")
    if status != 0:
        machine_journal = (tmp_path / "journal.txt").read_text(errors="replace")
        CACHE.joinpath("last-journal.txt").write_text(machine_journal)
        pytest.fail(f"{output[-8000:]}\nThe journal: {CACHE / 'last-journal.txt'}", pytrace=False)


def _ended(session: Session, topology: Topology, results: Path) -> int:
    with booted(session, topology=topology, kernel=KERNEL) as machine:
        status = machine.finish(_TESTS_TIMEOUT_S)
        machine.fetch_results(results)
    return status


def test_a_power_cut_while_it_writes_heals_after_the_boot(tmp_path: Path) -> None:
    """The disk keeps what was flushed; the next boot starts, connects and decides anew."""
    churn = Session(("/usr/bin/python3", "-m", "tests.vm.inside.churn"))
    after = pytest_session("tests/vm/inside/test_policies.py", "-q", "-k", "not reload")
    with private_disk(KERNEL) as disk:
        with booted(churn, topology=TOPOLOGIES["1s2c"], kernel=KERNEL, disk=disk) as machine:
            machine.wait_for(r"KOORD-VM: round 3", 150)
            machine.power_cut()
        with booted(after, topology=TOPOLOGIES["1s2c"], kernel=KERNEL, disk=disk) as machine:
            status = machine.finish(_TESTS_TIMEOUT_S)
            machine.fetch_results(tmp_path)
    output = (tmp_path / "output.txt").read_text(errors="replace")
    assert status == 0, output[-6000:]


def test_a_failed_boot_says_why() -> None:
    """The root's disk is no file system: the reason comes at once, not after the patience."""
    session = pytest_session("--version")
    with private_disk(KERNEL) as disk:
        with disk.open("r+b") as file:
            file.write(bytes(1 << 20))
        with (
            pytest.raises(BootError, match="mount /dev/vda"),
            booted(session, topology=TOPOLOGIES["1s2c"], kernel=KERNEL, disk=disk),
        ):
            pass
