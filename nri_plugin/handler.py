"""The `Handler` contract: what the daemon does with a runtime's events.

The transport knows frames, dialects and runtimes; it does not know policies, stores or kernel
files. The daemon implements `Handler` and gives it to `nri_plugin.supervisor.Supervisor`.

Every method is called on the event loop, the deciding ones inside the runtime's node-wide lock,
while kubelet waits: they answer from memory, do no I/O and never block. An event is handed over as
soon as its reply is written, before the next call. Work that follows from an event (files to
write, a repair to start) is noted by the handler and done later. The runtime gives a hook 2 s and
afterwards goes on without the answer, so the target is well below a millisecond.

An exception out of a handler is a defect: the transport counts and logs it, and answers without
values, or with an error under `FailurePolicy.FAIL`. `Refused` is the one exception with a meaning:
it makes the CRI call fail with its message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from hooks.decision import Decision, ResourceKey
from hooks.observed import Container, Sandbox
from nri_plugin.capabilities import RuntimeProfile


class Refused(Exception):
    """Raised by a handler to make the CRI call fail. Honoured at `create_container` and
    `update_container`, and at `run_sandbox` under `FailurePolicy.FAIL`; elsewhere the runtime would
    only log it, and it counts as a defect."""


class Handler(Protocol):
    """Implemented by the daemon; the module's docstring has the rules for every method.

    Order on one connection: `configured`, `synchronize`, then events, then `disconnected`;
    `list_overdue` comes between the first two when the second takes long. On some runtimes
    (launched by NRI 0.6) events follow `configured` directly. Events may repeat, and any of them
    may be missing: `synchronize` is the truth.
    """

    def resctrl_groups(self) -> Collection[str]:
        """Resctrl groups that exist now. A creation names no other group to the runtime, because
        the OCI runtime refuses to create a container in a group whose directory is missing."""
        ...

    def configured(self, runtime: RuntimeProfile) -> None:
        """A runtime accepted the registration; `runtime` says what it can do."""
        ...

    def list_overdue(self, reason: str) -> None:
        """The runtime configured us and sends no list: work from what other sources know.

        `reason` says so in words. `synchronize` may still follow, else `disconnected` does.
        """
        ...

    def now(self) -> int:
        """Return a mark of this moment, for `synchronize`."""
        ...

    def synchronize(
        self,
        sandboxes: Sequence[Sandbox],
        containers: Sequence[Container],
        *,
        taken_at: int | None = None,
    ) -> Iterable[tuple[str, Decision]]:
        """All sandboxes and live containers: replace what is known, and start a full repair.

        taken_at: the mark of the moment that the list is of, when events were served since; None
            when it is of this moment. What events reported since the mark is newer than the list.
        Returns (container id, decision) for containers whose values may have to change. The result
        may be lazy: the transport puts decisions into its reply while there is time, and leaves the
        rest to the reconciler. The store must be replaced before the first element is given.
        """
        ...

    def unrepairable(self, container: Container, lacks: Sequence[ResourceKey]) -> None:
        """A container runs without environment variables, mounts or devices that it should have
        been created with. Nothing but a new container repairs that: leave an event."""
        ...

    def run_sandbox(self, sandbox: Sandbox) -> None:
        """A sandbox is about to be used. Pod-level values are files: queue them here."""
        ...

    def update_sandbox(self, sandbox: Sandbox) -> None:
        """A pod's resources were resized in place (runtimes with NRI >= 0.10)."""
        ...

    def stop_sandbox(self, sandbox: Sandbox) -> None: ...

    def remove_sandbox(self, sandbox: Sandbox) -> None:
        """Possibly with nothing but the id known."""
        ...

    def create_container(self, container: Container) -> Decision | None:
        """Decide the container's values before it exists. None: nothing to change."""
        ...

    def start_container(self, container: Container) -> None:
        """The container's process runs now (after the start): what needs a process can follow."""
        ...

    def update_container(self, container: Container) -> Decision | None:
        """Kubelet asks for new resources (`subject.requested`). None: let the request pass."""
        ...

    def reply_written(self) -> None:
        """The reply to the last call is written: do the rest of that call's work, which the reply
        did not need, before the next call comes."""
        ...

    def container_updated(self, container: Container) -> None:
        """An update was carried out: the kernel's values may need another look."""
        ...

    def stop_container(self, container: Container) -> None: ...

    def remove_container(self, container: Container) -> None:
        """Also called to undo a creation that failed."""
        ...

    def disconnected(self, reason: str) -> None:
        """The connection is gone; until the next `synchronize` containers start unadjusted.

        reason: "" when the daemon itself stops.
        """
        ...
