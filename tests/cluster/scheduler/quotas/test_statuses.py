"""What the status of a quota shows, and what is patched."""

from __future__ import annotations

import json

import msgspec

from cluster.scheduler.binding.quota_statuses import status_patch
from cluster.scheduler.tables.quotas.exposition import quota_lines
from cluster.scheduler.tables.quotas.figures import QuotaFigures, figures
from tests.cluster.scheduler.quotas.making import PREFIX, Bed, make_quota


def _figures(bed: Bed, name: str = "a") -> QuotaFigures:
    found = figures(bed.table, name)
    assert found is not None
    return found


def _bed() -> Bed:
    bed = Bed("10")
    bed.quota("a", {"cpu": "2"}, {"cpu": "6", "memory": "8Gi"})
    bed.place("1", "a", "3")
    bed.want("2", "a", "5")
    return bed


def test_only_what_differs_is_patched() -> None:
    bed = _bed()
    shown = make_quota("a")
    patch = status_patch(shown, _figures(bed))
    assert patch["status"] == {"used": {"cpu": "3"}}
    annotations = {
        key.removeprefix(PREFIX): json.loads(text)
        for key, text in patch["metadata"]["annotations"].items()
    }
    assert annotations == {
        "runtime": {"cpu": "6", "memory": "0"},
        "request": {"cpu": "8"},
        "child-request": {"cpu": "8"},
    }
    meta = msgspec.structs.replace(shown.metadata, annotations=patch["metadata"]["annotations"])
    used = msgspec.convert({"used": {"cpu": "3"}}, dict)
    again = make_quota("a")
    again = msgspec.structs.replace(again, metadata=meta)
    assert status_patch(again, _figures(bed)) == {"status": used}


def test_zeros_and_notations_make_no_difference() -> None:
    bed = _bed()
    shown = make_quota(
        "a",
        annotations={
            "runtime": '{"cpu":"6000m"}',
            "request": '{"cpu":8,"memory":"0"}',
            "child-request": '{"cpu":"8"}',
            "non-preemptible-used": '{"cpu":"0"}',
        },
    )
    assert status_patch(shown, _figures(bed)) == {"status": {"used": {"cpu": "3"}}}


def test_an_annotation_that_cannot_be_read_is_replaced() -> None:
    bed = _bed()
    patch = status_patch(make_quota("a", annotations={"runtime": "{"}), _figures(bed))
    assert PREFIX + "runtime" in patch["metadata"]["annotations"]


def test_the_root_quota_shows_the_whole_tree() -> None:
    bed = _bed()
    root = _figures(bed, "koordinator-root-quota")
    assert root.runtime["cpu"] == 10_000
    assert root.used == {"cpu": 3000}
    assert root.child_request == {"cpu": 6000}


def test_gauges_show_all_quotas() -> None:
    bed = _bed()
    bed.quota("parent", {}, {"cpu": "9"}, labels={"is-parent": "true"})
    bed.quota("child", {}, {"cpu": "9"}, parent="parent")
    lines = list(quota_lines(bed.table))
    labels = 'name="a",resource="cpu",tree="",is_parent="false",parent="koordinator-root-quota"'
    assert f'scheduler_elastic_quota_spec{{{labels},field="min"}} 2000\n' in lines
    assert f'scheduler_elastic_quota_status{{{labels},field="used"}} 3000\n' in lines
    assert f'scheduler_elastic_quota_status{{{labels},field="runtime"}} 6000\n' in lines
    assert any('name="parent"' in line and 'is_parent="true"' in line for line in lines)
