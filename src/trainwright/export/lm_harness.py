"""Runs tasks of EleutherAI's lm-eval on a checkpoint: answers its requests with this package's models and tokenizers.

The results are those of lm-eval's own adapter for transformers on the exported model. Tasks, prompts and metrics are
those of lm-eval; benchmarks/ has this package's own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.benchmarks.generate import complete
from trainwright.data.chat import CHATML, render_prompt_text
from trainwright.data.order import mix_seed
from trainwright.data.tokenizer import TextTokenizer, load_tokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.export.huggingface import save_tokenizer
from trainwright.models.generation import room_after
from trainwright.models.scoring import Score, score_continuations
from trainwright.progress import progress
from trainwright.writers.benchmark_results import BenchmarkResult, MetricValue

DEFAULT_MAX_LENGTH = 2048
"""The tokens of a row for models without a limit, as in lm-eval."""
DEFAULT_MAX_NEW_TOKENS = 256


def run_tasks(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    apply_chat_template: bool = False,
) -> tuple[list[BenchmarkResult], dict[str, Any]]:
    """Returns the result of each task with its samples, and lm-eval's own results as JSON values.

    `tasks` are names of lm-eval's tasks and groups, or of those in the YAML files of `include_path`, which may run
    code.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            "--tasks needs lm-eval, which is not installed. Install it: pip install 'trainwright[lm_eval]'."
        ) from error
    manager = None
    if include_path is not None:
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
    # Reading the thousands of lm-eval's own tasks takes seconds. A group may name some of them.
    if manager is None or not {*tasks} <= {*manager.all_subtasks}:
        manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        where = f" or in {include_path}" if include_path is not None else ". Set --include-path for tasks of your own"
        raise ConfigError(f"--tasks: there is no task {', '.join(unknown)} in lm-eval{where}.")
    adapter = _adapter_class()(model, _as_text_tokenizer(tokenizer), batch_size)
    try:
        found: Any = simple_evaluate(
            model=adapter,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            batch_size=batch_size,
            apply_chat_template=apply_chat_template,
            task_manager=manager,
        )
    except (OSError, ImportError) as error:  # a dataset that is not on this machine, or a package of a task
        raise DataError(f"lm-eval cannot run {', '.join(tasks)}: {type(error).__name__}: {error}") from error
    samples = found.get("samples", {})
    results = [
        BenchmarkResult(
            name,
            dict(_values(values)),
            found.get("n-samples", {}).get(name, {}).get("effective", len(samples.get(name, ()))),
            samples.get(name, ()),
        )
        for name, values in found["results"].items()
    ]
    kept = ("results", "groups", "configs", "versions", "n-shot", "n-samples", "higher_is_better")
    return results, {key: found[key] for key in kept if key in found}


def _values(values: Mapping[str, Any]) -> Iterator[tuple[str, MetricValue]]:
    """Yields the metrics of a task; `acc,none` is the metric acc with the filter none."""
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = values.get(f"{metric}_stderr,{filter_name}")
        name = metric if filter_name == "none" else f"{metric} ({filter_name})"
        yield name, MetricValue(float(value), float(error) if isinstance(error, int | float) else float("nan"))


def _as_text_tokenizer(tokenizer: Any) -> TextTokenizer:
    """Returns this package's tokenizer for a tokenizer of any library, from its files."""
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer
    with tempfile.TemporaryDirectory() as folder:
        if not save_tokenizer(tokenizer, Path(folder)):
            raise ConfigError(f"A {type(tokenizer).__name__} has no tokenizer.json, which --tasks needs.")
        found = load_tokenizer(folder)
        _ = found.vocab_size, found.find_chat_template()  # reads the files while they exist
        return found


def _adapter_class() -> Callable[..., Any]:
    """Returns the class that answers lm-eval's requests; its base is in an optional package, slow to import."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class CheckpointLM(TemplateLM):  # type: ignore[misc, unused-ignore]  # without lm-eval its type is unknown
        """Answers lm-eval's requests with a model and its tokenizer."""

        def __init__(self, model: nn.Module, tokenizer: TextTokenizer, batch_size: int) -> None:
            super().__init__()
            self.tokenizer = tokenizer
            self.batch_size = batch_size
            # The last token of a row is not read, and needs no position.
            self.max_length = room_after(model, 1) or DEFAULT_MAX_LENGTH
            self._model = model

        @property
        def eot_token_id(self) -> int:
            return self.prefix_token_id if self.tokenizer.eos_id is None else self.tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int:
            found = self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
            if found is None:
                raise ConfigError(
                    f"The tokenizer {self.tokenizer.name} has no token for the beginning or the end of a text, which "
                    "lm-eval needs. Name one in its tokenizer_config.json."
                )
            return found

        @property
        def tokenizer_name(self) -> str:
            return self.tokenizer.name.replace("/", "__")

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return (self.tokenizer.find_chat_template()[0] or CHATML) if chat_template else None

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            if add_generation_prompt:
                return render_prompt_text(chat_history, self.tokenizer)
            # The last message is the beginning of an answer, which the model continues.
            return render_prompt_text(chat_history[:-1], self.tokenizer) + chat_history[-1]["content"]

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            [ids] = self.tokenizer.encode_batch([string], add_special_tokens=False)
            first = self.tokenizer.affixes[0]
            has_first = bool(first) and ids[: len(first)] == first  # as chat templates write it
            return ids if add_special_tokens is False or has_first else [*first, *ids]

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            rows = []
            for _texts, context, continuation in requests:
                room = self.max_length + 1 - len(continuation)
                if room < 1:
                    raise DataError(
                        f"An answer has {len(continuation)} tokens, but the model has {self.max_length} positions."
                    )
                rows.append((context[-room:], continuation))
            scores = self._in_batches(
                rows,
                length_of=lambda row: len(row[0]) + len(row[1]),
                answer=lambda batch, _: score_continuations(self._model, batch),
            )
            return [(each.log_likelihood, each.is_greedy) for each in scores]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            windows = []
            for number, request in enumerate(requests):
                tokens = self.tok_encode(request.args[0])
                for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                    windows.append((number, make_disjoint_window(window)))
            scores: list[Score] = self._in_batches(
                [window for _, window in windows],
                length_of=lambda row: len(row[0]) + len(row[1]),
                answer=lambda batch, _: score_continuations(self._model, batch),
            )
            totals = [0.0] * len(requests)
            for (number, _), score in zip(windows, scores, strict=True):
                totals[number] += score.log_likelihood
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            groups: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
            texts = [""] * len(requests)
            for numbers in groups.values():
                options = _generation_options(requests[numbers[0]].args[1])
                stops, length = options.pop("stop_texts"), options["max_new_tokens"]
                if length >= self.max_length:
                    raise DataError(
                        f"A task generates up to {length} tokens (max_gen_toks), but the model has {self.max_length} "
                        "positions. Set max_gen_toks in generation_kwargs of the task."
                    )
                rows = [self.tok_encode(requests[number].args[0])[length - self.max_length :] for number in numbers]

                def answer(
                    batch: list[list[int]],
                    which: Sequence[int],
                    numbers: list[int] = numbers,
                    stops: list[str] = stops,
                    options: dict[str, Any] = options,
                ) -> list[str]:
                    made = complete(
                        self._model,
                        self.tokenizer,
                        [ids or [self.prefix_token_id] for ids in batch],
                        seeds=[mix_seed(0, numbers[each]) for each in which],
                        stop_ids={self.eot_token_id},
                        stop_texts=stops,
                        **options,
                    )
                    return [each.text for each in made]

                found = self._in_batches(rows, length_of=len, answer=answer)
                for number, text in zip(numbers, found, strict=True):
                    texts[number] = text
            return texts

        def _in_batches(
            self,
            rows: Sequence[Any],
            *,
            length_of: Callable[[Any], int],
            answer: Callable[[list[Any], Sequence[int]], Sequence[Any]],
        ) -> list[Any]:
            """Returns the answer to each row; rows of similar lengths share a batch, the longest come first."""
            order = sorted(range(len(rows)), key=lambda number: -length_of(rows[number]))
            answers: list[Any] = [None] * len(rows)
            with progress("Answering lm-eval", total=len(rows), unit="requests") as advance:
                for start in range(0, len(order), self.batch_size):
                    which = order[start : start + self.batch_size]
                    for number, one in zip(which, answer([rows[each] for each in which], which), strict=True):
                        answers[number] = one
                    advance(len(which))
            return answers

    return CheckpointLM


_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The names of the limit of a completion in tasks; the first one that is set applies."""


def _generation_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `complete` for the generation_kwargs of a task."""
    until = given.get("until") or []
    length = next((given[name] for name in _LENGTHS if given.get(name) is not None), DEFAULT_MAX_NEW_TOKENS)
    is_sampled = bool(given.get("do_sample", given.get("temperature", 0) > 0))
    return {
        "stop_texts": [each for each in ([until] if isinstance(until, str) else until) if each],
        "max_new_tokens": int(length),
        "temperature": float(given.get("temperature", 1.0)) if is_sampled else 0.0,
        "top_k": given.get("top_k") if is_sampled else None,
        "top_p": given.get("top_p") if is_sampled else None,
    }
