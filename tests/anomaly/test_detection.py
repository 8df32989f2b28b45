"""Anomalies: seen on the host and on the device alike, held back where asked, the same after a resume."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.anomaly import detection as anomalies
from trainwright.anomaly.detection import Anomaly, AnomalyDetector, DeviceLossWindow, LossWindow, join_ranks
from trainwright.config import AnomaliesSection

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf

losses = st.one_of(
    st.floats(0.5, 3.0, width=32),
    st.sampled_from([NAN, INF, -INF, 0.0, 1.0, 2.0, 2.0, 2.0, 25.0, 1e4, -5.0, 3e38]),
)


@pytest.fixture
def far_away(monkeypatch):
    """Takes the CPU for a device that the host has to wait for."""
    monkeypatch.setattr(anomalies, "reads_at_once", lambda device: False)


def make(*, device=CPU, rank=0, **settings):
    return AnomalyDetector(AnomaliesSection(**settings), device=device, rank=rank)


def judge_all(watch, values, *, first_step=1, norm=1.0, **arguments):
    """Which of the losses were held back."""
    arguments = {"own_is_finite": True, **arguments}
    held = []
    for number, value in enumerate(values):
        answer = watch.judge(first_step + number, torch.tensor(value), torch.tensor(norm), **arguments)
        held.append(None if answer is None else bool(answer))
    return held


def same(first, second):
    return repr(first) == repr(second)  # a nan is not equal to itself


@pytest.mark.usefixtures("far_away")
def test_without_anything_to_hold_back_the_device_is_not_asked(monkeypatch):
    watch = make(spike="raise", spike_window=8)
    assert not watch.skips_updates
    values = [torch.tensor(value) for value in (2.0, 2.1, NAN, 1.9, 2.0, 2.0, 50.0)]
    norm = torch.tensor(1.0)
    for name in ("__sub__", "item", "tolist", "__float__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, None)
    answers = [watch.judge(step, value, norm, own_is_finite=True) for step, value in enumerate(values, 1)]
    monkeypatch.undo()
    assert answers == [None] * 7
    assert [(each.step, each.kind, each.policy) for each in watch.look()] == [
        (3, "non_finite", "raise"),
        (7, "spike", "raise"),
    ]
    assert watch.look() == []


@pytest.mark.parametrize(("loss", "norm", "is_bad"), [(1.0, 1.0, False), (NAN, 1.0, True), (1.0, INF, True)])
@pytest.mark.parametrize("policy", ["raise", "skip", "rollback"])
def test_a_loss_or_norm_that_is_not_finite_is_an_anomaly(loss, norm, is_bad, policy):
    watch = make(non_finite=policy)
    (held,) = judge_all(watch, [loss], norm=norm)
    assert held == (None if policy == "raise" else is_bad)
    assert [each.policy for each in watch.look()] == [policy] * is_bad


def test_with_a_loss_scale_only_the_loss_counts():
    watch = make(non_finite="skip")
    assert judge_all(watch, [1.0, NAN], norm=INF, judges_norm=False) == [False, True]
    assert [each.step for each in watch.look()] == [2]


@pytest.mark.usefixtures("far_away")
def test_with_a_loss_scale_only_the_loss_counts_on_a_device():
    watch = make(non_finite="skip")
    assert judge_all(watch, [1.0, NAN], norm=INF, judges_norm=False) == [False, True]


def test_an_anomaly_tells_what_is_known():
    watch = make(spike="skip", spike_window=8, rank=3)
    watch.positions = (64, 96)
    judge_all(watch, [2.0, 2.0, 2.5, 2.5, 1.5])
    assert judge_all(watch, [90.0], first_step=6) == [True]
    assert judge_all(watch, [NAN], first_step=7, own_is_finite=False) == [True]
    spike, nan = watch.look()
    assert spike == Anomaly(6, "spike", "skip", 90.0, 1.0, (), 2.0, 0.5 * 1.4826, (5, 1.5), (64, 96))
    assert same(nan, Anomaly(7, "non_finite", "raise", NAN, 1.0, (3,), None, None, (5, 1.5), (64, 96)))
    assert spike.describe() == (
        "The loss is 90 at step 6, 119 robust standard deviations above 2, the median of the steps before."
    )
    assert nan.describe() == "The loss is nan at step 7 on rank 3 (last finite: 1.5 at step 5)."
    norm = replace(nan, loss=2.0, grad_norm=INF, last_good=None)
    assert norm.describe() == "The gradient norm is inf at step 7, where the loss is 2."


def test_only_losses_far_above_the_window_are_spikes_and_only_good_ones_enter_it():
    watch = make(spike="skip", spike_window=8)
    assert judge_all(watch, [50.0, 2.0, 1.9, 2.1, 2.0, 2.05, 1.95]) == [False] * 7
    assert judge_all(watch, [-40.0, 2.2, 9.0, 9.0, 9.0, 9.0, 9.0, 2.0]) == [False, False] + [True] * 5 + [False]


def test_nothing_is_a_spike_before_a_quarter_of_the_window_and_five_losses_are_there():
    for size in (8, 30, 100):
        watch = make(spike="skip", spike_window=size)
        needed = max(math.ceil(size / 4), 5)
        assert judge_all(watch, [1.0] * (needed - 1) + [1e6]) == [False] * needed
        watch = make(spike="skip", spike_window=size)
        assert judge_all(watch, [1.0] * needed + [1e6]) == [False] * needed + [True]


def test_a_loss_that_stands_still_does_not_make_every_wiggle_a_spike():
    watch = make(spike="skip", spike_window=8)
    assert judge_all(watch, [2.0] * 8 + [2.02, 1.9, 2.04]) == [False, False, False, False] * 2 + [False, False, True]
    watch = make(spike="skip", spike_window=8)
    assert judge_all(watch, [0.0] * 8 + [1e-6, 1e-3]) == [False] * 9 + [True]


POLICIES = [
    {},
    {"spike": "raise"},
    {"non_finite": "skip"},
    {"non_finite": "rollback", "spike": "raise"},
    {"spike": "skip"},
    {"non_finite": "skip", "spike": "rollback"},
]


@settings(max_examples=60, deadline=None)
@given(st.lists(losses, max_size=40), st.sampled_from(POLICIES), st.integers(8, 12), st.sampled_from([2.0, 10.0]))
def test_the_device_and_the_host_agree(values, policies, size, threshold):
    section = {**policies, "spike_window": size, "spike_threshold": threshold}
    host = make(**section)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anomalies, "reads_at_once", lambda device: False)
        device = make(**section)
    assert judge_all(device, values) == judge_all(host, values)
    assert same(device.state_dict(), host.state_dict())
    assert same(device.look(), host.look())


@settings(max_examples=60, deadline=None)
@given(st.lists(losses, max_size=40), st.integers(0, 40), st.booleans())
def test_a_resumed_run_judges_alike(values, before, is_far):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anomalies, "reads_at_once", lambda device: not is_far)
        whole, first, later = (make(non_finite="skip", spike="skip", spike_window=9) for _ in range(3))
    held = judge_all(whole, values)
    judge_all(first, values[:before])
    judge_all(later, [7.0, NAN, 1e9])  # what was before a rollback is forgotten
    later.load_state_dict(first.state_dict())
    assert judge_all(later, values[before:], first_step=before + 1) == held[before:]
    assert same(first.look() + later.look(), whole.look())
    assert same(later.state_dict(), whole.state_dict())


def test_a_smaller_window_takes_up_the_newest_losses():
    first = make(spike="raise", spike_window=20)
    judge_all(first, [float(number) for number in range(20)])
    later = make(spike="raise", spike_window=8)
    later.load_state_dict(first.state_dict())
    assert later.state_dict()["losses"] == [float(number) for number in range(12, 20)]


@pytest.mark.usefixtures("far_away")
def test_nothing_is_read_from_a_device_before_somebody_looks(monkeypatch):
    watch = make(non_finite="skip", spike="skip", spike_window=8)
    values = [torch.tensor(value) for value in (2.0, 2.0, 2.0, 2.0, 2.0, NAN, 1e4, 2.0)]
    norm, answers = torch.tensor(1.0), []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "__index__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, None)
    for step, value in enumerate(values, 1):
        answers.append(watch.judge(step, value, norm, own_is_finite=torch.tensor(True)))
    monkeypatch.undo()
    assert [(answer.shape, answer.dtype) for answer in answers] == [((), torch.bool)] * 8
    assert [bool(answer) for answer in answers] == [*[False] * 5, True, True, False]
    assert [(each.step, each.kind) for each in watch.look()] == [(6, "non_finite"), (7, "spike")]


@pytest.mark.parametrize("is_far", [False, True])
def test_further_updates_of_a_step_share_its_answer_and_must_be_finite(is_far, monkeypatch):
    monkeypatch.setattr(anomalies, "reads_at_once", lambda device: not is_far)
    watch = make(non_finite="skip", spike="skip", spike_window=8)

    def judge(step, value, *, is_first):
        norm = torch.tensor(1.0)
        return bool(watch.judge(step, torch.tensor(value), norm, own_is_finite=True, is_first=is_first))

    for step in range(1, 6):
        assert not judge(step, 2.0, is_first=True)
        assert not judge(step, 500.0, is_first=False)  # another loss, of which there is no window
    assert judge(6, 100.0, is_first=True)
    assert judge(6, 1.0, is_first=False)
    assert not judge(7, 2.0, is_first=True)
    assert judge(7, NAN, is_first=False)
    assert not judge(8, 2.0, is_first=True)
    assert [(each.step, each.kind) for each in watch.look()] == [(6, "spike"), (7, "non_finite")]
    assert watch.state_dict()["losses"] == [2.0] * 7


def test_a_step_that_goes_wrong_twice_is_one_anomaly():
    watch = make()
    judge_all(watch, [NAN])
    judge_all(watch, [INF], is_first=False)
    (anomaly,) = watch.look()
    assert math.isnan(anomaly.loss)


@pytest.mark.usefixtures("far_away")
def test_what_waits_to_be_looked_at_is_bounded(monkeypatch):
    monkeypatch.setattr(anomalies, "_MAX_PENDING", 5)
    watch = make()
    judge_all(watch, [1.0, NAN, *[1.0] * 20])
    assert len(watch._pending) < 5
    assert [each.step for each in watch.look()] == [2]


def test_ranks_join_what_each_knows_of_itself():
    watches = [make(rank=rank) for rank in range(3)]
    for rank, watch in enumerate(watches):
        judge_all(watch, [NAN], own_is_finite=torch.tensor(rank == 1))
        judge_all(watch, [1.0], norm=INF, first_step=2)
    nan, norm = join_ranks([watch.look() for watch in watches])
    assert (nan.step, nan.ranks) == (1, (0, 2))
    assert (norm.step, norm.ranks) == (2, (0, 1, 2))
    assert "on ranks 0, 2" in nan.describe()


def test_losses_of_any_precision_are_judged_as_they_are(monkeypatch):
    for is_far in (False, True):
        monkeypatch.setattr(anomalies, "reads_at_once", lambda device, is_far=is_far: not is_far)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            watch = make(non_finite="skip", spike="skip", spike_window=8)
            norm = torch.tensor(60000.0, dtype=dtype)  # no sum with it may overflow
            held = [
                bool(watch.judge(step, torch.tensor([loss], dtype=dtype), norm, own_is_finite=True))
                for step, loss in enumerate([60000.0, 60000.0, 59000.0, NAN], 1)
            ]
            assert held == [False, False, False, True]
            assert watch.state_dict()["losses"][0] == float(torch.tensor(60000.0, dtype=dtype))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30), st.integers(8, 12))
def test_the_windows_measure_is_that_of_its_losses(values, size):
    window = LossWindow(size)
    for value in values:
        window.add(value)
    held = values[-size:]
    assert list(window.losses) == held
    measure = window.measure()
    if len(held) < 5:
        assert measure is None
        return
    median = statistics.median_low(held)
    distance = statistics.median_low([abs(value - median) for value in held])
    assert measure == (median, max(distance, abs(median) * 1e-3, 1e-6) * 1.4826)
    assert measure.limit(10.0) == median + 10.0 * measure.deviation


@given(st.lists(st.floats(0, 10), max_size=12))
def test_a_filled_device_window_goes_on_as_one_that_was_fed(values):
    fed, filled = (DeviceLossWindow(8, threshold=3.0, device=CPU) for _ in range(2))
    host = LossWindow(8)
    for value in values:
        loss = torch.tensor([value], dtype=torch.float64)
        if not fed.judge(loss, torch.tensor([False])):
            host.add(value)
    filled.fill(list(host.losses))
    for value in (1.0, 30.0, 5.0, 0.0, 4.0, 2.0, 60.0, 1.0, 3.0, 3.0, 200.0):
        loss = torch.tensor([value], dtype=torch.float64)
        assert fed.judge(loss, torch.tensor([False])) == filled.judge(loss, torch.tensor([False]))
