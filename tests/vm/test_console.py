"""How the host reads a machine's console; no machine is booted."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.machine import BootError, Machine, StoodStillError


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A process that lives and says nothing; tests write the console."""
    process = subprocess.Popen(["sleep", "60"])
    log = tmp_path / "console.txt"
    log.touch()
    yield Machine(process, log, tmp_path / "results.tar")
    process.kill()
    process.wait()


def test_a_machine_that_says_nothing_stands_still(machine: Machine) -> None:
    machine.log.write_text("KOORD-VM: session\n")
    with pytest.raises(StoodStillError, match="stood still"):
        machine.wait_for("exit", 30, still_s=0.3)


def test_a_machine_that_goes_on_saying_something_does_not(machine: Machine) -> None:
    def live() -> None:
        while not ended.wait(0.1):
            with machine.log.open("a") as console:
                console.write("KOORD-VM: alive\n")

    ended = threading.Event()
    living = threading.Thread(target=live)
    living.start()
    try:
        began = time.monotonic()
        with pytest.raises(BootError, match="did not say 'exit' within 3 s") as caught:
            machine.wait_for("exit", 3, still_s=1.5)
    finally:
        ended.set()
        living.join()
    assert not isinstance(caught.value, StoodStillError)
    assert time.monotonic() - began >= 3


def test_what_it_says_at_last_counts(machine: Machine) -> None:
    machine.log.write_text("alive\nexit 3\n")
    assert machine.wait_for(r"exit (\d)", 30, still_s=0.0)[1] == "3"
