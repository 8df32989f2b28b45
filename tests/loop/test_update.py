"""One update: its gradient is exactly that of Σtotal / Σcount, clipped and stepped as asked."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises
from torch import nn

from trainwright.anomaly import detection as anomalies
from trainwright.anomaly.detection import AnomalyDetector
from trainwright.config import AnomaliesSection
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.events import Mean
from trainwright.loop import update as update_module
from trainwright.loop.outputs import ForwardResult
from trainwright.loop.update import LossScale, ScheduledOptimizer, Updater, persistent_buffers
from trainwright.optim.adamw import AdamW
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon
from trainwright.parallel.collectives import Ranks


def constant(step, max_steps):
    return 1.0


def make_updater(parameters, *, batch_size=8, optimizer=None, lr=0.1, **options):
    optimizer = optimizer or torch.optim.SGD(parameters, lr=lr)
    updater = Updater(
        {"main": ScheduledOptimizer(optimizer, constant)},
        global_batch_size=batch_size,
        max_steps=10,
        ranks=Ranks(),
        **options,
    )
    updater.begin_step(0)
    return updater


def weight(*values):
    return nn.Parameter(torch.tensor(values or (1.0, -2.0, 3.0)))


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_plain_losses_weigh_their_samples_whatever_the_micro_batches(sizes, data):
    total = sum(sizes)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(total, 3, dtype=torch.float64, generator=generator)
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    update = make_updater([w], batch_size=total, lr=0.0).begin(total)
    for update.micro_batch, micro_batch in enumerate(x.split(sizes)):
        update.backward(ForwardResult(((micro_batch @ w) ** 2).mean(), len(micro_batch)))
    result = update.apply()
    expected = ((x @ w) ** 2).mean()
    (gradient,) = torch.autograd.grad(expected, w)
    assert torch.allclose(w.grad, gradient, rtol=1e-12)
    assert torch.allclose(result.loss, expected.detach(), rtol=1e-12)


def test_means_of_unequal_counts_give_the_mean_over_everything():
    w = weight()
    update = make_updater([w], lr=0.0).begin(8)
    x, y = torch.randn(3, 3), torch.randn(7, 3)
    update.micro_batch = 0
    update.backward(ForwardResult(Mean((x @ w).square().sum(), 3), 4))
    update.micro_batch = 1
    update.backward(ForwardResult(Mean((y @ w).square().sum(), torch.tensor(7)), 4))
    result = update.apply()
    expected = (torch.cat([x, y]) @ w).square().mean()
    (gradient,) = torch.autograd.grad(expected, w)
    torch.testing.assert_close(w.grad, gradient)
    torch.testing.assert_close(result.loss, expected.detach())
    assert float(update.weight) == 10


def test_a_micro_batch_without_samples_changes_nothing():
    w = weight()
    update = make_updater([w], lr=0.0).begin(8)
    update.backward(ForwardResult((w * 2).sum(), 8, {"accuracy": 0.5}))
    update.backward(ForwardResult(Mean((w * 1e6).sum(), 1000), 0, {"accuracy": 99.0}))
    result = update.apply()
    torch.testing.assert_close(w.grad, torch.full((3,), 2.0))
    assert result.metrics["accuracy"] == 0.5


def test_a_batch_in_which_nothing_counts_moves_nothing():
    w = weight()
    update = make_updater([w]).begin(8)
    update.backward(ForwardResult(Mean((w * 0).sum(), 0), 8))
    result = update.apply()
    assert w.tolist() == [1.0, -2.0, 3.0]
    assert float(result.loss) == 0.0


def mean_loss(w, x):
    return (x @ w).square().mean()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("sizes", [(5, 3), (8, 0), (8,)])
def test_a_mean_over_counted_labels_weighs_its_labels(sizes, on_device, monkeypatch):
    monkeypatch.setattr(update_module, "reads_at_once", lambda device: not on_device)
    w, x = nn.Parameter(torch.ones(3, dtype=torch.float64)), torch.randn(8, 3, dtype=torch.float64)
    updater = make_updater([w], batch_size=4, lr=0.0)
    update = updater.begin(4, num_backwards=len(sizes))
    for update.micro_batch, part in enumerate(x.split(sizes)):
        update.backward(ForwardResult(mean_loss(w, part), 2, count=torch.tensor(len(part))))
    result = update.apply()
    expected = mean_loss(w, x)
    (gradient,) = torch.autograd.grad(expected, w)
    torch.testing.assert_close(w.grad, gradient)
    torch.testing.assert_close(result.loss, expected.detach())
    torch.testing.assert_close(result.grad_norm, gradient.norm())
    assert float(update.weight) == 8


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_mean_with_a_count_on_the_device_gives_its_gradient_or_none(dtype, weights, on_device, monkeypatch):
    monkeypatch.setattr(update_module, "reads_at_once", lambda device: not on_device)
    x = torch.arange(12.0).reshape(4, 3).to(torch.promote_types(weights, torch.float32)) / 8
    for count in (3, 0):
        w = nn.Parameter(torch.ones(3, dtype=weights))
        scale = LossScale(torch.device("cpu"), initial=4.0) if weights == torch.float32 else None
        updater = make_updater([w], batch_size=4, lr=0.0, loss_scale=scale)
        update = updater.begin(4, num_backwards=1)
        counted = torch.arange(4) < count
        penalty = w.to(x.dtype).sum()  # a total that is not 0 where nothing counts
        total = ((x @ w.to(x.dtype)).square() * counted).sum() + penalty
        (gradient,) = torch.autograd.grad(total / 3, w, retain_graph=True)
        update.backward(Mean(total, torch.tensor(count).to(dtype)))
        result = update.apply()
        assert float(update.weight) == count
        if count:
            tolerance = 1e-2 if weights == torch.bfloat16 else 1e-6
            torch.testing.assert_close(
                result.grad_norm, gradient.float().norm().to(result.grad_norm), rtol=tolerance, atol=0
            )
            torch.testing.assert_close(result.loss, (total / 3).detach().to(result.loss), rtol=tolerance, atol=0)
        else:
            assert result.grad_norm == 0.0
            assert torch.isfinite(result.loss)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "plain SGD", "Lion", "Muon"])
def test_an_update_that_counts_nothing_leaves_weights_and_state(kind, on_device, num_micro_batches, monkeypatch):
    monkeypatch.setattr(update_module, "reads_at_once", lambda device: not on_device)
    w = nn.Parameter(torch.ones(4, 3))
    optimizer = {
        "AdamW": lambda: AdamW([w], lr=0.1, weight_decay=0.1),
        "SGD": lambda: torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
        "plain SGD": lambda: torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.1),
        "Lion": lambda: Lion([w], lr=0.1),
        "Muon": lambda: Muon([w], lr=0.1),
    }[kind]()
    detector = AnomalyDetector(AnomaliesSection(non_finite="raise"), device=torch.device("cpu"), rank=0)
    updater = make_updater([w], optimizer=optimizer, detector=detector, max_grad_norm=1.0)
    states = []
    for step, count in enumerate((3, 0, 3)):
        updater.begin_step(step)
        update = updater.begin(8, num_backwards=num_micro_batches)
        for update.micro_batch in range(num_micro_batches):
            logits = torch.ones(3, 4) @ w
            labels = torch.full((3,), 1 if count else -100)
            loss = nn.functional.cross_entropy(logits, labels)
            update.backward(ForwardResult(loss, 8 // num_micro_batches, count=torch.tensor(count)))
        result = update.apply()
        state = [value for value in optimizer.state[w].values() if isinstance(value, torch.Tensor)]
        states.append([each.detach().clone() for each in (w, *state)])
        assert torch.isfinite(result.loss)
        assert float(update.weight) == count * num_micro_batches
    assert all(torch.equal(*pair) for pair in zip(*states[:2], strict=True))
    assert not torch.equal(states[1][0], states[2][0])
    assert detector.look() == []
    assert updater.skips_updates


def test_grad_norm_is_measured_before_clipping_and_also_without():
    for limit in (None, 0.5):
        w = weight()
        update = make_updater([w], lr=1.0, max_grad_norm=limit).begin(8)
        update.backward((w * torch.tensor([3.0, 0.0, 4.0])).sum())
        result = update.apply()
        assert float(result.grad_norm) == pytest.approx(5.0)
        moved = (torch.tensor([1.0, -2.0, 3.0]) - w.detach()).norm()
        assert float(moved) == pytest.approx(5.0 if limit is None else 0.5, rel=1e-5)


def test_clipping_equals_torchs_own():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(8, 5) * 10
    update = make_updater(list(ours.parameters()), lr=0.1, max_grad_norm=1.0).begin(8)
    update.backward(ours(x).square().mean())
    result = update.apply()
    theirs(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    assert torch.equal(result.grad_norm, norm)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_clipping_by_value_bounds_each_element():
    w = weight()
    update = make_updater([w], lr=1.0, max_grad_value=0.5).begin(8)
    update.backward((w * torch.tensor([3.0, -0.1, -4.0])).sum())
    update.apply()
    torch.testing.assert_close(w.grad, torch.tensor([0.5, -0.1, -0.5]))


def test_metrics_of_the_step_reach_the_result():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            return {"num_updates": 1.0}

    w = weight()
    update = make_updater([w], optimizer=Counting([w], lr=0.1)).begin(8)
    update.backward(ForwardResult(w.sum(), 4, {"a": torch.tensor(1.0), "b": Mean(3.0, 1), "c": "first"}))
    update.backward(ForwardResult(w.sum(), 12, {"a": torch.tensor(2.0), "b": Mean(1.0, 1), "c": "last"}))
    metrics = update.apply().metrics
    assert float(metrics["a"]) == pytest.approx((4 * 1 + 12 * 2) / 16)
    assert metrics["b"].value == 2.0
    assert metrics["c"] == "last"
    assert metrics["num_updates"] == 1.0


def test_metrics_of_several_optimizers_carry_their_names():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            return {"moved": self.param_groups[0]["lr"]}

    first, second = weight(1.0), weight(1.0)
    optimizers = {"first": Counting([first], lr=1.0), "second": Counting([second], lr=0.1)}
    updater = Updater(
        {name: ScheduledOptimizer(each, constant) for name, each in optimizers.items()},
        global_batch_size=1,
        max_steps=10,
        ranks=Ranks(),
    )
    updater.begin_step(0)
    update = updater.begin(1)
    update.backward((first + second).sum())
    metrics = update.apply().metrics
    assert (metrics["moved/first"], metrics["moved/second"]) == (1.0, 0.1)
    assert "moved" not in metrics


def test_each_group_follows_the_schedule_from_its_own_rate():
    first, second = weight(1.0), weight(1.0)
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.01}], lr=0.1)
    scheduled = ScheduledOptimizer(optimizer, lambda step, max_steps: 1.0 - step / max_steps)
    assert scheduled.set_rate(5, 10) == 0.05
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]


def test_a_rate_is_written_where_it_differs_from_the_schedules():
    w = weight()
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.AdamW([w], lr=rate, foreach=False)
    scheduled = ScheduledOptimizer(optimizer, lambda step, max_steps: 1.0 if step < 6 else 0.5)
    versions = []
    for step in range(8):
        if step == 2:
            rate.fill_(7.0)
        if step == 4:
            rate = optimizer.param_groups[0]["lr"] = torch.tensor(7.0, dtype=torch.float64)
        assert scheduled.set_rate(step, 8) == (0.1 if step < 6 else 0.05)
        assert float(rate) == (0.1 if step < 6 else 0.05)
        versions.append(rate._version)
    assert versions == [1, 1, 3, 3, 1, 1, 2, 2]
    scheduled.forget_written()
    rate.data.fill_(7.0)  # loaded: without a trace
    assert scheduled.set_rate(8, 8) == float(rate) == 0.05


def test_a_group_that_is_added_during_a_constant_schedule_gets_its_rate():
    first, second = weight(1.0), weight(1.0)
    optimizer = torch.optim.SGD([first], lr=0.1)
    scheduled = ScheduledOptimizer(optimizer, lambda step, max_steps: 0.5)
    assert scheduled.set_rate(0, 10) == 0.05
    optimizer.add_param_group({"params": [second], "lr": 0.2})
    scheduled.read_groups()
    assert scheduled.set_rate(1, 10) == 0.05
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]


@pytest.mark.parametrize("limit", [None, 1.0])
def test_gradients_are_repaired_before_they_are_measured_and_clipped(limit):
    w = weight()
    optimizer = AdamW([w], lr=0.1, repair_nan=True)
    update = make_updater([w], optimizer=optimizer, max_grad_norm=limit).begin(8)
    update.backward((w * torch.tensor([0.6, float("nan"), 0.8])).sum())
    result = update.apply()
    assert float(result.grad_norm) == pytest.approx(1.0)
    assert float(result.metrics["nan_gradients"]) == 1.0
    torch.testing.assert_close(w.grad, torch.tensor([0.6, 0.0, 0.8]))


def test_optimizers_may_step_apart_with_their_own_rates():
    first, second = weight(1.0), weight(1.0)
    updater = Updater(
        {
            "first": ScheduledOptimizer(torch.optim.SGD([first], lr=1.0), lambda step, _: 1.0),
            "second": ScheduledOptimizer(torch.optim.SGD([second], lr=0.1), lambda step, _: 0.5),
        },
        global_batch_size=1,
        max_steps=10,
        ranks=Ranks(),
    )
    updater.begin_step(0)
    update = updater.begin(1)
    update.backward((first + second).sum())
    result = update.apply(optimizers=("second",))
    assert (first.item(), second.item()) == (1.0, pytest.approx(0.95))
    assert float(result.grad_norm) == 1.0  # of the parameters that were stepped
    assert result.lr == 0.05
    assert result.metrics["lr/first"] == 1.0
    update = updater.begin(1)
    update.backward((first * 2).sum())
    update.apply(optimizers=("first",))
    assert (first.item(), second.item()) == (-1.0, pytest.approx(0.95))
    with raises(ConfigError, "third"):
        update.apply(optimizers=("third",))


def test_a_loss_without_gradient_is_explained():
    w = weight()
    update = make_updater([w]).begin(8)
    with raises(TrainwrightError):
        update.backward(torch.tensor(1.0))
    with raises(TrainwrightError):
        update.apply()


def test_a_loss_that_touches_no_parameter_is_explained():
    w, other = weight(), weight()
    update = make_updater([w]).begin(8)
    update.backward(other.sum())
    with raises(TrainwrightError):
        update.apply()


def test_a_stand_in_may_even_be_nan():
    w = weight()
    update = make_updater([w], lr=0.0).begin(8)
    update.backward(ForwardResult((w * 2).sum(), 8))
    update.backward(ForwardResult((w * float("nan")).sum(), 0))
    result = update.apply()
    torch.testing.assert_close(w.grad, torch.full((3,), 2.0))
    assert float(result.loss) == 4.0


def test_sparse_gradients_are_rejected_by_name():
    embedding = nn.Embedding(4, 2, sparse=True)
    update = make_updater(list(embedding.parameters())).begin(8)
    update.backward(embedding(torch.tensor([1])).sum())
    with raises(TrainwrightError):
        update.apply()


class TestLossScale:
    @pytest.mark.parametrize("fused", [True, False])
    def test_an_overflow_skips_the_update_and_halves_the_scale(self, fused):
        w = weight()
        optimizer = torch.optim.AdamW([w], lr=0.1, fused=fused)
        scale = LossScale(torch.device("cpu"), initial=1024.0)
        updater = make_updater([w], optimizer=optimizer, loss_scale=scale)
        update = updater.begin(8)
        update.backward((w * float("inf")).sum())
        update.apply()
        assert w.tolist() == [1.0, -2.0, 3.0]
        assert float(scale.scale) == 512.0
        assert not any(bool((state["exp_avg"] != 0).any()) for state in optimizer.state.values())

    def test_an_overflow_is_seen_even_where_gradients_would_be_repaired(self):
        w = weight()
        scale = LossScale(torch.device("cpu"), initial=1024.0)
        optimizer = AdamW([w], lr=0.1, repair_nan=True)
        update = make_updater([w], optimizer=optimizer, loss_scale=scale).begin(8)
        update.backward((w * float("inf")).sum())
        update.apply()
        assert w.tolist() == [1.0, -2.0, 3.0]
        assert float(scale.scale) == 512.0

    @pytest.mark.parametrize("make", [Lion, partial(Muon, ns_dtype="fp32")], ids=["lion", "muon"])
    def test_our_optimizers_skip_an_overflow_without_a_look_from_the_host(self, make, monkeypatch):
        w, bias = nn.Parameter(torch.ones(2, 3)), weight()
        scale = LossScale(torch.device("cpu"), initial=1024.0)
        updater = make_updater([w, bias], optimizer=make([w, bias], lr=0.1), loss_scale=scale)
        update = updater.begin(8)
        update.backward((w * float("inf")).sum() + bias.sum())
        monkeypatch.setattr(torch.Tensor, "item", None)  # a look would fail
        update.apply()
        assert (w.tolist(), bias.tolist()) == ([[1.0] * 3] * 2, [1.0, -2.0, 3.0])

    def test_a_scaled_update_equals_an_unscaled_one(self):
        moved = []
        for scale in (None, LossScale(torch.device("cpu"), initial=2.0**12)):
            w = weight()
            update = make_updater([w], max_grad_norm=1.0, loss_scale=scale).begin(8)
            update.backward((w.square()).sum())
            result = update.apply()
            moved.append((w.detach().clone(), result.grad_norm, result.loss))
        for plain, scaled in zip(*moved, strict=True):
            torch.testing.assert_close(plain, scaled)

    def test_the_scale_never_runs_down_to_zero(self):
        scale = LossScale(torch.device("cpu"))
        for _ in range(300):
            scale.adjust(torch.tensor(True))
        assert float(scale.scale) > 0

    def test_the_scale_grows_after_the_interval_and_its_state_is_restored(self):
        scale = LossScale(torch.device("cpu"), initial=2.0, growth_interval=3)
        good, bad = torch.tensor(False), torch.tensor(True)
        for overflowed in (good, good, bad, good, good, good):
            scale.adjust(overflowed)
        assert float(scale.scale) == 2.0  # halved once, doubled once
        scale.adjust(good)
        other = LossScale(torch.device("cpu"), growth_interval=3)
        other.load_state_dict(scale.state_dict())
        for each in (scale, other):
            each.adjust(good)
            each.adjust(good)
        assert float(other.scale) == float(scale.scale) == 4.0


class TestAnomalies:
    def run(self, losses, *, optimizer=None, far=False, applies=1, **options):
        """Steps a weight by each of these factors of it; returns it, the watch, and the results."""
        w = weight()
        optimizer = torch.optim.AdamW([w], lr=0.1, fused=True) if optimizer is None else optimizer(w)
        with pytest.MonkeyPatch.context() as patch:
            if far:
                patch.setattr(anomalies, "reads_at_once", lambda device: False)
            section = AnomaliesSection(**{"spike_window": 8, **options.pop("section", {})})
            watch = AnomalyDetector(section, device=torch.device("cpu"), rank=0)
        updater = make_updater([w], optimizer=optimizer, detector=watch, **options)
        results = []
        for step, factor in enumerate(losses):
            updater.begin_step(step)
            for _ in range(applies):
                update = updater.begin(8)
                update.backward((w * factor).square().sum())
                results.append(update.apply())
        return w, watch, results

    @pytest.mark.parametrize("far", [False, True])
    @pytest.mark.parametrize("policy", ["skip", "rollback"])
    def test_a_bad_update_moves_nothing_and_is_told(self, policy, far):
        section = {"non_finite": policy, "spike": policy}
        good = [1.0] * 6
        expected, _, _ = self.run([*good, 1.0])
        w, watch, results = self.run([*good, float("nan"), 1e4, 1.0], section=section, far=far, max_grad_norm=1e9)
        assert torch.equal(w, expected)
        assert [(each.step, each.kind, each.policy) for each in watch.look()] == [
            (7, "non_finite", policy),
            (8, "spike", policy),
        ]
        assert torch.isnan(results[6].loss)  # logs never hide one
        assert torch.isnan(results[6].grad_norm)
        assert float(results[7].loss) > 1e6

    def test_by_default_a_bad_update_is_seen_though_nothing_holds_it(self):
        w, watch, _ = self.run([1.0, float("inf"), 1.0])
        assert torch.isnan(w).all()
        anomaly, _ = watch.look()
        assert (anomaly.step, anomaly.kind, anomaly.policy, anomaly.ranks) == (2, "non_finite", "raise", ())

    @pytest.mark.parametrize("far", [False, True])
    def test_optimizers_without_the_word_hold_too(self, far):
        section = {"non_finite": "skip"}

        def make(w):
            return torch.optim.SGD([w], lr=0.01, momentum=0.9)

        expected, _, _ = self.run([1.0, 1.0], optimizer=make)
        w, _, _ = self.run([float("nan"), 1.0, float("nan"), 1.0], optimizer=make, section=section, far=far)
        assert torch.equal(w, expected)

    def test_an_overflow_that_the_loss_scale_handles_is_no_anomaly(self):
        scale = LossScale(torch.device("cpu"), initial=2.0**126)
        w, watch, results = self.run([1.0, 1.0], loss_scale=scale, section={"non_finite": "skip"})
        assert w.tolist() == [1.0, -2.0, 3.0]
        assert not torch.isfinite(results[0].grad_norm)
        assert watch.look() == []
        _, watch, _ = self.run([1.0, float("nan")], loss_scale=LossScale(torch.device("cpu")))
        assert [each.step for each in watch.look()] == [2]

    @pytest.mark.parametrize("far", [False, True])
    def test_a_step_of_several_updates_is_judged_once(self, far):
        w, watch, _ = self.run([1.0, float("nan"), 1.0], applies=2, section={"non_finite": "skip"}, far=far)
        expected, _, _ = self.run([1.0, 1.0], applies=2)
        assert torch.equal(w, expected)
        assert [each.step for each in watch.look()] == [2]

    def test_a_repaired_gradient_is_no_anomaly_and_the_next_one_is_repaired_too(self):
        w = weight()
        w.register_hook(lambda grad: grad * torch.tensor([1.0, float("nan"), 1.0]))
        watch = AnomalyDetector(AnomaliesSection(non_finite="skip"), device=torch.device("cpu"), rank=0)
        updater = make_updater([w], optimizer=AdamW([w], lr=0.1, repair_nan=True), detector=watch)
        for step, loss in enumerate([1.0, float("nan"), 1.0]):
            updater.begin_step(step)
            update = updater.begin(8)
            update.backward(w.sum() * loss)
            result = update.apply()
        assert float(result.metrics["nan_gradients"]) == 1.0
        assert torch.isfinite(w).all()
        assert [each.step for each in watch.look()] == [2]

    @pytest.mark.parametrize("far", [False, True])
    def test_running_means_of_a_held_update_stay_as_they_were(self, far, monkeypatch):
        monkeypatch.setattr(anomalies, "reads_at_once", lambda device: not far)
        norms = {}
        for inputs in ([1.0, 2.0, float("nan"), 3.0], [1.0, 2.0, 3.0]):
            torch.manual_seed(0)
            norm = norms[len(inputs)] = nn.BatchNorm1d(3)
            watch = AnomalyDetector(AnomaliesSection(non_finite="skip"), device=torch.device("cpu"), rank=0)
            optimizer = torch.optim.AdamW(norm.parameters(), lr=0.1, fused=True)
            buffers = persistent_buffers(norm)
            updater = make_updater(list(norm.parameters()), optimizer=optimizer, detector=watch, buffers=buffers)
            for step, scale in enumerate(inputs):
                updater.begin_step(step)
                update = updater.begin(8)
                update.backward((norm(torch.arange(12.0).view(4, 3) * scale) ** 3).mean())
                update.apply()
        for held, plain in zip(norms[4].state_dict().values(), norms[3].state_dict().values(), strict=True):
            assert torch.equal(held, plain)

    def test_optimizers_that_make_the_host_wait_are_named_once_at_the_start(self, caplog, monkeypatch):
        monkeypatch.setattr(update_module, "reads_at_once", lambda device: False)
        with caplog.at_level("INFO"):
            self.run([1.0], section={"non_finite": "skip"}, optimizer=lambda w: torch.optim.RMSprop([w]))
            self.run([1.0], section={"non_finite": "skip"})
            self.run([1.0], optimizer=lambda w: torch.optim.RMSprop([w]))
        (line,) = [each for each in caplog.messages if "host waits" in each]
        assert "main (RMSprop)" in line


KINDS_THAT_DIVIDE = {
    "fp32": (torch.float32, {}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "bf16 moments": (torch.float32, {"state_dtype": "bf16"}),
}


def moments_after(kind, device, *, limit, by_hand):
    """The first moments, which are linear in the gradients, after steps whose gradients differ a hundredfold."""
    dtype, settings = KINDS_THAT_DIVIDE[kind]
    w = nn.Parameter(torch.ones(16, 16, device=device, dtype=dtype))
    optimizer = AdamW([w], lr=1e-3, **settings)
    updater = make_updater([w], optimizer=optimizer, max_grad_norm=None if by_hand else limit)
    for number, size in enumerate((1.0, 10.0, 0.001)):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).to(device, dtype)
        loss = size * (x @ w).square().mean()
        if by_hand:
            w.grad = None
            loss.backward()
            w.grad = w.grad.float().mul(min(1.0, limit / w.grad.float().norm().item())).to(dtype)
            optimizer.step()
        else:
            update = updater.begin(8)
            update.backward(loss)
            update.apply()
    return optimizer.state[w]["exp_avg"]


def assert_clipped_in_the_kernel(kind, device, monkeypatch):
    expected = moments_after(kind, device, limit=0.5, by_hand=True)
    other = moments_after(kind, device, limit=1e9, by_hand=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_mul_", None)  # there is no pass for clipping alone
        found = moments_after(kind, device, limit=0.5, by_hand=False)
    near = 1e-5 if kind == "fp32" else 0.01
    assert ((found - expected).norm() / expected.norm()).item() < near
    assert ((other - expected).norm() / expected.norm()).item() > 1


@pytest.mark.parametrize("kind", KINDS_THAT_DIVIDE)
def test_an_optimizer_that_divides_clips_in_its_kernel(kind, monkeypatch):
    monkeypatch.setattr(
        update_module, "waits_for_memory", lambda device: True
    )  # as on a GPU; the CPU has the kernel too
    assert_clipped_in_the_kernel(kind, "cpu", monkeypatch)


def test_gradients_in_fp64_are_clipped_in_fp64(monkeypatch):
    w = nn.Parameter(torch.ones(4, dtype=torch.float64))
    updater = make_updater([w], optimizer=AdamW([w], lr=0.1), max_grad_norm=0.3)
    monkeypatch.setattr(update_module, "waits_for_memory", lambda device: True)
    update = updater.begin(8)
    update.backward((w * torch.arange(4.0, dtype=torch.float64)).sum())
    update.apply()
    exact = torch.arange(4.0, dtype=torch.float64) * (0.3 / (14.0**0.5 + 1e-6))
    torch.testing.assert_close(w.grad, exact, rtol=1e-14, atol=0)


@pytest.mark.parametrize("first", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("second", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_norm_of_mixed_gradients_is_measured_in_at_least_fp32(first, second):
    """Squares of these overflow fp16, and the norm is not a number of bf16."""
    parameters = [nn.Parameter(torch.full((300,), 1.0, dtype=dtype)) for dtype in (first, second)]
    update = make_updater(parameters, batch_size=1, lr=0.0).begin(1)
    update.backward(sum((parameter * 999.0).double().sum() for parameter in parameters), 1)
    values = [torch.tensor(999.0).to(dtype).double() for dtype in (first, second)]
    expected = torch.stack([value.square() * 300 for value in values]).sum().sqrt()
    norm = update.apply().grad_norm
    assert norm.dtype == (torch.float64 if torch.float64 in (first, second) else torch.float32)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("kind", [AdamW, Lion, Muon, torch.optim.SGD, torch.optim.AdamW])
def test_gradients_of_16_bit_weights_add_up_in_fp32(kind, masters):
    """In bf16 the sum of 512 gradients is wrong by several percent."""
    if masters and kind.__module__.startswith("torch"):
        pytest.skip("has no masters")
    w = nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16))
    options = {"master_weights": True} if masters else {}
    seen = []

    class Seeing(kind):
        def step(self, *args, **kwargs):
            seen.append(w.grad.clone())
            return super().step(*args, **kwargs)

    updater = make_updater([w], batch_size=512, optimizer=Seeing([w], lr=1e-3, **options))
    generator = torch.Generator().manual_seed(0)
    gradients = 0.5 + torch.rand(512, 4, 8, generator=generator).bfloat16()
    update = updater.begin(1, num_backwards=512)
    for gradient in gradients:
        update.backward((w * gradient).sum(dtype=torch.float32), 1)
    update.apply()
    expected = gradients.double().mean(0)
    assert seen[0].dtype == (torch.float32 if masters else torch.bfloat16)
    torch.testing.assert_close(seen[0].double(), expected, rtol=1e-5 if masters else 2**-8, atol=0)


def test_one_backward_in_one_process_leaves_gradients_in_16_bits():
    w = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    update = make_updater([w]).begin(8, num_backwards=1, accumulates=False)
    update.backward(w.sum(dtype=torch.float32), 8)
    assert w.grad.dtype == torch.bfloat16
    update.apply()
