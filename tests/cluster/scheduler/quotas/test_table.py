"""The table of quotas: requests, uses and runtimes as pods, nodes and quotas change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.quotas.table import QuotaTable, Terminating
from cluster.scheduler.tables.quotas.tree import Sharing
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.quotas.making import PREFIX, Bed, make_quota
from tests.cluster.scheduler.quotas.oracle import Plain, runtimes


def test_quotas_divide_the_nodes_by_what_their_pods_request() -> None:
    bed = Bed("100")
    for name, least, weight in (("a", "40", "60"), ("b", "30", "40"), ("c", "10", "40")):
        bed.quota(name, {"cpu": least}, {"cpu": "100"}, weight={"cpu": weight})
    assert bed.cpus() == {"a": 0, "b": 0, "c": 0}
    bed.want("1", "a", "80")
    bed.want("2", "b", "20")
    assert bed.cpus() == {"a": 80, "b": 20, "c": 0}
    bed.want("3", "c", "60")
    assert bed.cpus() == {"a": 58, "b": 20, "c": 22}
    bed.set_cpu("200")
    assert bed.cpus() == {"a": 80, "b": 20, "c": 60}
    bed.set_cpu("100")
    bed.table.unwant("1")
    assert bed.cpus() == {"a": 0, "b": 20, "c": 60}


def test_a_request_counts_up_to_the_maximum_and_at_least_the_minimum_if_nothing_is_lent() -> None:
    bed = Bed("100")
    bed.quota("a", {"cpu": "10"}, {"cpu": "30"}, lends=False)
    bed.quota("b", {}, {"cpu": "100"})
    assert bed.cpus() == {"a": 10, "b": 0}
    bed.want("1", "a", "50")
    bed.want("2", "b", "500")
    # Of the 90 that are left, a takes 20 (its weight would give it 20.77), b the rest.
    assert bed.cpus() == {"a": 30, "b": 70}


def test_a_parent_has_what_its_children_divide() -> None:
    bed = Bed("100")
    bed.quota("left", {"cpu": "50"}, {"cpu": "60"}, labels={"is-parent": "true"})
    bed.quota("a", {"cpu": "30"}, {"cpu": "60"}, parent="left")
    bed.quota("b", {"cpu": "20"}, {"cpu": "60"}, parent="left")
    bed.quota("right", {"cpu": "50"}, {"cpu": "100"})
    for uid, quota in enumerate(("a", "b", "right")):
        bed.want(str(uid), quota, "100")
    left = bed.cpus()["left"]
    assert left == 50
    assert (bed.cpus()["a"], bed.cpus()["b"]) == (30, 20)
    bed.table.unwant("2")
    assert bed.cpus() == {"left": 60, "a": 35, "b": 25, "right": 0}


def test_minimums_are_reduced_in_proportion_where_the_parent_has_less() -> None:
    bed = Bed("100")
    bed.quota("a", {"cpu": "90"})
    bed.quota("b", {"cpu": "10"})

    def minimums() -> list[int]:
        return [bed.table.quotas[name].scaled_least()["cpu"] // 1000 for name in ("a", "b")]

    assert minimums() == [90, 10]
    bed.quota("b", {"cpu": "60"})
    assert minimums() == [60, 40]
    bed.quota("c", {"cpu": "50"})
    assert minimums() == [45, 30]
    bed.set_cpu("10")
    assert minimums() == [4, 3]
    bed.table.delete_quota("team/c")
    assert minimums() == [6, 4]


def test_a_pod_counts_in_the_request_before_and_after_it_has_a_node_and_in_the_use_after() -> None:
    bed = Bed()
    bed.quota("a")
    bed.want("1", "a", "4")
    quota = bed.table.quotas["a"]
    assert (quota.all.request["cpu"], quota.all.used["cpu"]) == (4000, 0)
    booking = bed.place("1", "a", "4")
    assert (quota.all.request["cpu"], quota.all.used["cpu"]) == (4000, 4000)
    bed.table.remove(booking)
    assert (quota.all.request["cpu"], quota.all.used["cpu"]) == (4000, 0)
    bed.table.place(booking)
    bed.table.unwant("1")
    assert (quota.all.request["cpu"], quota.all.used["cpu"]) == (4000, 4000)
    assert [each.uid for each in bed.table.pods(quota)] == ["1"]
    bed.table.remove(booking)
    assert not quota.all.request
    assert not quota.all.used
    assert not list(bed.table.pods(quota))


def test_resources_that_the_quota_does_not_limit_are_not_counted() -> None:
    bed = Bed()
    bed.quota("a", {}, {"memory": "1Gi"})
    bed.place("1", "a", "4")
    assert not bed.table.quotas["a"].all.used


def test_a_resource_that_a_quota_does_not_limit_has_no_runtime() -> None:
    bed = Bed("10")
    bed.quota("a", {}, {"cpu": "100"})
    bed.quota("b", {}, {"memory": "1Gi"})
    bed.quota("idle", {}, {"cpu": "100"})
    bed.want("1", "a", "20")
    assert bed.cpus() == {"a": 10, "b": 0, "idle": 0}


def test_forgetting_a_pending_pod_says_whether_its_request_ended() -> None:
    bed = Bed()
    bed.quota("a")
    assert not bed.table.unwant("1")
    bed.want("1", "a", "4")
    assert bed.table.unwant("1")
    assert not bed.table.unwant("1")
    bed.want("1", "a", "4")
    bed.place("1", "a", "4")
    assert not bed.table.unwant("1")


def test_a_pending_pod_that_is_edited_says_whether_its_former_request_ended() -> None:
    bed = Bed()
    bed.quota("a")
    small, large = bed.shape("a", "1"), bed.shape("a", "2")
    assert not bed.table.want("1", small)
    assert not bed.table.want("1", small)
    assert bed.table.want("1", large)
    assert bed.table.quotas["a"].all.request["cpu"] == 2000
    bed.place("1", "a", "2")
    # The booking decides what it counts with.
    assert not bed.table.want("1", small)


def test_the_version_grows_with_what_statuses_show_and_with_nothing_else() -> None:
    bed = Bed()
    booking = Booking("default/2", "2", bed.shape("a", "4"), "n0")
    node = make_node("n1", allocatable={"cpu": "1"})
    for change, grows in (
        (lambda: bed.quota("a"), True),
        (lambda: bed.quota("a"), False),
        (lambda: bed.quota("a", {"cpu": "1"}), True),
        (lambda: bed.quota("a", {"cpu": "2000"}), False),
        (lambda: bed.quota("b", {"cpu": "2000"}), True),
        (lambda: bed.want("1", "a", "4"), True),
        (lambda: bed.want("1", "a", "4"), False),
        (lambda: bed.table.place(booking), True),
        (lambda: bed.table.place(booking), False),
        (lambda: bed.table.remove(booking), True),
        (lambda: bed.table.remove(booking), False),
        (lambda: bed.table.unwant("1"), True),
        (lambda: bed.table.unwant("1"), False),
        (lambda: bed.table.set_node(1, node), True),
        (lambda: bed.table.forget_node(1), True),
        (lambda: bed.table.forget_node(1), False),
        (lambda: bed.table.delete_quota("team/a"), True),
        (lambda: bed.table.delete_quota("team/a"), False),
    ):
        before = bed.table.version
        change()
        assert (bed.table.version > before) is grows


def _quota_name(bed: Bed, namespace: str, label: str = "") -> str:
    quota = bed.table.of(bed.shape(label, "1", namespace=namespace)).quota
    return "" if quota is None else quota.name


def test_the_quota_of_a_pod_is_named_by_label_then_namespace_then_binding() -> None:
    bed = Bed()
    bed.quota("a")
    bed.quota("team")
    bed.quota("own", namespace="own")
    bed.quota("bound", annotations={"namespaces": '["x", "own"]'})
    assert _quota_name(bed, "team", "a") == "a"
    assert _quota_name(bed, "team") == "team"
    assert _quota_name(bed, "own") == "own"
    assert _quota_name(bed, "x") == "bound"
    assert _quota_name(bed, "y") == "koordinator-default-quota"
    assert _quota_name(bed, "y", "unknown") == "koordinator-default-quota"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"annotations": {"namespaces": '["x"]'}}, {"annotations": {"namespaces": '["y"]'}}),
        ({"namespace": "a"}, {"namespace": "team"}),
    ],
)
def test_pods_move_when_the_namespaces_of_a_quota_are_edited(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    bed = Bed()
    bed.quota("a", **before)
    names = [_quota_name(bed, each) for each in ("a", "x", "y")]
    if "namespace" in before:
        bed.table.delete_quota("a/a")
    bed.quota("a", **after)
    fresh = Bed()
    fresh.quota("a", **after)
    now = [_quota_name(bed, each) for each in ("a", "x", "y")]
    assert now == [_quota_name(fresh, each) for each in ("a", "x", "y")] != names


def test_without_a_default_quota_pods_without_a_known_quota_have_none() -> None:
    bed = Bed(default=False)
    bed.quota("a")
    bed.quota("own", namespace="own")
    assert _quota_name(bed, "own") == ""
    assert _quota_name(bed, "own", "unknown") == ""
    assert _quota_name(bed, "own", "a") == "a"


def test_pods_move_to_a_quota_that_appears_and_back_when_it_goes() -> None:
    bed = Bed("10")
    bed.place("1", "a", "4")
    default = "koordinator-default-quota"
    assert bed.table.quotas[default].all.used["cpu"] == 4000
    bed.quota("a", most={"cpu": "100"})
    bed.quota("b", most={"cpu": "100"})
    assert not bed.table.quotas[default].all.used
    assert bed.table.quotas["a"].all.used["cpu"] == 4000
    bed.want("2", "b", "100")
    # The minimum of a is 0: both have the same weight, and a takes what it requests.
    assert bed.cpus() == {"a": 4, "b": 6}
    bed.table.delete_quota("team/a")
    assert bed.table.quotas[default].all.used["cpu"] == 4000
    assert bed.cpus() == {"b": 6}


def test_pods_of_the_system_and_default_quota_take_from_the_total_of_the_others() -> None:
    bed = Bed("100")
    bed.quota("a", most={"cpu": "1000"})
    bed.want("1", "a", "1000")
    bed.place("2", "koordinator-system-quota", "10")
    bed.place("3", "", "20")
    assert bed.cpus() == {"a": 70}
    assert bed.table.quotas["koordinator-system-quota"].runtime("cpu") == 10**18


def test_trees_have_totals_of_their_own_which_leave_the_default_tree() -> None:
    root = {"tree-id": "t", "is-root": "true", "is-parent": "true"}
    total = {"total-resource": '{"cpu":"30"}'}

    def make(**labels: str) -> Bed:
        bed = Bed("100", several_trees=True)
        bed.quota("root", {"cpu": "30"}, {"cpu": "1000"}, labels=root | labels, annotations=total)
        bed.quota("a", {}, {"cpu": "1000"}, parent="root", labels={"tree-id": "t"})
        bed.quota("b", {}, {"cpu": "1000"})
        bed.want("1", "a", "1000")
        bed.want("2", "b", "1000")
        return bed

    assert make().cpus() == {"root": 30, "a": 30, "b": 70}
    assert make(**{"ignore-default-tree": "true"}).cpus() == {"root": 30, "a": 30, "b": 100}


def test_what_a_quota_uses_stays_guaranteed_with_the_gate() -> None:
    bed = Bed("100", sharing=Sharing(guarantee=True))
    bed.quota("a", {"cpu": "10"}, {"cpu": "100"})
    bed.quota("b", {"cpu": "10"}, {"cpu": "100"})
    bed.place("1", "a", "80")
    assert bed.cpus() == {"a": 80, "b": 10}
    bed.want("2", "b", "100")
    assert bed.cpus() == {"a": 80, "b": 20}
    assert bed.table.quotas["a"].guaranteed("cpu") == 80_000


def test_an_edited_minimum_counts_in_the_guarantees_of_all_quotas_above() -> None:
    bed = Bed("100", sharing=Sharing(guarantee=True))
    for name, parent in (("top", ""), ("other", ""), ("middle", "top"), ("low", "middle")):
        bed.quota(name, {}, {"cpu": "100"}, parent=parent)
    bed.want("1", "low", "100")
    bed.want("2", "other", "100")
    assert bed.cpus() == {"top": 50, "middle": 50, "low": 50, "other": 50}
    bed.quota("low", {"cpu": "80"}, {"cpu": "100"}, parent="middle")
    # The minimum comes first, and of the 20 that are left each has half.
    assert bed.cpus() == {"top": 90, "middle": 90, "low": 90, "other": 10}


# --- bad quotas ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"least": {"cpu": "50"}}, "spec.min.cpu = '50': must not be above spec.max, which is 40"),
        ({"most": {"cpu": "-1"}}, "spec.max.cpu = '-1': must not be negative"),
        ({"weight": {"cpu": "-1"}}, "must not be negative"),
        ({"annotations": {"shared-weight": "{"}}, "shared-weight"),
        ({"parent": "nowhere"}, "parent nowhere does not exist"),
        ({"parent": "a"}, "leads back to the quota itself (a cycle)"),
        ({"parent": "child"}, "leads back to the quota itself (a cycle)"),
        ({"parent": "koordinator-default-quota"}, "takes no children"),
    ],
)
def test_an_edit_that_cannot_be_used_leaves_the_quota_as_it_was(
    bad: dict[str, Any], text: str
) -> None:
    bed = Bed("100")
    good = {"least": {"cpu": "10"}, "most": {"cpu": "40"}}
    assert bed.quota("a", **good) == ""
    assert bed.quota("b", {"cpu": "20"}, {"cpu": "100"}) == ""
    assert bed.quota("child", parent="a", most={"cpu": "40"}) == ""
    bed.want("1", "child", "100")
    bed.want("2", "b", "100")
    before = bed.cpus()
    problem = bed.quota("a", **{**good, **bad})
    assert text in problem
    assert problem.startswith("ElasticQuota team/a:")
    assert dict(bed.table.problems()) == {"team/a": problem}
    assert bed.cpus() == before == {"a": 30, "child": 30, "b": 70}
    assert bed.quota("a", {"cpu": "10"}, {"cpu": "30"}) == ""
    assert bed.table.quotas["a"].definition.most == {"cpu": 30_000}
    assert not bed.table.problems()


def test_a_quota_that_was_never_usable_is_in_no_tree_and_named_to_its_pods() -> None:
    bed = Bed()
    bed.quota("a", {"cpu": "2"}, {"cpu": "1"})
    bed.want("1", "a", "1")
    belongs = bed.table.of(bed.shape("a", "1"))
    assert belongs.quota is None
    assert "must not be above spec.max" in belongs.problem
    bed.quota("a", {"cpu": "1"}, {"cpu": "1"})
    assert bed.table.quotas["a"].all.request["cpu"] == 1000


def test_children_may_be_read_before_their_parents() -> None:
    bed = Bed()
    assert "does not exist" in bed.quota("c", parent="b")
    assert "does not exist" in bed.quota("b", parent="a")
    assert bed.quota("a") == ""
    assert not bed.table.problems()
    assert bed.table.quotas["c"].parent is bed.table.quotas["b"]


def test_the_reason_of_a_quota_that_is_left_out_follows_the_others() -> None:
    bed = Bed(several_trees=True)
    assert "parent b does not exist" in bed.quota("c", parent="b")
    bed.quota("b", labels={"tree-id": "t"})
    assert "tree-id '' differs from that of parent b" in bed.table.problems()["team/c"]
    bed.quota("b", labels={})
    assert not bed.table.problems()


def test_no_tree_grows_beyond_64_levels_whatever_is_moved_below_what() -> None:
    def chain(bed: Bed, prefix: str, length: int, below: str) -> str:
        problem = ""
        for level in range(length):
            problem = bed.quota(f"{prefix}{level}", {}, {"cpu": "9"}, parent=below)
            below = f"{prefix}{level}"
        return problem

    bed = Bed("10", sharing=Sharing(guarantee=True))
    assert chain(bed, "a", 40, "") == ""
    assert chain(bed, "b", 24, "") == ""
    assert bed.quota("b0", {}, {"cpu": "9"}, parent="a39") == ""
    bed.place("1", "b23", "3")
    bed.want("2", "b23", "3")
    assert bed.cpus()["b23"] == 6
    problem = bed.quota("c", {}, {"cpu": "9"}, parent="b23")
    assert problem.startswith(f'ElasticQuota team/c: metadata.labels["{PREFIX}parent"] = ')
    assert "65 levels" in problem
    assert bed.quota("top") == ""
    # What is below the quota that moves counts, too.
    assert "65 levels" in bed.quota("a0", {}, {"cpu": "9"}, parent="top")
    assert bed.table.quotas["a0"].definition.parent == "koordinator-root-quota"
    bed.table.delete_quota("team/b23")
    assert bed.table.quotas["a0"].definition.parent == "top"


def test_a_deleted_parent_counts_until_its_children_are_gone() -> None:
    bed = Bed("100")
    bed.quota("a", most={"cpu": "10"})
    bed.quota("b", most={"cpu": "1000"}, parent="a")
    bed.want("1", "b", "100")
    bed.table.delete_quota("team/a")
    assert bed.cpus() == {"a": 10, "b": 10}
    assert "was deleted" in bed.table.problems()["team/a"]
    bed.table.delete_quota("team/b")
    assert bed.cpus() == {}
    assert not bed.table.problems()


def test_a_deleted_parent_whose_last_child_moves_away_is_parent_to_no_other() -> None:
    bed = Bed(several_trees=True)
    bed.quota("a", labels={"tree-id": "t"})
    bed.quota("child", parent="a", labels={"tree-id": "t"})
    bed.quota("other", labels={"tree-id": "t"})
    assert "differs from that of parent a" in bed.quota("waits", parent="a")
    bed.table.delete_quota("team/a")
    assert "waits" not in bed.table.quotas
    assert bed.quota("child", parent="other", labels={"tree-id": "t"}) == ""
    assert "a" not in bed.table.quotas
    assert dict(bed.table.problems()) == {
        "team/waits": "ElasticQuota team/waits: parent a does not exist, or cannot be used itself"
    }


_OLD, _NEW = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"


@pytest.mark.parametrize("older_first", [True, False])
@pytest.mark.parametrize("newer", [("team", _NEW), ("y", _OLD)])
def test_of_quotas_of_one_name_the_oldest_counts_in_whatever_order_they_are_read(
    older_first: bool, newer: tuple[str, str]
) -> None:
    bed = Bed("100")
    older = make_quota("a", {}, {"cpu": "10"}, namespace="x", created=_OLD)
    other = make_quota("a", {}, {"cpu": "20"}, namespace=newer[0], created=newer[1])
    bed.want("1", "a", "100")
    for quota in (older, other) if older_first else (other, older):
        bed.table.set_quota(quota)
        bed.cpus()
    assert bed.cpus() == {"a": 10}
    key = f"{newer[0]}/a"
    assert "the name is used by ElasticQuota x/a, which is older" in bed.table.problems()[key]
    bed.table.delete_quota("x/a")
    assert bed.cpus() == {"a": 20}
    assert not bed.table.problems()


@pytest.mark.parametrize("bad", ["unreadable", "without parent"])
def test_a_quota_that_an_older_one_replaces_does_not_come_back_with_what_it_said_before(
    bad: str,
) -> None:
    bed = Bed("100")
    bed.want("1", "a", "100")
    bed.quota("a", {}, {"cpu": "20"}, created=_NEW)
    if bad == "unreadable":
        bed.quota("a", {"cpu": "3"}, {"cpu": "2"}, created=_NEW)
    else:
        bed.quota("a", {}, {"cpu": "30"}, parent="b", created=_NEW)
    assert bed.cpus() == {"a": 20}
    bed.quota("a", {}, {"cpu": "10"}, namespace="x")
    assert bed.cpus() == {"a": 10}
    bed.table.delete_quota("x/a")
    assert bed.cpus() == {}
    assert "team/a" in bed.table.problems()


def test_built_in_quotas_are_defined_in_their_namespace_alone() -> None:
    bed = Bed("100", namespace="of-quotas")
    default = "koordinator-default-quota"
    problem = bed.quota(default, {}, {"cpu": "0"}, namespace="a-team")
    assert "metadata.namespace is 'a-team'" in problem
    assert bed.table.quotas[default].runtime("cpu") == 10**18
    assert bed.quota(default, {}, {"cpu": "7"}, namespace="of-quotas", created=_NEW) == ""
    assert bed.table.quotas[default].runtime("cpu") == 7000


# --- properties ---------------------------------------------------------------------------------

_NAMES = ["a", "b", "c", "d", "e"]
_SMALL = st.integers(0, 30)
_STEP = st.one_of(
    st.tuples(
        st.just("quota"), st.sampled_from(_NAMES), _SMALL, _SMALL, st.integers(0, 3), st.booleans(),
        st.sampled_from(["", *_NAMES]),
    ),
    st.tuples(st.just("delete"), st.sampled_from(_NAMES)),
    st.tuples(st.just("want"), st.integers(0, 7), st.sampled_from(_NAMES), _SMALL),
    st.tuples(st.just("place"), st.integers(0, 7), st.sampled_from(_NAMES), _SMALL),
    st.tuples(st.just("unwant"), st.integers(0, 7)),
    st.tuples(st.just("remove"), st.integers(0, 7)),
    st.tuples(st.just("node"), st.integers(0, 60)),
    st.tuples(st.just("look"),),
)  # fmt: skip


class _World:
    def __init__(self) -> None:
        self.bed = Bed("40")
        self.cpu = 40
        self.exist: set[str] = set()
        self.pending: dict[str, tuple[str, int]] = {}
        self.placed: dict[str, tuple[Booking, str, int]] = {}

    def step(self, step: tuple[Any, ...]) -> None:
        table = self.bed.table
        match step:
            case "quota", name, least, more, weight, lends, parent:
                self.exist.add(name)
                self.bed.quota(
                    name,
                    {"cpu": str(least)},
                    {"cpu": str(least + more)},
                    weight={"cpu": str(weight)},
                    lends=lends,
                    parent=parent,
                )
            case "delete", name:
                table.delete_quota(f"team/{name}")
                self.exist.discard(name)
            case "want", number, name, cpu:
                self.bed.want(f"u{number}", name, str(cpu))
                self.pending[f"u{number}"] = (name, cpu)
            case "unwant", number:
                table.unwant(f"u{number}")
                self.pending.pop(f"u{number}", None)
            case "place", number, name, cpu:
                self._remove(f"u{number}")
                booking = self.bed.place(f"u{number}", name, str(cpu))
                self.placed[f"u{number}"] = (booking, name, cpu)
            case "remove", number:
                self._remove(f"u{number}")
            case "node", cpu:
                self.cpu = cpu
                self.bed.set_cpu(str(cpu))
            case _:
                self.check()

    def _remove(self, uid: str) -> None:
        if uid in self.placed:
            self.bed.table.remove(self.placed.pop(uid)[0])

    def _sums(self) -> tuple[dict[str, int], dict[str, int]]:
        quotas = self.bed.table.quotas
        wanted: dict[str, int] = {}
        used: dict[str, int] = {}
        pods = {**self.pending, **{uid: each[1:] for uid, each in self.placed.items()}}
        for uid, (name, cpu) in pods.items():
            at = name if name in quotas else "koordinator-default-quota"
            if at != name and name in self.exist:
                # The quota cannot be used.
                continue
            wanted[at] = wanted.get(at, 0) + 1000 * cpu
            if uid in self.placed:
                used[at] = used.get(at, 0) + 1000 * cpu
        return wanted, used

    def check(self) -> None:
        table = self.bed.table
        wanted, used = self._sums()
        plain = {}
        for name, quota in table.quotas.items():
            said = quota.definition
            assert quota.own.request["cpu"] == wanted.get(name, 0)
            assert quota.own.used["cpu"] == used.get(name, 0)
            if name.startswith("koordinator-"):
                continue
            plain[name] = Plain(
                name,
                "" if said.parent == "koordinator-root-quota" else said.parent,
                said.least["cpu"],
                said.most["cpu"],
                said.weight["cpu"],
                said.lends,
                wanted.get(name, 0),
            )
        parents = {each.parent for each in plain.values()}
        if any(used.get(name) for name in parents):
            # The oracle knows no parents with pods of their own.
            return
        total = 1000 * self.cpu - used.get("koordinator-default-quota", 0)
        expected = runtimes(plain, total)
        found = {name: table.quotas[name].runtime("cpu") for name in plain}
        assert found == expected


@settings(max_examples=40)
@given(st.lists(_STEP, max_size=25))
def test_after_any_steps_counts_and_runtimes_are_those_of_the_oracle(
    steps: list[tuple[Any, ...]],
) -> None:
    world = _World()
    for step in steps:
        world.step(step)
    world.check()


@settings(max_examples=30)
@given(st.lists(_STEP, max_size=20))
def test_the_table_equals_one_that_is_made_from_what_is_there_at_the_end(
    steps: list[tuple[Any, ...]],
) -> None:
    world = _World()
    for step in steps:
        world.step(step)
    table = world.bed.table
    again = QuotaTable(table.settings)
    again.set_node(0, make_node("n", allocatable={"cpu": str(world.cpu), "memory": "1000Gi"}))
    for name, (quota, cpu) in world.pending.items():
        again.want(name, world.bed.shape(quota, str(cpu)))
    for booking, _, _ in world.placed.values():
        again.place(booking)
    for name, quota_node in table.quotas.items():
        said = quota_node.definition
        if name.startswith("koordinator-"):
            continue
        again.set_quota(
            make_quota(
                name,
                {"cpu": f"{said.least['cpu']}m"},
                {"cpu": f"{said.most['cpu']}m"},
                weight={"cpu": f"{said.weight['cpu']}m"},
                lends=said.lends,
                parent=said.parent,
            )
        )
    for name in world.exist - table.quotas.keys():
        again.set_quota(make_quota(name, {"cpu": "2"}, {"cpu": "1"}))
    assert again.quotas.keys() == table.quotas.keys()
    for name, other in again.quotas.items():
        one = table.quotas[name]
        assert (one.own, one.all) == (other.own, other.all)
        assert one.runtimes() == other.runtimes()


def test_overhead_and_pods_that_are_being_deleted_count_unless_the_gates_say_otherwise() -> None:
    def used(**settings: Any) -> int:
        bed = Bed(**settings)
        bed.quota("a")
        pod = make_pod(
            "p", requests={"cpu": "2"}, labels={PREFIX + "name": "a"}, overhead={"cpu": "500m"}
        )
        shape = bed.shapes.of(pod)
        bed.table.place(Booking("default/p", "p", shape, "n0"))
        bed.table.place(Booking("default/q", "q", shape, "n0", terminating=True))
        return bed.table.quotas["a"].all.used["cpu"]

    assert used() == 5000
    assert used(overhead=False) == 4000
    assert used(terminating=Terminating.NEVER) == 2500


@pytest.mark.parametrize(
    ("counts", "at_first", "later"),
    [
        (Terminating.ALWAYS, 4000, 4000),
        (Terminating.IN_GRACE_PERIOD, 4000, 2000),
        (Terminating.NEVER, 2000, 2000),
    ],
)
def test_a_pod_that_is_being_deleted_counts_as_long_as_the_gates_say(
    counts: Terminating, at_first: int, later: int
) -> None:
    bed = Bed(terminating=counts)
    bed.quota("a")
    bed.table.advance(1000.0)
    stays, ends = bed.place("stays", "a", "2"), bed.place("ends", "a", "2")
    assert bed.table.quotas["a"].all.used["cpu"] == 4000
    bed.table.place(replace(ends, terminating=True, ends=1030.0))

    def used() -> tuple[int, int]:
        quota = bed.table.quotas["a"].all
        return quota.used.get("cpu", 0), quota.request.get("cpu", 0)

    assert used() == (at_first, at_first)
    assert not bed.table.advance(1029.0)
    assert used() == (at_first, at_first)
    assert bed.table.advance(1030.0) == (counts is Terminating.IN_GRACE_PERIOD)
    assert used() == (later, later)
    # A trial takes it out and puts it back as it was.
    bed.table.remove(replace(ends, terminating=True, ends=1030.0))
    bed.table.place(replace(ends, terminating=True, ends=1030.0))
    assert used() == (later, later)
    bed.table.remove(replace(ends, terminating=True, ends=1030.0))
    bed.table.remove(stays)
    assert used() == (0, 0)


def test_the_last_grace_period_of_a_pod_counts() -> None:
    bed = Bed(terminating=Terminating.IN_GRACE_PERIOD)
    bed.quota("a")
    booking = bed.place("1", "a", "2")
    for ends in (1030.0, 1005.0, 1005.0, 1040.0):
        bed.table.place(replace(booking, terminating=True, ends=ends))
    assert not bed.table.advance(1035.0)
    assert bed.table.quotas["a"].all.used["cpu"] == 2000
    assert bed.table.advance(1040.0)
    assert bed.table.quotas["a"].all.used.get("cpu", 0) == 0


def test_grace_periods_of_years_leave_nothing_behind_once_their_pods_are_gone() -> None:
    bed = Bed(terminating=Terminating.IN_GRACE_PERIOD)
    bed.quota("a", {"cpu": "1"}, {"cpu": "9"})
    stays = replace(bed.place("stays", "a", "1"), terminating=True, ends=5000.0)
    bed.table.place(stays)
    for number in range(1000):
        uid = f"p{number}"
        booking = Booking(
            f"default/{uid}", uid, bed.shape("a", "1"), "n0", terminating=True, ends=2.0**31
        )
        bed.table.place(booking)
        bed.table.remove(booking)
    assert len(bed.table._ending) < 200
    assert bed.table._ends == {"stays": 5000.0}
    assert bed.table.quotas["a"].own.used == {"cpu": 1000}
    assert bed.table.advance(5000.0)
    assert not bed.table.quotas["a"].own.used


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("spec.min.cpu", {"least": {"cpu": "-1"}}),
        ("spec.max.memory", {"most": {"memory": "-1Gi"}}),
        (
            'metadata.annotations["quota.scheduling.koordinator.sh/shared-weight"].cpu',
            {"weight": {"cpu": "-1"}},
        ),
        ("spec.min.memory", {"least": {"memory": "3Gi"}, "most": {"memory": "2Gi"}}),
    ],
)
def test_the_amount_that_cannot_be_used_is_named(field: str, change: dict[str, Any]) -> None:
    problem = Bed().quota("a", **change)
    assert problem.startswith(f"ElasticQuota team/a: {field} = ")


def test_a_quota_may_begin_and_cease_to_limit_a_resource() -> None:
    bed = Bed("100")
    bed.quota("a", {}, {"memory": "1Gi"})
    bed.quota("b", {}, {"cpu": "100"})
    bed.want("1", "a", "60")
    bed.want("2", "b", "100")
    assert bed.cpus() == {"a": 0, "b": 100}
    bed.quota("a", {}, {"cpu": "100", "memory": "1Gi"})
    assert bed.cpus() == {"a": 50, "b": 50}
    bed.quota("a", {}, {"memory": "1Gi"})
    assert bed.cpus() == {"a": 0, "b": 100}


def test_what_grace_periods_end_does_not_forget_that_a_pod_waits() -> None:
    bed = Bed("100", terminating=Terminating.IN_GRACE_PERIOD)
    bed.quota("a", {}, {"cpu": "100"})
    shape = bed.want("1", "a", "3")
    bed.table.place(Booking("default/1", "1", shape, "n0", terminating=True, ends=100.0))
    assert bed.table.quotas["a"].own.used["cpu"] == 3000
    assert not bed.table.advance(99.0)
    assert bed.table.advance(100.0)
    assert bed.table.quotas["a"].own.used["cpu"] == 0
    assert bed.table.quotas["a"].own.request["cpu"] == 3000
    assert not bed.table.unwant("2") and bed.table.unwant("1")
    assert bed.table.quotas["a"].own.request["cpu"] == 0


def test_a_deleted_parent_that_is_made_again_is_parent_to_others_too() -> None:
    bed = Bed("100")
    bed.quota("top", {}, {"cpu": "100"})
    bed.quota("a", {}, {"cpu": "100"}, parent="top")
    bed.table.delete_quota("team/top")
    assert list(bed.table.problems()) == ["team/top"]
    assert bed.quota("other", {}, {"cpu": "50"}, parent="a") == ""
    version = bed.table.version
    assert bed.quota("top", {}, {"cpu": "100"}) == ""
    assert not bed.table.problems() and bed.table.version > version
    bed.table.delete_quota("team/a")
    bed.table.delete_quota("team/other")
    assert list(bed.cpus()) == ["top"]


def test_a_quota_keeps_the_tree_of_its_children() -> None:
    bed = Bed("100", several_trees=True)
    root = {"tree-id": "t", "is-root": "true", "is-parent": "true"}
    assert bed.quota("top", {}, {"cpu": "10"}, labels=root) == ""
    assert bed.quota("a", {}, {"cpu": "10"}, parent="top", labels={"tree-id": "t"}) == ""
    moved = bed.quota("top", {}, {"cpu": "10"}, labels=root | {"tree-id": "u"})
    assert moved == (
        "ElasticQuota team/top: tree-id 'u' differs from that of its child a, which is 't'"
    )
    strange = bed.quota("b", {}, {"cpu": "10"}, parent="top", labels={"tree-id": "u"})
    assert strange == (
        "ElasticQuota team/b: tree-id 'u' differs from that of parent top, which is 't'"
    )


def test_amounts_beyond_what_is_divided_at_once_are_divided_one_by_one() -> None:
    bed = Bed("100")
    large = str(2**52)
    for name in ("a", "b"):
        bed.quota(name, {}, {"cpu": large}, weight={"cpu": "1"})
    bed.want("1", "a", "80")
    bed.want("2", "b", "80")
    assert bed.cpus() == {"a": 50, "b": 50}
    # The limited request of one quota leaves the bounds, and comes back into them.
    shapes = [bed.want(f"more-{number}", "a", str(2**42)) for number in range(300)]
    assert bed.cpus() == {"a": 50, "b": 50}
    for number in range(len(shapes)):
        bed.table.unwant(f"more-{number}")
    assert bed.cpus() == {"a": 50, "b": 50}
    bed.table.unwant("2")
    assert bed.cpus() == {"a": 80, "b": 0}


def test_a_quota_that_waits_and_becomes_unreadable_does_not_come_into_force() -> None:
    bed = Bed("100")
    assert "parent top does not exist" in bed.quota("a", {}, {"cpu": "10"}, parent="top")
    broken = bed.quota("a", {}, {"cpu": "-1"}, parent="top")
    assert bed.quota("top", {}, {"cpu": "10"}) == ""
    assert list(bed.cpus()) == ["top"]
    assert dict(bed.table.problems()) == {"team/a": broken}


@pytest.mark.parametrize(
    ("labels", "annotations", "expected"),
    [
        ({}, {}, {"root": 30, "a": 30, "b": 70}),
        ({"ignore-default-tree": "true"}, {}, {"root": 30, "a": 30, "b": 100}),
        ({}, {"total-resource": '{"cpu":"40"}'}, {"root": 40, "a": 40, "b": 60}),
        ({"is-root": "false"}, {}, {"root": 0, "a": 0, "b": 100}),
    ],
)
def test_an_edited_root_of_a_tree_takes_other_amounts_out_of_the_default_tree(
    labels: dict[str, str], annotations: dict[str, str], expected: dict[str, float]
) -> None:
    root = {"tree-id": "t", "is-root": "true", "is-parent": "true"}
    total = {"total-resource": '{"cpu":"30"}'}
    bed = Bed("100", several_trees=True)
    bed.quota("root", {}, {"cpu": "1000"}, labels=root, annotations=total)
    bed.quota("a", {}, {"cpu": "1000"}, parent="root", labels={"tree-id": "t"})
    bed.quota("b", {}, {"cpu": "1000"})
    bed.want("1", "a", "1000")
    bed.want("2", "b", "1000")
    assert bed.cpus() == {"root": 30, "a": 30, "b": 70}
    edited = {"labels": root | labels, "annotations": total | annotations}
    assert not bed.quota("root", {}, {"cpu": "1000"}, **edited)
    assert bed.cpus() == expected


def test_a_tree_has_nothing_of_what_no_node_has() -> None:
    bed = Bed("100")
    bed.quota("a", {}, {"example.com/x": "5"})
    top = bed.table.top("")
    assert top is not None
    assert (top.runtime("example.com/x"), top.runtime("cpu")) == (0, 100_000)
    assert bed.table.total_names == ["cpu", "memory", "pods"]


def test_a_division_follows_what_becomes_guaranteed_after_it() -> None:
    bed = Bed("100", sharing=Sharing(guarantee=True))
    for name in ("a", "b"):
        bed.quota(name, {}, {"cpu": "100"})
    bed.want("1", "a", "100")
    bed.want("2", "b", "100")
    assert bed.cpus() == {"a": 50, "b": 50}
    booking = bed.place("3", "a", "80")
    assert bed.cpus() == {"a": 90, "b": 10}
    bed.table.remove(booking)
    assert bed.cpus() == {"a": 50, "b": 50}
