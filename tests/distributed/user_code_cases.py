"""Runs whose own forward, hook and optimizer compute with the parameters of a sharded model; see test_user_code.py."""

import json

import torch
from tests.distributed.layout_cases import LAYOUTS, Double, build_and_forget, load, words_of

from trainwright import Hook, Mean, get_event_storage
from trainwright.parallel import processes

SIZES = "data.eval={valid: {type: layout_cases.py:Rows, size: 7}}"
SHORT = (SIZES, "trainer.max_steps=3", "evaluation.metrics={}")


def penalty_of(model):
    return sum(parameter.square().sum() for parameter in model.parameters())


class Penalized(Double):
    """Adds a penalty on all weights, of which the model uses all but one, and measures them."""

    @classmethod
    def build_model(cls, build):
        model = super().build_model(build)
        model.spare = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
        return model

    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), Watch()]

    def forward(self, **batch):
        loss = super().forward(**batch)["loss"]
        penalty = penalty_of(self.model)
        return self.penalized(loss, penalty)

    def penalized(self, loss, penalty):
        get_event_storage().put_scalar("put", penalty)
        with get_event_storage().name_scope("last"):
            get_event_storage().put_scalar("put", penalty, smoothing_hint=False)
        metrics = {"penalty": penalty, "tripled": Mean(penalty * 3, 1), "read": penalty.item(), "head": self.head()}
        return Mean(loss.total + 1e-2 * penalty * loss.count, loss.count), metrics

    def head(self):
        return self.model.spare.detach() + 1

    def train_loop_end(self):
        return {**super().train_loop_end(), "end": penalty_of(self.model).detach()}

    def eval_end(self, aggregated):
        return {**super().eval_end(aggregated), "end": penalty_of(self.model)}


class PenalizedFirst(Penalized):
    """Computes the penalty before the model gathers its parameters."""

    def forward(self, **batch):
        penalty = penalty_of(self.model)
        return self.penalized(Double.forward(self, **batch)["loss"], penalty)


class OwnEvaluation(Penalized):
    """Evaluates with a loss of its own: a plain number, weighted by samples."""

    def eval_step(self, batch):
        lengths = (batch["input_ids"] != 0).sum(-1).double()
        self.model(**batch)
        return {"loss": lengths.mean() + penalty_of(self.model), "penalty": Mean(penalty_of(self.model), 1)}


class Directly(Double):
    """Uses a weight outside of the model's forward."""

    def forward(self, **batch):
        loss = super().forward(**batch)["loss"]
        table = self.model.model.embed_tokens.weight
        found = torch.nn.functional.embedding(batch["input_ids"], table)
        found = found * (batch["input_ids"] != 0)[..., None]
        return Mean(loss.total + found.square().sum(), loss.count)


class OwnStep(Double):
    """Adds the penalty in a step of its own, around the forward, and measures the weights after the update."""

    def train_step(self, batch):
        update = self.begin_update()
        for micro_batch in self.micro_batches(batch):
            result = self.run_forward(micro_batch)
            penalty = penalty_of(self.model)
            result.loss = Mean(result.loss.total + 1e-2 * penalty * result.loss.count, result.loss.count)
            result.metrics["penalty"] = penalty.detach()
            update.backward(result)
        done = update.apply()
        done.metrics.update(after=penalty_of(self.model).detach(), read=penalty_of(self.model).item())
        done.metrics["relative"] = done.metrics["after"] / done.loss
        return done


class OwnStepFirst(Double):
    """Propagates the penalty alone, before the forward gathers the parameters and after it."""

    def train_step(self, batch):
        update = self.begin_update()
        for micro_batch in self.micro_batches(batch):
            num_samples = self.batch.num_samples
            # With a number of samples each is a micro-batch of its own, because its count differs.
            update.backward(Mean(1e-2 * penalty_of(self.model) * num_samples, float(num_samples)), num_samples)
            update.backward(self.run_forward(micro_batch))
            update.backward(Mean(1e-2 * penalty_of(self.model) * num_samples, float(num_samples)), num_samples)
        return update.apply()


class TwoTerms(Double):
    """Adds two penalties to the loss with a `backward` of their own: per micro-batch, and once for the batch."""

    def train_step(self, batch):
        update = self.begin_update()
        for micro_batch in self.micro_batches(batch):
            update.backward(self.run_forward(micro_batch))
            update.backward(1e-2 * penalty_of(self.model))
        update.backward(1e-2 * penalty_of(self.model))
        return update.apply()


class Unfreezing(Double):
    """Freezes the first layer, unfreezes it after an update, and freezes the embeddings instead."""

    @classmethod
    def build_model(cls, build):
        model = super().build_model(build)
        model.model.layers[0].requires_grad_(False)
        return model

    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), ChangeTrainable()]


class ChangeTrainable(Hook):
    def after_step(self):
        if self.trainer.step == 1:
            self.trainer.model.model.layers[0].requires_grad_(True)
            self.trainer.model.model.embed_tokens.requires_grad_(False)
            self.kept = self.trainer.model.model.embed_tokens.weight.detach().clone()
        assert torch.equal(self.kept, self.trainer.model.model.embed_tokens.weight)


class Marked(Double):
    """Marks parameters, as a model may do."""

    @classmethod
    def build_model(cls, build):
        model = super().build_model(build)
        model.model.embed_tokens.weight.lr_scale = 0.1
        model.model.layers[0].self_attn.o_proj.weight.no_weight_decay = True
        return model


class Watch(Hook):
    """Logs what the weights are, at several events."""

    def before_train(self):
        self.at_first = float(next(self.trainer.model.parameters()).detach().norm())

    def after_eval(self, logs):
        self.trainer.storage.put_scalar("in_evaluation", float(next(self.trainer.model.parameters()).detach().norm()))
        self.trainer.storage.put_scalar("at_first", self.at_first)

    def after_step(self):
        weights = [parameter.detach().norm() for parameter in self.trainer.model.parameters()]
        self.trainer.storage.put_scalar("weight_norm", sum(weights))
        self.trainer.storage.put_scalar("first_norm", weights[0])
        self.trainer.storage.put_scalar("largest", max(each.abs().max() for each in self.trainer.model.parameters()))


class Signs(torch.optim.Optimizer):
    """Takes steps of one size and returns what the weights are."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        weights = [one for group in self.param_groups for one in group["params"]]
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad.sign(), alpha=group["lr"])
        return {"largest_weight": torch.stack([one.abs().max() for one in weights]).max(), "total": weights[0].sum()}


class OneRankPuts(Double):
    """One rank alone puts what the shards of all ranks make."""

    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), WatchOnMain()]


class WatchOnMain(Hook):
    def after_step(self):
        if self.trainer.is_main_process:
            self.trainer.storage.put_scalar("weight_norm", next(self.trainer.model.parameters()).detach().norm())


class OneRankReturns(Double):
    """One rank alone returns such a metric of an evaluation."""

    def eval_step(self, batch):
        logs = dict(super().eval_step(batch))
        if self.is_main_process:
            logs["weight"] = next(self.model.parameters()).sum()
        return logs


SIGNS = "trainer.optimizer={type: user_code_cases.py:Signs, lr: 1e-3}"
UNSHARDED = ("runtime.accumulate_unsharded=true", "runtime.reshard_after_forward=false")
COMPILED = ("runtime.mode=compile", "runtime.compile_backend=aot_eager")
SPLIT = ("fsdp", "tensor", "fsdp-tensor", "replicate-fsdp")
CASES = {
    "penalized": (("replicate", *SPLIT), Penalized, SHORT),
    "unsharded": (("fsdp",), Penalized, (*SHORT, *UNSHARDED)),
    "first": (("fsdp", "tensor", "replicate-fsdp"), PenalizedFirst, (*SHORT, SIGNS)),
    "own-evaluation": (("fsdp", "fsdp-tensor"), OwnEvaluation, SHORT),
    "own-step": (("replicate", *SPLIT), OwnStep, SHORT),
    "own-step-micro": (("fsdp",), OwnStep, (*SHORT, "trainer.micro_batch_size=1", *UNSHARDED)),
    "own-step-first": (("fsdp", "tensor", "replicate-fsdp"), OwnStepFirst, SHORT),
    "two-terms": (("replicate", "fsdp", "tensor"), TwoTerms, (*SHORT, "trainer.micro_batch_size=1")),
    "unfreezing": (("replicate", "fsdp", "tensor"), Unfreezing, (*SHORT, "trainer.micro_batch_size=1")),
    "compiled": (("fsdp",), Penalized, (*SHORT, *COMPILED)),
    "compiled-step": (("fsdp", "tensor"), OwnStep, (*SHORT, *COMPILED)),
    "marked": (SPLIT, Marked, (*SHORT, "trainer.optimizer={type: adamw, lr: 1e-2, weight_decay: 0.5}")),
    "direct": (("fsdp", "tensor", "fsdp-tensor"), Directly, SHORT),
}


SLOW = {("compiled-step", "fsdp"), ("compiled-step", "tensor")}
"""The slowest, which `make test-slow` alone runs, as it runs the layouts of four ranks."""


def main(folder, left_out=SLOW):
    for layout, axes in LAYOUTS.items():
        size = torch.tensor([*axes.values(), 1]).prod().item()
        if size != processes.world_size() or layout in ("context", "pipeline"):
            continue
        for name, (layouts, kind, overrides) in CASES.items():
            if layout not in ("one", *layouts) or (name, layout) in left_out:
                continue
            if layout == "one":
                overrides = [each for each in overrides if each not in COMPILED]  # what it is compared with
            build_and_forget(load(folder, name, layout, *overrides), kind).train()
        if layout == "fsdp":
            said = {}
            for kind in (OneRankPuts, OneRankReturns):
                trainer = build_and_forget(load(folder, kind.__name__, layout, *SHORT), kind)
                said[kind.__name__] = trainer.ranks.gather(words_of(trainer.train))
            write_said(folder, "said.json", said)
        if layout == "tensor":
            said = {}
            for kind in (PenalizedFirst, Directly):
                trainer = build_and_forget(load(folder, kind.__name__, layout, *SHORT, *COMPILED), kind)
                said[kind.__name__] = trainer.ranks.gather(words_of(trainer.train))
            write_said(folder, "said-compiled.json", said)


def write_said(folder, name, said):
    if processes.rank_and_size().rank == 0:
        (folder / name).write_text(json.dumps(said))
