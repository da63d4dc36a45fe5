"""ElasticQuotas as they are watched: which events change what is decided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from apis.quota import ElasticQuota
from cluster.scheduler.cycle.events import Action
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.plugins.quotas.elastic_quota import ELASTIC_QUOTA
from cluster.scheduler.registrations import registrations
from cluster.scheduler.sources.quotas import QuotaSource
from cluster.scheduler.tables.shapes import PodShape
from kube.cache import Change, Event
from tests.cluster.scheduler.quotas.making import PREFIX, Bed, make_quota
from tests.cluster.scheduler.sources.heard import HeardQueue


@pytest.fixture
def made() -> Iterator[tuple[Bed, QuotaSource]]:
    bed = Bed()
    queue: SchedulingQueue[PodShape] = SchedulingQueue(registrations())
    yield bed, QuotaSource(bed.table, queue, clock=lambda: 0.0)


def _edit(quota: ElasticQuota, **metadata: Any) -> ElasticQuota:
    meta = msgspec.structs.replace(quota.metadata, **metadata)
    return msgspec.structs.replace(quota, metadata=meta)


def test_a_written_status_is_no_change(made: tuple[Bed, QuotaSource]) -> None:
    bed, source = made
    old = make_quota("a", {"cpu": "1"}, {"cpu": "2"})
    source.quota_event(Event(Change.ADDED, None, old))
    version = bed.table.version
    new = _edit(old, annotations={PREFIX + "runtime": '{"cpu":"1"}'}, resource_version="2")
    source.quota_event(Event(Change.MODIFIED, old, new))
    assert bed.table.version == version


@pytest.mark.parametrize(
    "metadata",
    [
        {"annotations": {PREFIX + "shared-weight": '{"cpu":"7"}'}},
        {"annotations": {PREFIX + "namespaces": '["x"]'}},
        {"labels": {PREFIX + "allow-lent-resource": "false"}},
    ],
)
def test_what_defines_a_quota_is_taken_over(
    made: tuple[Bed, QuotaSource], metadata: dict[str, Any]
) -> None:
    bed, source = made
    old = make_quota("a", {"cpu": "1"}, {"cpu": "2"})
    source.quota_event(Event(Change.ADDED, None, old))
    before = bed.table.quotas["a"].definition
    source.quota_event(Event(Change.MODIFIED, old, _edit(old, **metadata)))
    assert bed.table.quotas["a"].definition != before


def test_a_quota_that_was_made_again_does_not_keep_the_former_definition(
    made: tuple[Bed, QuotaSource],
) -> None:
    bed, source = made
    old = _edit(make_quota("a", {"cpu": "1"}, {"cpu": "2"}), uid="1")
    source.quota_event(Event(Change.ADDED, None, old))
    new = _edit(make_quota("a", {"cpu": "3"}, {"cpu": "2"}), uid="2")
    source.quota_event(Event(Change.MODIFIED, old, new))
    assert "a" not in bed.table.quotas
    assert "team/a" in source.problems
    source.quota_event(Event(Change.DELETED, None, new))
    assert not source.problems


def test_pods_are_tried_when_what_waits_for_a_quota_or_the_quota_changes() -> None:
    bed, queue = Bed(), HeardQueue()
    source = QuotaSource(bed.table, queue, clock=lambda: 0.0)
    changed = [(ELASTIC_QUOTA, Action.UPDATE_OTHER)]
    quota = make_quota("a", {"cpu": "1"}, {"cpu": "2"})
    source.quota_event(Event(Change.ADDED, None, quota))
    assert queue.heard() == changed
    small, large = bed.shape("a", "1"), bed.shape("a", "2")
    for _ in range(2):
        source.waits("u", large)
    assert queue.heard() == []
    # What it requested before may fit others.
    source.waits("u", small)
    assert queue.heard() == changed
    for _ in range(2):
        source.waits_no_more("u")
    assert queue.heard() == changed
    # The same definition under another UID: deleted and made again between two looks.
    again = _edit(quota, uid="later")
    source.quota_event(Event(Change.MODIFIED, quota, again))
    assert queue.heard() == changed
    source.quota_event(Event(Change.MODIFIED, again, again))
    source.advance(0.0)
    assert queue.heard() == []
    source.quota_event(Event(Change.DELETED, again, again))
    assert queue.heard() == changed
    assert "a" not in bed.table.quotas
