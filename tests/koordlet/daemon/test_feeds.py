"""The objects of the directory and of the API server, as the rules have them."""

from __future__ import annotations

import json
from typing import Any

from koordlet.sources.apiserver import KEPT_FILE
from tests.koordlet.daemon.bed import NODE, SLO, node, run, until


def _topology(cpus: str) -> dict[str, Any]:
    pools = json.dumps([{"socket": 0, "node": 0, "cpuset": cpus}])
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha1",
        "kind": "NodeResourceTopology",
        "metadata": {
            "name": NODE,
            "annotations": {"node.koordinator.sh/cpu-shared-pools": pools},
        },
    }


def test_the_directorys_topology_counts_before_the_servers_until_it_is_deleted() -> None:
    async def test() -> None:
        async with node(kubernetes={"enabled": True, "kubeconfig": "/no/such/file"}) as n:
            # The server does not answer: what it said last is in force.
            kept = {
                "NodeResourceTopology of the API server": _topology("0-1"),
                "NodeSLO of the API server": SLO,
            }
            (n.folder / "run" / KEPT_FILE).write_text(json.dumps(kept))
            n.put(_topology("2-3"))

            def shared() -> list[str]:
                facts = n.daemon.parts.rules.inputs.topology
                return [] if facts is None else [str(pool.cpus) for pool in facts.shared_pools]

            async with n.running():
                assert shared() == ["2-3"]
                (n.folder / "objects.d" / f"NodeResourceTopology-{NODE}.yaml").unlink()
                await until("the server's pools", lambda: shared() == ["0-1"])

    run(test)
