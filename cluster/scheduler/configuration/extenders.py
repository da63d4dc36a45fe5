"""Extenders: webhooks that filter, rank, bind or preempt besides the plugins."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from msgspec import Meta, field
from msgspec.structs import replace

from cluster.scheduler.configuration.argument_rules import is_extended_resource
from cluster.scheduler.configuration.strict import Problems, Seconds, Section, read

_DEFAULT_TIMEOUT: Final = Seconds(5)


class ExtenderTLSConfig(Section, frozen=True):
    """Certificates for an extender; *_data is base64 and wins over the file."""

    insecure: bool = False
    server_name: str = ""
    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""
    cert_data: str = ""
    key_data: str = ""
    ca_data: str = ""


class ExtenderManagedResource(Section, frozen=True):
    """ignored_by_scheduler: NodeResourcesFit does not check the resource."""

    name: str
    ignored_by_scheduler: bool = False


class Extender(Section, frozen=True):
    """A webhook that takes part in scheduling. A verb that is empty is not called.

    ignorable: a failed call does not fail the pod. managed_resources: it is asked only about pods
    that request one of these; empty: about all.
    """

    url_prefix: str
    filter_verb: str = ""
    preempt_verb: str = ""
    prioritize_verb: str = ""
    weight: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    bind_verb: str = ""
    enable_https: bool = field(name="enableHTTPS", default=False)
    tls_config: ExtenderTLSConfig | None = None
    http_timeout: Seconds = field(name="httpTimeout", default=_DEFAULT_TIMEOUT)
    node_cache_capable: bool = False
    managed_resources: tuple[ExtenderManagedResource, ...] = ()
    ignorable: bool = False


def read_extenders(given: Sequence[Any], problems: Problems) -> tuple[Extender, ...]:
    """Return the extenders of a file that can be used; the others are noted."""
    extenders = []
    managed: set[str] = set()
    binder: int | None = None
    for index, tree in enumerate(given):
        if problems.full:
            break
        at = problems.below(index)
        extender = read(tree, Extender, at)
        if extender is None:
            continue
        _check_extender(extender, managed, at)
        if extender.bind_verb:
            if binder is not None:
                at.add(("bindVerb",), extender.bind_verb, f"extenders[{binder}] binds already")
            binder = index if binder is None else binder
        extenders.append(replace(extender, http_timeout=extender.http_timeout or _DEFAULT_TIMEOUT))
    return tuple(extenders)


def ignored_resources(extenders: Sequence[Extender]) -> tuple[str, ...]:
    """Return the resources that extenders manage and NodeResourcesFit shall not check."""
    return tuple(
        resource.name
        for extender in extenders
        for resource in extender.managed_resources
        if resource.ignored_by_scheduler
    )


def _check_extender(extender: Extender, managed: set[str], problems: Problems) -> None:
    try:
        url = urlsplit(extender.url_prefix)
        usable = url.scheme in ("http", "https") and bool(url.hostname)
        signed_in, _, host = url.netloc.rpartition("@")
    except ValueError:
        usable, signed_in = False, ""
    if signed_in:
        problems.add(
            ("urlPrefix",),
            f"{url.scheme}://...@{host}",
            "must have no user or password: the URL stands in logs and in the conditions of pods;"
            " use a client certificate (tlsConfig)",
        )
    elif not usable:
        problems.add(
            ("urlPrefix",), extender.url_prefix, "expected a URL such as https://host:port/path"
        )
    if extender.prioritize_verb and extender.weight == 0:
        problems.add(("weight",), 0, "must be at least 1 where prioritizeVerb is set")
    for index, resource in enumerate(extender.managed_resources):
        path = ("managedResources", index, "name")
        if not is_extended_resource(resource.name):
            problems.add(path, resource.name, "expected an extended resource: example.com/gpu")
        elif resource.name in managed:
            problems.add(path, resource.name, "is managed by an extender already")
        managed.add(resource.name)
    tls = extender.tls_config
    if tls is None:
        return
    at = problems.below("tlsConfig")
    if tls.insecure and (tls.ca_file or tls.ca_data):
        at.add(("insecure",), True, "cannot be combined with caFile or caData")
    if bool(tls.cert_file or tls.cert_data) != bool(tls.key_file or tls.key_data):
        at.add(("certFile",), tls.cert_file, "a certificate and its key are needed together")
    for name, text in (
        ("certData", tls.cert_data),
        ("keyData", tls.key_data),
        ("caData", tls.ca_data),
    ):
        try:
            base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            at.add((name,), "(not shown)", "expected base64")
