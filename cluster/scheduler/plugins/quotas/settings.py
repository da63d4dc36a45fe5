"""What the arguments of ElasticQuota and the feature gates say about the table of quotas."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.scheduler.configuration.koordinator_arguments import ElasticQuotaArgs
from cluster.scheduler.tables.quotas.definitions import whole_amounts
from cluster.scheduler.tables.quotas.table import QuotaSettings, Terminating
from cluster.scheduler.tables.quotas.tree import Sharing


def quota_settings(arguments: ElasticQuotaArgs, gates: Mapping[str, bool]) -> QuotaSettings:
    """Return the settings of the table. gates: by name; one that is missing is off."""

    def on(name: str) -> bool:
        return gates.get(name, False)

    if on("ElasticQuotaImmediateIgnoreTerminatingPod"):
        terminating = Terminating.NEVER
    elif on("ElasticQuotaIgnoreTerminatingPod"):
        terminating = Terminating.IN_GRACE_PERIOD
    else:
        terminating = Terminating.ALWAYS
    return QuotaSettings(
        default_most=whole_amounts(dict(arguments.default_quota_group_max)),
        system_most=whole_amounts(dict(arguments.system_quota_group_max)),
        namespace=arguments.quota_group_namespace,
        sharing=Sharing(
            scale=arguments.enable_min_quota_scale,
            guarantee=on("ElasticQuotaGuaranteeUsage"),
        ),
        several_trees=on("MultiQuotaTree"),
        default=not on("DisableDefaultQuota"),
        overhead=not on("ElasticQuotaIgnorePodOverhead"),
        terminating=terminating,
    )
