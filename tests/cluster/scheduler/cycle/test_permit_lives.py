"""Random lives of gangs on a small cluster: all or nothing, and nothing waits for ever."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.scheduler.configuration.koordinator_arguments import GangMatchPolicy
from cluster.scheduler.cycle.events import POD, Action, ClusterEvent, EventTable, Registration
from cluster.scheduler.cycle.permit import Decisions, Permit, Wanted, gang_gate
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.tables.gang_definitions import GangDefinition, GangMode
from cluster.scheduler.tables.gangs import Gangs, Step
from tests.cluster.scheduler.pending import FakeShape, Pod, pending

GANGS = ("g", "h", "i")
SHAPES = ("a", "b")
LONGEST_WAIT_S = 2000.0

names = st.integers(0, 9).map(str)
gangs = st.sampled_from(("", *GANGS))
definitions = st.builds(
    lambda name, minimum, mode, policy, wait_s, others: GangDefinition(
        id=name,
        min_member=minimum,
        total=minimum,
        mode=mode,
        wait_s=wait_s,
        group=tuple(sorted({name, *others})),
        match_policy=policy,
    ),
    st.sampled_from(GANGS),
    st.integers(1, 4),
    st.sampled_from(GangMode),
    st.sampled_from(GangMatchPolicy),
    st.sampled_from((5.0, LONGEST_WAIT_S)),
    st.sets(st.sampled_from(GANGS), max_size=1),
)


def _sets(wanted: tuple[Wanted[FakeShape], ...]) -> list[tuple[Wanted[FakeShape], set[Pod]]]:
    """Return what gangs want with their pods as sets, whose order means nothing."""
    return [(replace(each, pods=()), set(each.pods)) for each in wanted]


def _needs_others(cluster: Cluster, uid: str) -> bool:
    gang = cluster.gangs.of(uid)
    if gang is None or cluster.gangs.may_skip_group(gang):
        return False
    return sum(each.least for each in cluster.permit.unbound(uid)) > 1


class Cluster:
    """A scheduler with rooms for pods of each shape, and what it decided."""

    def __init__(self, room: int = 1) -> None:
        self.now = 0.0
        self.gangs = Gangs()
        self.queue: SchedulingQueue[FakeShape] = SchedulingQueue(
            EventTable({"Fit": [Registration(POD, Action.DELETE)]}), gates=[gang_gate(self.gangs)]
        )
        self.permit = Permit(self.queue, self.gangs)
        self.room = dict.fromkeys(SHAPES, room)
        self.pods: dict[str, Pod] = {}
        self.placed: dict[str, str] = {}
        """UID -> shape of every pod that has a node: it waits, is being bound, or is bound."""
        self.waiting: dict[str, float] = {}
        """UID -> the latest time until which it may wait."""
        self.binding: set[str] = set()
        self.bound: set[str] = set()

    def apply(self, decisions: Decisions) -> None:
        """Do what the decisions say, and check that they may say it."""
        for decision in decisions:
            for uid in decision.allow:
                del self.waiting[uid]
                self.binding.add(uid)
            for uid in decision.allow:
                self.check_group(uid)
            for uid in decision.give_back:
                del self.waiting[uid]
                self.free(self.placed.pop(uid), decision.undoes, decision.gangs)
            assert not set(decision.held_up) & set(self.placed)
            assert bool(decision.message) == bool(decision.give_back or decision.held_up)

    def free(self, shape: str, undoes: int = 0, gangs: tuple[str, ...] = ()) -> None:
        self.room[shape] += 1
        event = ClusterEvent(POD, Action.DELETE, undoes=undoes, gangs=gangs)
        self.queue.cluster_event(event, self.now)

    def check_group(self, uid: str) -> None:
        """A pod may be bound when each gang of its group has enough with a node."""
        gang = self.gangs.get(self.pods[uid].gang)
        if gang is None:
            assert not self.pods[uid].gang
            return
        assert gang.definition is not None
        group = [self.gangs.get(name) for name in gang.definition.group]
        for other in group:
            assert other is not None and other.definition is not None
            members = [u for u, pod in self.pods.items() if pod.gang == other.id]
            count = len([u for u in members if u in self.waiting or u in self.binding])
            policy = other.definition.match_policy
            if policy is GangMatchPolicy.WAITING_AND_RUNNING:
                count += len([u for u in members if u in self.bound])
            once = policy is GangMatchPolicy.ONCE_SATISFIED and any(
                one.once_satisfied for one in self.gangs.peers(other)
            )
            assert once or count >= other.definition.min_member

    def step(self) -> bool:
        """Try one pod. Returns whether there was one."""
        pod = self.permit.pop(self.now)
        if pod is None:
            return False
        shape = pod.shape.name
        if self.room[shape] > 0:
            self.room[shape] -= 1
            self.placed[pod.uid] = shape
            gang = self.gangs.get(pod.gang)
            wait_s = gang.definition.wait_s if gang is not None and gang.definition else 0.0
            self.waiting[pod.uid] = self.now + wait_s
            self.apply(self.permit.placed(pod.uid, self.now))
        else:
            self.apply(self.permit.refused(pod.uid, {"Fit"}, "full", self.now))
        return True

    def bind(self, uid: str) -> None:
        self.binding.discard(uid)
        self.bound.add(uid)
        self.apply(self.permit.bound(uid, self.now))

    def run(self) -> None:
        """Try pods and bind those that are allowed until nothing more happens."""
        for _ in range(400):
            worked = self.step()
            for uid in sorted(self.binding):
                self.bind(uid)
                worked = True
            if not worked:
                return
        raise AssertionError("pods are tried again and again although nothing changed")


class GangLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()

    @initialize(each=st.tuples(definitions, definitions))
    def begin(self, each: tuple[GangDefinition, GangDefinition]) -> None:
        for definition in each:
            self.define(definition)

    @rule(name=names, shape=st.sampled_from(SHAPES), defines=st.none() | definitions)
    def add(self, name: str, shape: str, defines: GangDefinition | None) -> None:
        c = self.cluster
        if name in c.placed:
            return
        gang = ("g", "g", "h", "g", "h", "i", "")[int(name) % 7]
        if defines is not None and defines.id != gang:
            defines = None
        pod = pending(name, shape, gang=gang, created=c.now)
        c.pods[name] = pod
        c.apply(c.permit.add(pod, c.now, defines=defines))

    @precondition(lambda self: self.cluster.waiting)
    @rule(data=st.data(), gang=gangs)
    def change_the_gang_of_a_waiting_pod(self, data: st.DataObject, gang: str) -> None:
        c = self.cluster
        name = data.draw(st.sampled_from(sorted(c.waiting)))
        c.pods[name] = pending(name, c.placed[name], gang=gang, created=c.now)
        c.apply(c.permit.add(c.pods[name], c.now))

    @rule(name=names)
    def delete(self, name: str) -> None:
        c = self.cluster
        if c.pods.pop(name, None) is None:
            return
        c.waiting.pop(name, None)
        c.binding.discard(name)
        c.bound.discard(name)
        c.apply(c.permit.gone(name, c.now))
        if name in c.placed:
            c.free(c.placed.pop(name))

    @rule(definition=definitions)
    def define(self, definition: GangDefinition) -> None:
        self.cluster.apply(self.cluster.permit.define(definition, self.cluster.now))

    @rule(gang=st.sampled_from(GANGS))
    def undefine(self, gang: str) -> None:
        self.cluster.apply(self.cluster.permit.undefine(gang, self.cluster.now))

    @rule(count=st.integers(1, 8))
    def schedule(self, count: int) -> None:
        for _ in range(count):
            self.cluster.step()

    @rule(name=names)
    def fail(self, name: str) -> None:
        """An error in the cycle, or of the binding."""
        c = self.cluster
        if name in c.binding:
            c.binding.discard(name)
        elif name in c.waiting:
            del c.waiting[name]
        else:
            return
        undoes = c.queue.order(name)
        c.apply(c.permit.failed(name, "an error", c.now))
        c.free(c.placed.pop(name), undoes)

    @precondition(lambda self: self.cluster.binding)
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        self.cluster.bind(data.draw(st.sampled_from(sorted(self.cluster.binding))))

    @rule(shape=st.sampled_from(SHAPES))
    def add_room(self, shape: str) -> None:
        self.cluster.free(shape)

    @rule(seconds=st.sampled_from((0.5, 7.0, 20.0)))
    def wait(self, seconds: float) -> None:
        c = self.cluster
        c.now += seconds
        c.apply(c.permit.expire(c.now))

    @invariant()
    def queue_gangs_and_nodes_agree(self) -> None:
        c = self.cluster
        for uid, pod in c.pods.items():
            place, step = c.queue.state_of(uid), c.gangs.step(uid)
            flying = uid in c.waiting or uid in c.binding
            assert (place is QueueState.IN_FLIGHT) == flying
            assert (place is None) == (uid in c.bound)
            assert (step is None) == (not pod.gang)
            if pod.gang:
                assert (step is Step.WAITING) == (uid in c.waiting)
                assert (step is Step.BINDING) == (uid in c.binding and step is not Step.PENDING)
                assert (step is Step.BOUND) == (uid in c.bound)
            else:
                assert uid not in c.waiting
        assert set(c.placed) == set(c.waiting) | c.binding | c.bound
        assert len(c.queue) == len(c.pods) - len(c.bound)

    @invariant()
    def what_gangs_want_is_as_of_now(self) -> None:
        c = self.cluster
        for uid in c.pods:
            # The same without anything kept.
            fresh = Permit(c.queue, c.gangs).wanted(uid)
            assert _sets(c.permit.wanted(uid)) == _sets(fresh)
            assert c.permit.needs_others(uid) == _needs_others(c, uid)

    @invariant()
    def the_end_of_the_next_wait_is_known(self) -> None:
        c = self.cluster
        assert c.permit.next_time() == min(c.waiting.values(), default=None)

    @invariant()
    def no_gang_waits_when_nothing_of_it_is_left_to_be_tried(self) -> None:
        c = self.cluster
        for uid in c.waiting:
            gang = c.gangs.of(uid)
            assert gang is not None
            assert c.queue.untried(gang.group) > 0

    def teardown(self) -> None:
        """With room for all and small gangs every pod is bound, whatever happened before."""
        c = self.cluster
        c.run()
        for _ in range(3):  # errors are waited out, and what remains does not fit
            c.now += 10
            c.apply(c.permit.expire(c.now))
            c.run()
        for name in GANGS:
            c.apply(
                c.permit.define(
                    GangDefinition(
                        id=name,
                        min_member=0,
                        total=0,
                        mode=GangMode.STRICT,
                        wait_s=60.0,
                        group=(name,),
                        match_policy=GangMatchPolicy.ONCE_SATISFIED,
                    ),
                    c.now,
                )
            )
        for shape in SHAPES:
            for _ in range(12):
                c.free(shape)
        for _ in range(3):
            c.now += 11
            c.apply(c.permit.expire(c.now))
            c.run()
        assert c.bound == set(c.pods)
        assert len(c.queue) == 0
        assert c.permit.next_time() is None


TestGangLives = GangLife.TestCase
TestGangLives.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


STRICT_PAIR = tuple(
    GangDefinition(
        id=name,
        min_member=2,
        total=2,
        mode=GangMode.STRICT,
        wait_s=60.0,
        group=("g", "h"),
        match_policy=GangMatchPolicy.ONLY_WAITING,
    )
    for name in ("g", "h")
)
EVENTS = (*STRICT_PAIR, *(pending(f"{gang}{n}", gang=gang) for gang in "gh" for n in range(2)))


@given(order=st.permutations(EVENTS), early=st.integers(0, len(EVENTS)))
@settings(max_examples=60, deadline=None)
def test_the_order_of_pods_and_pod_groups_does_not_matter(
    order: list[GangDefinition | Pod], early: int
) -> None:
    c = Cluster(room=0)
    c.room["plain"] = 4
    for number, event in enumerate(order):
        if number == early:
            c.run()
        if isinstance(event, GangDefinition):
            c.apply(c.permit.define(event, c.now))
        else:
            c.pods[event.uid] = event
            c.apply(c.permit.add(event, c.now))
        assert not c.bound
    c.run()
    assert c.bound == {"g0", "g1", "h0", "h1"}
