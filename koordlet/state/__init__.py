"""The node's pods and containers: one mutable store, fed by every source and read as snapshots.

A runtime (NRI events, NRI Synchronize, CRI lists) reports which sandboxes and containers exist, and
where. Pod objects (kubelet, the objects directory, the API server) describe what they are.
Precedence:

- existence: the runtime's latest full list; between two lists its events. Where no runtime reports
  a pod: the running containers of its Pod object, at the node's layout.
- metadata and specification: kubelet, then the objects directory, then the API server, then what
  the runtime received at RunPodSandbox, which it never refreshes.
- QoS class: the directory that the pod lives in, then the object.
- cgroup: the runtime, then the node's layout.
- requested values of a container: what kubelet requested in an event, then the specification, then
  the values that the runtime first reported, where `proxy_requests` has kubelet's in place of
  delivered ones. Later reports may contain delivered values, so
  `koordlet.state.requests_log` keeps the first ones over a restart. A value in a full list that was
  neither requested nor delivered was requested in an event that did not reach koordlet; it counts
  as requested.

`runtime_records` keeps what the runtime reported in values of `records`, `pod_objects` what Pod
objects say, `proxy_requests` what came through the proxy, `merging` merges all of it by the
precedence above, and `node_state` is the store that other rooms use.
"""

from koordlet.state.node_state import NodeState, Unprotected
from koordlet.state.pod_objects import Source

__all__ = ["NodeState", "Source", "Unprotected"]
