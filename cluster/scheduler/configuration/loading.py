"""The configuration of a process, from its command line and the file that it names.

Which of the two counts is kube-scheduler's rule: --leader-elect* override the file; --kubeconfig,
--kube-api-qps and --kube-api-burst count only where there is no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec.structs import replace

from apis.flags import bad_flag
from cluster.scheduler.configuration.configuration import (
    ClientConnection,
    LeaderElection,
    SchedulerConfiguration,
    lease_problems,
)
from cluster.scheduler.configuration.flags import Settings
from cluster.scheduler.configuration.gates import GATES, WITH_EFFECT
from cluster.scheduler.configuration.reading import (
    LARGEST_FILE,
    default_configuration,
    read_configuration,
)
from cluster.scheduler.configuration.strict import Seconds

_LEASE_FLAGS: Final[Mapping[str, str]] = {
    "leaderElect": "leader-elect",
    "leaseDuration": "leader-elect-lease-duration",
    "renewDeadline": "leader-elect-renew-deadline",
    "retryPeriod": "leader-elect-retry-period",
    "resourceLock": "leader-elect-resource-lock",
    "resourceName": "leader-elect-resource-name",
    "resourceNamespace": "leader-elect-resource-namespace",
}
"""Field of leaderElection -> the flag that overrides it."""
_CLIENT_FLAGS: Final = ("kubeconfig", "kube-api-qps", "kube-api-burst")


def load(settings: Settings) -> SchedulerConfiguration:
    """Return the configuration in force. Raises InputError, or InputErrors for a bad file."""
    path = settings.text("config")
    if path:
        configuration = read_configuration(_text(path), obj=path)
        configuration = _without_client_flags(configuration, settings)
    else:
        configuration = replace(default_configuration(), client_connection=_client(settings))
    lease = _lease(configuration.leader_election, settings)
    for field, value, problem in lease_problems(lease):
        # The file alone was checked, so that a flag is at fault.
        raise bad_flag(_LEASE_FLAGS[field], str(value), problem)
    return replace(
        configuration,
        leader_election=lease,
        notices=(*configuration.notices, *_gate_notices(settings)),
        gates=settings.gates.on,
    )


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST_FILE + 1)
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise bad_flag("config", path, f"cannot be read: {error}") from None


def _client(settings: Settings) -> ClientConnection:
    defaults = ClientConnection()
    return replace(
        defaults,
        kubeconfig=settings.text("kubeconfig"),
        qps=settings.number("kube-api-qps") or defaults.qps,
        burst=settings.whole("kube-api-burst") or defaults.burst,
    )


def _without_client_flags(
    configuration: SchedulerConfiguration, settings: Settings
) -> SchedulerConfiguration:
    notices = tuple(
        f"--{name} has no effect: --config is given, and its clientConnection counts"
        for name in _CLIENT_FLAGS
        if name in settings.given
    )
    return replace(configuration, notices=(*configuration.notices, *notices))


def _lease(lease: LeaderElection, settings: Settings) -> LeaderElection:
    changes: dict[str, Any] = {}
    for member, flag in zip(lease.__struct_fields__, _LEASE_FLAGS.values(), strict=True):
        if flag not in settings.given:
            continue
        now = getattr(lease, member)
        if isinstance(now, bool):
            changes[member] = settings.on(flag)
        elif isinstance(now, Seconds):
            changes[member] = _positive(flag, settings)
        else:
            changes[member] = settings.text(flag) or getattr(LeaderElection(), member)
    return replace(lease, **changes)


def _positive(flag: str, settings: Settings) -> Seconds:
    seconds = settings.seconds(flag)
    if seconds <= 0:
        raise bad_flag(flag, settings.text(flag), "must be greater than 0")
    return Seconds(seconds)


def _gate_notices(settings: Settings) -> Iterator[str]:
    gates = settings.gates
    idle = [
        f"{name}={'true' if on else 'false'}"
        for name, on in gates.on.items()
        if name not in WITH_EFFECT and on is not GATES[name].default
    ]
    for what, names in (
        ("feature gates that have no effect here", idle),
        ("feature gates of other components, which have no effect here", gates.others),
    ):
        if names:
            yield f"{what}: {', '.join(names)}"
