"""Standing claims in a decision: composed with the policies' claims, and never cached."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from apis.qos import KubeQoS
from hooks.claim import Claim, Op, Rank
from hooks.engine import Engine
from hooks.facts import NodeInputs
from hooks.policy import Policy, never
from hooks.standing import Claims, Standing, differing, merged, renewed, still_lifted
from hooks.subject import ContainerSubject, Level, Requested, make_pod
from linux.resources import UNLIMITED, Resource

_POD = make_pod(
    namespace="default",
    name="web-0",
    uid="u0",
    labels={},
    annotations={},
    kube_qos=KubeQoS.BESTEFFORT,
)
_CONTAINER = ContainerSubject(
    pod=_POD, name="main", id="c0", requested=Requested(cpu_shares=2, cfs_quota_us=200_000)
)
_QUOTA = (Resource.CPU_CFS_QUOTA, "")
_CPUS = (Resource.CPUSET_CPUS, "")


def _claim(
    resource: Resource,
    value: int | CpuSet,
    policy: str,
    *,
    op: Op = Op.SET,
    rank: int = Rank.DEFAULT,
    factor: float = 1.0,
) -> Claim:
    return Claim(
        resource=resource,
        value=value,
        policy=policy,
        reason="test",
        source="test",
        op=op,
        rank=rank,
        factor=factor,
    )


def _engine(*claims: Claim) -> Engine:
    policy = Policy(
        name="static",
        gate="Static",
        gate_default=True,
        summary="",
        parse=lambda inputs: inputs,
        claims={Level.CONTAINER: lambda rule, subject: claims},
        individual=never,
    )
    return Engine.build([policy], NodeInputs())


def test_a_standing_claim_outranks_a_policys_and_leaves_other_outcomes_as_they_are() -> None:
    engine = _engine(
        _claim(Resource.CPU_CFS_QUOTA, 150_000, "static"),
        _claim(Resource.CPU_SHARES, 512, "static"),
    )
    plain = engine.decide(_CONTAINER)
    claim = _claim(Resource.CPU_CFS_QUOTA, 300_000, "cpu-burst", rank=Rank.EMERGENCY)
    decision = engine.decide(_CONTAINER, standing=(claim,))
    assert decision.value(Resource.CPU_CFS_QUOTA) == 300_000
    assert [each.policy for each in decision.outcomes[_QUOTA].losers] == ["static"]
    key = (Resource.CPU_SHARES, "")
    assert decision.outcomes[key] is plain.outcomes[key]


def test_a_standing_claim_is_not_remembered_by_shape() -> None:
    engine = _engine(_claim(Resource.CPU_CFS_QUOTA, 150_000, "static"))
    claim = _claim(Resource.CPU_CFS_QUOTA, 300_000, "cpu-burst", rank=Rank.EMERGENCY)
    assert engine.decide(_CONTAINER, standing=(claim,)).value(Resource.CPU_CFS_QUOTA) == 300_000
    assert engine.decide(_CONTAINER).value(Resource.CPU_CFS_QUOTA) == 150_000
    assert engine.decide(_CONTAINER, standing=(claim,)).value(Resource.CPU_CFS_QUOTA) == 300_000


def test_a_normalised_quota_stays_divided_under_a_standing_claim() -> None:
    engine = _engine(_claim(Resource.CPU_CFS_QUOTA, 0, "normalization", op=Op.DIVIDE, factor=2.0))
    assert engine.decide(_CONTAINER).value(Resource.CPU_CFS_QUOTA) == 100_000
    claim = _claim(Resource.CPU_CFS_QUOTA, 300_000, "cpu-burst", rank=Rank.EMERGENCY)
    decision = engine.decide(_CONTAINER, standing=(claim,))
    assert decision.value(Resource.CPU_CFS_QUOTA) == 150_000


def test_claims_of_a_class_reach_every_container_of_it_beside_its_own() -> None:
    pool = _claim(Resource.CPUSET_CPUS, CpuSet({0, 1, 2, 3}), "static")
    narrowed = _claim(Resource.CPUSET_CPUS, CpuSet({2, 3, 4}), "cpu-suppress", op=Op.WITHIN)
    own = _claim(Resource.CPU_CFS_QUOTA, 50_000, "cpu-burst")
    standing = merged(
        [
            Standing(by_class={(Level.CONTAINER, KubeQoS.BESTEFFORT): (narrowed,)}),
            Standing(by_subject={_CONTAINER.key: (own,)}),
        ]
    )
    decision = _engine(pool).decide(_CONTAINER, standing=standing.of(_CONTAINER))
    assert decision.outcomes[_CPUS].value == CpuSet({2, 3})
    assert decision.outcomes[_QUOTA].value == 50_000
    other = ContainerSubject(
        pod=make_pod(
            namespace="default",
            name="web-1",
            uid="u1",
            labels={},
            annotations={},
            kube_qos=KubeQoS.BURSTABLE,
        ),
        name="main",
        id="c1",
    )
    assert standing.of(other) == ()


def _some(shares: int) -> Claims:
    """Claims that are equal to others with the same shares, and never the same object."""
    return (_claim(Resource.CPU_SHARES, shares, "cpu-suppress"),)


_STANDINGS = st.builds(
    lambda own, of_class: Standing(
        {f"container/{key}": _some(shares) for key, shares in own.items()},
        {} if of_class is None else {(Level.CONTAINER, KubeQoS.BESTEFFORT): _some(of_class)},
    ),
    st.dictionaries(st.sampled_from(["c0", "c1", "c2"]), st.integers(2, 4)),
    st.none() | st.integers(2, 3),
)


@given(_STANDINGS, _STANDINGS)
def test_what_differs_between_two_standings_is_seen_by_identity(
    before: Standing, wanted: Standing
) -> None:
    now = renewed(before, wanted)
    assert now == wanted
    assert (now is before) is (wanted == before)
    differ = differing(before, now)
    assert (differ is None) is (before.by_class != now.by_class)
    for name in ("c0", "c1", "c2"):
        container = ContainerSubject(pod=_POD, name="main", id=name)
        seen = differ is None or container.key in differ
        assert seen or now.of(container) == before.of(container)
        if differ is not None:
            assert seen is (now.of(container) != before.of(container))


_LIFTED = _claim(Resource.CPU_CFS_QUOTA, UNLIMITED, "cpu-suppress", rank=Rank.EMERGENCY)
_OF_CONTAINERS = (Level.CONTAINER, KubeQoS.BESTEFFORT)


def test_quotas_of_new_containers_alone_stay_lifted_beyond_the_claims() -> None:
    others = _some(3)
    before = Standing(
        {"kubeqos/BestEffort": (_claim(Resource.CPU_CFS_QUOTA, 100_000, "cpu-suppress"),)},
        {_OF_CONTAINERS: (*_some(2), _LIFTED), (Level.POD, KubeQoS.BESTEFFORT): (_LIFTED,)},
    )
    assert still_lifted(before, Standing()) == Standing(by_class={_OF_CONTAINERS: (_LIFTED,)})
    now = Standing({}, {_OF_CONTAINERS: others})
    assert still_lifted(before, now).by_class == {_OF_CONTAINERS: (*others, _LIFTED)}
    assert still_lifted(now, Standing()) == Standing()
    assert still_lifted(before, before) is before


def test_the_claims_of_one_strategy_alone_stay_the_same_object() -> None:
    one = Standing({_CONTAINER.key: _some(2)})
    assert merged([Standing(), one, Standing()]) is one
