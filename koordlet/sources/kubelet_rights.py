"""What kubelet's refusal of a request means, and what to apply so that it is granted.

Kubelet asks the API server whether the account may `get` a subresource of nodes. From Kubernetes
1.33 on (gate KubeletFineGrainedAuthz) that is the path's own subresource, such as `nodes/pods`, and
then `nodes/proxy`; an older kubelet asks for `nodes/proxy` alone. Its answer names what it asked
for: docs/facts/koordlet.md, "Kubelet's pod list".
"""

from __future__ import annotations

import re
from typing import Final

from apis.errors import printable
from koordlet.manifests import KUBELET_PARTS

_PROXY: Final = "proxy"
_FORBIDDEN: Final = re.compile(
    r"Forbidden \(user=(?P<user>.{1,300}), verb=\w+, resource=nodes,"
    r" subresource(?:\(s\)=\[(?P<several>[a-z ]{1,200})\]|=(?P<one>[a-z]{1,50}))\)"
)
_RBAC: Final = "deploy/koordlet/rbac-kubelet.yaml"
_RBAC_PROXY: Final = "deploy/koordlet/rbac-kubelet-proxy.yaml"


def refusal(status: int, path: str, body: bytes, credential: str) -> str:
    """Return why kubelet refused a request for `path`, and what to do.

    status: 401 or 403. body: kubelet's answer. credential: the file of the token or certificate.
    """
    if status == 401:
        return (
            f"answered 401 to {path}: it does not accept {credential}: it must be of an account of"
            " this cluster, and kubelet needs authentication.webhook.enabled for a token"
        )
    found = _FORBIDDEN.search(body[:2048].decode("utf-8", "replace"))
    own = KUBELET_PARTS[path]
    if found is None:
        return (
            f"answered 403 to {path}: the account of {credential} needs the right to get"
            f" nodes/{own}: apply {_RBAC}, or before Kubernetes 1.33 {_RBAC_PROXY}"
        )
    user = printable(found["user"])
    asked = (found["several"] or found["one"]).split()
    if asked == [_PROXY]:
        return (
            f'answered 403 to {path}: user "{user}" may not get nodes/proxy, and this kubelet'
            " checks no smaller right (it is older than Kubernetes 1.33, or its gate"
            f" KubeletFineGrainedAuthz is off): apply {_RBAC_PROXY}"
        )
    rights = " nor ".join(f"nodes/{one}" for one in asked)
    neither = "neither " if len(asked) > 1 else "not "
    return f'answered 403 to {path}: user "{user}" may get {neither}{rights}: apply {_RBAC}'
