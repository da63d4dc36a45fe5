"""The journal: what was written is read back, however the file was cut or bent."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy import checkpoint as checkpoint_module
from runtime_proxy.checkpoint import Checkpoint, read_records
from runtime_proxy.model import Container, Pod, PodChanges, PodMeta, Resources
from runtime_proxy.store import Store

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
    assert recorded.torn_bytes == 0
    assert journal(tmp_path).stat().st_mode & 0o777 == 0o600


def test_environments_never_reach_the_disk(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    checkpoint.container(Container(id="c", envs={"PASSWORD": "hunter2"}))
    content = journal(tmp_path).read_bytes()
    assert b"hunter2" not in content
    assert b"PASSWORD" not in content


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_torn_write_costs_the_torn_record_and_no_other(
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
    recorded, sound = read_records(content[:cut])
    whole = max((n for n, size in enumerate(sizes) if size <= cut), default=0)
    assert len(recorded.pods) == whole
    assert sound == (sizes[whole] if cut >= sizes[0] else 0)
    journal(folder).write_bytes(content[:cut])
    again = Checkpoint(str(folder))
    again.pod(POD)
    assert set(Checkpoint(str(folder)).recorded.pods) == {*recorded.pods, "p1"}


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 400), value=st.integers(0, 255))
def test_a_bent_octet_ends_the_reading_and_raises_nothing(
    at: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    checkpoint = Checkpoint(str(folder))
    for number in range(8):
        checkpoint.pod(Pod(id=f"p{number}"))
    content = bytearray(journal(folder).read_bytes())
    content[at % len(content)] = value
    recorded, _ = read_records(bytes(content))
    assert [f"p{n}" for n in range(len(recorded.pods))] == list(recorded.pods)


def test_history_is_dropped_before_it_fills_the_disk(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    for number in range(3000):
        checkpoint.pod(Pod(id="p", labels={"n": f"{number:01000}"}))
    assert journal(tmp_path).stat().st_size < 1_200_000
    assert Checkpoint(str(tmp_path)).recorded.pods["p"].labels["n"] == f"{2999:01000}"


def test_a_full_disk_is_said_once_and_made_good_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(str(tmp_path))
    real = os.write

    def half(descriptor: int, data: bytes) -> int:
        return real(descriptor, bytes(data)[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    checkpoint.pod(POD)
    assert checkpoint.errors == 1

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    checkpoint.container(CONTAINER)
    assert checkpoint.errors == 2
    monkeypatch.undo()
    checkpoint.pod(Pod(id="p3"))
    recorded = Checkpoint(str(tmp_path)).recorded
    assert set(recorded.pods) == {"p1", "p3"}
    assert recorded.containers == {"c1": CONTAINER}


def test_a_file_that_is_no_journal_is_begun_anew(tmp_path: Path) -> None:
    journal(tmp_path).write_bytes(b"something else entirely")
    checkpoint = Checkpoint(str(tmp_path))
    assert checkpoint.recorded.torn_bytes == 23
    checkpoint.pod(POD)
    assert Checkpoint(str(tmp_path)).recorded.pods == {"p1": POD}


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
    assert recorded.torn_bytes == 0


def test_a_record_of_another_release_costs_itself_alone(tmp_path: Path) -> None:
    Checkpoint(str(tmp_path)).pod(POD)
    body = msgspec.msgpack.encode({"kind": "volume", "id": "v"})
    newer = msgspec.msgpack.encode({"kind": "pod", "id": "p2", "colour": "red"})
    with journal(tmp_path).open("ab") as file:
        for record in (body, newer):
            file.write(struct.pack("<II", len(record), zlib.crc32(record)) + record)
    again = Checkpoint(str(tmp_path))
    assert set(again.recorded.pods) == {"p1", "p2"}
    assert again.recorded.torn_bytes == 0
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
    real = checkpoint_module.read_records

    def meanwhile(content: bytes) -> tuple[checkpoint_module.Recorded, int]:
        old.container(CONTAINER)
        return real(content)

    monkeypatch.setattr(checkpoint_module, "read_records", meanwhile)
    Checkpoint(str(tmp_path))
    monkeypatch.undo()
    assert Checkpoint(str(tmp_path)).recorded.containers == {"c1": CONTAINER}


def test_a_predecessor_adds_to_the_file_that_its_successor_made_anew(tmp_path: Path) -> None:
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
