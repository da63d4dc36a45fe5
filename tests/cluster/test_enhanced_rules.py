"""The config map of enhanced validation: which one counts, and when its rules are in force."""

from __future__ import annotations

from typing import Any

import msgspec

from apis.core import ConfigMap
from cluster.webhook.enhanced import EnhancedRules, EnhancedRulesSource, Rule
from kube.cache import Cache
from kube.resources import CONFIG_MAPS
from tests.cluster.admission import filled

OWNED = '[{"name":"owned","requiredLabels":["owner"],"namespaceWhitelist":["kube-system"]}]'
IN_FORCE = EnhancedRules(True, (Rule("owned", ("owner",), ("kube-system",)),))


def source() -> tuple[EnhancedRulesSource, Cache[ConfigMap]]:
    maps = filled(CONFIG_MAPS, ConfigMap)
    return EnhancedRulesSource(maps, namespace="koord", name="rules"), maps


def event(kind: str, *, name: str = "rules", namespace: str = "koord", **data: str) -> bytes:
    obj: dict[str, Any] = {"metadata": {"name": name, "namespace": namespace}, "data": data}
    return msgspec.json.encode({"type": kind, "object": obj})


def test_no_rule_is_in_force_without_the_config_map() -> None:
    rules, maps = source()
    assert rules.current() == EnhancedRules()
    maps.take(event("ADDED", enable=" True ", rules=OWNED))
    assert rules.current() == IN_FORCE
    maps.take(event("DELETED", enable="true", rules=OWNED))
    assert rules.current() == EnhancedRules()


def test_other_config_maps_do_not_count() -> None:
    rules, maps = source()
    maps.take(event("ADDED", name="others", enable="true", rules=OWNED))
    maps.take(event("ADDED", namespace="default", enable="true", rules=OWNED))
    assert rules.current() == EnhancedRules()


def test_broken_rules_leave_the_last_good_ones_in_force() -> None:
    rules, maps = source()
    maps.take(event("ADDED", enable="true", rules=OWNED))
    maps.take(event("MODIFIED", enable="true", rules="[{"))
    assert rules.current() == IN_FORCE
    maps.take(event("MODIFIED", enable="false", rules=OWNED))
    assert not rules.current().enable
    maps.take(event("MODIFIED", enable="true"))
    assert rules.current() == EnhancedRules(True)
