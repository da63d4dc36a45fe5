"""Who may read which page of the secure port, as the API server answers it.

As in kube-scheduler: a client is known by a certificate of the client CA, or by a bearer token that
a TokenReview accepts, else it is `system:anonymous`. Whether it may use the method on the path is
the answer of a SubjectAccessReview. Health pages need neither. Answers are kept for some seconds,
so that a scraper does not cost the API server two requests each time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec

from kube.client import ApiError, Client, Unreachable
from kube.resources import Resource
from service.http_server import Handler, Request, Response, text

_log = logging.getLogger(__name__)

TOKEN_REVIEWS: Final = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", False)
ACCESS_REVIEWS: Final = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", False
)
_MOST_KEPT: Final = 1024
"""Answers of each kind. Chosen: a cluster has some scrapers and people; a client that makes up
tokens pushes out others' answers, which are asked for again."""
_AT_ONCE: Final = 4
"""Reviews in parallel. Chosen: whoever floods the port with tokens costs the API server this
much, and others wait."""
_PRIVILEGED: Final = "system:masters"
"""Kubernetes grants this group everything, without a review."""
_AUTHENTICATED: Final = "system:authenticated"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class User:
    """Who asks. extra: as the TokenReview has it."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)


_ANONYMOUS: Final = User("system:anonymous", ("system:unauthenticated",))


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """always_allowed: paths that need no right; one that ends with * stands for all that begin so.
    token_s, allowed_s, denied_s: how long answers of a review are kept, in seconds."""

    always_allowed: tuple[str, ...] = ("/healthz", "/readyz", "/livez")
    token_s: float = 10.0
    allowed_s: float = 10.0
    denied_s: float = 10.0


class _TokenStatus(msgspec.Struct, rename="camel"):
    authenticated: bool = False
    user: dict[str, Any] = msgspec.field(default_factory=dict)


class _TokenReview(msgspec.Struct):
    status: _TokenStatus = msgspec.field(default_factory=_TokenStatus)


class _AccessStatus(msgspec.Struct):
    allowed: bool = False
    reason: str = ""


class _AccessReview(msgspec.Struct):
    status: _AccessStatus = msgspec.field(default_factory=_AccessStatus)


class _Kept(Generic[T]):
    """Answers by what was asked, until their time is over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: OrderedDict[Any, tuple[float, T]] = OrderedDict()

    def get(self, key: Any) -> tuple[T] | None:
        """Return the answer in a tuple, None if there is none."""
        found = self._answers.get(key)
        if found is None or found[0] <= self._clock():
            return None
        return (found[1],)

    def keep(self, key: Any, answer: T, seconds: float) -> None:
        self._answers.pop(key, None)
        self._answers[key] = (self._clock() + seconds, answer)
        if len(self._answers) > _MOST_KEPT:
            self._answers.popitem(last=False)


class Access:
    """Guards handlers."""

    def __init__(
        self,
        settings: AccessSettings,
        *,
        tokens: Client,
        rights: Client,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tokens, rights: for TokenReviews and SubjectAccessReviews."""
        self._settings = settings
        self._token_client = tokens
        self._right_client = rights
        self._users: _Kept[User | None] = _Kept(clock)
        self._allowed: _Kept[bool] = _Kept(clock)
        self._gate = asyncio.Semaphore(_AT_ONCE)

    def guard(self, handler: Handler) -> Handler:
        """Return a handler that asks `handler` only for clients that may use it."""

        async def guarded(request: Request) -> Response:
            if self._is_open(request.path):
                return await handler(request)
            try:
                user = await self._user(request)
                if user is None:
                    return text(401, "Unauthorized")
                allowed = await self._may(user, request)
            except (ApiError, Unreachable, msgspec.DecodeError) as error:
                _log.warning("a client of the secure port cannot be checked: %s", error)
                return text(503, "the API server does not answer who may read this; try again")
            if allowed:
                return await handler(request)
            verb, path = request.method.lower(), reviewed_path(request.path)
            return text(403, f'forbidden: User "{user.name}" cannot {verb} path "{path}"')

        return guarded

    def _is_open(self, path: str) -> bool:
        return any(
            path.startswith(each[:-1]) if each.endswith("*") else path == each
            for each in self._settings.always_allowed
        )

    async def _user(self, request: Request) -> User | None:
        """Return who asks; None where a token is given that is not valid."""
        known = user_of(request.peer.certificate)
        if known is not None:
            return known
        scheme, _, token = request.authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return _ANONYMOUS
        # The token itself is not kept.
        key = hashlib.sha256(token.encode()).digest()
        kept = self._users.get(key)
        if kept is not None:
            return kept[0]
        body = {"spec": {"token": token}}
        status = (await self._review(self._token_client, TOKEN_REVIEWS, body, _TokenReview)).status
        user = None
        if status.authenticated:
            shown = status.user
            user = User(
                name=str(shown.get("username", "")),
                groups=tuple(map(str, shown.get("groups") or ())),
                uid=str(shown.get("uid", "")),
                extra=shown.get("extra") or {},
            )
        self._users.keep(key, user, self._settings.token_s)
        return user

    async def _may(self, user: User, request: Request) -> bool:
        if _PRIVILEGED in user.groups:
            return True
        verb, path = request.method.lower(), reviewed_path(request.path)
        extra = tuple((name, tuple(values)) for name, values in sorted(user.extra.items()))
        key = (user.name, user.groups, user.uid, extra, verb, path)
        kept = self._allowed.get(key)
        if kept is not None:
            return kept[0]
        spec: dict[str, Any] = {
            "nonResourceAttributes": {"path": path, "verb": verb},
            "user": user.name,
            "groups": list(user.groups),
        }
        if user.uid:
            spec["uid"] = user.uid
        if user.extra:
            spec["extra"] = dict(user.extra)
        review = await self._review(
            self._right_client, ACCESS_REVIEWS, {"spec": spec}, _AccessReview
        )
        allowed = review.status.allowed
        seconds = self._settings.allowed_s if allowed else self._settings.denied_s
        self._allowed.keep(key, allowed, seconds)
        return allowed

    async def _review(
        self, client: Client, resource: Resource, body: Mapping[str, Any], kind: type[T]
    ) -> T:
        named = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        async with self._gate:
            answer = await client.request(
                "POST", resource.path(), body=msgspec.json.encode(named), tries=1
            )
        return msgspec.json.decode(answer, type=kind)


def reviewed_path(path: str) -> str:
    """Return the path that a user needs the right to.

    Every cluster lets all of its users read /apis/*, which on the API server is nothing but a list
    of kinds (ClusterRole system:discovery). Here it names the pods of all namespaces, so the right
    to /debug/apis/* is asked for instead.
    """
    return f"/debug{path}" if path == "/apis" or path.startswith("/apis/") else path


def user_of(certificate: Mapping[str, Any]) -> User | None:
    """Return the user of a verified client certificate: its common name, and its organizations as
    groups. None without a certificate, or for one without a name."""
    names: dict[str, list[str]] = {}
    for parts in certificate.get("subject", ()):
        for name, value in parts:
            names.setdefault(name, []).append(value)
    common = names.get("commonName", [])
    if not common:
        return None
    return User(common[0], (*names.get("organizationName", ()), _AUTHENTICATED))
