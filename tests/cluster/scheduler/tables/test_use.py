"""What pods take of a node, added up and compared."""

from __future__ import annotations

from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.use import NO_USE, Use, use_of
from tests.cluster.scheduler.making import make_pod

_ONE = Use({"cpu": 1000, "memory": 5}, cpu=1000, memory=7, pods=1)
_OTHER = Use({"cpu": 400, "x": 2}, cpu=400, memory=9, pods=3)


def test_uses_are_added_and_taken_back() -> None:
    both = Use({"cpu": 1400, "memory": 5, "x": 2}, cpu=1400, memory=16, pods=4)
    assert _ONE + _OTHER == _OTHER + _ONE == both
    assert both - _OTHER == _ONE
    assert _ONE - _ONE == NO_USE and NO_USE + _ONE == _ONE
    assert Use({"cpu": -400, "x": -2}, cpu=-400, memory=-9, pods=-3) == NO_USE - _OTHER


def test_the_larger_of_two_uses_is_that_of_each_amount() -> None:
    larger = Use({"cpu": 1000, "memory": 5, "x": 2}, cpu=1000, memory=9, pods=3)
    assert _ONE.larger(_OTHER) == _OTHER.larger(_ONE) == larger
    assert _ONE.larger(NO_USE) == _ONE


def test_the_use_of_a_pod_has_its_requests_and_the_amounts_for_scores() -> None:
    shape = Shapes().of(make_pod("p", requests={"cpu": "2"}))
    assert use_of(shape) == Use({"cpu": 2000}, cpu=2000, memory=200 * 1024**2, pods=1)
