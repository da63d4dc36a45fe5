"""What follows from a decision, computed once for replicas."""

from __future__ import annotations

import msgspec

from hooks.subject import Requested
from koordlet.transports.creations import KnownConsequences
from linux.resources import Resource
from tests.nri_plugin.scenes import QUOTA, decision


def test_consequences_kept_for_replicas_differ_by_what_each_requested() -> None:
    consequences = KnownConsequences()
    decided = decision({QUOTA: 50_000})
    usual, short = Requested(cfs_period_us=100_000), Requested(cfs_period_us=10_000)
    for requested, quota_us in ((usual, 50_000), (short, 5_000), (usual, 50_000)):
        found = consequences.of(requested, decided)
        assert (found.delivered.cfs_quota_us, found.delivered.cfs_period_us) == (quota_us, None)
        line = msgspec.json.decode(b'{"id":"c"' + found.kept)
        assert line == {
            "id": "c",
            "period_us": requested.cfs_period_us,
            "delivered": {"quota_us": quota_us},
        }
    other = consequences.of(usual, decision({QUOTA: 60_000}))
    assert other.delivered.cfs_quota_us == 60_000
    assert consequences.of(usual, decided) is consequences.of(usual, decided)


def test_host_directories_are_found_with_their_modes() -> None:
    made = decision({(Resource.HOST_DIRECTORY, "/run/a"): 0o755, QUOTA: 50_000})
    assert KnownConsequences().of(Requested(), made).directories == (("/run/a", 0o755),)
