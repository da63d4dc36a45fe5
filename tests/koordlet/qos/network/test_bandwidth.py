"""The bandwidth of classes: percents and quantities, in bits per second."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.errors import InputErrors
from koordlet.qos.network.bandwidth import Bandwidths, ClassBandwidth, Rate, bandwidths
from tests.hooks.making import slo


def _of(total: str | int, **classes: dict[str, Any]) -> Bandwidths:
    return bandwidths(
        slo(
            {
                "systemStrategy": {"totalNetworkBandwidth": total},
                "resourceQOSStrategy": {
                    f"{name}Class": {"networkQOS": {"enable": True} | qos}
                    for name, qos in classes.items()
                },
            }
        )
    )


def test_percents_are_of_the_node_and_texts_are_quantities() -> None:
    found = _of(
        "1G",
        ls={"ingressRequest": 50, "ingressLimit": 100, "egressRequest": "40M", "egressLimit": "1G"},
        be={"egressLimit": 5},
    )
    assert found == Bandwidths(
        total=1_000_000_000,
        ls=ClassBandwidth(
            ingress=Rate(500_000_000, 1_000_000_000), egress=Rate(40_000_000, 1_000_000_000)
        ),
        be=ClassBandwidth(egress=Rate(0, 50_000_000)),
    )


def test_a_class_that_is_not_enabled_has_nothing() -> None:
    assert _of("1G", ls={"enable": False, "egressLimit": 50}) == Bandwidths(total=1_000_000_000)


_FIELDS = ("ingressRequest", "ingressLimit", "egressRequest", "egressLimit")


@pytest.mark.parametrize(
    ("qos", "field"),
    [
        ({"egressLimit": 101}, "egressLimit"),
        ({"ingressRequest": -1}, "ingressRequest"),
        *(({field: "2G"}, field) for field in _FIELDS),
        ({"egressRequest": "much"}, "egressRequest"),
        ({"egressRequest": "-5M"}, "egressRequest"),
    ],
)
def test_a_rate_that_cannot_be_used_is_named(qos: dict[str, Any], field: str) -> None:
    with pytest.raises(InputErrors) as caught:
        _of("1G", be=qos)
    (error,) = caught.value.errors
    assert error.obj.startswith("NodeSLO")
    assert error.field.endswith(f"resourceQOSStrategy.beClass.networkQOS.{field}")


@given(st.integers(0, 1 << 50), st.integers(-5, 105) | st.text(max_size=6), st.integers(0, 1 << 51))
def test_no_rate_exceeds_the_node(total: int, percent: int | str, quantity: int) -> None:
    try:
        found = _of(total, ls={"egressLimit": percent}, be={"ingressRequest": str(quantity)})
    except InputErrors:
        return
    for rate in (found.ls.egress, found.ls.ingress, found.be.egress, found.be.ingress):
        assert 0 <= rate.request <= total and 0 <= rate.limit <= total
