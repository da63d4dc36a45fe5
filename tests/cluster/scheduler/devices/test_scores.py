"""How DeviceShare ranks nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster.scheduler.exact.devices.candidates import Scoring
from cluster.scheduler.plugins.devices.device_share import DeviceShareScore
from cluster.scheduler.plugins.devices.settings import Settings
from tests.cluster.scheduler.devices.clusters import (
    a_cluster,
    eight,
    hold,
)
from tests.cluster.scheduler.devices.making import (
    a_gpu,
    a_nic,
    a_shape,
)


@pytest.mark.parametrize(
    ("requests", "most", "expected"),
    [
        # 8 GPUs of 80 GiB, two in use: ratio and memory both (800 - (200 + 100)) / 800.
        ({"gpu": 100}, False, 62),
        ({"gpu": 100}, True, 37),
        # All four of the pod's GPUs count: (800 - (200 + 400)) / 800.
        ({"gpu": 400}, False, 25),
        ({"gpu-memory": "80Gi"}, False, 62),
        ({"gpu": 700}, False, 0),
        ({"rdma": 100}, False, 0),
    ],
)
def test_scores_by_what_is_left(requests: Any, most: bool, expected: int) -> None:
    tables, devices = a_cluster(n1=eight(), n2=None)
    hold(tables, "n1", 0, 1)
    plugin = DeviceShareScore(devices, Settings(scoring=Scoring(most=most)))
    shape = a_shape(requests)
    assert plugin.score(shape, tables, slice(0, 2)).tolist() == [expected, 0]
    assert plugin.score(shape, tables, np.array([0])).tolist() == [expected]


def test_the_largest_sum_over_types_becomes_100() -> None:
    tables, devices = a_cluster(n1=[*eight(), a_nic(0)], n2=[*eight(), a_nic(0), a_nic(1)])
    plugin = DeviceShareScore(devices)
    raw = plugin.score(a_shape({"gpu": 100, "rdma": 100}), tables, slice(0, 2))
    assert raw.tolist() == [87 + 0, 87 + 50]
    assert plugin.normalize(raw).tolist() == [87 * 100 // 137, 100]


def test_scores_look_at_selected_devices_only() -> None:
    gpus = [a_gpu(0, labels={"good": "1"}), a_gpu(1), a_gpu(2), a_gpu(3)]
    tables, devices = a_cluster(n1=gpus)
    hint = {"gpu": {"selector": {"matchLabels": {"good": "1"}}}}
    shape = a_shape({"gpu": 50}, hint=hint)
    assert DeviceShareScore(devices).score(shape, tables, slice(0, 1)).tolist() == [50]
