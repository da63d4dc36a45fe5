"""Serving admission reviews over TLS.

A handler is a plain function from a request to a verdict; it answers from memory, so nothing is
awaited between the request's bytes and the answer's. A handler that fails answers 500 for that
request only: whether the object passes then is the webhook's failure policy, which is visible in
the cluster, and not this code's guess.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from apis.errors import InputError, InputErrors
from kube.certificates import Certificates

_log = logging.getLogger(__name__)

_LARGEST_REVIEW: Final = 8 * 1024 * 1024
"""An API server accepts objects of 3 MiB; a review holds the new and the old one."""


class GroupVersionKind(msgspec.Struct, frozen=True):
    group: str = ""
    version: str = ""
    kind: str = ""


class GroupVersionResource(msgspec.Struct, frozen=True):
    group: str = ""
    version: str = ""
    resource: str = ""


class UserInfo(msgspec.Struct, frozen=True):
    username: str = ""
    groups: tuple[str, ...] | None = None


class AdmissionRequest(msgspec.Struct, frozen=True, rename="camel"):
    """One request; `object` and `old_object` are raw JSON, empty or null where there is none."""

    uid: str
    kind: GroupVersionKind = GroupVersionKind()
    resource: GroupVersionResource = GroupVersionResource()
    sub_resource: str = ""
    name: str = ""
    namespace: str = ""
    operation: str = ""
    user_info: UserInfo = UserInfo()
    object: msgspec.Raw = msgspec.Raw(b"null")
    old_object: msgspec.Raw = msgspec.Raw(b"null")
    dry_run: bool | None = None

    @property
    def ref(self) -> str:
        """How errors name the object: "Pod default/web"."""
        place = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.kind.kind} {place}"


class Verdict(msgspec.Struct, frozen=True):
    """What becomes of a request. patch: RFC 6902 operations, for mutating webhooks."""

    allowed: bool
    message: str = ""
    code: int = 403
    patch: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()


ALLOWED: Final = Verdict(True)


def denied(message: str, *, code: int = 403) -> Verdict:
    """Return a refusal; the message is what kubectl shows."""
    return Verdict(False, message, code)


Handler = Callable[[AdmissionRequest], Verdict]
AsyncHandler = Callable[[AdmissionRequest], Awaitable[Verdict]]


class _Review(msgspec.Struct, rename="camel"):
    request: AdmissionRequest
    api_version: str = ""


_decode_review = msgspec.json.Decoder(_Review).decode
_encode = msgspec.json.Encoder().encode

_VERSIONS: Final = ("admission.k8s.io/v1", "admission.k8s.io/v1beta1")


def answer_review(body: bytes, handler: Handler) -> tuple[int, bytes]:
    """Return (HTTP status, JSON) for the bytes of one AdmissionReview."""
    try:
        review = _decode_review(body)
    except (msgspec.DecodeError, RecursionError) as error:
        return 400, _encode({"error": f"not an AdmissionReview: {error}"})
    verdict = _judge(review.request, handler)
    return 200, encode_answer(review.api_version, review.request.uid, verdict)


def _judge(request: AdmissionRequest, handler: Handler) -> Verdict:
    try:
        return handler(request)
    except Exception as error:  # noqa: BLE001 - one request must not stop the server
        return _failed(request, error)


def _failed(request: AdmissionRequest, error: Exception) -> Verdict:
    if isinstance(error, InputError | InputErrors):
        return denied(str(error), code=400)
    if isinstance(error, msgspec.DecodeError):
        return denied(f"{request.ref}: {error}", code=400)
    _log.error("admission of %s failed", request.ref, exc_info=error)
    return denied(f"internal error: {type(error).__name__}", code=500)


def encode_answer(api_version: str, uid: str, verdict: Verdict) -> bytes:
    """Return the JSON of an AdmissionReview that answers with `verdict`."""
    response: dict[str, Any] = {"uid": uid, "allowed": verdict.allowed}
    if not verdict.allowed or verdict.message:
        response["status"] = {
            "metadata": {},
            "status": "Success" if verdict.allowed else "Failure",
            "message": verdict.message,
            "reason": "" if verdict.allowed else _REASONS.get(verdict.code, "Forbidden"),
            "code": 200 if verdict.allowed else verdict.code,
        }
    if verdict.patch:
        response["patch"] = base64.b64encode(_encode(verdict.patch)).decode()
        response["patchType"] = "JSONPatch"
    if verdict.warnings:
        response["warnings"] = list(verdict.warnings)
    return _encode(
        {
            "kind": "AdmissionReview",
            "apiVersion": api_version if api_version in _VERSIONS else _VERSIONS[0],
            "response": response,
        }
    )


_REASONS: Final = {400: "BadRequest", 403: "Forbidden", 500: "InternalError"}


# --- JSON patch --------------------------------------------------------------------------------


def json_patch(before: Any, after: Any, path: str = "") -> list[dict[str, Any]]:
    """Return RFC 6902 operations that turn plain data `before` into `after`.

    Objects are compared member by member; lists of equal length item by item, others as a whole.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        operations: list[dict[str, Any]] = []
        for key in before:
            if key not in after:
                operations.append({"op": "remove", "path": f"{path}/{_pointer(key)}"})
        for key, value in after.items():
            where = f"{path}/{_pointer(key)}"
            if key not in before:
                operations.append({"op": "add", "path": where, "value": value})
            elif before[key] != value or type(before[key]) is not type(value):
                operations += json_patch(before[key], value, where)
        return operations
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        operations = []
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                operations += json_patch(old, new, f"{path}/{index}")
        return operations
    if before == after and type(before) is type(after):
        return []
    return [{"op": "replace", "path": path, "value": after}]


def _pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def merge_patch(before: Any, after: Any) -> Any:
    """Return the RFC 7386 document that turns object `before` into `after`; {} if equal."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key not in before:
            patch[key] = value
        elif before[key] != value:
            patch[key] = merge_patch(before[key], value)
    return patch


# --- the server --------------------------------------------------------------------------------


def load_certificates(tls: ssl.SSLContext, certificates: Certificates) -> None:
    """Serve `certificates` from the next handshake on; connections that stand keep theirs."""
    # The ssl module reads keys from files only: a private file, removed at once.
    with tempfile.TemporaryDirectory(prefix="koord-tls-") as folder:
        cert, key = Path(folder, "cert.pem"), Path(folder, "key.pem")
        cert.write_bytes(certificates.cert)
        key.touch(mode=0o600)
        key.write_bytes(certificates.key)
        tls.load_cert_chain(cert, key)


class WebhookServer:
    """HTTPS server of admission paths. `routes`: path -> handler (plain or async)."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        certificates: Certificates,
        routes: Mapping[str, Handler],
        async_routes: Mapping[str, AsyncHandler] | None = None,
        observe: Callable[[str, AdmissionRequest, Verdict, float], None] | None = None,
        pages: Mapping[str, Callable[[], bytes]] | None = None,
    ) -> None:
        """observe: called with (path, request, verdict, seconds) for each review.

        pages: path -> function that returns the JSON of a GET.
        """
        self._host = host
        self._port = port
        self._observe = observe
        self._draining = False
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        load_certificates(self._tls, certificates)
        application = web.Application(client_max_size=_LARGEST_REVIEW)
        for path, handler in routes.items():
            application.router.add_post(path, self._sync_route(path, handler))
        for path, async_handler in (async_routes or {}).items():
            application.router.add_post(path, self._async_route(path, async_handler))
        for path, page in (pages or {}).items():
            application.router.add_get(path, _page(page))
        application.router.add_get("/healthz", _healthz)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=10)

    async def start(self) -> None:
        """Listen; return when connections are taken."""
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, self._host, self._port, ssl_context=self._tls, backlog=1024
        )
        await site.start()

    @property
    def port(self) -> int:
        """The port that is listened on; useful when it was given as 0."""
        address = self._runner.addresses[0]
        return int(address[1])

    def use(self, certificates: Certificates) -> None:
        """Serve other certificates from the next handshake on."""
        load_certificates(self._tls, certificates)

    def drain(self) -> None:
        """End each connection with its next answer, so that none is cut while a review is on it."""
        self._draining = True

    async def stop(self) -> None:
        """Take no new connections, let running requests end, close."""
        with suppress(asyncio.CancelledError):
            await self._runner.cleanup()

    def _sync_route(
        self, path: str, handler: Handler
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def decide(request: AdmissionRequest) -> Verdict:
            return _judge(request, handler)

        return self._async_route(path, decide)

    def _async_route(
        self, path: str, handler: AsyncHandler
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def serve(request: web.Request) -> web.Response:
            body = await request.read()
            started = asyncio.get_running_loop().time()
            try:
                review = _decode_review(body)
            except (msgspec.DecodeError, RecursionError) as error:
                return web.json_response({"error": f"not an AdmissionReview: {error}"}, status=400)
            try:
                verdict = await handler(review.request)
            except Exception as error:  # noqa: BLE001 - one request must not stop the server
                verdict = _failed(review.request, error)
            if self._observe is not None:
                seconds = asyncio.get_running_loop().time() - started
                self._observe(path, review.request, verdict, seconds)
            answer = encode_answer(review.api_version, review.request.uid, verdict)
            response = web.Response(body=answer, content_type="application/json")
            if self._draining:
                response.force_close()
            return response

        return serve


def _page(page: Callable[[], bytes]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=page(), content_type="application/json")

    return serve


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok")
