"""Discovery: versions and resources that the API server serves; evictions by its newest API."""

from __future__ import annotations

import msgspec

from kube.client import ApiError, Client
from kube.resources import PODS


class _ApiResource(msgspec.Struct):
    name: str
    kind: str = ""
    group: str = ""
    version: str = ""


class _ApiResourceList(msgspec.Struct):
    resources: list[_ApiResource] | None = None


_decode_list = msgspec.json.Decoder(_ApiResourceList).decode


class Discovery:
    """Answers of the server, cached."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._resources: dict[str, dict[str, _ApiResource]] = {}

    async def serves(self, api_version: str, resource: str) -> bool:
        """Return whether `resource` ("pods", "pods/eviction") exists in `api_version`."""
        return resource in await self._of(api_version)

    async def eviction_version(self) -> str:
        """Return the API version of Eviction that the server takes: policy/v1 or v1beta1."""
        eviction = (await self._of("v1")).get("pods/eviction")
        if eviction is not None and eviction.group == "policy" and eviction.version:
            return f"policy/{eviction.version}"
        return "policy/v1beta1"

    async def _of(self, api_version: str) -> dict[str, _ApiResource]:
        known = self._resources.get(api_version)
        if known is None:
            path = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
            try:
                found = _decode_list(await self._client.request("GET", path))
            except ApiError as error:
                if not error.not_found:
                    raise
                found = _ApiResourceList()
            known = {resource.name: resource for resource in found.resources or ()}
            if known:
                # An absent group is not cached: it may be installed later.
                self._resources[api_version] = known
        return known


async def evict(
    client: Client,
    discovery: Discovery,
    *,
    namespace: str,
    name: str,
    uid: str,
    grace_seconds: int | None = None,
) -> None:
    """Ask the API server to evict the pod with this very uid.

    Raises ApiError: 429 when a disruption budget forbids it now, 404 or 409 when the pod is gone
    or is another one.
    """
    options: dict[str, object] = {"preconditions": {"uid": uid}}
    if grace_seconds is not None:
        options["gracePeriodSeconds"] = grace_seconds
    body = {
        "apiVersion": await discovery.eviction_version(),
        "kind": "Eviction",
        "metadata": {"namespace": namespace, "name": name},
        "deleteOptions": options,
    }
    path = PODS.path(namespace=namespace, name=name, subresource="eviction")
    await client.request("POST", path, body=msgspec.json.encode(body), tries=1)
