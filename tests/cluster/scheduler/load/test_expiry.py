"""A pod that the load of nodes holds back, when their reports get too old."""

from __future__ import annotations

import json

import pytest

from cluster.scheduler.cycle.waiting import QueueState
from tests.cluster.scheduler.beds.core import Bed
from tests.cluster.scheduler.configuration.files import args, enabled, file


@pytest.mark.parametrize("passes", [True, False])
def test_a_pod_is_tried_when_the_report_that_held_it_back_expires(passes: bool) -> None:
    arguments = args("LoadAwareScheduling", enableScheduleWhenNodeMetricsExpired=passes)
    plugins = {"filter": enabled("LoadAwareScheduling"), "reserve": enabled("LoadAwareScheduling")}
    profile = {
        "schedulerName": "koord-scheduler",
        "plugins": plugins,
        "pluginConfig": [arguments],
    }
    bed = Bed(json.dumps(file(profiles=[profile])))
    bed.node("n", 4)
    used = {"nodeUsage": {"resources": {"cpu": "3", "memory": "0"}}}
    status = {"updateTime": "2027-01-15T08:00:00Z", "nodeMetric": used}
    cache = next(each for each in bed.core.caches if each.resource.kind == "NodeMetric")
    bed.show(cache, "ADDED", {"metadata": {"name": "n"}, "status": status})
    bed.pod("web", 1, 0)
    bed.run()
    bed.run(170.0)
    assert "node(s) cpu usage exceed threshold" in bed.messages["web"]
    # The report is 180 s old, and the next one is far from now.
    bed.run(11.0)
    assert bed.node_of("web") == ("n" if passes else "")
    assert bed.core.queue.state_of("u-web") is (None if passes else QueueState.UNSCHEDULABLE)
