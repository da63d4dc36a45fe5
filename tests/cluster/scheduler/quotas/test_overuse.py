"""Which pods a quota gives back when it uses more than its runtime for too long."""

from __future__ import annotations

from cluster.scheduler.plugins.quotas.overuse import OveruseMonitor
from cluster.scheduler.tables.booking import Booking
from tests.cluster.scheduler.making import make_pod
from tests.cluster.scheduler.quotas.making import PREFIX, Bed


def _place(
    bed: Bed,
    name: str,
    requests: dict[str, str],
    priority: int,
    *,
    start: float = 0.0,
    firm: bool = False,
    terminating: bool = False,
) -> None:
    labels = {PREFIX + "name": "a"}
    if firm:
        labels[PREFIX + "preemptible"] = "false"
    shape = bed.shapes.of(make_pod(name, requests=requests, labels=labels, priority=priority))
    booking = Booking(f"default/{name}", name, shape, "n0", start=start, terminating=terminating)
    bed.table.place(booking)


def _revoked(bed: Bed) -> list[str]:
    monitor = OveruseMonitor(bed.table, delay_s=10)
    monitor.look(0)
    return [booking.uid for each in monitor.look(11) for booking in each.pods]


def test_pods_go_after_the_delay_and_again_after_another() -> None:
    bed = Bed("10")
    bed.quota("a", {}, {"cpu": "10"})
    _place(bed, "one", {"cpu": "8"}, 0)
    monitor = OveruseMonitor(bed.table, delay_s=10)
    assert monitor.look(0) == ()
    bed.quota("a", {}, {"cpu": "5"})
    assert monitor.look(1) == ()
    assert monitor.look(11) == ()
    (revoked,) = monitor.look(11.5)
    assert (revoked.quota, revoked.used, revoked.runtime) == ("a", {"cpu": 8000}, {"cpu": 5000})
    assert [booking.uid for booking in revoked.pods] == ["one"]
    assert monitor.look(20) == ()
    assert monitor.look(22)


def test_a_quota_that_recovers_in_between_has_the_whole_delay_again() -> None:
    bed = Bed("10")
    bed.quota("a", {}, {"cpu": "5"})
    _place(bed, "one", {"cpu": "8"}, 0)
    monitor = OveruseMonitor(bed.table, delay_s=10)
    monitor.look(0)
    bed.quota("a", {}, {"cpu": "9"})
    monitor.look(5)
    bed.quota("a", {}, {"cpu": "5"})
    monitor.look(6)
    assert monitor.look(15) == ()
    assert monitor.look(17)


def test_the_least_important_pods_go_and_of_equal_ones_the_last_that_started() -> None:
    bed = Bed("10")
    bed.quota("a", {}, {"cpu": "10"})
    _place(bed, "old", {"cpu": "3"}, 1, start=1.0)
    _place(bed, "new", {"cpu": "3"}, 1, start=2.0)
    _place(bed, "high", {"cpu": "4"}, 9)
    bed.quota("a", {}, {"cpu": "7"})
    assert _revoked(bed) == ["new"]
    bed.quota("a", {}, {"cpu": "5"})
    assert _revoked(bed) == ["new", "old"]


def test_a_pod_stays_that_turns_out_not_to_be_in_the_way() -> None:
    bed = Bed("20")
    bed.quota("a", {}, {"cpu": "20"})
    _place(bed, "small", {"cpu": "1"}, 0)
    _place(bed, "large", {"cpu": "8"}, 1)
    _place(bed, "high", {"cpu": "4"}, 9)
    bed.quota("a", {}, {"cpu": "6"})
    assert _revoked(bed) == ["large"]


def test_only_as_many_pods_stay_as_there_is_room_for_together() -> None:
    bed = Bed("20")
    bed.quota("a", {}, {"cpu": "20"})
    _place(bed, "less", {"cpu": "2"}, 0)
    _place(bed, "more", {"cpu": "2"}, 1)
    _place(bed, "large", {"cpu": "5"}, 2)
    _place(bed, "high", {"cpu": "2"}, 9)
    bed.quota("a", {}, {"cpu": "5"})
    assert _revoked(bed) == ["less", "large"]


def test_pods_that_use_nothing_of_what_lacks_stay() -> None:
    bed = Bed("20")
    bed.quota("a", {}, {"cpu": "20", "memory": "100Gi"})
    _place(bed, "memory", {"memory": "50Gi"}, 0)
    _place(bed, "cpu", {"cpu": "8"}, 5)
    bed.quota("a", {}, {"cpu": "6", "memory": "100Gi"})
    assert _revoked(bed) == ["cpu"]


def test_pods_that_are_not_preemptible_or_go_already_are_left_alone() -> None:
    bed = Bed("20")
    bed.quota("a", {"cpu": "2"}, {"cpu": "20"})
    _place(bed, "firm", {"cpu": "2"}, 0, firm=True)
    _place(bed, "going", {"cpu": "4"}, 0, terminating=True)
    _place(bed, "one", {"cpu": "4"}, 3)
    bed.quota("a", {"cpu": "2"}, {"cpu": "6"})
    assert _revoked(bed) == []
    bed.quota("a", {"cpu": "2"}, {"cpu": "5"})
    assert _revoked(bed) == ["one"]


def test_a_pod_stays_only_if_all_that_it_uses_is_there() -> None:
    bed = Bed("20")
    bed.quota("a", {}, {"cpu": "20", "memory": "100Gi"})
    _place(bed, "both", {"cpu": "4", "memory": "10Gi", "example.com/x": "1"}, 0)
    _place(bed, "cpu", {"cpu": "4"}, 5)
    bed.quota("a", {}, {"cpu": "6", "memory": "100Gi"})
    assert _revoked(bed) == ["both"]


def test_a_quota_that_was_deleted_has_the_whole_delay_when_it_is_made_again() -> None:
    bed = Bed("10")
    bed.quota("a", {}, {"cpu": "5"})
    _place(bed, "one", {"cpu": "8"}, 0)
    monitor = OveruseMonitor(bed.table, delay_s=10)
    monitor.look(0)
    bed.table.delete_quota("team/a")
    monitor.look(5)
    bed.quota("a", {}, {"cpu": "5"})
    assert monitor.look(15) == ()
    assert monitor.look(24) == ()
    assert monitor.look(26)
