"""The node's pods and containers: the one mutable store, fed by every source, read as snapshots.

What a runtime tells (NRI events, NRI Synchronize, CRI lists) says which sandboxes and containers
exist and where; what Pod objects tell (kubelet, the objects directory) says what they are. Stated
precedence:

- existence: the runtime's latest full list; events between two lists; where no runtime tells of a
  pod, the running containers of kubelet's or the directory's Pod object, at the node's layout.
- metadata and specification: kubelet, then the objects directory, then what the runtime was told at
  RunPodSandbox, which it never refreshes.
- QoS class: the directory that the pod lives in, then the object.
- cgroup: the runtime, then the node's layout.
- requested values of a container: what kubelet asked the runtime for in an event, then the
  specification, then what the runtime had when the container was first seen (both kept over a
  restart by `koordlet.state.requests_log`: what it has later may be ours). A value in the
  runtime's full list that is neither kubelet's nor ours was asked for in an event that nobody
  heard, and counts as heard.

`runtime_records` keeps what the runtime told, `pod_objects` what Pod objects say, `merging` lays
them over each other by the precedence above, and `node_state` is the store that others hold.
"""

from koordlet.state.node_state import NodeState, Unprotected
from koordlet.state.pod_objects import Source

__all__ = ["NodeState", "Source", "Unprotected"]
