"""SystemConfig: memory watermarks and scheduler settings of the whole host, from the NodeSLO.

Only what `spec.systemStrategy` sets is claimed. A field that is removed gives its original back. A
value outside of its range is an error that names the field, and the setting's last good value
stays. vm.min_free_kbytes is a share of the memory: memory in KiB x minFreeKbytesFactor / 10000.

Settings and ranges: docs/facts/kernel.md, "Settings of the host".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final

import msgspec

from apis.errors import InputError, InputErrors
from hooks.claim import Claim
from hooks.facts import NodeInputs
from hooks.policy import Off, OffBecause, Partial, Policy, never
from hooks.subject import Level, NodeSubject
from linux.kernel_settings import (
    IDLE_SAVER_WMARK,
    MIN_FREE_KBYTES,
    PAGE_CACHE_LIMIT,
    REAP_BACKGROUND,
    WATERMARK_SCALE_FACTOR,
    check_value,
    feature,
)
from linux.resources import Resource
from linux.sysctls import GROUP_IDENTITY

NAME: Final = "SystemConfig"

_STRATEGY: Final = "spec.systemStrategy"
_FACTORS: Final = 10_000
"""minFreeKbytesFactor counts ten thousandths of the memory."""


class Rule(msgspec.Struct, frozen=True):
    """claims: by the field of the strategy that each comes from."""

    claims: Mapping[str, Claim]


def parse(inputs: NodeInputs) -> Rule | Off | Partial:
    strategy = inputs.slo.system_strategy
    numbers = {
        "minFreeKbytesFactor": (MIN_FREE_KBYTES, strategy.min_free_kbytes_factor),
        "watermarkScaleFactor": (WATERMARK_SCALE_FACTOR, strategy.watermark_scale_factor),
        "memcgReapBackGround": (REAP_BACKGROUND, strategy.memcg_reap_back_ground),
        "schedIdleSaverWmark": (IDLE_SAVER_WMARK, strategy.sched_idle_saver_wmark_ns),
        "pageCacheLimitEnabled": (PAGE_CACHE_LIMIT, strategy.page_cache_limit_enabled),
    }
    claims: dict[str, Claim] = {}
    errors: dict[str, InputError] = {}
    for field, (setting, number) in numbers.items():
        if number is None:
            continue
        value, reason = number, "as the NodeSLO sets it"
        if setting == MIN_FREE_KBYTES:
            memory = inputs.kernel.memory_bytes
            if not memory:
                errors[field] = _error(field, number, "the memory of this machine is not known")
                continue
            value = memory // 1024 * number // _FACTORS
            reason = f"{number}/{_FACTORS} of {memory >> 20} MiB"
        try:
            check_value(setting, str(value))
        except ValueError as error:
            errors[field] = _error(field, number, f"makes {setting} {value}: {error}")
        else:
            claims[field] = _claim(Resource.KERNEL_SETTING, setting, str(value), field, reason)
    if (on := strategy.sched_group_identity_enabled) is not None:
        field = "schedGroupIdentityEnabled"
        if on in (0, 1):
            claims[field] = _claim(
                Resource.SYSCTL, GROUP_IDENTITY, str(on), field, "as the NodeSLO sets it"
            )
        else:
            errors[field] = _error(field, on, "not 0 or 1")
    for name, wanted in strategy.sched_features.items():
        field = f"schedFeatures.{name}"
        try:
            setting = feature(name)
        except ValueError as error:
            errors[field] = _error(field, wanted, str(error))
        else:
            value_text = "1" if wanted else "0"
            claims[field] = _claim(
                Resource.KERNEL_SETTING, setting, value_text, field, "as the NodeSLO sets it"
            )
    rule = Rule(claims)
    if errors:
        return Partial(rule, InputErrors(list(errors.values())), partial(_mend, rule, errors))
    if not claims:
        return Off(OffBecause.NODESLO, f"NodeSLO {_STRATEGY}: no setting of the host is set")
    return rule


def _mend(rule: Rule, fields: Iterable[str], last: Rule) -> Rule:
    """Return the rule with the last good claims of some fields."""
    kept = {field: last.claims[field] for field in fields if field in last.claims}
    return Rule({**rule.claims, **kept})


def _error(field: str, value: object, problem: str) -> InputError:
    return InputError(obj="NodeSLO", field=f"{_STRATEGY}.{field}", value=value, problem=problem)


def _claim(resource: Resource, key: str, value: str, field: str, reason: str) -> Claim:
    return Claim(
        resource=resource,
        key=key,
        value=value,
        policy=NAME,
        reason=reason,
        source=f"NodeSLO {_STRATEGY}.{field}",
    )


def claims(rule: Rule, subject: NodeSubject) -> Iterator[Claim]:
    yield from rule.claims.values()


POLICY: Final = Policy(
    name=NAME,
    gate="SystemConfig",
    gate_default=False,
    summary="memory watermarks and scheduler settings of the host",
    parse=parse,
    claims={Level.NODE: claims},
    individual=never,
)
