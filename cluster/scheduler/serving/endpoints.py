"""The two ports of a scheduler process, and their pages.

The plain port shows health and metrics to everyone who reaches it, as upstream's does, and the
state of the scheduler to this machine alone, unless the operator names the address that it listens
on. The secure port shows all of it to clients that the API server allows to read it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any, Final

from cluster.exposition import CONTENT_TYPE
from cluster.flags import FlagError
from cluster.scheduler.configuration.flags import Settings
from cluster.scheduler.configuration.writing import to_tree
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.serving.access import Access, AccessSettings
from cluster.scheduler.serving.certificates import ServingTls
from cluster.scheduler.serving.debugging import debugging_page
from cluster.scheduler.serving.exposition import show_state
from cluster.scheduler.serving.health import PAGES, Check, Health
from cluster.scheduler.serving.resource_metrics import pod_lines
from kube.client import Client
from kube.connection import ConnectionConfigError, load_connection
from service.http_server import Handler, Peer, Request, Response, Server, json, text

_log = logging.getLogger(__name__)

_PIECE: Final = 500
"""Lines of pods that are made until decisions go on. Chosen: some ms at 2 to 5 us a line and 5 us a
pod."""
_LONGEST_BODY: Final = 64
"""Bytes of a request's body: a log level."""
_OPEN: Final = frozenset({"/metrics", "/metrics/slis"})
"""Pages of the plain port that are not only for this machine, beside health."""


class Endpoints:
    """Serves a process until `stack` is closed."""

    def __init__(self, process: SchedulerProcess, settings: Settings) -> None:
        """Raises FlagError for certificates that cannot be used."""
        self._process = process
        self._settings = settings
        self._tls = ServingTls(settings) if settings.port("secure-port") else None
        self._debugging = debugging_page(process, leading=lambda: process.leading)
        self.health = Health(_checks(process))
        show_state(process)
        self.plain: Server | None = None
        self.secure: Server | None = None
        self.addresses: list[str] = []
        """URLs of the ports that are served."""

    async def start(self, stack: AsyncExitStack) -> None:
        """Serve. Raises ApiError or Unreachable if a necessary look-up fails, FlagError for a port
        that is taken, and for a kubeconfig that cannot be used."""
        settings = self._settings
        if settings.port("port"):
            self.plain = self._server(stack, self._only_here)
            await self._listen(self.plain, "port", "address")
        if self._tls is not None:
            await self._start_secure(stack, self._tls)

    async def _start_secure(self, stack: AsyncExitStack, tls: ServingTls) -> None:
        settings = self._settings
        rights = await self._client(stack, "authorization-kubeconfig")
        tokens = await self._client(stack, "authentication-kubeconfig")
        published = not (
            settings.text("client-ca-file") or settings.on("authentication-skip-lookup")
        )
        if published:
            tolerate = settings.on("authentication-tolerate-lookup-failure")
            await tls.look_up_client_ca(tokens, tolerate=tolerate)
        access = Access(access_settings(settings), tokens=tokens, rights=rights)
        self.secure = self._server(stack, access.guard)
        await self._listen(self.secure, "secure-port", "bind-address", tls=tls)
        following = asyncio.create_task(
            tls.follow(tokens if published else None), name="certificates"
        )
        stack.callback(following.cancel)

    async def _listen(
        self, server: Server, port_flag: str, address_flag: str, *, tls: ServingTls | None = None
    ) -> None:
        port, address = self._settings.port(port_flag), self._settings.text(address_flag)
        try:
            await server.listen_tcp(address, port, tls=None if tls is None else tls.current)
        except OSError as error:
            text = f"cannot be served on --{address_flag}={address}: {error.strerror or error}"
            raise FlagError(f"--{port_flag}={port}: {text}") from None
        scheme = "http" if tls is None else "https"
        host = f"[{address}]" if ":" in address else address
        self.addresses.append(f"{scheme}://{host}:{port}")

    async def _client(self, stack: AsyncExitStack, flag: str) -> Client:
        """Return a client for reviews: of the flag's kubeconfig, else as the scheduler itself."""
        path = self._settings.text(flag)
        if not path:
            return await stack.enter_async_context(self._process.client.sibling())
        try:
            connection = load_connection(path)
        except ConnectionConfigError as error:
            raise FlagError(f"--{flag}={path}: {error}") from None
        return await stack.enter_async_context(Client(connection, user_agent="koord-scheduler"))

    def _server(self, stack: AsyncExitStack, guard: Any) -> Server:
        server = Server(
            {route: guard(page) for route, page in self._pages().items()},
            max_body_bytes=_LONGEST_BODY,
            otherwise=guard(self._other),
        )
        stack.push_async_callback(server.close)
        return server

    def _only_here(self, handler: Handler) -> Handler:
        """Guard the plain port's pages about the state of the scheduler."""
        if "address" in self._settings.given:
            return handler

        async def guarded(request: Request) -> Response:
            if _is_open(request.path) or is_this_machine(request.peer):
                return await handler(request)
            return text(403, "only from this machine, unless --address is given")

        return guarded

    # --- pages ---------------------------------------------------------------------------------

    def _pages(self) -> Mapping[tuple[str, str], Handler]:
        return {
            ("GET", "/metrics"): self._metrics,
            ("GET", "/metrics/slis"): self._slis,
            ("GET", "/metrics/resources"): self._resources,
            ("GET", "/configz"): self._configz,
            ("PUT", "/debug/flags/v"): self._set_log_level,
        }

    async def _other(self, request: Request) -> Response:
        """Answer what has no route of its own: health, and the pages below /apis/v1."""
        health = self.health.page(request)
        return await self._debugging(request) if health is None else health

    async def _metrics(self, _: Request) -> Response:
        return await _exposition(self._process.metrics.registry.slices())

    async def _slis(self, _: Request) -> Response:
        return await _exposition(("".join(self.health.lines()),))

    async def _resources(self, _: Request) -> Response:
        process = self._process
        if not process.leading:
            # As kube-scheduler: a replica that waits for the lease knows no pods.
            return await _exposition(())
        lines = pod_lines(process.pods.items.values(), process.source.shape_of)
        # 150,000 pods have 100 MB of lines.
        return Response(200, b"", CONTENT_TYPE, pieces=_pieces(batched(lines, _PIECE)))

    async def _configz(self, _: Request) -> Response:
        return json({"componentconfig": to_tree(self._process.configuration)})

    async def _set_log_level(self, request: Request) -> Response:
        try:
            level = int(request.body)
        except ValueError:
            return text(400, f"expected a whole number, not {request.body[:20]!r}")
        logging.getLogger().setLevel(logging.DEBUG if level >= 5 else logging.INFO)
        _log.info("log level %d by request", level)
        return text(200, f"successfully set klog.logging.verbosity to {level}")


async def _exposition(pieces: Iterable[str]) -> Response:
    made = []
    for each in pieces:
        made.append(each.encode())
        # Decisions go on between two pieces.
        await asyncio.sleep(0)
    return Response(200, b"".join(made), CONTENT_TYPE)


async def _pieces(batches: Iterable[list[str]]) -> AsyncIterator[bytes]:
    for each in batches:
        yield "".join(each).encode()
        # As in `_exposition`.
        await asyncio.sleep(0)


def batched(lines: Iterable[str], most: int) -> Iterator[list[str]]:
    """Yield the lines in pieces of at most `most`."""
    waiting = iter(lines)
    while piece := list(islice(waiting, most)):
        yield piece


def _checks(process: SchedulerProcess) -> dict[str, tuple[Check, ...]]:
    """Return kube-scheduler's checks by page, and `rights`."""
    election = Check("leaderElection", process.overdue_lease)
    stopping = Check("shutdown", lambda: "the process is stopping" if process.stopping else "")
    # That the process answers is all that ping asks.
    return {
        "healthz": (election,),
        "livez": (Check("ping", str),),
        "readyz": (
            election,
            stopping,
            Check("rights", lambda: "\n".join(process.missing_rights)),
            Check("sched-handler-sync", process.unsynced),
        ),
    }


def _is_open(path: str) -> bool:
    # A target need not begin with a slash: `OPTIONS *`.
    return path in _OPEN or path.removeprefix("/").partition("/")[0] in PAGES


def access_settings(settings: Settings) -> AccessSettings:
    """Return what the flags say about access to the secure port."""
    return AccessSettings(
        always_allowed=settings.names("authorization-always-allow-paths"),
        token_s=settings.seconds("authentication-token-webhook-cache-ttl"),
        allowed_s=settings.seconds("authorization-webhook-cache-authorized-ttl"),
        denied_s=settings.seconds("authorization-webhook-cache-unauthorized-ttl"),
    )


def is_this_machine(peer: Peer) -> bool:
    """Return whether a peer is connected over a loopback address."""
    try:
        address = ipaddress.ip_address(peer.address)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
