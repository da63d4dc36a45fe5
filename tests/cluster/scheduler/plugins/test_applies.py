"""Whether a plugin applies to a pod is asked again only where tables may change the answer."""

from __future__ import annotations

import json

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.plugins.contract import AppliesByShape, Filter, Score, SetScore
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import chart_profile, file
from tests.cluster.scheduler.making import make_pod


class _NoTables(Tables):
    """Fails where anything of it is read."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"tables.{name} was read")


def test_plugins_that_apply_by_shape_read_no_table() -> None:
    text = json.dumps(file(profiles=[chart_profile()]))
    plugins = make_plugins(read_configuration(text, obj="test"), Tables())
    (profile,) = plugins.profiles.values()
    every: tuple[Filter | Score | SetScore, ...] = (
        *profile.filters,
        *(score for score, _ in profile.scores),
        *(score for score, _ in profile.set_scores),
    )
    marked = [plugin for plugin in every if isinstance(plugin, AppliesByShape)]
    shapes = Shapes()
    terms = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}
    term = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
    pods = [
        shapes.of(make_pod("plain")),
        shapes.of(
            make_pod(
                "rich",
                labels={"a": "b"},
                containers=[
                    {
                        "name": "main",
                        "image": "x",
                        "ports": [{"containerPort": 80, "hostPort": 80}],
                        "resources": {"requests": {"cpu": "1", "koordinator.sh/gpu": "100"}},
                    }
                ],
                nodeSelector={"a": "b"},
                tolerations=[{"key": "a", "operator": "Exists"}],
                affinity={
                    "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms},
                    "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
                },
                topologySpreadConstraints=[
                    {**term, "maxSkew": 1, "whenUnsatisfiable": when}
                    for when in ("DoNotSchedule", "ScheduleAnyway")
                ],
            )
        ),
    ]
    applied = {
        type(plugin).__name__
        for plugin in marked
        for pod in pods
        if plugin.applies(pod, _NoTables())
    }
    assert applied >= {"NodeAffinity", "NodePorts", "PodTopologySpread", "DeviceShareFilter"}
