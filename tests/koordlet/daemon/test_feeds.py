"""The objects of the directory and of the API server, as the rules have them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from koordctl.status import status_text
from koordlet.daemon.serving.readings import DaemonReadings
from koordlet.exposition.metrics import Registries
from koordlet.sources.apiserver import KEPT_FILE
from tests.answering import answering
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


def test_a_kubelet_that_is_lost_is_shown_with_the_age_of_its_last_list() -> None:
    async def test() -> None:
        with ExitStack() as kubelet:
            port, _, _ = kubelet.enter_context(answering(200, b'{"items": []}'))
            settings = {"enabled": True, "readOnly": True, "readOnlyPort": port}
            async with node(kubelet=settings) as n, n.running() as daemon:
                (source,) = daemon.parts.feeds.statuses
                await until("the list", lambda: source.fetches)
                kubelet.close()
                daemon.parts.feeds.fetch_soon("kubelet")
                await until("the failure", lambda: source.failures)
                _, answer = await n.ask("GET", "/status")
                text = Registries.text(Registries(DaemonReadings(daemon.parts)).internal).decode()
            (shown,) = answer["sources"]
            assert shown["problem"] and shown["ageSeconds"] >= 0
            (line,) = (one for one in text.splitlines() if "koordlet_source_age_seconds{" in one)
            name, _, age = line.partition(" ")
            assert name == 'koordlet_source_age_seconds{source="kubelet"}' and float(age) > 0
            shown["ageSeconds"] = 40.0
            lines = " ".join(status_text(answer).split())
            assert f"{shown['problem']}; last answer 40s ago" in lines
            shown["ageSeconds"] = None
            assert "last answer" not in status_text(answer)

    run(test)
