"""The journal: what was written is read back, however the file was cut or bent."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy import checkpoint as checkpoint_module
from runtime_proxy.checkpoint import Checkpoint, Recorded
from runtime_proxy.model import Container, Pod, PodChanges, PodMeta, Resources
from runtime_proxy.records import Records
from runtime_proxy.store import Store
from service.append_log import encode_line

POD = Pod(
    id="p1",
    meta=PodMeta(name="web", uid="u", namespace="d", attempt=2),
    labels={"a": "b"},
    resources=Resources(cpu_shares=5, unified={"x": "y"}),
    changes=PodChanges(annotations={"k": "v"}, cgroup_parent="/other"),
)
CONTAINER = Container(
    id="c1", pod_id="p1", name="main", resources=Resources(cpuset_cpus="0-3"), stopped=True
)


def journal(folder: Path) -> Path:
    return folder / "journal"


def test_entries_come_back(tmp_path: Path) -> None:
    store = Store(Checkpoint(str(tmp_path)))
    store.put_pod(POD)
    store.put_container(CONTAINER)
    store.put_pod(Pod(id="p2"))
    store.drop_pod("p2")
    recorded = Checkpoint(str(tmp_path)).recorded
    assert recorded.pods == {"p1": POD}
    assert recorded.containers == {"c1": CONTAINER}
    assert journal(tmp_path).stat().st_mode & 0o777 == 0o600


def test_environments_never_reach_the_disk(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    checkpoint.container(Container(id="c", envs={"PASSWORD": "hunter2"}))
    content = journal(tmp_path).read_bytes()
    assert b"hunter2" not in content
    assert b"PASSWORD" not in content


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_torn_write_costs_the_torn_object_and_no_other(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    checkpoint = Checkpoint(str(folder))
    sizes = [journal(folder).stat().st_size]
    for number in range(6):
        checkpoint.pod(Pod(id=f"p{number}", labels={"n": "x" * number * 10}))
        sizes.append(journal(folder).stat().st_size)
    content = journal(folder).read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    journal(folder).write_bytes(content[:cut])
    # The last newline alone may be missing.
    whole = [f"p{n}" for n, size in enumerate(sizes[1:]) if size - 1 <= cut]
    again = Checkpoint(str(folder))
    assert list(again.recorded.pods) == whole
    again.pod(POD)
    assert set(Checkpoint(str(folder)).recorded.pods) == {*whole, "p1"}


def test_damage_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    for number in range(4):
        checkpoint.pod(Pod(id=f"p{number}"))
    content = journal(tmp_path).read_bytes()
    journal(tmp_path).write_bytes(content.replace(b'"p1"', b'"p7"')[:-5])
    again = Checkpoint(str(tmp_path))
    assert set(again.recorded.pods) == {"p0", "p2"}
    (record,) = caplog.records
    assert record.__dict__["damaged_lines"] == 1
    assert record.__dict__["torn_octets"] > 0


def test_history_is_dropped_before_it_fills_the_disk(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    for number in range(3000):
        checkpoint.pod(Pod(id="p", labels={"n": f"{number:01000}"}))
    assert journal(tmp_path).stat().st_size < 1_200_000
    assert Checkpoint(str(tmp_path)).recorded.pods["p"].labels["n"] == f"{2999:01000}"


def test_a_full_disk_costs_nothing_once_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    checkpoint = Checkpoint(str(tmp_path), monotonic=lambda: now)
    real = os.write

    def half(descriptor: int, data: bytes) -> int:
        return real(descriptor, bytes(data)[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    checkpoint.pod(POD)
    assert checkpoint.errors == 1
    assert "bytes were written" in checkpoint.problem

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    checkpoint.container(CONTAINER)
    assert checkpoint.errors == 1  # nothing is tried during the pause
    now = 11
    checkpoint.pod(Pod(id="p3"))
    assert checkpoint.errors == 2
    assert "No space left" in checkpoint.problem
    monkeypatch.undo()
    now = 22
    checkpoint.catch_up()
    assert checkpoint.problem == ""
    recorded = Checkpoint(str(tmp_path)).recorded
    assert set(recorded.pods) == {"p1", "p3"}
    assert recorded.containers == {"c1": CONTAINER}


def test_a_file_that_is_no_journal_is_replaced(tmp_path: Path) -> None:
    journal(tmp_path).write_bytes(b"something else entirely")
    checkpoint = Checkpoint(str(tmp_path))
    checkpoint.pod(POD)
    assert Checkpoint(str(tmp_path)).recorded.pods == {"p1": POD}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def three_gib(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


@pytest.mark.parametrize("make", [fifo, three_gib, Path.mkdir])
def test_what_cannot_be_a_journal_is_left_alone_and_reported(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    now = 0.0
    make(journal(tmp_path))
    records = Records(str(tmp_path), monotonic=lambda: now)
    records.store.put_pod(POD)
    assert records.recorded == Recorded()
    assert records.reread() == Recorded()
    (trouble,) = records.troubles()
    assert trouble.startswith(f"{journal(tmp_path)} cannot be read: ")
    assert trouble.endswith("move it away")
    journal(tmp_path).rename(tmp_path / "moved")
    now = 11
    records.catch_up()
    assert records.troubles() == []
    assert Checkpoint(str(tmp_path)).recorded.pods == {"p1": POD}


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    records = Records(str(tmp_path / "file" / "state"))
    records.store.put_pod(POD)
    (trouble,) = records.troubles()
    assert trouble == f"no journal: {tmp_path}/file/state cannot be made: Not a directory"
    assert Records("").troubles() == []


def test_the_next_process_knows_everything_that_hooks_are_sent(tmp_path: Path) -> None:
    """Every field of a pod and a container but the environment, each with a value of its own."""
    resources = Resources(
        cpu_period=1,
        cpu_quota=2,
        cpu_shares=3,
        memory_limit_in_bytes=4,
        oom_score_adj=5,
        cpuset_cpus="6",
        cpuset_mems="7",
        hugepage_limits=(("2MB", 8),),
        unified={"memory.high": "9"},
        memory_swap_limit_in_bytes=10,
    )
    pod = Pod(
        id="p",
        meta=PodMeta(name="n", uid="u", namespace="ns", attempt=11),
        runtime_handler="kata",
        labels={"l": "12"},
        annotations={"a": "13"},
        cgroup_parent="/kubepods/p",
        overhead=Resources(cpu_shares=14),
        resources=resources,
        changes=PodChanges(labels={"cl": "15"}, annotations={"ca": "16"}, cgroup_parent="/17"),
        stopped=True,
    )
    container = Container(
        id="c",
        pod_id="p",
        name="main",
        attempt=18,
        annotations={"k": "19", "line\nbreak": "\u2028"},
        resources=resources,
        cgroup_parent="/20",
        stopped=True,
    )
    defaults = (Pod(), Container(), Resources())
    for value, default in zip((pod, container, resources), defaults, strict=True):
        left_out = {"envs"}
        for name in set(value.__struct_fields__) - left_out:
            assert getattr(value, name) != getattr(default, name), name
    checkpoint = Checkpoint(str(tmp_path))
    checkpoint.pod(pod)
    checkpoint.container(msgspec.structs.replace(container, envs={"SECRET": "x"}))
    again = Checkpoint(str(tmp_path))
    assert again.recorded == Recorded({"p": pod}, {"c": container})
    again._log.rewrite()
    assert Checkpoint(str(tmp_path)).recorded == Recorded({"p": pod}, {"c": container})


def test_two_processes_may_write_during_a_handover(tmp_path: Path) -> None:
    old = Checkpoint(str(tmp_path))
    old.pod(POD)
    new = Checkpoint(str(tmp_path))
    old.container(CONTAINER)
    new.pod(Pod(id="p2"))
    old.pod(Pod(id="p3"))
    recorded = Checkpoint(str(tmp_path)).recorded
    assert set(recorded.pods) == {"p1", "p2", "p3"}
    assert set(recorded.containers) == {"c1"}


def test_a_record_of_another_release_costs_itself_alone(tmp_path: Path) -> None:
    Checkpoint(str(tmp_path)).pod(POD)
    with journal(tmp_path).open("ab") as file:
        file.write(encode_line(b'{"kind":"volume","id":"v"}'))
        file.write(encode_line(b'{"kind":"pod","id":"p2","colour":"red"}'))
    again = Checkpoint(str(tmp_path))
    assert set(again.recorded.pods) == {"p1", "p2"}
    again.container(CONTAINER)
    assert Checkpoint(str(tmp_path)).recorded.containers == {"c1": CONTAINER}


def test_a_record_too_large_to_be_read_back_is_not_written(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    checkpoint.pod(POD)
    checkpoint.pod(Pod(id="p1", annotations={"a": "x" * (5 << 20)}))
    checkpoint.container(CONTAINER)
    recorded = Checkpoint(str(tmp_path)).recorded
    assert recorded.pods == {}
    assert recorded.containers == {"c1": CONTAINER}


def test_what_a_predecessor_writes_while_a_successor_opens_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Checkpoint(str(tmp_path))
    old.pod(POD)
    real = checkpoint_module.replay

    def meanwhile(lines: Iterable[bytes]) -> Recorded:
        old.container(CONTAINER)
        return real(lines)

    monkeypatch.setattr(checkpoint_module, "replay", meanwhile)
    Checkpoint(str(tmp_path))
    monkeypatch.undo()
    assert Checkpoint(str(tmp_path)).recorded.containers == {"c1": CONTAINER}


def test_a_predecessor_adds_to_the_file_that_its_successor_rewrote(tmp_path: Path) -> None:
    old = Checkpoint(str(tmp_path))
    old.pod(POD)
    new = Checkpoint(str(tmp_path))
    old.stand_back()
    for number in range(3000):
        new.pod(Pod(id="busy", labels={"n": f"{number:01000}"}))
    old.container(CONTAINER)
    for number in range(3000):
        old.pod(Pod(id="p3", labels={"n": f"{number:0400}"}))
    new.pod(Pod(id="p4"))
    recorded = new.reread()
    assert set(recorded.pods) == {"p1", "busy", "p3", "p4"}
    assert recorded.containers == {"c1": CONTAINER}
    assert Checkpoint(str(tmp_path)).recorded == recorded


def test_a_removal_that_makes_the_file_too_large_holds(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    checkpoint.pod(POD)
    checkpoint.container(CONTAINER)
    before = journal(tmp_path).stat().st_ino
    checkpoint._log._check_above = checkpoint._log._rewrite_bytes = 0
    checkpoint._lines.pop("c1")  # what a predecessor has added
    checkpoint.forget("p1")
    assert journal(tmp_path).stat().st_ino != before
    assert checkpoint.reread() == Recorded(containers={"c1": CONTAINER})
