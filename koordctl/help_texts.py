"""What the help of koordctl and its commands ends with: examples, and how to read the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EPILOG: Final = """\
examples:
  koordctl status
  koordctl explain container default/web/main
  koordctl explain file /sys/fs/cgroup/kubepods.slice/cpu.weight
  koordctl explain node worker-1 batch-cpu
  koordctl plan --objects ./new-objects
  koordctl doctor
  koordctl top
  koordctl report > node.html
  koordctl why default/web
  koordctl simulate --cluster ./dump --pods new-pods.yaml

koordctl COMMAND --help has more of them for each command.
"""

_OF_COMMANDS: Final[Mapping[str, str]] = {
    "explain": """\
  koordctl explain pod default/web                 its pod's, sandbox's and containers' values
  koordctl explain container default/web/main      one container's; an id will do too
  koordctl explain file /sys/fs/cgroup/kubepods.slice/cpu.weight
  koordctl explain subject kubeqos/BestEffort      the directory of all best-effort pods
  koordctl explain node worker-1 batch-cpu         how the manager computed a resource of a Node

Below a value stand the field that it came from, what shaped or overruled it, the value from before
koordlet, and the last writes. OBSERVED is what the kernel has.
""",
    "plan": """\
  koordctl plan --objects ./new-objects            what the daemon would write under these objects
  koordctl plan --objects ./new-objects --offline  the same before koordlet is installed
""",
    "status": """\
  koordctl status
  koordctl status -o json                          every figure, for programs

The exit status is 1 while koordlet is not ready or not healthy.
""",
    "top": """\
  koordctl top --sort pressure                     the pods that wait most come first
  koordctl top --once                              one look, for a log
  koordctl top -o json                             one look, for programs

CPU in cores, memory without page cache, THROTTLED the share of CFS periods, STALLED the share of
the last 10 seconds in which tasks waited; a dash is a value without a recent sample.
""",
    "report": """\
  koordctl report --file node.html
  koordctl report > node.html

The file has no script and needs no network. The daemon keeps the hour in memory.
""",
    "replay": """\
  koordctl replay /var/log/koordlet/recording
  koordctl replay /var/log/koordlet/recording --nodeslo new-nodeslo.yaml
  koordctl replay ./copied/recording-00000007.koordlet -o json

koordlet records with `recording.enabled: true`. The decisions are made by the strategies of this
koordctl, so a new version can be tried on what an old one saw.
""",
    "events": """\
  koordctl events
  koordctl events -o json
""",
    "why": """\
  kubectl -n koordinator-system port-forward POD 10251 &
  koordctl why default/web                         by the scheduler that the port leads to
  koordctl why default/web --kubeconfig admin.conf  by its condition, if no scheduler answers
""",
    "doctor": """\
  koordctl doctor
  koordctl doctor --config ./config.yaml           before koordlet is installed

Nothing is changed, except a scratch cgroup that is removed again. The exit status is 1 after a
failed check.
""",
    "restore": """\
  systemctl stop koordlet
  koordctl restore                                 every value as it was before koordlet
""",
}


_SIMULATE: Final = """\
what would happen to these pods (Pods, Deployments, Jobs, ... in one file):
  kubectl get nodes,pods,priorityclasses -A -o json > dump/cluster.json
  koordctl simulate --cluster dump --pods new-pods.yaml --config scheduler.yaml --scores

how many more of them fit, where, and what stops the next one:
  koordctl simulate --cluster dump --pods new-pods.yaml --config scheduler.yaml --capacity

where all pods would be under another configuration, and which would have no node:
  koordctl simulate --cluster dump --config packed.yaml --against scheduler.yaml

from the cluster itself, which is only read, with the configuration that it has:
  kubectl -n koordinator-system get configmap koord-scheduler-config -o yaml > scheduler.yaml
  koordctl simulate --cluster kubeconfig --pods new-pods.yaml --config scheduler.yaml

Add what the configuration looks at to a dump, by kubectl get TYPE -A -o json > dump/TYPE.json:
nodemetrics, noderesourcetopologies, devices, podgroups, replicasets, statefulsets, services,
namespaces.
Equal input and seed give equal answers. The exit status is 1 if a pod gets no node.
"""


def epilog(command: str) -> str:
    """Return the end of a command's help."""
    return _SIMULATE if command == "simulate" else f"examples:\n{_OF_COMMANDS[command]}"
