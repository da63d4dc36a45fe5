"""Enhanced pod validation: labels that every pod of a namespace must carry.

The rules stand in a config map that is watched, so all replicas follow at once; a broken one leaves
the last good rules in force. Its data: `enable` is "true" or not, `rules` is a JSON list.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from apis.core import ConfigMap
from apis.decode import Embedded, decode_field, field_decoder
from apis.errors import InputError
from kube.cache import Cache, Change, Event

_log = logging.getLogger(__name__)


class Rule(Embedded, frozen=True):
    name: str = ""
    required_labels: tuple[str, ...] = ()
    namespace_whitelist: tuple[str, ...] = ()


class EnhancedRules(msgspec.Struct, frozen=True):
    """The rules in force."""

    enable: bool = False
    rules: tuple[Rule, ...] = ()

    def problem(self, labels: Mapping[str, str], namespace: str) -> str | None:
        """Return the first rule that a pod breaks, or None."""
        if not self.enable:
            return None
        for rule in self.rules:
            if namespace in rule.namespace_whitelist:
                continue
            missing = [key for key in rule.required_labels if key not in labels]
            if missing:
                return f"rule {rule.name!r} requires the labels {', '.join(missing)}"
        return None


_decode_rules = field_decoder(tuple[Rule, ...])


def parse_rules(data: Mapping[str, str], *, obj: str) -> EnhancedRules:
    """Return the rules of the config map's data. Raises InputError."""
    enable = data.get("enable", "").strip().lower() == "true"
    text = data.get("rules", "")
    rules = decode_field(_decode_rules, text, obj=obj, field="data[rules]") if text else ()
    return EnhancedRules(enable, rules)


class EnhancedRulesSource:
    """Follows the config map; ask it with `current`."""

    def __init__(self, cache: Cache[ConfigMap], *, namespace: str, name: str) -> None:
        self._key = f"{namespace}/{name}"
        self._rules = EnhancedRules()
        cache.subscribe(self._changed)

    def current(self) -> EnhancedRules:
        return self._rules

    def _changed(self, event: Event[ConfigMap]) -> None:
        if event.key != self._key:
            return
        if event.change is Change.DELETED:
            self._rules = EnhancedRules()
            return
        try:
            self._rules = parse_rules(event.new.data, obj=f"ConfigMap {self._key}")
        except InputError as error:
            _log.warning("%s; the last good rules stay in force", error)
