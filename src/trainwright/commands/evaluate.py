"""`trainwright evaluate RUN`: evaluates a checkpoint, or runs tasks of lm-eval on it, and prints the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.commands.terminal import (
    CheckpointStep,
    Overrides,
    RunPath,
    Trust,
    Weights,
    load_run,
    shown_in_terminal,
)
from trainwright.config import Component
from trainwright.config.files import parse_file
from trainwright.config.sections import benchmark_name
from trainwright.config.yaml_text import Node
from trainwright.errors import ConfigError
from trainwright.safe_text import json_text


def evaluate(
    run: RunPath,
    overrides: Overrides = None,
    step: CheckpointStep = "latest",
    weights: Weights = None,
    trust: Trust = False,
    benchmarks: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file with a list of benchmarks, in addition to those of the run (evaluation.benchmarks).",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Run these tasks of lm-eval instead, separated by commas.", show_default=False),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="With --tasks: a folder with your own tasks.", show_default=False)
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(min=0, help="With --tasks: examples before each question.", show_default="the task's"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --tasks: samples of each task.", show_default="all")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="With --tasks: rows per forward.", show_default="8")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="With --tasks: prompts are user messages.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="With --tasks: auto, cpu, cuda or cuda:N.", show_default="auto")
    ] = None,
) -> None:
    """Evaluate a checkpoint on the run's evaluation sets and benchmarks and print the metrics as JSON.

    With --tasks it runs tasks of lm-eval on the checkpoint instead, prints a table, and writes the results to the
    folder benchmarks in the run folder.
    """
    if step not in ("latest", "best") and not step.isdecimal():
        raise ConfigError(f"--step: {step!r} is not a checkpoint. Use latest, best or a number.")
    options = {
        "include_path": include_path,
        "num_fewshot": num_fewshot,
        "limit": limit,
        "batch_size": batch_size,
        "apply_chat_template": apply_chat_template or None,
        "device": device,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if tasks is not None:
        for name, value in (("--benchmarks", benchmarks), ("a setting", overrides)):
            if value:
                raise ConfigError(f"{name} has no effect with --tasks, which evaluates a checkpoint as it was trained.")
        _run_tasks(run, tasks, step=step, weights=weights, trust=trust, **given)
        return
    for name in given:
        raise ConfigError(f"--{name.replace('_', '-')} has no effect without --tasks. Add --tasks, or remove it.")

    with shown_in_terminal("Importing torch"):
        from trainwright.api.run import run_experiment

    model_dir = str(run) if run.is_dir() else None
    config = load_run(run, overrides, trust=trust)
    if benchmarks is not None:
        listed = _with_benchmarks(config.evaluation.benchmarks, _read_benchmarks(benchmarks))
        config = config.derive({"evaluation.benchmarks": listed})
    _, logs = run_experiment(config, mode="eval", model_dir=model_dir, step=step, weights=weights)
    print(json_text(logs, indent=2))


def _with_benchmarks(own: Sequence[Component], added: Sequence[Node]) -> list[Node]:
    """Returns the benchmarks of a run and of a file; for equal names, that of the file."""
    components = []
    for number, each in enumerate(added):
        entry = each.plain()
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            problem = f"--benchmarks: entry {number} (counted from 0) has no type. Add one."
            raise ConfigError(problem, where=each.origin)
        components.append(Component.from_mapping(entry))
    names = [benchmark_name(each) for each in components]
    kept = [Node(each.to_dict(), each.origin) for each in own if benchmark_name(each) not in names]
    return [*kept, *added]


def _read_benchmarks(file: Path) -> Sequence[Node]:
    """Returns the list of a file, or its `benchmarks`, or those of its `evaluation` section."""
    try:
        found = parse_file(file, str(file))
    except ConfigError as error:
        raise ConfigError(f"--benchmarks: {error.problem}", where=error.where) from error
    for name in ("evaluation", "benchmarks"):
        found = found.value.get(name, found) if isinstance(found.value, dict) else found
    if not isinstance(found.value, tuple) or not found.value:
        raise ConfigError("--benchmarks: must be a list such as [{type: multiple_choice, path: …}].", where=file)
    return found.value


def _run_tasks(
    run: Path,
    tasks: str,
    *,
    step: str,
    weights: str | None,
    trust: bool,
    device: str = "auto",
    include_path: Path | None = None,
    **options: Any,
) -> None:
    """Runs tasks of lm-eval on a checkpoint, prints a table and writes the results to the run folder."""
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError("--tasks is empty. Name tasks, such as --tasks arc_easy,hellaswag.")
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"--include-path: there is no folder {include_path}. Pass a folder with YAML files of tasks.")

    from trainwright.backends.backend import pick_backend
    from trainwright.checkpoint.listing import checkpoints_location
    from trainwright.checkpoint.remote_store import open_store
    from trainwright.checkpoint.resume import pick_step
    from trainwright.checkpoint.run_folder import run_folder
    from trainwright.export.lm_harness import run_tasks
    from trainwright.export.text import load_text_model
    from trainwright.writers.benchmark_results import results_folder, table_lines, write_results

    config = load_run(run, trust=trust)
    folder = run if run.is_dir() else run_folder(config)
    store = open_store(checkpoints_location(folder, config))
    chosen = pick_step(store, step, best=config.checkpoint.keep_best)
    model, tokenizer = load_text_model(
        folder, step=chosen, weights=weights, device=pick_backend(device).device, trust=trust
    )
    results, details = run_tasks(model, tokenizer, names, include_path=include_path, **options)
    to = results_folder(folder, chosen, weights) / "lm_eval"
    write_results(to, results, details)
    print("\n".join(table_lines(results)))
    print(f"Results and samples: {to}")
