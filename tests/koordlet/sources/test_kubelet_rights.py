"""Kubelet's refusals, as its versions word them, and what koordlet says to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.sources.kubelet_rights import refusal

FINE_GRAINED = (
    b"Forbidden (user=system:serviceaccount:koordinator-system:koordlet, verb=get,"
    b" resource=nodes, subresource(s)=[%s])\n"
)
OLD = b"Forbidden (user=koordlet, verb=get, resource=nodes, subresource=proxy)"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/pods/",
            FINE_GRAINED % b"pods proxy",
            'answered 403 to /pods/: user "system:serviceaccount:koordinator-system:koordlet" may'
            " get neither nodes/pods nor nodes/proxy: apply deploy/koordlet/rbac-kubelet.yaml",
        ),
        (
            "/configz",
            FINE_GRAINED % b"configz proxy",
            'answered 403 to /configz: user "system:serviceaccount:koordinator-system:koordlet" may'
            " get neither nodes/configz nor nodes/proxy: apply deploy/koordlet/rbac-kubelet.yaml",
        ),
        (
            "/pods/",
            OLD,
            'answered 403 to /pods/: user "koordlet" may not get nodes/proxy, and this kubelet'
            " checks no smaller right (it is older than Kubernetes 1.33, or its gate"
            " KubeletFineGrainedAuthz is off): apply deploy/koordlet/rbac-kubelet-proxy.yaml",
        ),
        (
            "/pods/",
            b"<html>a proxy of this network</html>",
            "answered 403 to /pods/: the account of /token needs the right to get nodes/pods:"
            " apply deploy/koordlet/rbac-kubelet.yaml, or before Kubernetes 1.33"
            " deploy/koordlet/rbac-kubelet-proxy.yaml",
        ),
    ],
)
def test_a_refusal_names_the_right_and_the_file_to_apply(path: str, body: bytes, said: str) -> None:
    assert refusal(403, path, body, "/token") == said


def test_the_gate_that_is_switched_off_counts_as_an_old_kubelet() -> None:
    assert "rbac-kubelet-proxy.yaml" in refusal(403, "/pods/", FINE_GRAINED % b"proxy", "/token")


def test_a_token_that_is_not_known_is_named() -> None:
    said = refusal(401, "/pods/", b"Unauthorized", "/token")
    assert said.startswith("answered 401 to /pods/: it does not accept /token")


@given(st.sampled_from([401, 403]), st.binary(max_size=400))
def test_whatever_kubelet_answers_is_said_in_one_printable_line(status: int, body: bytes) -> None:
    assert refusal(status, "/pods/", body, "/token").isprintable()
    hostile = (FINE_GRAINED % b"pods").replace(b"koordlet", body)
    assert refusal(status, "/pods/", hostile, "/token").isprintable()
