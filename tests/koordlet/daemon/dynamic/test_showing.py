"""`/top` and `/history` of a running daemon, on the simulated kernel."""

from __future__ import annotations

from typing import Any

from apis.keys import ANNOTATION_NODE_RESERVATION
from koordctl.report import page
from koordctl.top import screen
from koordlet.prediction.peak import Both, Prediction, Predictions
from tests.koordlet.daemon.bed import ONE_CPU, SLO, node, node_object, run, until


def test_a_running_daemon_shows_its_pods_classes_and_strategies() -> None:
    async def test() -> None:
        # A report would put its own prediction into the place of the one below.
        async with node(reports={"nodeMetric": False}) as n:
            manifest = node_object("1.25")
            manifest["metadata"]["annotations"][ANNOTATION_NODE_RESERVATION] = (
                '{"reservedCPUs":"0"}'
            )
            n.put({**SLO, "spec": {"cpuBurstStrategy": {"policy": "auto"}}}, manifest)
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running() as daemon:
                await n.run_pod(pod)
                await n.create(pod, "c1")
                showing = daemon.parts.showing
                # Before the first point, which takes two rounds of measurements.
                daemon.parts.reporting.predictions = Predictions(
                    by_pod=Prediction(Both(), Both(2000, 1 << 30)),
                    by_class=Prediction(Both(), Both(2500, 1 << 29)),
                )

                look: dict[str, Any] = {}

                def shown() -> bool:
                    look.update(showing.top())
                    return look["measured"] and any(
                        each["cpu"] is not None for each in look["pods"]
                    )

                await until("a look with a measured pod", shown)
                assert (await n.ask("GET", "/top"))[0] == 200
                [row] = [each for each in look["pods"] if each["uid"] == pod.uid]
                assert row["cpu"] >= 0 and row["memory"] >= 0
                assert look["node"]["cpu"]["capacity"] == len(n.kernel.online_cpus)
                assert {each["name"] for each in look["strategies"]} >= {"CPUEvict"}
                cpus = [cpu for each in look["topology"]["nodes"] for cpu in each["cpus"]]
                assert {cpu["id"] for cpu in cpus} == set(n.kernel.online_cpus)
                owners = {cpu["id"]: [each["name"] for each in cpu["owners"]] for cpu in cpus}
                assert owners.pop(0) == ["node reservation"] and not any(owners.values())
                assert "node reservation 0, shared 1" in screen(look)
                assert f"{row['namespace']}/{row['name']}" in screen(look)
                await until("a point", lambda: showing.history()["times"])
                status, history = await n.ask("GET", "/history")
                assert status == 200
                assert len(history["times"]) == 1  # the next one is due 10 s later
                assert "cpu.node" in history["series"]
                assert history["series"]["cpu_burst_raised_quotas"] == [0.0]
                assert history["series"]["predicted.cpu.prod"] == [2.5]
                assert history["series"]["predicted.memory.prod"] == [float(1 << 30)]
                assert "Strategies" in page(history, look)

    run(test)


def test_without_measurements_the_look_says_so() -> None:
    async def test() -> None:
        async with node(measuring={"enabled": False}) as n, n.running():
            status, look = await n.ask("GET", "/top")
            assert status == 200 and look["measured"] is False
            assert "koordctl status" in screen(look)
            assert (await n.ask("GET", "/history"))[1]["times"] == []

    run(test)
