"""The configuration in force, written as a file."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from cluster.scheduler.configuration.writing import to_tree
from tests.cluster.scheduler.configuration.files import (
    Tree,
    args,
    chart_file,
    chart_profile,
    enabled,
    file,
    load,
)


def profile(*configs: Tree, **plugins: Any) -> Tree:
    return file(profiles=[{"plugins": plugins, "pluginConfig": list(configs)}])


@pytest.mark.parametrize(
    "tree",
    [
        file(),
        chart_file(),
        file(profiles=[{}]),
        file(profiles=[chart_profile("a"), {"schedulerName": "b", "percentageOfNodesToScore": 5}]),
        profile(preBind=enabled(disabled=("DefaultPreBind",))),
        profile(
            score=enabled("ImageLocality:7", disabled=("*",)), multiPoint=enabled("Reservation")
        ),
        profile(
            args(
                "LoadAwareScheduling",
                dominantResourceWeight=3,
                aggregated={"usageAggregatedDuration": "1m30.5s", "usageAggregationType": "p95"},
            ),
            args("ElasticQuota", defaultQuotaGroupMax={"cpu": "500m"}, delayEvictTime="100ns"),
            args("PodTopologySpread", defaultingType="List"),
            args("Coscheduling", defaultTimeout="876000h"),
        ),
        file(
            clientConnection={"kubeconfig": "/k", "qps": 1.5},
            leaderElection={"leaderElect": False, "retryPeriod": "1h"},
            extenders=[
                {
                    "urlPrefix": "https://extender/x",
                    "httpTimeout": "250ms",
                    "tlsConfig": {"caFile": "/ca"},
                    "managedResources": [{"name": "a.io/x", "ignoredByScheduler": True}],
                }
            ],
        ),
    ],
)
def test_what_is_written_reads_as_the_same_configuration(tree: Tree) -> None:
    before = load(tree)
    after = load(to_tree(before))
    assert replace(after, notices=()) == replace(before, notices=())


def test_every_point_lists_what_is_called_there() -> None:
    (written,) = to_tree(load(file()))["profiles"]
    assert written["plugins"]["bind"] == {
        "enabled": [{"name": "DefaultBinder"}],
        "disabled": [{"name": "*"}],
    }
    assert {"name": "TaintToleration", "weight": 3} in written["plugins"]["score"]["enabled"]
    assert written["schedulerName"] == "default-scheduler"


def test_empty_lists_are_left_out() -> None:
    (written,) = to_tree(load(file()))["profiles"]
    volumes = next(each for each in written["pluginConfig"] if each["name"] == "VolumeBinding")
    assert "shape" not in volumes["args"]


def test_keys_of_extenders_are_not_written() -> None:
    tls = {"certData": "Y2VydA==", "keyData": "c2VjcmV0", "caData": "Y2E="}
    tree = file(extenders=[{"urlPrefix": "https://extender/x", "tlsConfig": tls}])
    written = to_tree(load(tree))
    assert "c2VjcmV0" not in str(written)
    assert written["extenders"][0]["tlsConfig"]["caData"] == "Y2E="
    assert load(written).extenders[0].url_prefix == "https://extender/x"
