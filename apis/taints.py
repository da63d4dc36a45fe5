"""Which taints a toleration covers, as the API machinery decides it."""

from __future__ import annotations

from collections.abc import Iterable

from apis.core import Taint, Toleration


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Return whether a toleration covers a taint."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    return toleration.operator in ("", "Equal") and toleration.value == taint.value


def tolerated(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
    """Return whether one of the tolerations covers a taint."""
    return any(tolerates(toleration, taint) for toleration in tolerations)
