"""What the evictor remembers over a restart of the daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from koordlet.qos.eviction.past_file import PastFile
from koordlet.qos.eviction.past_rounds import Eviction, Past
from koordlet.qos.strategy import PodOnNode
from tests.koordlet.qos.eviction.making import A, Api, B, Bed, C, Runtime, short
from tests.koordlet.qos.eviction_making import a_pod, on_node

PAST = Past({"u1": Eviction(10.0, (("memory", False, 5),), 130.0)}, {"BEMemoryEvict": 10.0})


class Life(Bed):
    """An evictor from a start of its daemon at `now` to its end, without a word."""

    def __init__(
        self, path: Path, *, now: float, boot: str = "b1", dry_run: bool = False, **given: Any
    ) -> None:
        self.file = PastFile(str(path), boot=boot, dry_run=dry_run)
        super().__init__(keep=self._keep, dry_run=dry_run, **given)
        self.now = now
        self.evictor.resume(self.file.load())

    async def _keep(self, past: Past) -> None:
        self.file.save(past)


def test_what_was_saved_is_loaded_in_the_same_boot_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "evictions")
    PastFile(path, boot="b1", dry_run=False).save(PAST)
    assert PastFile(path, boot="b1", dry_run=False).load() == PAST
    assert PastFile(path, boot="b2", dry_run=False).load() == Past()
    assert PastFile(path, boot="", dry_run=False).load() == Past()
    # Evictions that were left out have released nothing.
    assert PastFile(path, boot="b1", dry_run=True).load() == Past()
    other = str(tmp_path / "none")
    PastFile(other, boot="", dry_run=False).save(PAST)
    assert not Path(other).exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"format":"koordlet evictions 9","boot":"b1","dry_run":false,"past":{}}',
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_counts_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "evictions"
    path.write_bytes(content)
    assert PastFile(str(path), boot="b1", dry_run=False).load() == Past()
    assert [str(path) in one.message for one in caplog.records] == [True]


def test_a_file_of_a_version_that_did_not_note_unfinished_stops_is_read(tmp_path: Path) -> None:
    path = tmp_path / "evictions"
    path.write_bytes(
        b'{"format":"koordlet evictions 1","boot":"b1","dry_run":false,"past":{"evicted":'
        b'{"u1":{"at":10.0,"releases":[["memory",false,5]],"counts_until":130.0}},'
        b'"cooled_at":{"BEMemoryEvict":10.0}}}'
    )
    assert PastFile(str(path), boot="b1", dry_run=False).load() == PAST


def test_a_missing_file_is_no_news_and_one_that_cannot_be_written_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = PastFile(str(tmp_path / "away" / "evictions"), boot="b1", dry_run=False)
    assert file.load() == Past() and not caplog.records
    for _ in range(3):
        file.save(PAST)
    assert ["cannot keep evictions" in one.message for one in caplog.records] == [True]


def test_a_cool_down_goes_on_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "evictions"
    first = Life(path, now=1000.0, api=Api())
    asyncio.run(first.round(short(5, (A, 10), (B, 10))))
    assert first.api is not None and first.api.asked == ["a"]

    later = Life(path, now=1002.0, api=Api())
    assert later.api is not None
    # Nothing of what is short is released yet, and another gate is short of the same.
    asyncio.run(later.round(short(15, (B, 10), (C, 10)), pods=[B, C]))
    assert later.api.asked == [] and "within 4 s of the last evictions" in later.why[0]
    later.now += 2
    asyncio.run(later.round(short(15, (B, 10), (C, 10)), pods=[B, C]))
    assert later.api.asked == ["b", "c"]


def test_what_an_evicted_pod_will_release_counts_after_a_kill(tmp_path: Path) -> None:
    """The pod's end takes its grace, and the node is as short as before."""
    path = tmp_path / "evictions"
    first = Life(path, now=1000.0, api=Api())
    asyncio.run(first.round(short(5, (A, 10), (B, 10))))
    later = Life(path, now=1100.0, api=Api())
    assert later.api is not None
    asyncio.run(later.round(short(5, (A, 10), (B, 10))))
    assert later.api.asked == []
    later.now = 1120.0  # two minutes after the eviction: the pod is stuck
    asyncio.run(later.round(short(5, (A, 10), (B, 10))))
    assert later.api.asked == ["a"]


def test_a_stop_that_a_kill_cuts_off_is_tried_again(tmp_path: Path) -> None:
    """A container that ignores SIGTERM goes on: the runtime stops it no further."""
    path = tmp_path / "evictions"
    pods: list[PodOnNode] = [on_node(A), on_node(B)]

    async def killed() -> None:
        first = Life(path, now=1000.0, runtime=Runtime(released=asyncio.Event()))
        await first.round(short(5, (A, 10), (B, 10)), pods=pods)
        assert first.runtime is not None and len(first.runtime.stopped) == 1

    asyncio.run(killed())
    later = Life(path, now=1003.0, runtime=Runtime())
    assert later.runtime is not None
    asyncio.run(later.round(short(5, (A, 10), (B, 10)), pods=pods))
    assert later.runtime.stopped == [], "the gate's cool-down goes on"
    later.now += 1
    asyncio.run(later.round(short(5, (A, 10), (B, 10)), pods=pods))
    assert later.runtime.stopped == [(("uid-a-c0",), 10.0)], "the same pod, and not the next"


def test_stopped_containers_count_as_released_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "evictions"
    pods: list[PodOnNode] = [on_node(A), on_node(B)]
    first = Life(path, now=1000.0, runtime=Runtime())
    asyncio.run(first.round(short(5, (A, 10), (B, 10)), pods=pods))
    later = Life(path, now=1004.0, runtime=Runtime())
    assert later.runtime is not None
    asyncio.run(later.round(short(5, (A, 10), (B, 10)), pods=pods))
    assert later.runtime.stopped == []


def test_a_stop_that_failed_counts_for_nothing_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "evictions"
    first = Life(path, now=1000.0, runtime=Runtime(error="the runtime is away"))
    asyncio.run(first.round(short(5, (A, 10)), pods=[on_node(A)]))
    later = Life(path, now=1010.0, runtime=Runtime())
    assert later.runtime is not None
    asyncio.run(later.round(short(5, (A, 10)), pods=[on_node(A)]))
    assert len(later.runtime.stopped) == 1


def test_what_a_dry_run_left_out_does_not_hold_evictions_back(tmp_path: Path) -> None:
    path = tmp_path / "evictions"
    dry = Life(path, now=1000.0, api=Api(), dry_run=True)
    asyncio.run(dry.round(short(5, (A, 10))))
    assert dry.api is not None and dry.api.asked == [] and path.exists()
    wet = Life(path, now=1001.0, api=Api())
    asyncio.run(wet.round(short(5, (A, 10))))
    assert wet.api is not None and wet.api.asked == ["a"]


def test_moments_to_come_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "evictions"
    PastFile(str(path), boot="b1", dry_run=False).save(
        Past({A.uid: Eviction(9e9, (), 9e9)}, {"BEMemoryEvict": 9e9})
    )
    life = Life(path, now=1000.0, api=Api())
    asyncio.run(life.round(short(5, (A, 10))))
    assert life.api is not None and life.api.asked == ["a"]


def test_without_an_eviction_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "evictions"
    life = Life(path, now=1000.0, api=Api())
    asyncio.run(life.round(pods=[a_pod("x")]))
    assert not path.exists()
