"""The engine: rules parsed once, faults kept where they happen, the last good rule kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from apis.errors import InputError, InputErrors
from hooks.claim import Claim, Claimed, Op
from hooks.engine import KEPT, Engine, Watch
from hooks.facts import NodeInputs, Settings
from hooks.policy import Off, OffBecause, Partial, Policy, always, never
from hooks.subject import Level, NodeSubject, Subject
from linux.resources import Resource
from tests.hooks.making import a_container, a_pod, a_pod_subject, node, values

SUBJECT = a_container(a_pod("LS"))


def _claim(name: str, value: int = 7, resource: Resource = Resource.CPU_SHARES) -> Claim:
    return Claim(resource=resource, value=value, policy=name, reason="because", source="a test")


def _policy(name: str, claims: Any = None, parse: Any = None, *, gate: bool = True) -> Policy:
    return Policy(
        name=name,
        gate=name,
        gate_default=gate,
        summary="for the test",
        parse=parse or (lambda inputs: "rule"),
        claims={Level.CONTAINER: claims or (lambda rule, subject: [_claim(name)])},
    )


def _bad(problem: str = "no good") -> InputError:
    return InputError(obj="Pod default/web", field="metadata.x", value="y", problem=problem)


def _raises(error: Exception) -> Any:
    def function(*_: Any) -> Iterable[Claim]:
        raise error

    return function


def _build(*policies: Policy, inputs: NodeInputs | None = None, previous: Any = None) -> Engine:
    return Engine.build(policies, inputs or node(), previous=previous)


def test_a_gate_that_is_off_comes_before_every_other_reason() -> None:
    on, off = _policy("On"), _policy("Off", gate=False)
    engine = _build(on, off)
    assert engine.state("On") is not None
    state = engine.state("Off")
    assert state is not None and state.off == Off(OffBecause.GATE, "feature gate Off=false")
    assert [claim.winner.policy for claim in engine.decide(SUBJECT).outcomes.values()] == ["On"]
    turned = _build(on, off, inputs=node(gates={"On": False, "Off": True}))
    assert [o.winner.policy for o in turned.decide(SUBJECT).outcomes.values()] == ["Off"]
    assert engine.state("Nobody") is None


def test_a_policy_that_is_off_by_the_nodeslo_claims_nothing() -> None:
    reason = Off(OffBecause.NODESLO, "not asked for")
    engine = _build(_policy("A", parse=lambda inputs: reason))
    state = engine.state("A")
    assert state is not None and state.off == reason and not state.active
    assert engine.decide(SUBJECT).outcomes == {}


@pytest.mark.parametrize(
    ("error", "input_error"),
    [
        (_bad(), True),
        (InputErrors([_bad("first"), _bad("second")]), True),
        (KeyError("x"), False),
        (ZeroDivisionError("division by zero"), False),
        (RecursionError(), False),
    ],
)
def test_a_failing_policy_costs_its_own_claims_only(error: Exception, input_error: bool) -> None:
    engine = _build(_policy("A", _raises(error)), _policy("B"))
    decision = engine.decide(SUBJECT)
    assert [outcome.winner.policy for outcome in decision.outcomes.values()] == ["B"]
    (fault,) = decision.faults
    assert (fault.policy, fault.input_error) == ("A", input_error)
    assert str(error) in fault.message if input_error else type(error).__name__ in fault.message


def test_an_error_among_the_claims_costs_nothing_but_itself() -> None:
    def claims(rule: Any, subject: Subject) -> Iterator[Claimed]:
        yield _claim("A", 1)
        yield _bad()
        yield _claim("A", 2, Resource.CPU_CFS_QUOTA)

    decision = _build(_policy("A", claims)).decide(SUBJECT)
    assert values(decision) == {"cpu.shares": 1, "cpu.cfs_quota_us": 2}
    assert [fault.message for fault in decision.faults] == [str(_bad())]


@pytest.mark.parametrize("error", [_bad(), InputErrors([_bad()]), RuntimeError("defect")])
def test_a_bad_input_keeps_the_last_good_rule_of_that_policy_alone(error: Exception) -> None:
    """Each rule is the NodeSLO's generation, so a person sees which one is in force."""
    generation = iter(range(10))

    def changing(inputs: NodeInputs) -> int:
        if inputs.settings.disable_unset_cpu_quota:
            raise error
        return 1

    good = Settings()
    bad = Settings(disable_unset_cpu_quota=True)

    def value_of(rule: int, subject: Subject) -> list[Claim]:
        return [_claim("A", rule)]

    policies = (
        _policy("A", value_of, changing),
        _policy(
            "B",
            lambda rule, subject: [_claim("B", rule, Resource.CPU_CFS_QUOTA)],
            lambda inputs: next(generation),
        ),
    )
    first = Engine.build(policies, NodeInputs(settings=good))
    second = Engine.build(policies, NodeInputs(settings=bad), previous=first)
    third = Engine.build(policies, NodeInputs(settings=bad), previous=second)
    for engine, newest in ((first, 0), (second, 1), (third, 2)):
        assert values(engine.decide(SUBJECT)) == {"cpu.shares": 1, "cpu.cfs_quota_us": newest}
    state = third.state("A")
    assert state is not None and state.active and str(error) in state.problem
    fresh = Engine.build(policies, NodeInputs(settings=bad)).state("A")
    assert fresh is not None and fresh.off is not None
    assert fresh.off.because is OffBecause.BAD_INPUT and str(error) in fresh.off.detail
    recovered = Engine.build(policies, NodeInputs(settings=good), previous=third).state("A")
    assert recovered is not None and recovered.active and recovered.problem == ""
    assert [engine.generation for engine in (first, second, third)] == [1, 2, 3]


def test_a_bad_field_costs_a_partial_rule_nothing_but_itself() -> None:
    """Each rule is (field, everything else); a bad field takes its last good value."""
    field, rest = "1", 0

    def parse(inputs: NodeInputs) -> tuple[str, int] | Partial:
        made = (field, rest)
        if field == "bad":
            return Partial(("default", rest), _bad(), lambda last: (last[0], made[1]))
        return made

    def now(previous: Engine | None) -> tuple[Engine, tuple[str, int], bool]:
        built = Engine.build([_policy("A", parse=parse)], node(), previous=previous)
        state = built.state("A")
        assert state is not None and state.active
        return built, state.rule, str(_bad()) == state.problem

    good, rule, told = now(None)
    assert (rule, told) == (("1", 0), False)
    field, rest = "bad", 1
    assert now(good)[1:] == (("1", 1), True)
    fresh, rule, told = now(None)
    assert (rule, told) == (("default", 1), True)
    rest = 2
    assert now(fresh)[1:] == (("default", 2), True)
    field = "2"
    assert now(fresh)[1:] == (("2", 2), False)


def test_a_defect_while_mending_keeps_the_last_good_rule() -> None:
    good = Engine.build([_policy("A")], node())
    broken = _policy("A", parse=lambda inputs: Partial("x", _bad(), lambda last: 1 // 0))
    state = Engine.build([broken], node(), previous=good).state("A")
    assert state is not None and state.rule == "rule" and "ZeroDivisionError" in state.problem


def test_a_rule_that_was_off_is_not_kept() -> None:
    """Off by its gate before, bad input now: there is no last good rule to go on with."""
    off = Engine.build([_policy("A", gate=False)], node())
    bad = _policy("A", parse=_raises(_bad()))
    state = Engine.build([bad], node(gates={"A": True}), previous=off).state("A")
    assert state is not None and state.off is not None
    assert state.off.because is OffBecause.BAD_INPUT


def test_policies_run_in_the_order_of_their_names() -> None:
    asked: list[str] = []

    def function(name: str) -> Any:
        def claims(rule: Any, subject: Subject) -> list[Claim]:
            asked.append(name)
            return [_claim(name)]

        return claims

    names = ["b", "C", "A", "site/x"]
    engine = _build(*(_policy(name, function(name)) for name in names))
    outcome = engine.decide(SUBJECT).outcomes[Resource.CPU_SHARES, ""]
    assert asked == sorted(names)
    assert outcome.winner.policy == "A"
    assert [claim.policy for claim in outcome.losers] == ["C", "b", "site/x"]


def test_a_policy_claims_on_its_levels_only() -> None:
    engine = _build(_policy("A"))
    assert engine.decide(a_pod_subject(a_pod())).outcomes == {}
    assert engine.decide(NodeSubject()).outcomes == {}


class _Incomparable:
    """A rule of a site's own that refuses to be compared, as a NumPy array does."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("rules", "same"),
    [
        (("rule", "rule"), True),
        (([1], [1]), True),
        (("rule", "other"), False),
        (("rule", Off(OffBecause.NODESLO)), False),
        ((_Incomparable(), _Incomparable()), False),
    ],
)
def test_a_cached_decision_outlives_its_engine_where_the_next_claims_the_same(
    rules: tuple[Any, Any], same: bool
) -> None:
    asked: list[str] = []

    def claims(rule: Any, subject: Subject) -> Iterator[Claim]:
        asked.append("")
        yield _claim("A")

    def policy(rule: Any) -> Policy:
        return replace(_policy("A", claims, lambda inputs: rule), individual=never)

    first = _build(policy(rules[0]))
    second = _build(policy(rules[1]), previous=first)
    assert second.claims_as(first, Level.CONTAINER) is same
    # At other levels neither claims anything.
    assert second.claims_as(first, Level.POD)
    decided = first.decide(SUBJECT)
    assert (second.known(SUBJECT) is decided) is same
    active = not isinstance(rules[1], Off)
    assert bool(second.decide(SUBJECT).outcomes) is active
    assert len(asked) == (1 if same or not active else 2)


def test_engines_with_other_individual_pods_share_no_decisions() -> None:
    first = _build(replace(_policy("A", _one_claim), individual=never))
    second = _build(replace(_policy("A", _one_claim), individual=always), previous=first)
    first.decide(SUBJECT)
    assert not second.claims_as(first, Level.CONTAINER)
    assert second.known(SUBJECT) is None


def _one_claim(rule: Any, subject: Subject) -> Iterator[Claim]:
    yield _claim("A")


def test_keyed_claims_do_not_meet() -> None:
    def claims(rule: Any, subject: Subject) -> Iterator[Claim]:
        for key in ("A", "B"):
            yield Claim(
                resource=Resource.ENV, key=key, value=key, policy="A", reason="r", source="s"
            )

    decision = _build(_policy("A", claims)).decide(SUBJECT)
    assert values(decision) == {"env:A": "A", "env:B": "B"}
    assert decision.value(Resource.ENV, "B") == "B" and decision.value(Resource.ENV) is None


@pytest.mark.parametrize(
    ("requested", "quota"),
    [
        ({"cfs_quota_us": 40000}, 20000),
        ({"cfs_quota_us": 40000, "cfs_period_us": 100000}, 20000),
        ({"cfs_quota_us": 40000, "cfs_period_us": 50000}, 40000),
        ({"cfs_quota_us": -1, "cfs_period_us": 50000}, -1),
        ({}, None),
    ],
)
def test_modifiers_work_on_what_was_requested_per_100_ms(
    requested: dict[str, Any], quota: int | None
) -> None:
    half = Claim(
        resource=Resource.CPU_CFS_QUOTA,
        value=0,
        policy="A",
        reason="r",
        source="s",
        op=Op.DIVIDE,
        factor=2.0,
    )
    engine = _build(_policy("A", lambda rule, subject: [half]))
    decision = engine.decide(a_container(a_pod(), **requested))
    assert decision.value(Resource.CPU_CFS_QUOTA) == quota


def test_a_guard_calls_its_policies_and_may_refuse() -> None:
    guarded: list[tuple[str, Any, str]] = []

    def guard(name: str, function: Any, rule: Any, subject: Subject) -> Iterable[Claimed]:
        guarded.append((name, rule, subject.key))
        if name == "B":
            raise TimeoutError("B took too long")
        return tuple(function(rule, subject))

    watch = Watch([], {"B": guard, "C": guard})
    decision = _build(_policy("A"), _policy("B"), _policy("C")).decide(SUBJECT, watch)
    assert guarded == [("B", "rule", SUBJECT.key), ("C", "rule", SUBJECT.key)]
    assert [(called.policy, len(called.claims)) for called in watch.calls] == [
        ("A", 1),
        ("B", 0),
        ("C", 1),
    ]
    assert all(called.took_s >= 0 for called in watch.calls)
    assert [outcome.winner.policy for outcome in decision.outcomes.values()] == ["A"]
    assert decision.faults[0].message == "TimeoutError: B took too long"


# --- input that goes bad while a pod runs ------------------------------------------------------


def _annotated(text: str) -> Any:
    return a_container(a_pod("LS", annotations={"x": text}), cfs_quota_us=100000)


def _by_annotation(rule: Any, subject: Any) -> Iterator[Claimed]:
    text = subject.pod.annotations["x"]
    if text == "bad":
        yield _bad()
        return
    yield _claim("A", int(text))
    yield Claim(
        resource=Resource.CPU_CFS_QUOTA,
        value=0,
        policy="A",
        reason="r",
        source="s",
        op=Op.DIVIDE,
        factor=2.0,
    )


def test_what_was_claimed_before_stays_in_force_while_the_input_is_bad() -> None:
    low = _policy("B", lambda rule, subject: [_claim("B", 50)])
    engine = _build(_policy("A", _by_annotation), low)
    good = engine.decide(_annotated("77"))
    bad = engine.decide(_annotated("bad"), before=good)
    assert values(bad) == values(good) == {"cpu.shares": 77, "cpu.cfs_quota_us": 50000}
    assert bad.outcomes[Resource.CPU_SHARES, ""].winner.degraded == KEPT
    assert bad.outcomes[Resource.CPU_SHARES, ""].losers[0].policy == "B"
    assert len(bad.faults) == 1
    assert engine.decide(_annotated("bad"), before=bad) == bad
    again = engine.decide(_annotated("78"), before=bad)
    assert again == engine.decide(_annotated("78"))
    assert values(engine.decide(_annotated("bad"))) == {"cpu.shares": 50}


def test_a_claim_that_can_still_be_made_is_not_taken_from_before() -> None:
    def claims(rule: Any, subject: Any) -> Iterator[Claimed]:
        if subject.pod.annotations["x"] == "bad":
            yield _bad()
            yield _claim("A", 1)
        else:
            yield _claim("A", 2)

    engine = _build(_policy("A", claims))
    before = engine.decide(_annotated("good"))
    assert values(engine.decide(_annotated("bad"), before=before)) == {"cpu.shares": 1}


def test_a_defect_keeps_nothing_and_neither_does_a_policy_that_is_off() -> None:
    good = _build(_policy("A")).decide(SUBJECT)
    assert good.outcomes
    defect = _build(_policy("A", _raises(RuntimeError("x"))))
    assert defect.decide(SUBJECT, before=good).outcomes == {}
    off = _build(_policy("A"), inputs=node(gates={"A": False}))
    assert off.decide(SUBJECT, before=good).outcomes == {}
