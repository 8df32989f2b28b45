"""The loop as a run will go: each phase in order, and under it who acts there, from which file and line.

A class that cannot be found is a line of its own, and the rest goes on. The loop itself is loop/trainer.py, the
order of construction build.py's; commands/explain.py prints this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.config import Component, RunConfig, resolve_batch
from trainwright.errors import TrainwrightError
from trainwright.explaining.found import (
    OURS,
    Act,
    Found,
    HookUse,
    act_of,
    acts_of,
    components_of,
    find_all,
    first_line,
    names_in,
    overridden,
    overrides_of,
)
from trainwright.explaining.weights import Rule, Weights
from trainwright.hooks.obey_preemption import ObeyPreemption
from trainwright.hooks.time_steps import TimeSteps
from trainwright.hooks.watch_for_hangs import WatchForHangs
from trainwright.loop.hook import Hook
from trainwright.loop.task import Task
from trainwright.loop.trainer import Trainer

DEFAULT_HOOKS: tuple[type[Hook], ...] = (TimeSteps, ObeyPreemption, WatchForHangs)
"""The classes of the hooks that every run has, in order: parts.py makes them before those of the config."""


@dataclass(frozen=True)
class Line:
    """One line of the explanation: a heading, a phase of the loop, somebody who acts in it, or a problem."""

    kind: Literal["heading", "phase", "act", "problem"]
    text: str
    depth: int = 0
    place: str = ""
    remark: str = ""
    is_users: bool = False


def explain(config: RunConfig) -> list[Line]:
    """Returns the run as lines: how its parts are built, then its loop."""
    found = find_all(config)
    return [*_Construction(config, found).lines(), *_Loop(config, found).lines()]


class _Writer:
    """Collects lines for a config and the classes found for it."""

    def __init__(self, config: RunConfig, found: Found) -> None:
        self.config = config
        self.found = found
        self.out: list[Line] = []

    def phase(self, text: str, acts: list[Act], *, depth: int, nobody: str = OURS, remark: str = "") -> None:
        """Adds a phase and who acts in it; where nobody does, one line says so."""
        self.out.append(Line("phase", text, depth, remark=remark if acts else nobody))
        for act in acts:
            self.out.append(Line("act", act.name, depth + 1, act.place, act.remark, act.is_users))

    def problem(self, label: str, *, depth: int = 1) -> None:
        """Adds the problem with a part, if it has one."""
        if label in self.found.problems:
            self.out.append(Line("problem", self.found.problems[label], depth))

    def trainer_acts(self, method: str) -> list[Act]:
        """The overrides of a Trainer method, in call order."""
        return acts_of(self.found.trainer, method, Trainer)

    def task_acts(self, method: str) -> list[Act]:
        """The overrides of a Task method, in call order."""
        return acts_of(self.found.task, method, Task) if self.found.task else []


class _Construction(_Writer):
    """How the parts are made, in the order of build.py."""

    def lines(self) -> list[Line]:
        """Returns the lines."""
        self.out.append(Line("heading", "Construction, in this order"))
        self.problem("imports")
        self._part("task", ["task"], "build_task", ours="Task: forward calls model(**batch)")
        self._part("model", ["model"], "build_model", task_method="build_model")
        weights = Weights(self.config, self.found.parts.get("model"))
        if not self.task_acts("build_model"):
            self._rules(weights.of_model)
        self._part("data.collator", ["data.collator"], "build_collator")
        self._part("data.train", ["data.train"], "build_train_data", task_method="build_dataset")
        sets = [f"data.eval.{name}" for name in self.config.data.eval]
        self._part("data.eval", sets, "build_eval_data", task_method="build_dataset", ours=self._cut() or "none")
        if self.config.data.test is not None:
            self._part("data.test", ["data.test"], None, task_method="build_dataset")
        optimizers = [label for label, kind, _ in components_of(self.config) if kind == "optimizer"]
        self._part("optimizers", optimizers, "build_optimizers", ours="none")
        for label in optimizers:
            self._rules(weights.of_optimizers.get(label, []))
        schedules = [label for label, kind, _ in components_of(self.config) if kind == "schedule"]
        self._part("schedules", schedules, None, ours="a constant learning rate")
        self._hooks()
        self._part("writers", [f"writers.{n}" for n in range(len(self.config.writers))], "build_writers", ours="none")
        if self.config.evaluation.metrics:
            self._part("metrics", [f"evaluation.metrics.{name}" for name in self.config.evaluation.metrics], None)
        self._trainer()
        return self.out

    def _part(
        self,
        name: str,
        labels: list[str],
        trainer_method: str | None,
        *,
        task_method: str | None = None,
        ours: str = "none",
    ) -> None:
        """Says who makes a part: the trainer's or the task's own method, or its section."""
        acts = self.trainer_acts(trainer_method) if trainer_method else []
        builds_itself = "what it asks `build` for: " if acts else ""
        if not acts and task_method is not None:
            acts = self.task_acts(task_method)
            builds_itself = "has no effect and will be refused: " if acts else ""
        given = [
            self._section_act(label, component, builds_itself)
            for label, _, component in components_of(self.config)
            if label in labels and label in self.found.parts
        ]
        nobody = "" if any(label in self.found.problems for label in labels) else ours
        self.phase(name, [*acts, *given], depth=1, nobody=nobody, remark=self._cut() if name == "data.train" else "")
        for label in labels:
            self.problem(label, depth=2)

    def _rules(self, rules: list[Rule]) -> None:
        """Adds what the rules of a section do, below it."""
        for rule in rules:
            self.out.append(Line("problem" if rule.is_problem else "phase", rule.text, 2, remark=rule.remark))

    def _section_act(self, label: str, component: Component, prefix: str) -> Act:
        found = act_of(self.found.parts[label])
        where = self.config.written_at((*label.split("."), "type")) or "default"
        named = label.split(".")[2:3] if label.startswith(("data.eval.", "evaluation.metrics.", "trainer.opt")) else []
        name = "".join(f"{each}: " for each in named) + component.type
        return Act(f"{name} ({where})", found.place, f"{prefix}{found.remark}", found.is_users)

    def _cut(self) -> str:
        split, names = self.config.data.split, self.config.data.cut_off
        if isinstance(split, tuple):
            return f"data.train is cut {' : '.join(f'{one:g}' for one in split)} by data.split"
        sizes = " and ".join(f"{getattr(split, name):,} samples for {name}" for name in names)
        return f"data.split cuts {sizes} off from data.train" if names else ""

    def _hooks(self) -> None:
        acts = self.trainer_acts("build_hooks")
        remark = "it may add or drop hooks; the others are what build.hooks() gives it" if acts else ""
        defaults = [act_of(each) for each in DEFAULT_HOOKS]
        given = [self._hook(number, each) for number, each in enumerate(self.config.hooks)]
        listed = [*acts, *defaults, *filter(None, given)]
        self.phase("hooks, in the order of their calls", listed, depth=1, remark=remark)
        for number in range(len(self.config.hooks)):
            self.problem(f"hooks.{number}", depth=2)
            self.problem(f"hooks.{number}.call", depth=2)

    def _hook(self, number: int, component: Component) -> Act | None:
        label = f"hooks.{number}"
        if label not in self.found.parts:
            return None
        act = self._section_act(label, component, "")
        if component.type == "every":
            remark = f"calls {component.arguments.get('call')} every {component.arguments.get('steps')} steps"
            return Act(act.name, act.place, remark, act.is_users)
        if not isinstance(self.found.parts[label], type):
            return Act(act.name, act.place, "makes a hook; when that acts is known only once it is made", act.is_users)
        return act

    def _trainer(self) -> None:
        found = act_of(self.found.trainer)
        where = self.config.written_at(("trainer", "type")) or "default"
        named = Act(f"{found.name} ({where})", found.place, found.remark, found.is_users)
        acts = [named, *self.trainer_acts("__init__"), *self.trainer_acts("post_init")]
        options = ", ".join(f"{name}: {value}" for name, value in self.config.trainer.options.items())
        self.phase("trainer", acts, depth=1, remark=f"with {options}" if options else "")
        self.problem("trainer", depth=2)


class _Loop(_Writer):
    """The loop of loop/trainer.py, line by line."""

    def lines(self) -> list[Line]:
        """Returns the lines."""
        self.out.append(Line("heading", f"The loop: {self._limits()}; {self._batch()}"))
        if overridden(self.found.trainer, "train", Trainer):
            self.phase("train", self.trainer_acts("train"), depth=0, remark="is the loop itself, or goes around it")
        self._moment("load_state_dict", 0, "where the run goes on from a checkpoint")
        self._moment("before_train", 0)
        self.out.append(Line("phase", "while step < max_steps:"))
        self._moment("before_step", 1)
        self.phase("batch = next_train_inputs(iterator)", self.trainer_acts("next_train_inputs"), depth=1)
        self._train_step()
        self.out.append(Line("phase", "step += 1", 1))
        self._moment("after_step", 1)
        self._evaluate()
        self._write()
        self._save()
        self._moment("after_train", 0, "not after an error or an interruption")
        self._moment("close", 0, "always, also after an error")
        self._rest()
        return self.out

    def _limits(self) -> str:
        trainer = self.config.trainer
        names = ("steps", "epochs", "samples", "tokens")
        given = [(getattr(trainer, f"max_{name}"), name) for name in names]
        limits = [f"{value:,g} {name}" for value, name in given if value is not None]
        if not limits:
            return "without a limit, which training will refuse"
        return f"up to {limits[0]}" if len(limits) == 1 else f"until the first of {', '.join(limits)}"

    def _batch(self) -> str:
        try:
            plan = resolve_batch(self.config, 1)
        except TrainwrightError as error:
            return str(error)
        cut = f" in {plan.accumulation} micro-batches" if plan.accumulation > 1 else ""
        return f"{plan.global_batch_size} samples a step{cut}"

    def _moment(self, moment: str, depth: int, when: str = "") -> None:
        """Adds a moment with the hooks that act in it, in the order of their calls."""
        self.phase(moment, self._hook_acts(moment), depth=depth, nobody="no hook", remark=when)

    def _hook_acts(self, moment: str) -> list[Act]:
        acts = []
        for use in [*(HookUse(each) for each in DEFAULT_HOOKS), *self.found.hooks]:
            if use.function is not None and moment == "after_step":
                found = act_of(use.function)
                acts.append(Act(found.name, found.place, f"{use.period}: {found.remark}", found.is_users))
            elif isinstance(use.target, type) and overridden(use.target, moment, Hook):
                for found in acts_of(use.target, moment, Hook):
                    period = f"{use.period}: " if use.period and moment.endswith("_step") else ""
                    acts.append(Act(found.name, found.place, f"{period}{found.remark}", found.is_users))
        return acts

    def _train_step(self) -> None:
        acts = self.trainer_acts("train_step")
        self.phase("result = train_step(batch)", acts, depth=1)
        for method in ("begin_update", "micro_batches", "run_forward"):
            if self.trainer_acts(method):
                self.phase(method, self.trainer_acts(method), depth=2)
        forward = self.trainer_acts("forward")
        functions = [function for _, function in overrides_of(self.found.trainer, "forward", Trainer)]
        if not functions or any("task" in names_in(function) for function in functions):
            forward += self.task_acts("forward")
        model = self.found.parts.get("model")
        builds_model = self.trainer_acts("build_model") or self.task_acts("build_model")
        if isinstance(model, type) and not builds_model and hasattr(model, "forward"):
            # An inherited forward is torch's stub for a missing one, or that of the class that wrote it.
            forward.append(act_of(model.forward, ": ".join(filter(None, ("the model", first_line(model.forward))))))
        self.phase("forward, for each micro-batch", forward, depth=2)
        self.phase("the optimizer's step", self._optimizer_acts(), depth=2)

    def _optimizer_acts(self) -> list[Act]:
        acts = self.trainer_acts("build_optimizers")[:1]
        if acts:
            return [Act(acts[0].name, acts[0].place, "makes the optimizers", acts[0].is_users)]
        labels = [label for label, kind, _ in components_of(self.config) if kind == "optimizer"]
        classes = [self.found.parts[label] for label in labels if label in self.found.parts]
        steps = [(each, act_of(each.step)) for each in classes if hasattr(each, "step")]
        return [Act(f"{each.__name__}.step", act.place, act.remark, act.is_users) for each, act in steps]

    def _evaluate(self) -> None:
        when = self._when(self.config.evaluation.every_steps)
        builders = self.trainer_acts("build_eval_data") or self.task_acts("build_dataset")
        sets = [*self.config.data.eval] or [name for name in self.config.data.cut_off if name != "test"]
        if not sets and not builders and self.config.data.test is None:
            self.out.append(Line("phase", "evaluate", 1, remark="never: there is no evaluation set (data.eval)"))
            return
        names = f"the sets of {builders[0].name}" if builders else ", ".join(sets)
        has_test = self.config.data.test is not None or "test" in self.config.data.cut_off
        test = "; test once, at the end" if has_test else ""
        self.out.append(Line("phase", "evaluate", 1, remark=f"{names}: {when}{test}" if names else "test, at the end"))
        self._moment("before_eval", 2)
        for method in ("eval_begin", "next_eval_inputs", "eval_step"):
            self.phase(method, self.trainer_acts(method), depth=2)
        if self.task_acts("aggregate_logs"):
            self.phase("aggregate_logs", self.task_acts("aggregate_logs"), depth=2)
        self.phase("eval_end", [*self.trainer_acts("eval_end"), *self.task_acts("reduce_aggregated_logs")], depth=2)
        self._moment("after_eval", 2)

    def _write(self) -> None:
        labels = [f"writers.{number}" for number in range(len(self.config.writers))]
        writers = [self.found.parts[label] for label in labels if label in self.found.parts]
        self.out.append(Line("phase", "write", 1, remark=self._when(self.config.log.every_steps)))
        self.phase("train_loop_end", self.trainer_acts("train_loop_end"), depth=2)
        acts = self.trainer_acts("build_writers") or [act_of(each.write) for each in writers if hasattr(each, "write")]
        self.phase("the writers", acts, depth=2, nobody="none")
        self.phase("train_loop_begin", self.trainer_acts("train_loop_begin"), depth=2)

    def _save(self) -> None:
        best = self.config.checkpoint.keep_best
        when = self._when(self.config.checkpoint.every_steps)
        if best is not None:
            when += f"; and when {best.metric} is the {'lowest' if best.mode == 'min' else 'highest'} so far"
        self.out.append(Line("phase", "save", 1, remark=when))
        self._moment("state_dict", 2)
        self._moment("after_save", 2)

    def _when(self, every_steps: int | None) -> str:
        if every_steps is None:
            return "once, at the end"
        return "every step" if every_steps == 1 else f"every {every_steps:,} steps, and at the end"

    def _rest(self) -> None:
        """Names what else a user's trainer replaces, so that no override goes unseen."""
        shown = {line.text for line in self.out if line.kind == "act"}
        skipped = {"__init__", "post_init", "train"} | {name for name in dir(Trainer) if name.startswith("build_")}
        acts = []
        for name in sorted(vars(Trainer)):
            is_plain = not name.startswith("__") and name not in skipped
            if is_plain and overridden(self.found.trainer, name, Trainer):
                acts += [act for act in self.trainer_acts(name) if act.name not in shown]
        if acts:
            self.phase("also replaced", acts, depth=0)
