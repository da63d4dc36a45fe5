"""Requests to the API server: one session, bounded rate, typed errors, retries where they are safe.

Bodies go out as bytes that msgspec encoded and come back as bytes; callers decode into the types of
`apis`. Watches run as streams of lines on the same session; no thread is involved.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec

from kube.connection import Connection, watchful_socket
from kube.request_counts import RequestCounts
from kube.resources import Resource

T = TypeVar("T")

MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
"""Server-side apply; JSON is YAML, so JSON bodies go with it too."""

_TRIES: Final = 4
"""Chosen: about 2 s of pauses in all; a controller's own back-off takes over then."""
_LONGEST_LINE: Final = 16 * 1024 * 1024
"""Chosen: bounds memory. An API server stores objects of at most 1.5 MiB by default."""


class ApiError(Exception):
    """The API server refused a request. status: HTTP code; reason: the API's machine reason."""

    def __init__(
        self, *, status: int, reason: str, message: str, what: str, retry_after: float | None = None
    ) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        super().__init__(f"{what}: {status} {reason}: {message}")

    @property
    def not_found(self) -> bool:
        return self.status == 404

    @property
    def forbidden(self) -> bool:
        """A right is missing; the message names it."""
        return self.status == 403

    @property
    def conflict(self) -> bool:
        """The object changed since it was read (not: it exists already)."""
        return self.status == 409 and self.reason != "AlreadyExists"

    @property
    def already_exists(self) -> bool:
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def too_large(self) -> bool:
        """The object would exceed a limit: 256 KiB of annotations, 3 MiB of a request, or the
        1.5 MiB of an object in etcd, which is reported as an internal error."""
        return (
            self.status == 413
            or (self.status == 422 and "too long" in self.message.lower())
            or "request is too large" in self.message
        )

    @property
    def gone(self) -> bool:
        """The resourceVersion is too old to go on from."""
        return self.status == 410


class Unreachable(Exception):
    """The API server did not answer: refused, reset, timed out."""


class AnswerTooLong(Unreachable):
    """The answer is longer than the client takes; asking again would bring the same."""


class RateLimit:
    """Token bucket: `qps` requests a second on average, `burst` at once. qps 0 means no limit."""

    def __init__(self, qps: float, burst: int) -> None:
        self._qps = qps
        self._burst = max(1, burst)
        self._tokens = float(self._burst)
        self._at: float | None = None

    async def take(self) -> None:
        if self._qps <= 0:
            return
        now = asyncio.get_running_loop().time()
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._qps)
        self._at = now
        self._tokens -= 1
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._qps)


class _Status(msgspec.Struct):
    reason: str = ""
    message: str = ""
    code: int = 0


class Client:
    """Talks to one API server. Use as an async context manager.

    The default burst and time limit are chosen: a controller's start sends some dozen requests, and
    30 s is half of what an API server itself allows a request. qps 0 leaves the rate to the server.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        user_agent: str = "koordinator",
        qps: float = 0,
        burst: int = 100,
        timeout_seconds: float = 30,
        counts: RequestCounts | None = None,
    ) -> None:
        """counts: where requests are counted; None for counts of its own."""
        self.counts = counts or RequestCounts(urlsplit(connection.server).netloc.rpartition("@")[2])
        self._connection = connection
        self._user_agent = user_agent
        self._limit = RateLimit(qps, burst)
        self._timeout_seconds = timeout_seconds
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._session: aiohttp.ClientSession | None = None

    def sibling(self) -> Client:
        """Return another client of the same server, not yet opened, with its own connections.

        It has no rate limit. It is for the few requests that must not wait behind all others, such
        as the renewal of a lease. Its requests are counted with those of this client.
        """
        return Client(self._connection, user_agent=self._user_agent, counts=self.counts)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(
            ssl=self._connection.tls if self._connection.tls is not None else False,
            limit=0,
            # Chosen: one connection for each watch (about a dozen), the rest for requests.
            limit_per_host=64,
            # Chosen: seconds that an idle connection stays open for the next request.
            keepalive_timeout=60,
            socket_factory=watchful_socket,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            # Looked up once: the session would read the environment for every request.
            proxy=environment_proxy(self._connection.server),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": self._user_agent, "Accept": "application/json"},
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        tries: int = _TRIES,
    ) -> bytes:
        """Send one request; return the body of a 2xx answer.

        Retries requests that the server refuses for now (429), after the pause that it names, at
        most 10 s, and reads whose connection was lost, after 0.2 s and twice as long each time; up
        to `tries` in all. Raises ApiError or Unreachable.
        """
        tried = 0
        verb = self.counts.verb(method)
        while True:
            tried += 1
            asked = time.perf_counter()
            await self._limit.take()
            began = time.perf_counter()
            verb.limited.observe(began - asked)
            verb.sent.observe(len(body) if body else 0)
            try:
                answer = await self._once(method, path, params, body, content_type)
                verb.duration.observe(time.perf_counter() - began)
                verb.received.observe(len(answer))
                return answer
            except ApiError as error:
                verb.duration.observe(time.perf_counter() - began)
                if error.status == 401:
                    self._connection.forget_credentials()
                    if tried == 1:
                        continue
                if error.status != 429 or tried >= tries:
                    raise
                pause = error.retry_after if error.retry_after is not None else 1.0
                await asyncio.sleep(min(pause, 10) + random.uniform(0, 0.2))
            except AnswerTooLong:
                self.counts.answered(method, None)
                raise
            except Unreachable:
                verb.duration.observe(time.perf_counter() - began)
                self.counts.answered(method, None)
                if method != "GET" or tried >= tries:
                    raise
                await asyncio.sleep(0.1 * 2**tried * random.uniform(0.5, 1.5))

    async def _once(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        body: bytes | None,
        content_type: str,
    ) -> bytes:
        headers = await self._headers()
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            async with self._open().request(
                method,
                self._connection.server + path,
                params=params,
                data=body,
                headers=headers,
                timeout=self._timeout,
            ) as answer:
                data = await answer.read()
                self.counts.answered(method, answer.status)
                if answer.status >= 300:
                    raise _refused(answer, data, f"{method} {path}")
                return data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{method} {path}: {type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def stream(
        self, path: str, *, params: Mapping[str, str], silence_seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a GET that answers line by line; yield an iterator of lines.

        Raises ApiError, or Unreachable when the stream breaks or nothing arrives for
        `silence_seconds`.
        """
        await self._limit.take()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=silence_seconds)
        try:
            async with self._open().request(
                "GET",
                self._connection.server + path,
                params=params,
                headers=await self._headers(),
                timeout=timeout,
            ) as answer:
                self.counts.answered("GET", answer.status)
                if answer.status >= 300:
                    if answer.status == 401:
                        self._connection.forget_credentials()
                    raise _refused(answer, await answer.read(), f"GET {path}")
                yield _lines(answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"GET {path}: {type(error).__name__}: {error}") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the client inside its context: async with Client(...)")
        return self._session

    async def _headers(self) -> dict[str, str]:
        try:
            header = await self._connection.header()
        except Exception as error:
            # Exec plugins and token files raise any kind of error; the next try calls them again.
            raise Unreachable(f"no credentials: {type(error).__name__}: {error}") from error
        return {"Authorization": header} if header else {}

    # --- verbs ---------------------------------------------------------------------------------

    async def get(
        self, resource: Resource, name: str, decode: Callable[[bytes], T], *, namespace: str = ""
    ) -> T:
        """Return one object. Raises ApiError (404 when it does not exist)."""
        return decode(await self.request("GET", resource.path(namespace=namespace, name=name)))

    async def find(
        self, resource: Resource, name: str, decode: Callable[[bytes], T], *, namespace: str = ""
    ) -> T | None:
        """Return one object, or None when it does not exist."""
        try:
            return await self.get(resource, name, decode, namespace=namespace)
        except ApiError as error:
            if error.not_found:
                return None
            raise

    async def create(self, resource: Resource, body: bytes, *, namespace: str = "") -> bytes:
        """Create an object; return it as stored."""
        return await self.request("POST", resource.path(namespace=namespace), body=body)

    async def replace(
        self,
        resource: Resource,
        name: str,
        body: bytes,
        *,
        namespace: str = "",
        subresource: str = "",
    ) -> bytes:
        """Replace an object; a resourceVersion in `body` makes it fail on conflict."""
        path = resource.path(namespace=namespace, name=name, subresource=subresource)
        return await self.request("PUT", path, body=body)

    async def patch(
        self,
        resource: Resource,
        name: str,
        body: bytes,
        *,
        content_type: str = MERGE_PATCH,
        namespace: str = "",
        subresource: str = "",
        field_manager: str = "",
        force: str = "",
    ) -> bytes:
        """Patch an object; `content_type` is one of the *_PATCH constants.

        field_manager: required for APPLY_PATCH. force: "true" takes fields over from others.
        """
        params = {
            name_: value
            for name_, value in (("fieldManager", field_manager), ("force", force))
            if value
        }
        path = resource.path(namespace=namespace, name=name, subresource=subresource)
        return await self.request(
            "PATCH", path, body=body, content_type=content_type, params=params or None
        )

    async def delete(
        self, resource: Resource, name: str, *, namespace: str = "", uid: str = ""
    ) -> None:
        """Delete an object if it exists; with `uid` only that very object."""
        body = (
            msgspec.json.encode(
                {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
            )
            if uid
            else None
        )
        try:
            await self.request("DELETE", resource.path(namespace=namespace, name=name), body=body)
        except ApiError as error:
            if not error.not_found:
                raise


async def retry_on_conflict(write: Callable[[], Awaitable[T]], *, tries: int = 5) -> T:
    """Run `write`, which reads an object and writes it, again after each conflict.

    Tries and pauses (10 ms, five times longer each time) are client-go's.
    """
    pause = 0.01
    for attempt in range(1, tries + 1):
        try:
            return await write()
        except ApiError as error:
            if not error.conflict or attempt == tries:
                raise
        await asyncio.sleep(pause * random.uniform(0.9, 1.1))
        pause *= 5
    raise AssertionError("unreachable")


def environment_proxy(server: str) -> str | None:
    """Return the environment's proxy for the API server, as client-go would use it."""
    parts = urlsplit(server)
    if not parts.hostname or proxy_bypass(parts.hostname):
        return None
    return getproxies().get(parts.scheme)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    pending = bytearray()
    async for chunk in answer.content.iter_any():
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            if pending:
                pending += chunk[start:end]
                yield bytes(pending)
                pending.clear()
            elif end > start:
                yield chunk[start:end]
            start = end + 1
        pending += chunk[start:]
        if len(pending) > _LONGEST_LINE:
            raise aiohttp.ClientPayloadError(f"a line is longer than {_LONGEST_LINE} bytes")
    if pending:
        yield bytes(pending)


def _refused(answer: aiohttp.ClientResponse, data: bytes, what: str) -> ApiError:
    after = answer.headers.get("Retry-After", "")
    return api_error(answer.status, answer.reason or "", after, data, what)


def api_error(status: int, phrase: str, retry_after: str, body: bytes, what: str) -> ApiError:
    """Return the error that an answer means.

    status, phrase: of the answer's first line. retry_after: the header's value, "" for none; only
    whole seconds count. what: method and path, for the text.
    """
    try:
        detail = msgspec.json.decode(body, type=_Status)
    except msgspec.DecodeError:
        detail = _Status(message=body[:500].decode(errors="replace").strip())
    return ApiError(
        status=status,
        reason=detail.reason or phrase,
        message=detail.message,
        what=what,
        retry_after=float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None,
    )


def encode_object(resource: Resource, plain: Mapping[str, Any]) -> bytes:
    """Return the JSON of `plain` with the resource's kind and apiVersion."""
    return msgspec.json.encode({"apiVersion": resource.api_version, "kind": resource.kind, **plain})
