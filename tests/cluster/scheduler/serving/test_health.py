"""Probes: what fails them, and how they are counted."""

from __future__ import annotations

from cluster.scheduler.serving.health import Check, Health
from service.http_server import Request, Response


def _ask(health: Health, path: str, **query: str) -> tuple[int, str]:
    answer = health.page(Request("GET", path, query, b""))
    assert isinstance(answer, Response), path
    return answer.status, answer.body.decode()


def test_a_page_fails_with_the_checks_that_fail() -> None:
    why = ["reading the cluster"]
    health = Health({"readyz": (Check("shutdown", str), Check("sync", lambda: why[0]))})
    assert _ask(health, "/readyz") == (
        503,
        "[+]shutdown ok\n[-]sync failed: reading the cluster\nreadyz check failed\n",
    )
    assert _ask(health, "/readyz/shutdown") == (200, "ok")
    assert _ask(health, "/readyz/sync")[0] == 503
    assert _ask(health, "/readyz", exclude="sync") == (200, "ok")
    why[0] = ""
    assert _ask(health, "/readyz") == (200, "ok")
    shown = "[+]shutdown ok\n[+]sync ok\nreadyz check passed\n"
    assert _ask(health, "/readyz", verbose="") == (200, shown)
    for path in ("/readyz/other", "/livez", "/", "/readyz/"):
        found = health.page(Request("GET", path, {}, b""))
        assert (found is None) == (path != "/readyz/"), path


def test_checks_are_counted_once_they_are_asked_for() -> None:
    why = [""]
    health = Health({"livez": (Check("ping", lambda: why[0]),)})
    assert not [line for line in health.lines() if "ping" in line]
    _ask(health, "/livez")
    _ask(health, "/livez")
    why[0] = "no"
    _ask(health, "/livez")
    assert [line for line in health.lines() if "ping" in line] == [
        'kubernetes_healthcheck{name="ping",type="livez"} 0\n',
        'kubernetes_healthchecks_total{name="ping",type="livez",status="error"} 1\n',
        'kubernetes_healthchecks_total{name="ping",type="livez",status="success"} 2\n',
    ]
