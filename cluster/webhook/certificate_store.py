"""Where the webhook's certificates are kept: a Secret that all replicas share, or a folder.

A replica that finds them missing or about to expire makes new ones; a replica that comes second
uses those of the first. Each replica looks once a minute, registers a CA before it serves a
certificate of that CA, and changes certificates without a restart. Names of the Secret's keys are
upstream's. The private keys stay in the Secret and in memory.
"""

from __future__ import annotations

import base64
import dataclasses
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from cluster.webhook.configuration import (
    MUTATING_NAME,
    VALIDATING_NAME,
    Address,
    sync_configuration,
)
from kube.certificates import Certificates, make_certificates, problem_with
from kube.client import ApiError, Client, encode_object
from kube.resources import MUTATING_WEBHOOKS, SECRETS, VALIDATING_WEBHOOKS

_log = logging.getLogger(__name__)

_KEYS: Final = {
    "ca-cert.pem": "ca_cert",
    "ca-key.pem": "ca_key",
    "cert.pem": "cert",
    "key.pem": "key",
    "tls.crt": "cert",
    "tls.key": "key",
}


class _Secret(msgspec.Struct):
    metadata: dict[str, Any]
    data: dict[str, str] | None = None


_decode_secret = msgspec.json.Decoder(_Secret).decode


class CertificateStore(Protocol):
    """Keeps one set of certificates for all replicas."""

    async def ensure(
        self, dns_names: tuple[str, ...], *, serving: Certificates | None = None
    ) -> Certificates:
        """Return certificates for `dns_names`, making and keeping new ones when needed.

        serving: what is served now; its CA is kept where nothing better is stored, so that a
        store that was lost does not make clients distrust what they still meet.
        """


@dataclass(frozen=True, slots=True)
class SecretStore:
    """Certificates in a Secret of the API server."""

    client: Client
    namespace: str
    name: str

    async def ensure(
        self, dns_names: tuple[str, ...], *, serving: Certificates | None = None
    ) -> Certificates:
        for _ in range(5):
            secret = await self.client.find(
                SECRETS, self.name, _decode_secret, namespace=self.namespace
            )
            found = _of_secret(secret)
            problem = "missing" if found is None else problem_with(found, dns_names)
            if found is not None and problem is None:
                return found
            _log.info("creating webhook certificates: %s", problem)
            made = make_certificates(dns_names, previous=found or serving)
            try:
                await self._keep(secret, made)
            except ApiError as error:
                # Another replica was faster: take what it made.
                if error.status != 409:
                    raise
            else:
                return made
        raise RuntimeError(f"Secret {self.namespace}/{self.name} keeps changing while it is read")

    async def _keep(self, secret: _Secret | None, made: Certificates) -> None:
        data = {
            key: base64.b64encode(getattr(made, member)).decode() for key, member in _KEYS.items()
        }
        metadata: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        if secret is None:
            body = encode_object(SECRETS, {"metadata": metadata, "type": "Opaque", "data": data})
            await self.client.create(SECRETS, body, namespace=self.namespace)
            return
        patch = {
            "metadata": {"resourceVersion": secret.metadata.get("resourceVersion")},
            "data": data,
        }
        await self.client.patch(
            SECRETS, self.name, msgspec.json.encode(patch), namespace=self.namespace
        )


@dataclass(frozen=True, slots=True)
class FolderStore:
    """Certificates in a private folder; for a manager outside the cluster."""

    folder: Path

    async def ensure(
        self, dns_names: tuple[str, ...], *, serving: Certificates | None = None
    ) -> Certificates:
        found = self._read()
        problem = "missing" if found is None else problem_with(found, dns_names)
        if found is not None and problem is None:
            return found
        _log.info("creating webhook certificates in %s: %s", self.folder, problem)
        made = make_certificates(dns_names, previous=found or serving)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for key, member in _KEYS.items():
            new = self.folder / f".{key}.new"
            new.unlink(missing_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(getattr(made, member))
            new.replace(self.folder / key)
        return made

    def _read(self) -> Certificates | None:
        try:
            return Certificates(
                **{
                    member: (self.folder / key).read_bytes()
                    for key, member in _KEYS.items()
                    if key.endswith(".pem")
                }
            )
        except FileNotFoundError:
            return None


def _of_secret(secret: _Secret | None) -> Certificates | None:
    if secret is None or not secret.data:
        return None
    try:
        return Certificates(
            **{
                member: base64.b64decode(secret.data[key], validate=True)
                for key, member in _KEYS.items()
                if key.endswith(".pem")
            }
        )
    except (KeyError, ValueError):
        return None


class WebhookRegistration:
    """Keeps certificates, trust and addresses of the webhooks right."""

    def __init__(
        self,
        client: Client,
        store: CertificateStore,
        address: Address,
        active: frozenset[str],
        *,
        mutating_name: str = MUTATING_NAME,
        validating_name: str = VALIDATING_NAME,
    ) -> None:
        self._client = client
        self._store = store
        self._address = address
        self._active = active
        self.names = (
            (MUTATING_WEBHOOKS, mutating_name),
            (VALIDATING_WEBHOOKS, validating_name),
        )
        self.current: Certificates | None = None

    def listen_on(self, port: int) -> None:
        """Take the port that the server really listens on; it stands in URLs of a host."""
        self._address = dataclasses.replace(self._address, port=port)

    async def certificates(self) -> Certificates:
        """Return the certificates to serve, making them if there are none."""
        return await self._store.ensure(self._address.dns_names, serving=self.current)

    async def sync(self, serve: Callable[[Certificates], None]) -> bool:
        """Make one round: certificates, then trust, then serving. Raises on the first failure.

        Return whether a configuration had to be written.
        """
        certificates = await self.certificates()
        any_written = False
        for resource, name in self.names:
            written = await sync_configuration(
                self._client,
                resource,
                name,
                ca_bundle=certificates.ca_cert,
                address=self._address,
                active=self._active,
            )
            if written:
                any_written = True
                _log.info("updated %s %s", resource.kind, name)
        if certificates != self.current:
            serve(certificates)
            self.current = certificates
        return any_written
