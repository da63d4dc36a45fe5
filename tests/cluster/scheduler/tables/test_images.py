"""Which nodes have an image, as their status says."""

from __future__ import annotations

from typing import Any

from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node


def _image(size: int, *names: str) -> dict[str, Any]:
    return {"names": list(names), "sizeBytes": size}


def test_images_follow_the_status_of_nodes() -> None:
    tables = Tables()
    images = tables.images

    def sizes() -> dict[str, dict[int, int]]:
        return {name: dict(images.rows(name)) for name in ("a", "b", "c")}

    tables.upsert_node(make_node("n0", images=[_image(1, "a", "b"), _image(2, "c")]))
    tables.upsert_node(make_node("n1", images=[_image(3, "a")]))
    assert sizes() == {"a": {0: 1, 1: 3}, "b": {0: 1}, "c": {0: 2}}
    version = images.version
    tables.upsert_node(make_node("n1", images=[_image(3, "a")]))
    assert images.version == version
    tables.upsert_node(make_node("n0", images=[_image(2, "c"), _image(4, "b")]))
    assert images.version > version
    assert sizes() == {"a": {1: 3}, "b": {0: 4}, "c": {0: 2}}
    tables.upsert_node(make_node("n0"))
    tables.delete_node("n1")
    assert sizes() == {"a": {}, "b": {}, "c": {}}


def test_images_that_a_node_lost_and_has_again_are_found() -> None:
    tables = Tables()
    for images in ([_image(1, "a")], [], [_image(1, "a")]):
        tables.upsert_node(make_node("n0", images=images))
        assert dict(tables.images.rows("a")) == ({0: 1} if images else {})
