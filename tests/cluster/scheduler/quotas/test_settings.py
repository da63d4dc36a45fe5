"""What the arguments of ElasticQuota and the feature gates mean for the table of quotas."""

from __future__ import annotations

from typing import Any

import pytest

from apis.quantity import parse_quantity
from cluster.scheduler.configuration.koordinator_arguments import ElasticQuotaArgs
from cluster.scheduler.plugins.quotas.settings import quota_settings
from cluster.scheduler.tables.quotas.table import QuotaSettings, Terminating
from cluster.scheduler.tables.quotas.tree import Sharing


def _changed(settings: QuotaSettings) -> dict[str, Any]:
    """Return the settings that differ from those of no arguments and no gates."""
    usual = quota_settings(ElasticQuotaArgs(), {})
    return {
        name: getattr(settings, name)
        for name in QuotaSettings.__dataclass_fields__
        if getattr(settings, name) != getattr(usual, name)
    }


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ("MultiQuotaTree", {"several_trees": True}),
        ("DisableDefaultQuota", {"default": False}),
        ("ElasticQuotaIgnorePodOverhead", {"overhead": False}),
        ("ElasticQuotaImmediateIgnoreTerminatingPod", {"terminating": Terminating.NEVER}),
        ("ElasticQuotaIgnoreTerminatingPod", {"terminating": Terminating.IN_GRACE_PERIOD}),
        ("ElasticQuotaGuaranteeUsage", {"sharing": Sharing(scale=True, guarantee=True)}),
        ("OmitNodeLabelsForReservation", {}),
    ],
)
def test_each_gate_changes_one_setting(gate: str, expected: dict[str, Any]) -> None:
    assert _changed(quota_settings(ElasticQuotaArgs(), {gate: True})) == expected
    assert _changed(quota_settings(ElasticQuotaArgs(), {gate: False})) == {}


def test_the_arguments_limit_the_built_in_quotas_and_say_where_they_are() -> None:
    arguments = ElasticQuotaArgs(
        default_quota_group_max={"cpu": parse_quantity("2"), "memory": parse_quantity("1Ki")},
        system_quota_group_max={"cpu": parse_quantity("500m")},
        quota_group_namespace="quotas",
        enable_min_quota_scale=False,
    )
    assert _changed(quota_settings(arguments, {})) == {
        "default_most": {"cpu": 2000, "memory": 1024},
        "system_most": {"cpu": 500},
        "namespace": "quotas",
        "sharing": Sharing(scale=False),
    }
