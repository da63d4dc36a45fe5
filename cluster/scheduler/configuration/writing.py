"""The configuration in force as a file, for an operator to compare with the file that was given.

Everything is spelt out: each point lists its plugins in the order of their calls, and each plugin's
arguments are complete. Reading it again gives the same configuration.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from apis.decode import enc_hook
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.configuration.extenders import Extender
from cluster.scheduler.configuration.plugin_arguments import ARGUMENTS
from cluster.scheduler.configuration.points import Point
from cluster.scheduler.configuration.profiles import ALL, Profile
from cluster.scheduler.configuration.reading import GROUP_VERSION, KIND
from cluster.scheduler.configuration.strict import Seconds

_WITHOUT_SECRETS: Final = frozenset({"keyData", "keyFile", "certData", "certFile"})
"""Of an extender's certificate. The names of its files go with it, because a certificate without a
key is refused when it is read."""


def to_tree(configuration: SchedulerConfiguration) -> dict[str, Any]:
    """Return a KubeSchedulerConfiguration as mappings and lists; it holds no extender's key."""
    return {
        "apiVersion": GROUP_VERSION,
        "kind": KIND,
        "clientConnection": _plain(configuration.client_connection),
        "leaderElection": _plain(configuration.leader_election),
        "parallelism": configuration.parallelism,
        "percentageOfNodesToScore": configuration.percentage_of_nodes_to_score,
        "podInitialBackoffSeconds": configuration.pod_initial_backoff_seconds,
        "podMaxBackoffSeconds": configuration.pod_max_backoff_seconds,
        "enableProfiling": configuration.enable_profiling,
        "enableContentionProfiling": configuration.enable_contention_profiling,
        "delayCacheUntilActive": configuration.delay_cache_until_active,
        "profiles": [_profile(each) for each in configuration.profiles],
        "extenders": [_extender(each) for each in configuration.extenders],
    }


def _plain(value: Any) -> Any:
    return _without_empty(msgspec.json.decode(msgspec.json.encode(value, enc_hook=_enc_hook)))


def _without_empty(tree: Any) -> Any:
    """Return the tree without members that are null or [], as Go leaves them out.

    kube-scheduler takes `shape` of VolumeBinding for a feature that is off, even if it is empty.
    """
    if isinstance(tree, list):
        return [_without_empty(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        name: _without_empty(member)
        for name, member in tree.items()
        if member is not None and member != []
    }


def _enc_hook(value: Any) -> Any:
    if isinstance(value, Seconds):
        # Nanoseconds are as exact as the text of a duration can be.
        return f"{value:.9f}".rstrip("0").rstrip(".") + "s"
    return enc_hook(value)


def _profile(profile: Profile) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "schedulerName": profile.scheduler_name,
        "plugins": {point.value: _point(profile, point) for point in Point},
        "pluginConfig": [
            {
                "name": name,
                "args": {
                    "apiVersion": GROUP_VERSION,
                    "kind": f"{name}Args",
                    **_plain(getattr(profile.arguments, rule.member)),
                },
            }
            for name, rule in ARGUMENTS.items()
        ],
    }
    if profile.percentage_of_nodes_to_score is not None:
        tree["percentageOfNodesToScore"] = profile.percentage_of_nodes_to_score
    return tree


def _point(profile: Profile, point: Point) -> dict[str, Any]:
    weights = profile.score_weights if point is Point.SCORE else {}
    enabled = [
        {"name": name, "weight": weights[name]} if name in weights else {"name": name}
        for name in profile.plugins[point]
    ]
    return {"enabled": enabled, "disabled": [{"name": ALL}]}


def _extender(extender: Extender) -> dict[str, Any]:
    tree: dict[str, Any] = _plain(extender)
    certificates = tree.get("tlsConfig")
    if certificates is not None:
        tree["tlsConfig"] = {
            name: value for name, value in certificates.items() if name not in _WITHOUT_SECRETS
        }
    return tree
