"""The network bandwidth of the classes that a NodeSLO asks for, in bits per second. Pure.

A number in the NodeSLO is a percentage of the node's bandwidth, a text is a quantity. A class that
is not enabled has no guarantee and no limit: 0.
"""

from __future__ import annotations

import msgspec

from apis.errors import InputError, InputErrors
from apis.nodeslo import NetworkQOS, NodeSLOSpec, bandwidth_bits

_STRATEGY = "spec.resourceQOSStrategy"


class Rate(msgspec.Struct, frozen=True):
    """A guarantee and a limit; a limit of 0 is none."""

    request: int = 0
    limit: int = 0


class ClassBandwidth(msgspec.Struct, frozen=True):
    """What a class may receive (ingress) and send (egress)."""

    ingress: Rate = Rate()
    egress: Rate = Rate()


class Bandwidths(msgspec.Struct, frozen=True):
    """total: of the node. ls: of LSE, LSR and LS pods together. be: of BE pods."""

    total: int = 0
    ls: ClassBandwidth = ClassBandwidth()
    be: ClassBandwidth = ClassBandwidth()


def bandwidths(slo: NodeSLOSpec, *, line_bits: int = 0) -> Bandwidths:
    """Return the bandwidths; raises InputErrors with every field that cannot be used.

    line_bits: the node's bandwidth where the NodeSLO does not set it.

    The NodeSLO's decoder has refused negative bandwidths and percents above 100.
    """
    total = slo.system_strategy.total_network_bandwidth.value() or line_bits
    errors: list[InputError] = []
    strategy = slo.resource_qos_strategy
    ls = _of_class("lsClass", strategy.ls_class.network_qos, total, errors)
    be = _of_class("beClass", strategy.be_class.network_qos, total, errors)
    if errors:
        raise InputErrors(errors)
    return Bandwidths(total, ls, be)


def _of_class(name: str, qos: NetworkQOS, total: int, errors: list[InputError]) -> ClassBandwidth:
    if not qos.enable:
        return ClassBandwidth()

    def bits(field: str, rate: int | str) -> int:
        try:
            found = bandwidth_bits(rate, total_bits=total)
            if found > total:
                raise ValueError(f"more than the node's bandwidth of {total} bits per second")
        except ValueError as error:
            errors.append(
                InputError(
                    obj="NodeSLO",
                    field=f"{_STRATEGY}.{name}.networkQOS.{field}",
                    value=rate,
                    problem=str(error),
                )
            )
            return 0
        return found

    return ClassBandwidth(
        ingress=Rate(
            bits("ingressRequest", qos.ingress_request), bits("ingressLimit", qos.ingress_limit)
        ),
        egress=Rate(
            bits("egressRequest", qos.egress_request), bits("egressLimit", qos.egress_limit)
        ),
    )
