"""The two predictions: upstream's worked example, and what counts when something is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.qos import PriorityClass
from hooks.subject import Pod
from koordlet.prediction.models import SYSTEM, Models, Use, class_key
from koordlet.prediction.peak import (
    Both,
    PodOutlook,
    Prediction,
    Predictions,
    Settings,
    by_class,
    by_pod,
    peak_of,
    predict,
)
from tests.koordlet.prediction.pods import GIB, HOUR, NOW, pod

PROD, NONE = class_key(PriorityClass.PROD), class_key(PriorityClass.NONE)
DEFAULT = Settings()
PLENTY = Both(64_000, 256 * GIB)


def trained(uses: dict[str, tuple[float, float]], times: int = 800) -> Models:
    """Return models with a constant use: (cores, GiB)."""
    models = Models()
    for _ in range(times):
        found = {key: Use(cores, gib * GIB) for key, (cores, gib) in uses.items()}
        models.train(found, NOW)
    return models


def of_example() -> Models:
    return trained({"p1": (2.0, 4.0), PROD: (3.0, 6.0), NONE: (0.0, 0.0), SYSTEM: (1.0, 2.0)})


P1 = pod("p1", cpu_milli=8000, memory_bytes=16 * GIB, age_s=72 * HOUR)
P2 = pod("p2", cpu_milli=4000, memory_bytes=8 * GIB, age_s=HOUR)
BOTH = frozenset(("p1", "p2"))


def predicted(
    models: Models, *pods: Pod, settings: Settings = DEFAULT, allocatable: Both = PLENTY
) -> Predictions:
    return predict(
        models,
        [(each, False) for each in pods],
        allocatable=allocatable,
        settings=settings,
        wall_s=NOW,
        measured=BOTH,
    )


def test_the_worked_example_number_by_number() -> None:
    models = of_example()
    peaks = models.peaks(("p1", PROD, NONE, SYSTEM), cpu_fraction=0.95, memory_fraction=0.98)
    assert {key: peak_of(use, 1.0) for key, use in peaks.items()} == {
        "p1": Both(2001, 4384414627),
        PROD: Both(3019, 6527842091),
        NONE: Both(25, 5242880),
        SYSTEM: Both(1035, 2162529934),
    }
    assert peak_of(peaks["p1"], 1.10) == Both(2201, 4822856089)
    found = predicted(models, P1, P2)
    assert found.by_pod == Prediction(Both(5799, 12357013095), Both(6201, 13412790681))
    assert found.by_class == Prediction(Both(7514, 16204627381), Both(4486, 9565176395))
    assert found.careful == Prediction(Both(5799, 12357013095), Both(6201, 13412790681))


def test_a_node_of_young_pods_offers_nothing_and_peaks_at_their_requests() -> None:
    young = pod("p1", cpu_milli=8000, memory_bytes=16 * GIB, age_s=HOUR)
    found = predicted(of_example(), young, P2).careful
    assert found == Prediction(Both(), Both(12000, 24 * GIB))


def test_what_is_reclaimed_fits_into_what_is_allocatable() -> None:
    small = Both(3000, 5 * GIB)
    found = predicted(of_example(), P1, P2, allocatable=small)
    assert found.by_pod.reclaimable == Both(3000 - 2201, 5 * GIB - 4822856089)
    assert found.by_class.reclaimable == Both()


def test_an_old_pod_whose_model_is_new_counts_with_its_request() -> None:
    models = trained({"p1": (2.0, 4.0), PROD: (3.0, 6.0), SYSTEM: (1.0, 2.0)}, times=3)
    assert predicted(models, P1).by_pod == Prediction(Both(), Both(8000, 16 * GIB))
    by_age = Settings(by_age_only=True)
    assert predicted(models, P1, settings=by_age).by_pod.reclaimable == Both(5799, 12357013095)


def test_a_model_is_trusted_after_half_of_the_cold_start_time() -> None:
    for times, cpu_milli in ((719, 0), (720, 5799)):
        models = trained({"p1": (2.0, 4.0)}, times=times)
        assert predicted(models, P1).by_pod.reclaimable.cpu_milli == cpu_milli


def test_a_pod_without_a_model_leaves_the_other_predictor_as_it_is() -> None:
    old = pod("p2", cpu_milli=4000, memory_bytes=8 * GIB, age_s=72 * HOUR)
    found = predicted(of_example(), P1, old)
    assert found.by_pod == Prediction(Both(5799, 12357013095), Both(6201, 13412790681))
    assert found.by_class == Prediction(Both(7514, 16204627381), Both(4486, 9565176395))


def test_a_class_without_a_model_counts_with_the_requests_of_its_pods() -> None:
    models = trained({"p1": (2.0, 4.0), SYSTEM: (1.0, 2.0)})
    found = predicted(models, P1)
    assert found.by_class.reclaimable == Both()
    assert found.by_class.peak.cpu_milli == 8000 + int(1035 * 1.1)
    assert found.by_pod.reclaimable == Both(5799, 12357013095)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_counts_in_neither_whatever_its_age(phase: str) -> None:
    ended = pod("p2", cpu_milli=4000, memory_bytes=8 * GIB, age_s=HOUR, phase=phase)
    assert predicted(of_example(), P1, ended) == predicted(of_example(), P1)


def test_a_pod_that_is_being_deleted_counts_in_neither() -> None:
    found = predict(
        of_example(),
        [(P1, False), (P2, True)],
        allocatable=PLENTY,
        settings=Settings(),
        wall_s=NOW,
        measured=BOTH,
    )
    assert found == predicted(of_example(), P1)


def test_a_pod_without_samples_counts_with_its_request_in_the_peak_alone() -> None:
    found = predict(
        of_example(),
        [(P1, False)],
        allocatable=PLENTY,
        settings=Settings(),
        wall_s=NOW,
        measured=frozenset(),
    )
    assert found.by_pod == Prediction(Both(), Both(8000, 16 * GIB))
    assert found.by_class.reclaimable == Both()


def test_batch_pods_do_not_count() -> None:
    batch = pod("p2", priority=PriorityClass.BATCH, cpu_milli=4000, memory_bytes=8 * GIB)
    assert predicted(of_example(), P1, batch) == predicted(of_example(), P1)


_AMOUNT = st.builds(Both, st.integers(0, 10**6), st.integers(0, 2**45))
_POD = st.builds(
    PodOutlook,
    request=_AMOUNT,
    priority=st.sampled_from(list(PriorityClass)),
    peak=st.none() | _AMOUNT,
    measured=st.booleans(),
)
_USE = st.builds(Use, st.floats(0, 1000), st.floats(0, 2.0**45))


@given(
    st.lists(_POD, max_size=20),
    st.dictionaries(st.sampled_from((SYSTEM, PROD, NONE)), _USE),
    _AMOUNT,
)
def test_no_amount_is_negative_or_above_what_is_allocatable(
    pods: list[PodOutlook], classes: dict[str, Use], allocatable: Both
) -> None:
    found = Predictions(by_pod(pods, allocatable), by_class(pods, classes, allocatable, 1.1))
    for each in (found.by_pod, found.by_class, found.careful):
        assert each.reclaimable.at_most(allocatable) == each.reclaimable
        assert each.reclaimable.at_least(Both()) == each.reclaimable
        assert each.peak.at_least(Both()) == each.peak
    counted = (PriorityClass.PROD, PriorityClass.NONE)
    requests = sum((each.request for each in pods if each.priority in counted), Both())
    assert found.careful.reclaimable.at_most(requests) == found.careful.reclaimable


def test_the_defaults_are_upstreams() -> None:
    assert (
        Settings(
            safety_margin_percent=10, cold_start_s=86_400.0, training_s=60.0, by_age_only=False
        )
        == DEFAULT
    )
    assert DEFAULT.least_samples == 720


def test_a_pod_without_a_model_peaks_at_its_request() -> None:
    """Also where it is old and measured, and no training is demanded."""
    found = predicted(Models(), P1, settings=Settings(cold_start_s=0.0))
    assert found.by_pod == Prediction(Both(), Both(8000, 16 * GIB))
