"""/healthz, /livez, /readyz, and how they went: /metrics/slis.

The names of the checks are kube-scheduler's, so that probes of a single check and alerts on
kubernetes_healthcheck go on working.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from cluster.exposition import head_lines, label_text
from service.http_server import Request, Response, text

PAGES: Final = ("healthz", "livez", "readyz")


@dataclass(frozen=True, slots=True)
class Check:
    """One question about the process. test: why it fails, or ""."""

    name: str
    test: Callable[[], str]


class Health:
    """Answers the probes."""

    def __init__(self, checks: dict[str, tuple[Check, ...]]) -> None:
        """checks: by page. A page fails if one of its checks does."""
        self._checks = checks
        self._last: dict[tuple[str, str], bool] = {}
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def page(self, request: Request) -> Response | None:
        """Return the answer to /PAGE and /PAGE/CHECK, None for another path."""
        page, _, only = request.path.removeprefix("/").partition("/")
        checks = self._checks.get(page)
        if checks is None or request.method not in ("GET", "HEAD"):
            return None
        if only:
            checks = tuple(check for check in checks if check.name == only)
            if not checks:
                return None
        else:
            left_out = request.query.get("exclude", "")
            checks = tuple(check for check in checks if check.name != left_out)
        shown, failed = [], []
        for check in checks:
            why = check.test()
            self._note(page, check.name, why)
            if why:
                failed.append(check.name)
            shown.append(f"[-]{check.name} failed: {why}" if why else f"[+]{check.name} ok")
        if failed:
            shown.append(f"{page} check failed")
            return text(503 if page == "readyz" else 500, "\n".join(shown))
        if "verbose" in request.query and not only:
            return text(200, "\n".join((*shown, f"{page} check passed")))
        return Response(200, b"ok")

    def _note(self, page: str, name: str, why: str) -> None:
        self._last[name, page] = not why
        self._counts[name, page, "error" if why else "success"] += 1

    def lines(self) -> Iterator[str]:
        """Yield the lines of kubernetes_healthcheck and kubernetes_healthchecks_total."""
        name = "kubernetes_healthcheck"
        yield head_lines(name, "1 if a check passed when it was last asked for.")
        for key, passed in sorted(self._last.items()):
            yield f"{name}{{{label_text(('name', 'type'), key)}}} {int(passed)}\n"
        name = "kubernetes_healthchecks_total"
        yield head_lines(name, "Checks, by how they went.", "counter")
        for each, count in sorted(self._counts.items()):
            yield f"{name}{{{label_text(('name', 'type', 'status'), each)}}} {count}\n"
