"""Serving admission reviews over TLS.

A handler is a plain function from a request to a verdict that answers from memory. A handler that
has to wait for the API server returns a `FollowUp` instead, which is awaited. A large review is
decoded and judged in a thread, so that it holds up no other one; so handlers must not iterate over
what the event loop changes.

A body that is not a review, and an object that is not of its kind, is the sender's fault: 400. A
handler that fails answers 500 for that request only. Whether the object passes then is the
webhook's failure policy, which is visible in the cluster.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from apis.errors import InputError, InputErrors
from kube.certificates import Certificates
from service import http_server
from service.http_server import Request, Response, Server

_log = logging.getLogger(__name__)

LARGEST_REVIEW: Final = 8 << 20
"""Bytes of a body. An API server takes requests of 3 MiB; a review of one carries the object, the
stored object and the options."""
LARGE_REVIEW: Final = 64 << 10
"""Bytes from which a review is judged in a thread. Pods have 2 to 20 KiB. The costliest object that
was found (containers of 60 bytes that are all replaced) takes 0.8 s for each MiB, so 50 ms."""
_MOST_LARGE_REVIEWS: Final = 16
"""Large reviews that wait for the thread. API servers give up after 10 s (timeoutSeconds)."""
_MOST_CONNECTIONS: Final = 1000
"""An API server has 200 changes under way by default, and each of several may ask."""
_MOST_HELD_BYTES: Final = 16 * LARGEST_REVIEW
"""Of all bodies together; the shipped Deployment is limited to 1 GiB."""
_DRAIN_SECONDS: Final = 10.0
"""What the longest review takes; API servers wait no longer."""


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


FollowUp = Callable[[], Awaitable[Verdict]]
"""The rest of a judgement that has to wait for something; called on the event loop."""
Handler = Callable[[AdmissionRequest], Verdict | FollowUp]


class _Review(msgspec.Struct, rename="camel"):
    request: AdmissionRequest
    api_version: str = ""


_decode_review = msgspec.json.Decoder(_Review).decode
_encode = msgspec.json.Encoder().encode

_VERSIONS: Final = ("admission.k8s.io/v1", "admission.k8s.io/v1beta1")


class Answer(msgspec.Struct):
    """What becomes of a body. `body` is empty while there is a `follow_up`."""

    status: int
    body: bytes
    review: _Review | None = None
    verdict: Verdict | None = None
    follow_up: FollowUp | None = None


def answer_review(body: bytes, handler: Handler) -> Answer:
    """Return the answer to the bytes of one AdmissionReview, or what is left to do for it."""
    try:
        review = _decode_review(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Answer(400, _encode({"error": f"not an AdmissionReview: {error}"}))
    try:
        judged = handler(review.request)
    except Exception as error:  # noqa: BLE001 - one request must not stop the server
        judged = _failed(review.request, error)
    if isinstance(judged, Verdict):
        return _answered(review, judged)
    return Answer(200, b"", review, follow_up=judged)


async def finish(answer: Answer) -> Answer:
    """Return the whole answer, after its follow-up where it has one."""
    if answer.follow_up is None or answer.review is None:
        return answer
    try:
        verdict = await answer.follow_up()
    except Exception as error:  # noqa: BLE001 - one request must not stop the server
        verdict = _failed(answer.review.request, error)
    return _answered(answer.review, verdict)


def _answered(review: _Review, verdict: Verdict) -> Answer:
    try:
        body = encode_answer(review.api_version, review.request.uid, verdict)
    except RecursionError as error:
        verdict = _failed(review.request, error)
        body = encode_answer(review.api_version, review.request.uid, verdict)
    return Answer(200, body, review, verdict)


def _failed(request: AdmissionRequest, error: Exception) -> Verdict:
    """Return the refusal for a handler's exception: 400 for an unusable object, else 500."""
    match error:
        case InputError() | InputErrors():
            return denied(str(error), code=400)
        case RecursionError():
            return denied(f"{request.ref}: nested too deep", code=400)
        case msgspec.DecodeError() | UnicodeError():
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


# --- the server --------------------------------------------------------------------------------


def load_certificates(tls: ssl.SSLContext, certificates: Certificates) -> None:
    """Serve `certificates` from the next handshake on; connections that stand keep theirs."""
    load_pair(tls, certificates.cert, certificates.key)


def load_pair(tls: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Serve a certificate with its key, PEM texts, from the next handshake on.

    Raises ssl.SSLError, also for a key that needs a password.
    """
    # The ssl module reads keys from files only: a private file, removed at once.
    with tempfile.TemporaryDirectory(prefix="koord-tls-") as folder:
        cert_file, key_file = Path(folder, "cert.pem"), Path(folder, "key.pem")
        cert_file.write_bytes(cert)
        key_file.touch(mode=0o600)
        key_file.write_bytes(key)
        # Without a password OpenSSL would ask the terminal for one.
        tls.load_cert_chain(cert_file, key_file, password="")


class WebhookServer:
    """HTTPS server of admission paths. `routes`: path -> handler."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        certificates: Certificates,
        routes: Mapping[str, Handler],
        observe: Callable[[str, AdmissionRequest, Verdict, float], None] | None = None,
        pages: Mapping[str, Callable[[], bytes]] | None = None,
        patience: http_server.Patience | None = None,
    ) -> None:
        """host: "" for every address of the machine.

        observe: called with (path, request, verdict, seconds) for each review.
        pages: path -> function that returns the JSON of a GET.
        """
        self._host = host
        self._port = port
        self._observe = observe
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self._tls.set_alpn_protocols(["http/1.1"])
        load_certificates(self._tls, certificates)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large-reviews")
        self._large = 0
        self._server = Server(
            {
                ("GET", "/healthz"): _healthz,
                **{("GET", path): _page(page) for path, page in (pages or {}).items()},
                **{("POST", path): self._route(path, handler) for path, handler in routes.items()},
            },
            max_body_bytes=LARGEST_REVIEW,
            max_connections=_MOST_CONNECTIONS,
            max_held_bytes=_MOST_HELD_BYTES,
            patience=patience or http_server.Patience(),
        )

    async def start(self) -> None:
        """Listen; return when connections are taken. Raises OSError when the port is taken."""
        await self._server.listen_tcp(self._host, self._port, tls=self._tls)

    @property
    def port(self) -> int:
        """The port that is listened on; useful when it was given as 0."""
        return int(self._server.sockets[0].getsockname()[1])

    def use(self, certificates: Certificates) -> None:
        """Serve other certificates from the next handshake on."""
        load_certificates(self._tls, certificates)

    def drain(self) -> None:
        """End each connection with its next answer, so that none is cut while a review is on it."""
        self._server.draining = True

    async def stop(self) -> None:
        """Take no new connections, let running requests end, close."""
        await self._server.drain(_DRAIN_SECONDS)
        await self._server.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _route(self, path: str, handler: Handler) -> http_server.Handler:
        async def serve(request: Request) -> Response:
            loop = asyncio.get_running_loop()
            started = loop.time()
            if len(request.body) <= LARGE_REVIEW:
                answer = answer_review(request.body, handler)
            elif self._large >= _MOST_LARGE_REVIEWS:
                return http_server.text(503, "too many large reviews at once; try again")
            else:
                self._large += 1
                try:
                    answer = await loop.run_in_executor(
                        self._thread, answer_review, request.body, handler
                    )
                finally:
                    self._large -= 1
            answer = await finish(answer)
            if self._observe is not None and answer.review and answer.verdict:
                seconds = loop.time() - started
                self._observe(path, answer.review.request, answer.verdict, seconds)
            return Response(answer.status, answer.body, "application/json")

        return serve


def _page(page: Callable[[], bytes]) -> http_server.Handler:
    async def serve(_: Request) -> Response:
        return Response(200, page(), "application/json")

    return serve


async def _healthz(_: Request) -> Response:
    return Response(200, b"ok")
