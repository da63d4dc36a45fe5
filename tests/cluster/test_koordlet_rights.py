"""The rights of koordlet's account by its manifests, as a real API server reports them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest

from koordlet.manifests import ACCOUNT, files
from kube.client import encode_object
from kube.resources import Resource
from tests.beds.apiserver import ApiServer, eventually

_RBAC = "rbac.authorization.k8s.io"
_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", False
)
_KINDS = {
    "ClusterRole": Resource(_RBAC, "v1", "clusterroles", "ClusterRole", False),
    "ClusterRoleBinding": Resource(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", False),
}
_NAMESPACE = "a-namespace"
_PODS = ("get", "pods")
_PROXY = ("get", "proxy")


@pytest.mark.apiserver
def test_the_rights_to_a_kubelet_are_in_files_of_their_own(server: ApiServer) -> None:
    made = files(_NAMESPACE)

    async def test() -> list[list[bool]]:
        async with server.client() as client:

            async def install(name: str) -> None:
                for document in made[name]:
                    if resource := _KINDS.get(document["kind"]):
                        name = document["metadata"]["name"] + "-tried"
                        tried = {**document, "metadata": {"name": name}}
                        if reference := tried.get("roleRef"):
                            tried["roleRef"] = {**reference, "name": reference["name"] + "-tried"}
                        await client.create(resource, encode_object(resource, tried))

            async def allowed(verb: str, part: str) -> bool:
                asked = {"verb": verb, "resource": "nodes", "subresource": part}
                user = f"system:serviceaccount:{_NAMESPACE}:{ACCOUNT}"
                review: dict[str, Any] = {"spec": {"user": user, "resourceAttributes": asked}}
                body = await client.create(_REVIEWS, encode_object(_REVIEWS, review))
                return bool(msgspec.json.decode(body)["status"]["allowed"])

            questions = (_PODS, ("get", "configz"), _PROXY, ("create", "proxy"), ("watch", ""))
            answers = []
            # The authorizer hears of a role a little after it was stored.
            for name, granted in (
                ("rbac.yaml", ("watch", "")),
                ("rbac-kubelet.yaml", _PODS),
                ("rbac-kubelet-proxy.yaml", _PROXY),
            ):
                await install(name)
                await eventually(partial(allowed, *granted))
                answers.append([await allowed(*question) for question in questions])
            return answers

    without, fine_grained, with_proxy = asyncio.run(test())
    assert without == [False, False, False, False, True]
    assert fine_grained == [True, True, False, False, True]
    assert with_proxy == [True, True, True, False, True]
