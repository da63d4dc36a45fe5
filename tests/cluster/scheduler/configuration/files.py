"""Configuration files for the tests: like the chart's, and the parts of others."""

from __future__ import annotations

import json
from typing import Any

from apis.errors import InputError, InputErrors
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.configuration.reading import read_configuration

Tree = dict[str, Any]

GROUP_VERSION = "kubescheduler.config.k8s.io/v1"


def args(plugin: str, **members: Any) -> Tree:
    """Return an element of pluginConfig, with the kind that files of the chart have."""
    named = {"apiVersion": GROUP_VERSION, "kind": f"{plugin}Args"}
    return {"name": plugin, "args": named | members}


def enabled(*names: str, disabled: tuple[str, ...] = ()) -> Tree:
    """Return a set of plugins; "Name:5" has a weight."""
    entries = []
    for each in names:
        name, _, weight = each.partition(":")
        entries.append({"name": name, "weight": int(weight)} if weight else {"name": name})
    tree: Tree = {"enabled": entries} if entries else {}
    if disabled:
        tree["disabled"] = [{"name": name} for name in disabled]
    return tree


def file(**members: Any) -> Tree:
    """Return a file with these members."""
    return {"apiVersion": GROUP_VERSION, "kind": "KubeSchedulerConfiguration", **members}


def chart_profile(name: str = "koord-scheduler") -> Tree:
    """Return the profile that Koordinator's chart installs."""
    return {
        "schedulerName": name,
        "plugins": {
            "preEnqueue": enabled("Coscheduling"),
            "queueSort": enabled("PrioritySort", disabled=("*",)),
            "preFilter": enabled(
                "SchedulingHint",
                "Coscheduling",
                "Reservation",
                "NodeNUMAResource",
                "DeviceShare",
                "ElasticQuota",
            ),
            "filter": enabled(
                "Reservation", "LoadAwareScheduling", "NodeNUMAResource", "DeviceShare"
            ),
            "postFilter": enabled("Reservation", "Coscheduling", "ElasticQuota", disabled=("*",)),
            "preScore": enabled("Reservation", "Coscheduling"),
            "score": enabled(
                "LoadAwareScheduling:1",
                "NodeNUMAResource:1",
                "DeviceShare:1",
                "Reservation:5000",
                "Coscheduling:1",
            ),
            "reserve": enabled(
                "Reservation",
                "LoadAwareScheduling",
                "NodeNUMAResource",
                "DeviceShare",
                "Coscheduling",
                "ElasticQuota",
            ),
            "permit": enabled("Coscheduling"),
            "preBind": enabled(
                "NodeNUMAResource", "DeviceShare", "Reservation", "Coscheduling", "DefaultPreBind"
            ),
            "bind": enabled("Reservation", "DefaultBinder", disabled=("*",)),
            "postBind": enabled("Coscheduling"),
        },
        "pluginConfig": [
            args(
                "NodeResourcesFit",
                scoringStrategy={
                    "type": "LeastAllocated",
                    "resources": [
                        {"name": name, "weight": 1}
                        for name in (
                            "cpu",
                            "memory",
                            "kubernetes.io/batch-cpu",
                            "kubernetes.io/batch-memory",
                        )
                    ],
                },
            ),
            args(
                "LoadAwareScheduling",
                filterExpiredNodeMetrics=False,
                nodeMetricExpirationSeconds=300,
                resourceWeights={"cpu": 1, "memory": 1},
                usageThresholds={"cpu": 65, "memory": 95},
                estimatedScalingFactors={"cpu": 85, "memory": 70},
            ),
            args("ElasticQuota", quotaGroupNamespace="koordinator-system"),
            args("Coscheduling", enablePreemption=True, awareNetworkTopology=True),
            args(
                "DeviceShare",
                gpuShareUnsupportedModels=[{"vendor": "huawei", "model": "Ascend-310P3-300I-DUO"}],
            ),
        ],
    }


def chart_file() -> Tree:
    """Return the file that Koordinator's chart installs."""
    return file(
        leaderElection={
            "leaderElect": True,
            "resourceLock": "leases",
            "resourceName": "koord-scheduler",
            "resourceNamespace": "koordinator-system",
        },
        profiles=[chart_profile()],
    )


def load(tree: Any) -> SchedulerConfiguration:
    """Read a file. It is spelt as JSON, which is YAML and quicker to write."""
    return read_configuration(json.dumps(tree, ensure_ascii=False), obj="config.yaml")


def errors_of(tree: Any) -> tuple[InputError, ...]:
    """Return what is wrong with a file, () if nothing is."""
    try:
        load(tree)
    except InputErrors as errors:
        return errors.errors
    return ()


def fields_of(tree: Any) -> list[str]:
    """Return the fields that are wrong."""
    return [error.field for error in errors_of(tree)]
