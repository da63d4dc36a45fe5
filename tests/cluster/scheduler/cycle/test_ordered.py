"""A heap from which items can be removed."""

from __future__ import annotations

from random import Random

import pytest

from cluster.scheduler.cycle.ordered import Ordered, OrderedItem


class _Item(OrderedItem):
    def __init__(self, key: tuple[int, ...]) -> None:
        super().__init__()
        self.key = key


@pytest.mark.parametrize("seed", range(5))
def test_the_first_item_is_the_least_whatever_was_removed(seed: int) -> None:
    random = Random(seed)
    ordered: Ordered[_Item] = Ordered()
    items: list[_Item] = []
    for _ in range(2000):
        # The heap grows to some hundred items, and most of them are removed at once, now and then.
        if not items or random.random() < 0.7:
            item = _Item((random.randrange(20),))
            items.append(item)
            ordered.push(item.key, item)
        else:
            for _ in range(1 if random.random() < 0.99 else len(items) * 3 // 4):
                ordered.remove(items.pop(random.randrange(len(items))))
        # Of equal keys, the one that was pushed first.
        least = min(items, key=lambda each: each.key, default=None)
        assert ordered.first() == (None if least is None else (least.key, least))


def test_what_is_kept_of_removed_items_is_bounded() -> None:
    ordered: Ordered[_Item] = Ordered()
    for number in range(1000):
        item = _Item((number,))
        ordered.push(item.key, item)
        if number:
            ordered.remove(item)
    assert len(ordered._heap) <= 70
    first = ordered.first()
    assert first is not None
    assert first[0] == (0,)


def test_an_item_that_was_removed_can_be_pushed_again() -> None:
    ordered: Ordered[_Item] = Ordered()
    item, other = _Item((1,)), _Item((2,))
    for each in (item, other):
        ordered.push(each.key, each)
    ordered.remove(item)
    ordered.push((3,), item)
    assert ordered.first() == ((2,), other)
    ordered.remove(other)
    assert ordered.first() == ((3,), item)
    ordered.remove(item)
    assert ordered.first() is None
