"""The plugin's settings, and how a runtime that launches plugins hands over its connection.

Source: docs/facts/nri.md, "Launched plugins".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from apis.errors import InputError
from nri_plugin.capabilities import FAILURE_POLICY_SINCE, RuntimeProfile
from nri_plugin.events import SUBSCRIBED, Event

DEFAULT_SOCKET: Final = "/var/run/nri/nri.sock"
DEFAULT_NAME: Final = "koordlet_nri"
DEFAULT_INDEX: Final = "00"

# What NRI 0.12 takes; older runtimes take any name that is not empty.
_NAME = re.compile(r"[a-zA-Z0-9_.+-]{1,128}")
_INDEX = re.compile(r"[0-9]{2}")


class FailurePolicy(StrEnum):
    """What becomes of a request that could not be answered as it should.

    IGNORE: the pod goes on without our values, and the reconciler repairs what it can.
    FAIL: the request fails, and kubelet tries it again. A failing policy, a defect of the daemon
        and an answer too large to be sent fail the request on every runtime; a late answer or a
        lost connection only where the runtime serves it (`RuntimeProfile.failure_policy`).
    """

    IGNORE = "Ignore"
    FAIL = "Fail"

    def in_force(self, runtime: RuntimeProfile | None) -> str:
        """Say what the policy comes to with `runtime`; None is not a connected runtime."""
        if self is FailurePolicy.IGNORE:
            return "a request that fails goes on without koordlet's values"
        if runtime is None:
            return "no runtime is connected, so requests go on without koordlet's values"
        if runtime.failure_policy:
            return "errors, late answers and the loss of the connection fail the request"
        since = ".".join(str(part) for part in FAILURE_POLICY_SINCE)
        return (
            "errors fail the request; after a late answer or the loss of the connection it goes on"
            f" without koordlet's values (the runtime did not report NRI {since} or later)"
        )


class Options(msgspec.Struct, frozen=True):
    """The supervisor's settings.

    run_dir: holds the lock file; must exist.
    cgroup_version: 1 or 2, of the node: `unified` values exist on 2 only.
    register_timeout_s: for the reply to RegisterPlugin, and then for Configure. Long, because
        runtimes accept plugins one at a time, and giving up early makes them later read a dead
        registration.
    failure_policy: see `FailurePolicy`.
    list_overdue_s: how long after Configure the runtime's list (Synchronize) may take before the
        daemon reports that it is missing. A runtime that sends it at once is then dialled again:
        NRI up to 0.6.1 leaves a plugin connected whose list it could not send. Collecting and
        sending the list of 10,000 containers takes containerd a few seconds on a busy machine.
    list_given_up_s: the same limit for a runtime that first waits until no CRI call runs. A call
        that stops a container lasts for the pod's grace period, and each new dial costs the
        runtime such a wait, so this is many times the usual 30 s.
    back-off: from first to longest, doubling, with jitter; starts again after a connection that was
        synchronized for `stable_after_s`. longest_unlisted_backoff_s is the longest after a
        connection on which no list came: each attempt makes the runtime collect its list.
    max_synchronize_updates: how many updates one Synchronize reply asks for. The runtime carries
        them out one by one while it holds its lock; beyond this the reconciler's direct writes are
        faster for everybody.
    """

    run_dir: str
    socket: str = DEFAULT_SOCKET
    name: str = DEFAULT_NAME
    index: str = DEFAULT_INDEX
    events: frozenset[Event] = SUBSCRIBED
    cgroup_version: int = 1
    failure_policy: FailurePolicy = FailurePolicy.IGNORE
    dial_timeout_s: float = 10.0
    register_timeout_s: float = 30.0
    list_overdue_s: float = 30.0
    list_given_up_s: float = 600.0
    first_backoff_s: float = 1.0
    longest_backoff_s: float = 30.0
    longest_unlisted_backoff_s: float = 300.0
    stable_after_s: float = 30.0
    socket_poll_s: float = 1.0
    max_synchronize_updates: int = 256

    def checked(self) -> Options:
        """Return self if a runtime of any version would take name and index; else InputError."""
        if not _NAME.fullmatch(self.name):
            raise InputError(
                obj="NRI plugin",
                field="name",
                value=self.name,
                problem="a plugin name has letters, digits and _ . + - only",
                hint="set nri.pluginName",
            )
        if not _INDEX.fullmatch(self.index):
            raise InputError(
                obj="NRI plugin",
                field="index",
                value=self.index,
                problem='an index has exactly two digits, "00" to "99"',
                hint="set nri.pluginIndex",
            )
        return self


class Launch(msgspec.Struct, frozen=True):
    """The runtime started this process: its connection, and the names it gave. "": not given."""

    descriptor: int
    name: str
    index: str


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """Return how the runtime launched this process, None when it did not.

    Raises InputError when NRI_PLUGIN_SOCKET is not a descriptor's number.
    """
    text = environment.get("NRI_PLUGIN_SOCKET", "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise InputError(
            obj="environment",
            field="NRI_PLUGIN_SOCKET",
            value=text,
            problem="is not the number of an open descriptor",
            hint="it is set by a runtime that launches plugins; unset it otherwise",
        )
    return Launch(
        descriptor=int(text),
        name=environment.get("NRI_PLUGIN_NAME", ""),
        index=environment.get("NRI_PLUGIN_IDX", ""),
    )
