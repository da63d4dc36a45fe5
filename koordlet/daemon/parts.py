"""The composition root: makes the daemon's parts and connects them.

Nothing is started here: `koordlet.daemon.daemon` does that. A part gets others in its constructor;
where it calls back, it calls a method of `Parts`, which forwards the call. The event loop owns all
mutable state. I/O on disks and the kernel runs in the worker threads or in the reconciler's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from hooks.engine import Engine
from hooks.facts import NodeInputs, NodeMeta
from hooks.policies import BUILTIN, blkio
from hooks.standing import Standing
from hooks.subject import Pod
from koordlet.configuration.config import Config
from koordlet.configuration.gates import BEYOND_POLICIES, GATES
from koordlet.daemon.after_hooks import AfterHooks
from koordlet.daemon.after_reply import AfterReply
from koordlet.daemon.auditing import Auditing
from koordlet.daemon.background import Background
from koordlet.daemon.dynamic.dynamics import Dynamics
from koordlet.daemon.dynamic.evictions import Evictions
from koordlet.daemon.dynamic.measuring import Measuring
from koordlet.daemon.dynamic.network_qos import NetworkQos
from koordlet.daemon.dynamic.on_node import node_amounts
from koordlet.daemon.dynamic.showing import Showing
from koordlet.daemon.feeds import Feeds, awaited
from koordlet.daemon.gaps import Gaps
from koordlet.daemon.health import Health
from koordlet.daemon.node_kernel import NodeKernel
from koordlet.daemon.passes import Passes
from koordlet.daemon.reports.device_facts import DeviceFacts
from koordlet.daemon.reports.predicting import Predicting
from koordlet.daemon.reports.reporting import Reporting
from koordlet.daemon.reports.terway import Terway
from koordlet.daemon.reports.topology_facts import TopologyFacts
from koordlet.daemon.sweep import Sweep
from koordlet.decisions.decider import Decider
from koordlet.decisions.rules import Rules
from koordlet.decisions.site_policies import Site
from koordlet.decisions.site_watch import SiteWatch
from koordlet.executor.journal import FILE_NAME, Journal
from koordlet.executor.network import FILE_NAME as NETWORK_QOS
from koordlet.executor.network import Network
from koordlet.measurement.store import View
from koordlet.node.disks import with_volume_settings
from koordlet.node.host_apps import host_app_subjects
from koordlet.node.kubepods_lock import KubepodsLock
from koordlet.qos.eviction.past_file import FILE_NAME as EVICTIONS
from koordlet.qos.eviction.past_file import PastFile
from koordlet.qos.lease_file import FILE_NAME as LEASES
from koordlet.qos.lease_file import LeaseFile
from koordlet.qos.recording.recorder import Recorder
from koordlet.qos.strategies.registry import STRATEGIES
from koordlet.qos.strategy import NodeAmounts, Note, Situation
from koordlet.state import NodeState
from koordlet.state.requests_log import RequestsLog, load_requests
from koordlet.transports.nri_handler import NriHandler
from koordlet.transports.nri_link import NriLink
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.procfs import boot_id
from nri_plugin.options import Launch
from service.events import Events, Severity
from service.locks import LockHeld
from service.scheduling import schedule_beside_event_loop

_LOG = logging.getLogger("koordlet")

_WORKERS: Final = 3
"""Threads for I/O. Chosen: kubelet and the CRI may both wait for an answer, and files are read all
the same. Twice the value lets more sources wait at a time, and costs a thread's stack each."""


def gates_without_effect(config: Config) -> list[str]:
    """Return the feature gates that are on and that no part of the daemon looks at."""
    used = {policy.gate for policy in BUILTIN} | BEYOND_POLICIES
    used |= {gate for strategy in STRATEGIES for gate in strategy.gates}
    return sorted(name for name, on in config.feature_gates.items() if on and name not in used)


class Parts:
    """The parts of one daemon. Belongs to the event loop."""

    def __init__(
        self,
        config: Config,
        *,
        host: Host,
        lock: KubepodsLock | None,
        launch: Launch | None,
        background: Background,
        displaced: Callable[[LockHeld], None],
    ) -> None:
        """displaced: called when another daemon has the lock of this node's pods."""
        self.config = config
        """The configuration in force; a reload replaces it."""
        self.node_name = config.node_name
        self.started_at = time.time()
        self._started = time.monotonic()
        self.host = host
        self.background = background
        self.workers = ThreadPoolExecutor(
            max_workers=_WORKERS,
            thread_name_prefix="koordlet-io",
            initializer=schedule_beside_event_loop,
        )
        self.events = Events()
        self.audit = Auditing(config, self.workers, views=lambda: self.dynamics.views)
        self._boot = boot_id(host)
        self.journal = Journal(f"{config.run_dir}/{FILE_NAME}", boot=self._boot)
        requests_path = f"{config.run_dir}/requests.log"
        self.state = NodeState(remembered=load_requests(requests_path), awaited=awaited(config))
        self.requests = RequestsLog(requests_path, self.state.all_remembered)
        self.site = Site(config, self.events) if config.site_policies.enabled else None
        self.after_reply = AfterReply()
        self.hook_decider = Decider(
            self.events,
            site_guard=self.site.hook_guard if self.site else None,
            later=self.after_reply.later,
        )
        self.repair_decider = Decider(
            self.events, site_guard=self.site.repair_guard if self.site else None
        )
        self.rules = Rules(
            NodeInputs(node=NodeMeta(name=config.node_name), settings=config.settings()),
            self.events,
            self._engine_swapped,
            delay=config.intervals.rebuild_delay,
        )
        self.site_watch = (
            SiteWatch(
                self.site,
                config,
                rules=self.rules,
                deciders=(self.hook_decider, self.repair_decider),
                events=self.events,
                workers=self.workers,
            )
            if self.site
            else None
        )
        self.kernel = NodeKernel(
            config,
            host,
            rules=self.rules,
            events=self.events,
            workers=self.workers,
            changed=self._layout_changed,
        )
        self._gaps = Gaps()
        self.passes = Passes(
            config,
            host=host,
            state=self.state,
            rules=self.rules,
            journal=self.journal,
            decide=self.repair_decider.repair,
            lock=lock,
            catch_up=self.after_reply.catch_up,
            published=self._published,
            displaced=displaced,
            cpus_changed=self._cpus_changed,
            gaps=self._gaps,
            followed=self.hook_decider.followed,
            written=self.audit.wrote if self.audit.log is not None else None,
        )
        self.feeds = Feeds(
            config,
            state=self.state,
            rules=self.rules,
            events=self.events,
            workers=self.workers,
            surroundings=self,
        )
        self._make_dynamic()
        self._make_reports()
        self._make_transports(launch)

    def _make_dynamic(self) -> None:
        """Make what measures, steps strategies and evicts."""
        config = self.config
        self.evictions = Evictions(
            config,
            events=self.events,
            note=lambda note: self._noted("evictor", note),
            kept=PastFile(
                f"{config.run_dir}/{EVICTIONS}",
                boot=self._boot,
                dry_run=config.qos.evict_dry_run,
            ),
            workers=self.workers,
        )
        self.recorder = (
            Recorder(
                config.recording.directory, most_bytes=config.recording.max_disk_space_mb << 20
            )
            if config.recording.enabled
            else None
        )
        self.dynamics = Dynamics(
            config,
            STRATEGIES,
            state=self.state,
            inputs=lambda: self.rules.inputs,
            node=lambda: self.feeds.objects.node,
            machine=lambda: self.kernel.machine,
            events=self.events,
            claimed=self._claimed,
            noted=self._noted,
            record=self._record,
            leases=LeaseFile(f"{config.run_dir}/{LEASES}", boot=self._boot),
            workers=self.workers,
            short=self.evictions.evictor.submit,
        )
        self.measuring = Measuring(
            config,
            self.host,
            boot=self._boot,
            layout=lambda: self.kernel.layout,
            views=lambda: self.dynamics.views,
            host_apps=lambda: self.dynamics.host_apps,
            settings=lambda: self.rules.inputs.settings,
            after_round=self._round,
            rest=self._gaps.wait,
            workers=self.workers,
        )
        self.showing = Showing(
            config.node_name,
            dynamics=self.dynamics,
            machine=lambda: self.kernel.machine,
            inputs=lambda: self.rules.inputs,
            predictions=lambda: self.reporting.predictions,
            interval_s=float(config.measuring.interval),
        )
        self.network_qos = NetworkQos(
            config,
            host=self.host,
            inputs=lambda: self.rules.inputs,
            pods=lambda: self.dynamics.views,
            layout=lambda: self.kernel.layout,
            listed=lambda: self.state.complete,
            events=self.events,
            noted=lambda note: self._noted(NETWORK_QOS, note),
            network=Network(f"{config.run_dir}/{NETWORK_QOS}"),
        )

    def _make_reports(self) -> None:
        """Make what reports the node to the cluster and to agents beside koordlet."""
        config, host = self.config, self.host
        self.predicting = Predicting(
            config,
            measurements=self.measuring.view,
            pods=self._pods,
            host_apps=lambda: self.dynamics.host_apps,
            node=lambda: self.feeds.objects.node,
            node_amounts=self._node_amounts,
            events=self.events,
            workers=self.workers,
        )
        self.reporting = Reporting(
            config,
            measurements=self.measuring.view,
            pods=self._pods,
            host_apps=lambda: self.dynamics.host_apps,
            gpus=self.measuring.gpus,
            gate=self._gate,
            keep=self.measuring.keep_for_reports,
            topology=TopologyFacts(
                config,
                host,
                machine=lambda: self.kernel.machine,
                pods=self._pods,
                node=lambda: self.feeds.objects.node,
                kubelet=lambda: self.feeds.kubelet,
                gate=self._gate,
                listed=lambda: self.state.complete,
            ).gather,
            devices=DeviceFacts(
                config, host, gpus=self.measuring.gpu_answer, gate=self._gate
            ).gather,
            predicting=self.predicting,
            events=self.events,
            workers=self.workers,
        )
        self.terway = Terway(
            config,
            inputs=lambda: self.rules.inputs,
            pods=self._pods,
            layout=lambda: self.kernel.layout,
            listed=lambda: self.state.complete,
            events=self.events,
        )

    def _make_transports(self, launch: Launch | None) -> None:
        """Make what brings pods and containers in, and the watch over the daemon's health."""
        config = self.config
        self.sweep = Sweep(
            state=self.state, host=self.host, workers=self.workers, changed=self.state_changed
        )
        self.after_hooks = AfterHooks(
            host=self.host,
            state=self.state,
            rules=self.rules,
            journal=self.journal,
            passes=self.passes,
            later=self.after_reply.later,
            dynamics=self.dynamics,
            feeds=self.feeds,
            events=self.events,
            nri_protects=lambda: self.nri.protects,
        )
        handler = NriHandler(
            state=self.state,
            decider=self.hook_decider,
            events=self.events,
            requests=self.requests,
            surroundings=self.after_hooks,
        )
        self.nri = NriLink(config, handler, launch=launch)
        self.health = Health(
            state=self.state,
            nri=self.nri,
            passes=self.passes,
            journal=self.journal,
            events=self.events,
            pass_interval_s=config.intervals.reconcile,
        )

    # --- measuring -----------------------------------------------------------------------------

    async def start_measuring(self) -> None:
        """Start the sampling thread, in which the strategies run too."""
        self.dynamics.start()
        machine = self.kernel.machine
        if not self.config.measuring.enabled or machine is None:
            return
        await self.measuring.start(cpus=len(machine.cpus))

    def _round(self, measured: View) -> None:
        """Use a round's measurements. In the sampling thread."""
        self.dynamics.step(measured)
        self.showing.round(measured)

    def _record(self, situation: Situation) -> None:
        """Record what the strategies see, where this is wanted. In the sampling thread."""
        if self.recorder is not None:
            self.recorder.round(situation)

    def _pods(self) -> list[tuple[Pod, bool]]:
        """Return the pods, each with whether its deletion has begun. Any thread."""
        return [(view.pod, view.deleting) for view in self.dynamics.views]

    def _gate(self, name: str) -> bool:
        """Return whether a feature gate is on. Any thread."""
        return self.rules.inputs.settings.gate(name, default=GATES[name].default)

    def _node_amounts(self) -> NodeAmounts | None:
        """Return what the node has, once that is known. Any thread."""
        machine = self.kernel.machine
        return None if machine is None else node_amounts(machine, self.feeds.objects.node)

    async def stop_measuring(self) -> None:
        """End the sampling thread after the round in progress."""
        self.dynamics.stop()
        if not await self.measuring.stop():
            return
        await self.dynamics.keep_last()
        if self.recorder is not None:
            self.recorder.close()

    # --- for several parts ---------------------------------------------------------------------

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def engine(self) -> Engine:
        return self.rules.engine

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self.background.spawn(name, work)

    def state_changed(self, reason: str) -> None:
        self.passes.state_changed(reason)
        self.dynamics.state_changed()

    # --- from the feeds and the rules ----------------------------------------------------------

    def objects_changed(self) -> None:
        self._place_host_apps()
        self.reporting.look_again()
        self.state_changed("objects")

    def _engine_swapped(self, engine: Engine) -> None:
        self._place_host_apps()
        self.dynamics.settings_changed(engine.inputs.settings)
        self.state_changed("rules")

    # --- from the kernel -----------------------------------------------------------------------

    def _layout_changed(self, layout: Layout) -> None:
        self.state.set_layout(layout)
        self._place_host_apps()
        self.passes.set_layout(layout, burst_above_quota=self.kernel.burst_above_quota)
        self.state_changed("layout")

    def _place_host_apps(self) -> None:
        layout = self.kernel.layout
        if layout is None:
            return
        subjects, errors = host_app_subjects(self.rules.inputs.slo.host_applications, layout)
        for error in errors:
            self.events.add("bad-object", error.obj, str(error), severity=Severity.ERROR)
        self.state.set_host_apps(subjects)

    # --- from the passes -----------------------------------------------------------------------

    def _published(self) -> None:
        layout = self.kernel.layout
        if layout is not None and not layout.kubepods and self.state.counts[0]:
            self.spawn("kubepods", self.find_kubepods())
        if self._follow_volumes():
            self.spawn("volumes", self.kernel.look_at_volumes())

    def _follow_volumes(self) -> bool:
        """Follow the volumes that pods name; return whether they are of other pods than before."""
        pods = (view.pod for view in self.state.pod_views())
        on = self._gate(blkio.POLICY.gate)
        return self.kernel.follow_volumes(with_volume_settings(pods) if on else frozenset())

    async def look_at_volumes(self) -> None:
        """Read again where the volumes that pods name are mounted."""
        self._follow_volumes()
        await self.kernel.look_at_volumes()

    async def find_kubepods(self) -> None:
        """Find and probe the pods' root, which a node's first pod creates."""
        live = [each.cgroup for each in self.state.pod_subjects() if each.cgroup]
        await self.kernel.find_kubepods(live)

    def _cpus_changed(self) -> None:
        self.spawn("cpus", self.kernel.look_at_cpus())

    # --- from the strategies -------------------------------------------------------------------

    def _claimed(self, standing: Standing) -> None:
        """Put the strategies' claims in force. Any thread."""
        self.hook_decider.stand(standing)
        self.passes.standing_changed(standing)

    def _noted(self, strategy: str, note: Note) -> None:
        """Pass an entry of a strategy on to the audit log. Any thread."""
        self.audit.note(note.verbosity, note.reason, note.message, pod=note.obj)
        self.showing.noted(strategy, note)
