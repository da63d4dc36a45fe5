"""One registration with a runtime: the dialogue between registering and the end of the trunk.

A `Session` answers the runtime's calls in every wire generation: an event may come as `StateChange`
or as an RPC of its own, and both are served at all times. It never waits; it asks its `Handler` for
decisions inside the call.

A session that was superseded answers everything with an empty result: only the live one decides.
Source: docs/facts/nri.md, "Registration" and "Failures".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from google.protobuf.message import DecodeError

from apis.errors import InputError, printable
from hooks.decision import Decision
from hooks.observed import Container, Sandbox
from nri_plugin import replies, subjects
from nri_plugin.capabilities import Generation, RuntimeKind, RuntimeProfile, runtime_profile
from nri_plugin.events import Event, parse_events, subscription
from nri_plugin.handler import Handler, Refused
from nri_plugin.listing import Listing
from nri_plugin.options import FailurePolicy, Options
from nri_plugin.statistics import Missed, State, Statistics
from nri_plugin.ttrpc import MAX_SENT_BYTES, Call, Code, RpcError
from protos.nri.v1alpha1 import nri_pb2 as nri
from service import manifest
from service.repeats import Repeats

log = logging.getLogger(__name__)

PLUGIN: Final = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME: Final = "nri.pkg.api.v1alpha1.Runtime"
NRI_VERSION: Final = "v0.12.0"
"""The API that we speak, as runtimes from 0.12 on ask for it."""

_MAX_PAYLOAD: Final = MAX_SENT_BYTES - 16
"""An error instead of an answer would fail the container's creation: such an answer is empty."""

_MOST_CONFIGURED: Final = 1000
"""Values of the configuration text, of which one is used."""

_DEDICATED: Final[Mapping[str, Event]] = {
    "RunPodSandbox": Event.RUN_POD_SANDBOX,
    "PostUpdatePodSandbox": Event.POST_UPDATE_POD_SANDBOX,
    "StopPodSandbox": Event.STOP_POD_SANDBOX,
    "RemovePodSandbox": Event.REMOVE_POD_SANDBOX,
    "PostCreateContainer": Event.POST_CREATE_CONTAINER,
    "StartContainer": Event.START_CONTAINER,
    "PostStartContainer": Event.POST_START_CONTAINER,
    "PostUpdateContainer": Event.POST_UPDATE_CONTAINER,
    "StopContainer": Event.STOP_CONTAINER,
    "RemoveContainer": Event.REMOVE_CONTAINER,
}
"""The RPCs that only report. All of them are {1 pod, 2 container}, those about pods without
the second field, so one message type reads them all; an empty reply answers each."""


class Inventory:
    """The containers that the daemon saw, over all connections. What a list adds to them was
    created without the daemon."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._synchronized = False

    def created(self, container_id: str) -> None:
        self._ids.add(container_id)

    def removed(self, container_id: str) -> None:
        self._ids.discard(container_id)

    def synchronized(self, container_ids: set[str]) -> int:
        """Take the truth; return how many were created while the daemon was away."""
        missed = len(container_ids - self._ids) if self._synchronized else 0
        self._ids = container_ids
        self._synchronized = True
        return missed


class Session:
    """Answers one connection's calls. The connection calls `serve`, and `reply_written` after it.

    entered(state): called when the dialogue reaches CONFIGURED and SYNCED.
    broken(reason): called when the connection has to be given up although it looks alive.
    repeats: counts log lines over all connections.
    later(work): runs work after the reply, with time for requests before it; None: on the running
        event loop.
    """

    def __init__(
        self,
        *,
        handler: Handler,
        options: Options,
        statistics: Statistics,
        inventory: Inventory,
        entered: Callable[[State], None],
        broken: Callable[[str], None],
        launched: bool = False,
        repeats: Repeats | None = None,
        later: Callable[[Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handler = handler
        self._options = options
        self._statistics = statistics
        self._inventory = inventory
        self._entered = entered
        self._broken = broken
        self._launched = launched
        self._repeats = repeats or Repeats()
        self._clock = clock
        self._gathering: Listing | None = None
        self._listing: Listing | None = None
        self._later = later or _soon
        self._retired = False
        self._method = ""
        """What was called last."""
        self._took: float | None = None
        """How many seconds the answer took; None for an error."""
        self._reported: Callable[[], None] | None = None
        """Gives the handler the event that was answered last."""
        self.runtime: RuntimeProfile | None = None
        # Events before Configure do not occur; should they, the most careful profile serves.
        self._creations = replies.Creations(self._profile)
        self.synchronized = False
        self._pods = subjects.Pods()
        self._methods: dict[str, Callable[[bytes, float], bytes]] = {
            "Configure": self._configure,
            "Synchronize": self._synchronize,
            "Shutdown": self._shutdown,
            "CreateContainer": self._create_container,
            "UpdateContainer": self._update_container,
            "StateChange": self._state_change,
            # Never subscribed to. Empty answers: take the update, do not reject the adjustment.
            "UpdatePodSandbox": _empty,
            "ValidateContainerAdjustment": _empty,
        }
        for method, event in _DEDICATED.items():
            self._methods[method] = self._dedicated(event)
        self._on_event: dict[int, Callable[[nri.PodSandbox, nri.Container], None]] = {
            Event.RUN_POD_SANDBOX: lambda p, c: handler.run_sandbox(self._new_sandbox(p)),
            Event.POST_UPDATE_POD_SANDBOX: lambda p, c: handler.update_sandbox(
                self._new_sandbox(p)
            ),
            Event.STOP_POD_SANDBOX: lambda p, c: handler.stop_sandbox(self._sandbox(p)),
            Event.REMOVE_POD_SANDBOX: self._remove_sandbox,
            Event.POST_START_CONTAINER: self._start_container,
            Event.POST_UPDATE_CONTAINER: lambda p, c: handler.container_updated(
                self._existing(p, c)
            ),
            Event.STOP_CONTAINER: lambda p, c: handler.stop_container(self._existing(p, c)),
            Event.REMOVE_CONTAINER: self._remove_container,
        }

    def retire(self) -> None:
        """From now on answer everything with an empty result."""
        self._retired = True

    def serve(self, call: Call) -> bytes:
        """Answer one call. Raises RpcError for what is to be answered with an error."""
        if call.service != PLUGIN:
            raise RpcError(Code.UNIMPLEMENTED, f"service {printable(call.service)}")
        method = self._methods.get(call.method)
        if method is None:
            raise RpcError(Code.UNIMPLEMENTED, f"method {printable(call.method)}")
        if self._retired:
            if call.method == "Configure":
                # An empty answer would subscribe to everything.
                raise RpcError(Code.UNAVAILABLE, "this connection was given up")
            if call.method in ("CreateContainer", "UpdateContainer"):
                self._statistics.missed[Missed.SUPERSEDED] += 1
            return b""
        self._method = call.method
        started = self._clock()
        timeout_s = call.timeout_ns / 1e9 if call.timeout_ns else self._request_timeout_s
        try:
            payload = method(call.payload, started + timeout_s)
        except DecodeError as error:
            self._note_failed_synchronize(call.method, f"it could not be read: {error}")
            raise RpcError(Code.INTERNAL, f"ttrpc: error unmarshalling payload: {error}") from error
        except Refused as refusal:
            self._statistics.refused += 1
            raise RpcError(Code.UNKNOWN, str(refusal)) from refusal
        except RpcError:
            raise
        except Exception as fault:
            self._note_fault(call.method)
            if call.method in ("CreateContainer", "UpdateContainer"):
                self._statistics.missed[Missed.FAULT] += 1
            if self._fails and _decides(call):
                raise RpcError(Code.UNKNOWN, f"koordlet failed: {_brief(fault)}") from fault
            payload = b""
        if len(payload) > _MAX_PAYLOAD:
            self._note_oversized(call.method, len(payload))
            if self._fails and _decides(call):
                raise RpcError(
                    Code.UNKNOWN, f"koordlet's answer of {len(payload)} bytes is too large"
                )
            payload = b""
        took = self._clock() - started
        self._took = took
        if took > timeout_s:
            self._note_late(call.method, took, timeout_s, payload)
        return payload

    def reply_written(self) -> None:
        """Do what the last reply did not need: the runtime has it."""
        took, self._took = self._took, None
        reported, self._reported = self._reported, None
        try:
            if reported is not None:
                reported()
            self._handler.reply_written()
        except Exception:  # noqa: BLE001 - counted and logged
            self._note_fault(self._method)
        if took is not None:
            self._statistics.observe(self._method, took)

    @property
    def _request_timeout_s(self) -> float:
        return self.runtime.request_timeout_s if self.runtime else 2.0

    @property
    def _kind(self) -> RuntimeKind:
        return self.runtime.kind if self.runtime else RuntimeKind.OTHER

    @property
    def _profile(self) -> RuntimeProfile:
        return self.runtime or runtime_profile("", "")

    @property
    def _fails(self) -> bool:
        return self._options.failure_policy is FailurePolicy.FAIL

    def _note_fault(self, method: str) -> None:
        self._statistics.handler_faults += 1
        if (left_out := self._repeats.due(("fault", method))) is not None:
            log.exception(
                "the handler failed", extra={"method": method, "failures_not_logged": left_out}
            )

    def _note_oversized(self, method: str, length: int) -> None:
        self._statistics.unusable_values += 1
        if (left_out := self._repeats.due(("oversized", method))) is not None:
            log.error(
                "an answer is too large to be sent",
                extra={"method": method, "bytes": length, "answers_not_logged": left_out},
            )

    def _note_late(self, method: str, took: float, timeout_s: float, payload: bytes) -> None:
        if (left_out := self._repeats.due(("late", method))) is not None:
            log.warning(
                "answered later than the runtime waits: it does not use the answer",
                extra={
                    "method": method,
                    "took_s": round(took, 3),
                    "timeout_s": round(timeout_s, 3),
                    "answers_not_logged": left_out,
                },
            )
        if payload and method in ("CreateContainer", "UpdateContainer"):
            self._statistics.missed[Missed.LATE] += 1
        self._note_failed_synchronize(method, f"it took {took:.1f} s of {timeout_s:g} s")

    def _note_failed_synchronize(self, method: str, why: str) -> None:
        """Up to NRI 0.6.1 a failed Synchronize leaves a connection that looks healthy and never
        gets an event; later ones close it. Give it up ourselves."""
        if method == "Synchronize":
            self._broken(f"Synchronize failed, so the runtime may have forgotten us: {why}")

    # ---------------------------------------------------------------- registration

    def _configure(self, payload: bytes, deadline: float) -> bytes:
        request = nri.ConfigureRequest.FromString(payload)
        profile = runtime_profile(
            request.runtime_name,
            request.runtime_version,
            nri_version=request.NRI_version,
            request_timeout_ms=request.request_timeout,
            registration_timeout_ms=request.registration_timeout,
            cgroup_version=self._options.cgroup_version,
        )
        self.runtime = profile
        self._creations = replies.Creations(profile)
        mask = subscription(self._events(request.config), profile.valid_mask)
        log.info(
            "configured by the runtime",
            extra={
                "runtime": printable(request.runtime_name),
                "runtime_version": printable(request.runtime_version),
                "nri_generation": profile.generation.value,
                "events": f"{mask:#x}",
            },
        )
        try:
            self._handler.configured(profile)
        except Exception:  # noqa: BLE001 - Configure must be answered with the mask all the same
            self._note_fault("Configure")
        self._entered(State.CONFIGURED)
        if self._launched and profile.generation is Generation.A:
            # These runtimes send no Synchronize to plugins that they launched.
            self._become_synchronized()
        return nri.ConfigureResponse(
            events=mask,
            # Runtimes that do not know the field skip it. One late answer is no reason to part:
            # each new registration holds back the node's CRI calls.
            failure_policy=nri.FailurePolicy(fail_request=self._fails, keep_connected=True),
        ).SerializeToString()

    def _events(self, config: str) -> frozenset[Event]:
        """The configuration text, which only launched plugins get, may name the events."""
        if not config.strip():
            return self._options.events
        try:
            tree = manifest.document(config[:65536], most_values=_MOST_CONFIGURED)
            if isinstance(tree, dict) and isinstance(tree.get("events"), str):
                return parse_events(tree["events"], obj="NRI plugin configuration")
            problem = "it has no text under 'events'"
        except (manifest.NotYaml, InputError) as error:
            problem = printable(str(error))
        log.warning(
            "the runtime's configuration text is not used: %s; the default events stay", problem
        )
        return self._options.events

    def _shutdown(self, payload: bytes, deadline: float) -> bytes:
        self._broken("the runtime asked the plugin to shut down")
        return b""

    # ---------------------------------------------------------------- Synchronize

    def _synchronize(self, payload: bytes, deadline: float) -> bytes:
        started = self._clock()
        request = nri.SynchronizeRequest.FromString(payload)
        listing = self._gathering or Listing(
            self._handler,
            self._profile,
            report=self._report,
            most_updates=self._options.max_synchronize_updates,
            clock=self._clock,
        )
        self._gathering = None
        if not listing.add(request, started, deadline):
            self._note_failed_synchronize("Synchronize", "it lists too many containers")
            raise RpcError(Code.RESOURCE_EXHAUSTED, "too many pods and containers")
        if request.more:
            self._gathering = listing
            return nri.SynchronizeResponse(more=True).SerializeToString()
        self._statistics.created_while_away += self._inventory.synchronized(listing.container_ids)
        self._listing = listing
        try:
            done = listing.answer()
        except Exception:  # noqa: BLE001 - the runtime takes the updates made so far, and has us
            self._note_fault("Synchronize")
            done = True
        self._statistics.updates += len(listing.response.update)
        self._statistics.synchronizations += 1
        if not done:
            log.info("the rest of the runtime's list is taken after the reply")
            self._later(lambda: self._take_rest(listing))
        self._note_left_out(listing, done)
        self._become_synchronized()
        return listing.response.SerializeToString()

    def _become_synchronized(self) -> None:
        self.synchronized = True
        self._entered(State.SYNCED)

    def _take_rest(self, listing: Listing) -> None:
        """Go on with a list after its reply, for as long as it is the connection's last one."""
        if listing is not self._listing or self._retired:
            return
        try:
            if listing.resume():
                self._listing = None
            else:
                self._later(lambda: self._take_rest(listing))
        except Exception:  # noqa: BLE001 - counted and logged
            self._note_fault("Synchronize")

    def _note_left_out(self, listing: Listing, done: bool) -> None:
        if done:
            self._listing = None
        if listing.left_out or not done:
            self._statistics.truncated_synchronizations += 1

    # ---------------------------------------------------------------- events

    def _create_container(self, payload: bytes, deadline: float) -> bytes:
        request = nri.CreateContainerRequest.FromString(payload)
        container = subjects.created_container(
            self._pods.of(request.pod), request.container, self._kind
        )
        self._inventory.created(container.subject.id)
        decision = self._handler.create_container(container)
        if decision is None:
            return b""
        if decision.faults:
            self._refuse_faulty(decision)
        reply, problems = self._creations.reply(
            request.container,
            container.subject.requested,
            decision,
            self._handler.resctrl_groups,
        )
        if problems:
            self._report(container, problems)
        if reply:
            self._statistics.adjustments += 1
        return reply

    def _update_container(self, payload: bytes, deadline: float) -> bytes:
        request = nri.UpdateContainerRequest.FromString(payload)
        container = subjects.updated_container(
            self._pods.of(request.pod), request.container, request.linux_resources, self._kind
        )
        decision = self._handler.update_container(container)
        if decision is None:
            return b""
        if decision.faults:
            self._refuse_faulty(decision)
        made = replies.update(
            request.container,
            container.current,
            decision,
            self._profile,
            requested=request.linux_resources,
        )
        if made.problems:
            self._report(container, made.problems)
        if made.message is None:
            return b""
        self._statistics.updates += 1
        return nri.UpdateContainerResponse(update=[made.message]).SerializeToString()

    def _refuse_faulty(self, decision: Decision) -> None:
        """Raise Refused for a decision that lacks a policy's claims, under `FailurePolicy.FAIL`."""
        if self._fails:
            raise Refused(
                "; ".join(f"policy {each.policy}: {each.message}" for each in decision.faults)
            )

    def _state_change(self, payload: bytes, deadline: float) -> bytes:
        request = nri.StateChangeEvent.FromString(payload)
        self._event(request.event, request.pod, request.container)
        return b""

    def _dedicated(self, event: Event) -> Callable[[bytes, float], bytes]:
        def serve(payload: bytes, deadline: float) -> bytes:
            request = nri.StartContainerRequest.FromString(payload)
            self._event(event, request.pod, request.container)
            return b""

        return serve

    def _event(self, event: int, pod: nri.PodSandbox, container: nri.Container) -> None:
        """Unknown and unneeded events are acknowledged: a newer runtime may have more of them.

        The reply to an event says nothing but that it arrived, so the handler gets the event after
        the reply. Only a sandbox that must not run without its values waits for the handler.
        """
        report = self._on_event.get(event)
        if report is None:
            return
        if event == Event.RUN_POD_SANDBOX and self._fails:
            report(pod, container)
        else:
            self._reported = partial(report, pod, container)

    def _start_container(self, pod: nri.PodSandbox, message: nri.Container) -> None:
        container = self._existing(pod, message)
        injected = self._creations.injected.pop(message.id, None)
        if injected is not None and (lacks := replies.lacks_at_creation(message, injected)):
            # The answer to the creation came too late, and the runtime kept the connection.
            self._handler.unrepairable(container, lacks)
        self._handler.start_container(container)

    def _remove_container(self, pod: nri.PodSandbox, container: nri.Container) -> None:
        self._creations.injected.pop(container.id, None)
        self._inventory.removed(container.id)
        self._handler.remove_container(self._existing(pod, container))

    def _existing(self, pod: nri.PodSandbox, container: nri.Container) -> Container:
        return subjects.container_of_pod(self._pods.of(pod), container, self._kind)

    def _new_sandbox(self, message: nri.PodSandbox) -> Sandbox:
        return subjects.sandbox(message, self._pods.read(message))

    def _sandbox(self, message: nri.PodSandbox) -> Sandbox:
        return subjects.sandbox(message, self._pods.of(message))

    def _remove_sandbox(self, message: nri.PodSandbox, container: nri.Container) -> None:
        self._handler.remove_sandbox(self._sandbox(message))
        self._pods.forget(message.id)

    def _report(self, container: Container, problems: tuple[str, ...]) -> None:
        self._statistics.unusable_values += len(problems)
        for problem in problems:
            if (left_out := self._repeats.due(("unusable", problem))) is not None:
                log.warning(
                    "a decided value was left out: %s",
                    printable(problem),
                    extra={
                        "container": container.subject.id,
                        "pod": container.subject.pod.obj,
                        "values_not_logged": left_out,
                    },
                )


def _soon(work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(work)


def _empty(payload: bytes, deadline: float) -> bytes:
    return b""


def _decides(call: Call) -> bool:
    """True for the requests whose failure makes a CRI call fail that a pod waits for."""
    if call.method == "StateChange":
        return nri.StateChangeEvent.FromString(call.payload).event == int(Event.RUN_POD_SANDBOX)
    return call.method in ("RunPodSandbox", "CreateContainer", "UpdateContainer")


def _brief(fault: Exception) -> str:
    return printable(f"{type(fault).__name__}: {fault}"[:200])
