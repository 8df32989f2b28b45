"""Converts chats to tokens: a row → messages → the text of the chat template → tokens, and which of them are trained.

    read_row(row) → Chat or TextPair → render → RenderedChat(ids, is_trained)

The sources are in sources/chat.py and sources/preferences.py; this module is independent of files, lengths and batches.
Errors are DataErrors without a location, which the sources add.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.data.tokenizer import Span, TextTokenizer
from trainwright.errors import ConfigError, DataError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ (message['content'] or '') + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ (message['content'] or '') + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template for tokenizers without one."""

TRAIN_ON = ("assistant", "last", "all")

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

# The names of roles in ShareGPT's rows, whose messages are {"from": …, "value": …}.
_SHAREGPT_ROLES: Mapping[str, str] = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    **{role: role for role in ROLES},
}

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the markers that transformers recognizes

_LAYOUTS = (
    "Use messages (role, content), conversations (from, value), instruction with output, or prompt with completion."
)

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """A conversation in the form that a chat template expects."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    num_prompt: int = 0
    """The number of messages at the start that form the prompt; the assistant's turns among them are not trained."""


@dataclass(frozen=True)
class TextPair:
    """A prompt and its completion as text, to which no chat template is applied."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class RenderedChat:
    """The tokens of a conversation, and whether the model is trained to predict each."""

    ids: list[int]
    is_trained: list[bool]

    def cut(self, max_length: int | None) -> RenderedChat:
        """Returns the first `max_length` tokens; all if it is None."""
        return RenderedChat(self.ids[:max_length], self.is_trained[:max_length])


def read_row(row: Any) -> Chat | TextPair:
    """Returns the conversation of a row: `messages`, `conversations`, `instruction` and `output`, or a prompt's.

    A field that is None counts as missing, as in the tables of Parquet files.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"a row of type {type(row).__name__}, not a mapping. {_LAYOUTS}")
    given = {name: value for name, value in row.items() if value is not None}
    tools = read_tools(given.get("tools"))
    for name in ("messages", "conversations", "conversation"):
        if name in given:
            return Chat(_read_system(given) + read_messages(given[name], name), tools)
    if "instruction" in given:
        return Chat(_read_instruction(given), tools)
    if "prompt" in given and "completion" in given:
        prompt, completion = given["prompt"], given["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if tools or given.get("system"):
                name = "tools" if tools else "system"
                raise DataError(f"the row has {name}, but prompt and completion are texts. Use messages for both.")
            return TextPair(prompt, completion)
        if isinstance(prompt, str) or isinstance(completion, str):
            raise DataError(
                f"prompt is {_kind(prompt)}, completion is {_kind(completion)}. Use text for both, or messages for "
                "both."
            )
        beginning = _read_system(given) + read_messages(prompt, "prompt")
        return Chat(beginning + read_messages(completion, "completion"), tools, num_prompt=len(beginning))
    raise DataError(f"no conversation among the fields {', '.join(map(str, row)) or '(none)'}. {_LAYOUTS}")


def read_messages(value: Any, name: str = "messages") -> list[Message]:
    """Returns messages with `role` and `content` for a template, from OpenAI's or ShareGPT's format.

    Fields that are None are removed, parts of content that are texts are joined, and a tool call's arguments are a
    mapping even if they are given as JSON. `name` is the field's name for errors.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise DataError(f"{name} is {_kind(value)}. Use a list of messages, each with role and content.")
    if not len(value):
        raise DataError(f"{name} is empty. It needs at least one message, with role and content.")
    return [_read_message(each, f"{name}[{number}]") for number, each in enumerate(value)]


def _read_message(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"{name} is {_kind(value)}. Use a message with role and content.")
    message = {key: each for key, each in value.items() if each is not None}
    if "role" not in message and "from" in message:
        message = _read_sharegpt(message, name)
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{name}.role is {role!r}. Use one of: {', '.join(ROLES)}.")
    weight = message.pop("weight", 1)
    if weight != 1:
        raise DataError(
            f"{name}.weight is {weight!r}, but every turn of the assistant has the same weight. Remove it, or move the "
            "messages before the turn to train into prompt, and that turn into completion."
        )
    if isinstance(message.get("content"), list | tuple):
        message["content"] = "".join(_read_part(part, f"{name}.content") for part in message["content"])
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = [_read_call(call, f"{name}.tool_calls") for call in calls]
    content = message.get("content")
    if not isinstance(content, str) and (content is not None or not calls):
        raise DataError(f"{name}.content is {_kind(content)}. Use text.")
    return message


def _read_sharegpt(message: Message, name: str) -> Message:
    source = message["from"]
    role = _SHAREGPT_ROLES.get(source) if isinstance(source, str) else None
    if role is None:
        raise DataError(f"{name}.from is {source!r}. Use one of: {', '.join(_SHAREGPT_ROLES)}.")
    others = {key: each for key, each in message.items() if key not in ("from", "value")}
    if source == "function_call":
        return {"role": role, "tool_calls": [message.get("value")], **others}
    return {"role": role, "content": message.get("value"), **others}


def _read_part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise DataError(f"{name} has a part of type {kind}. Only text can be read: chats contain no images or sounds.")


def _read_call(call: Any, name: str) -> dict[str, Any]:
    """Returns a tool call as {"type": "function", "function": {"name": …, "arguments": {…}}}."""
    call = _read_json(call, name)
    function = _read_json(call.get("function"), name) if call.get("function") is not None else call
    if not isinstance(function.get("name"), str):
        raise DataError(f"{name} has no name of a function: {call!r:.80}.")
    arguments = function.get("arguments")
    arguments = {} if arguments in (None, "") else _read_json(arguments, f"{name}: arguments")
    identity = {key: each for key, each in call.items() if key in ("id",) and each is not None}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _read_json(value: Any, name: str) -> dict[str, Any]:
    """Returns a mapping that may be given as JSON, because Parquet has no type for mappings of any keys."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{name} is not JSON: {error}.") from error
    if not isinstance(found, Mapping):
        raise DataError(f"{name} is {_kind(found)}. Use a mapping, or its JSON.")
    return dict(found)


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Returns the JSON schemas of a row's tools, which may be given as JSON; None without any."""
    try:
        found = json.loads(value) if isinstance(value, str) and value.strip() else value
    except ValueError as error:
        raise DataError(f"tools is not JSON: {error}.") from error
    if not found:
        return None
    if isinstance(found, str | Mapping) or not isinstance(found, Sequence):
        raise DataError(f"tools is {_kind(found)}. Use a list of JSON schemas.")
    return [_read_json(each, f"tools[{number}]") for number, each in enumerate(found)]


def _read_instruction(given: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of Alpaca's layout; the input follows the instruction after a blank line."""
    texts = {"input": "", "output": None, **given}
    for name in ("instruction", "input", "output"):
        if not isinstance(texts[name], str):
            raise DataError(f"{name} is {_kind(texts[name])}. Use text.")
    request = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    turns = [{"role": "user", "content": request}, {"role": "assistant", "content": texts["output"]}]
    return _read_system(given) + turns


def _read_system(given: Mapping[str, Any]) -> list[Message]:
    """Returns the message of the field `system`, which some rows have in addition to the conversation."""
    text = given.get("system", "")
    if not isinstance(text, str):
        raise DataError(f"system is {_kind(text)}. Use text.")
    return [{"role": "system", "content": text}] if text else []


def _kind(value: Any) -> str:
    return {str: "a text", list: "a list", dict: "a mapping", type(None): "missing"}.get(
        type(value), f"of type {type(value).__name__}"
    )


def check_train_on(train_on: str, *, where: str | None = None) -> None:
    """Rejects an unknown value of `train_on`; `where` is the component that it is set in."""
    if train_on not in TRAIN_ON:
        raise ConfigError(f'train_on is "{train_on}". Use one of: {", ".join(TRAIN_ON)}.', where=where)


def render(
    row: Chat | TextPair, tokenizer: TextTokenizer, *, train_on: str = "assistant", chat_template: str | None = None
) -> RenderedChat:
    """Returns the tokens of a row."""
    if isinstance(row, TextPair):
        return render_text(row.prompt, row.completion, tokenizer, train_on=train_on)
    return render_chat(
        row.messages,
        tokenizer,
        tools=row.tools,
        train_on=train_on,
        num_prompt=row.num_prompt,
        chat_template=chat_template,
    )


def render_text(prompt: str, completion: str, tokenizer: TextTokenizer, *, train_on: str = "assistant") -> RenderedChat:
    """Returns the tokens of a prompt and its completion without a template; the EOS token is appended.

    A token that contains the end of the prompt and the beginning of the completion is trained.
    """
    check_train_on(train_on)
    if tokenizer.eos_id is None:
        raise DataError(
            f"The tokenizer {tokenizer.name} has no token for the end of a text, which ends a completion. Use messages "
            "instead of text, or set eos_token in its tokenizer_config.json."
        )
    ids, spans = tokenizer.encode_with_spans(prompt + completion, add_special_tokens=True)
    # Tokens that represent no text have empty spans; only those at the end belong to the completion.
    first = next((number for number, (_, end) in enumerate(spans) if end > len(prompt)), len(ids))
    is_trained = [train_on == "all" or number >= first for number in range(len(ids))]
    if not ids or ids[-1] != tokenizer.eos_id:
        ids, is_trained = [*ids, tokenizer.eos_id], [*is_trained, True]
    return RenderedChat(ids, is_trained)


def render_chat(
    messages: Sequence[Message],
    tokenizer: TextTokenizer,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    train_on: str = "assistant",
    num_prompt: int = 0,
    chat_template: str | None = None,
) -> RenderedChat:
    """Returns the tokens of a conversation, the same as transformers' `apply_chat_template`.

    `train_on` selects the turns of the assistant, the last one of them, or all tokens; turns among the first
    `num_prompt` messages are not trained, except with all. A turn includes the token that ends it. The turns are those
    that the template marks with {% generation %}, or otherwise the text between the prompt for a turn and the
    conversation up to its end. If that text is not a part of the conversation, because the template drops earlier
    reasoning for example, or if nothing ends it, this raises DataError. `chat_template` replaces the tokenizer's
    template.
    """
    check_train_on(train_on)
    template = _Template.of(tokenizer, tools, chat_template)
    text, marked = template.render(messages)
    ids, spans = tokenizer.encode_with_spans(text)
    if train_on == "all":
        return RenderedChat(ids, [True] * len(ids))
    turns = [number for number, each in enumerate(messages) if each["role"] == "assistant" and number >= num_prompt]
    turns = turns[-1:] if train_on == "last" else turns
    if not turns:
        return RenderedChat(ids, [False] * len(ids))
    if template.has_markers:
        ranges = marked[_count_marked(template, messages, turns[0], marked) :]
    else:
        ranges = [_find_turn(template, messages, number, text) for number in turns]
    return RenderedChat(ids, _mark_tokens(spans, ranges))


def render_prompt(
    messages: Sequence[Message],
    tokenizer: TextTokenizer,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    chat_template: str | None = None,
) -> list[int]:
    """Returns the tokens of a conversation with the beginning of the assistant's next turn, to generate the turn."""
    text = render_prompt_text(messages, tokenizer, tools=tools, chat_template=chat_template)
    return tokenizer.encode_with_spans(text)[0]


def render_prompt_text(
    messages: Sequence[Message],
    tokenizer: TextTokenizer,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    chat_template: str | None = None,
) -> str:
    """Returns the text whose tokens `render_prompt` returns."""
    return _Template.of(tokenizer, tools, chat_template).render(messages, add_generation_prompt=True)[0]


PROBE = "X"
"""The assistant's turn of a conversation that is used to find out how a template ends turns."""


def find_turn_end(
    asked: Sequence[int], whole: Sequence[int], *, special_ids: Collection[int], decode: Callable[[list[int]], str]
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Returns the tokens and the texts that end a turn of the assistant, from two conversations.

    `asked` is the prompt for a turn, and `whole` the same conversation with `PROBE` as the turn. The end is the
    template's output after the turn: the first special token or, without one, the text.
    """
    # The prompt may have more than the finished turn, such as the beginning of a thought.
    turn = list(whole[common_length(asked, whole) :])
    stop = next((token for token in turn if token in special_ids), None)
    if stop is not None:
        return frozenset({stop}), ()
    ending = str(decode(turn)).rpartition(PROBE)[2].strip()
    return frozenset(), (ending,) if ending else ()


def turn_end(tokenizer: TextTokenizer, chat_template: str | None = None) -> tuple[frozenset[int], tuple[str, ...]]:
    """Returns the tokens and the texts that end a turn of the assistant in a tokenizer's chats."""
    question = {"role": "user", "content": PROBE}
    asked = render_prompt([question], tokenizer, chat_template=chat_template)
    turns = [question, {"role": "assistant", "content": PROBE}]
    try:
        whole = render_chat(turns, tokenizer, train_on="all", chat_template=chat_template).ids
    except DataError:  # such as a template that only renders prompts; the tokenizer's EOS token remains
        return frozenset(), ()
    return find_turn_end(asked, whole, special_ids=tokenizer.special_ids, decode=tokenizer.decode)


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Returns the length of the longest common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(left), len(right)))


def end_of_turn(tokenizer: TextTokenizer, chat_template: str | None = None) -> int:
    """Returns the special token with which the chat template ends the assistant's turn."""
    stop_ids, _ = turn_end(tokenizer, chat_template)
    found = next(iter(stop_ids), tokenizer.eos_id)
    if found is None:
        raise DataError(
            "the chat template ends the assistant's turn with no special token of the tokenizer "
            f"{tokenizer.name}, so that no generated turn would end. Set chat_template."
        )
    return found


def read_template(given: str, project_dir: Path) -> str:
    """Returns a chat template that is given as its text, or as a .jinja file."""
    if "{" in given:
        return given
    file = project_dir / Path(given).expanduser()
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"chat_template: {file} cannot be read: {error}. Use a .jinja file, or the text of a template."
        ) from error


@dataclass(frozen=True)
class _Template:
    """A Jinja template and the values that it is rendered with."""

    text: str
    special_tokens: Mapping[str, str]
    tools: Sequence[dict[str, Any]] | None

    @classmethod
    def of(
        cls, tokenizer: TextTokenizer, tools: Sequence[dict[str, Any]] | None, chat_template: str | None
    ) -> _Template:
        own, special_tokens = tokenizer.find_chat_template(has_tools=bool(tools))
        text = chat_template or own or CHATML
        if text is CHATML and tools:
            raise DataError(
                f"the row has tools, but the tokenizer {tokenizer.name} has no chat template, and ChatML cannot "
                "describe tools. Set chat_template."
            )
        return cls(text, special_tokens, tools or None)

    @property
    def has_markers(self) -> bool:
        """True if the template marks the assistant's text."""
        return _GENERATION.search(self.text) is not None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """Returns the text, and the ranges that the template marks."""
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ConfigError(
                "Chat templates need transformers, which is not installed. Install it: pip install "
                "'trainwright[transformers]'."
            ) from error
        if self.text is CHATML and any("tool_calls" in message for message in messages):
            raise DataError("the row has tool calls, which ChatML cannot describe. Set chat_template.")
        arguments: dict[str, Any] = {
            **self.special_tokens,
            "tools": None if self.tools is None else list(self.tools),
            "chat_template": self.text,
            "return_assistant_tokens_mask": self.has_markers,
            "add_generation_prompt": add_generation_prompt,
        }
        render: Any = render_jinja_template  # annotated as a function that returns one text
        try:
            try:
                [text], ranges = render(conversations=[list(messages)], **arguments)
            except TypeError:  # some templates need the arguments of tool calls as JSON, most as a mapping
                [text], ranges = render(conversations=[[_with_json_arguments(each) for each in messages]], **arguments)
        except Exception as error:  # Jinja's errors, those of the template itself, and of Python in expressions
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"the chat template cannot render the messages {roles}: {type(error).__name__}: {error}"
            ) from error
        return text, ([(int(start), int(end)) for start, end in ranges[0]] if self.has_markers else [])


def _with_json_arguments(message: Message) -> Message:
    """Returns a message whose tool calls have their arguments as JSON."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
    calls = [
        {**call, "function": {**function, "arguments": text}}
        for call, function, text in zip(message["tool_calls"], functions, texts, strict=True)
    ]
    return {**message, "tool_calls": calls}


def _count_marked(template: _Template, messages: Sequence[Message], first: int, marked: Sequence[Span]) -> int:
    """Returns the number of marked ranges of the messages before `first`."""
    if not any(message["role"] == "assistant" for message in messages[:first]):
        return 0
    count = len(template.render(messages[:first])[1])
    if count >= len(marked):
        raise DataError(
            f"the chat template marks {len(marked)} ranges with {{% generation %}} in the conversation and {count} in "
            f"its first {first} messages, so that the later turns cannot be identified. Use train_on: assistant."
        )
    return count


def _find_turn(template: _Template, messages: Sequence[Message], number: int, text: str) -> Span:
    """Returns the range of an assistant's turn, from the conversations before and after it."""
    if number == 0:
        raise DataError(
            "the first message is the assistant's, and the chat template has no {% generation %} markers, so that the "
            "beginning of the turn is unknown. Begin with a user's message."
        )
    before, _ = template.render(messages[:number], add_generation_prompt=True)
    after = text if number + 1 == len(messages) else template.render(messages[: number + 1])[0]
    advice = "set chat_template to one with {% generation %} markers."
    if not after.startswith(before):
        raise DataError(
            f"the chat template begins the assistant's turn otherwise when it is to be generated than in messages"
            f"[{number}] ({_first_difference(before, after)}), for example with reasoning that the message does not "
            f"have, so that the beginning of the turn is unknown. Change the message, or {advice}"
        )
    if not text.startswith(after):
        raise DataError(
            f"the chat template renders messages[{number}] differently as the last message than within the "
            f"conversation ({_first_difference(after, text)}), for example because it drops earlier reasoning, so that "
            f"its tokens cannot be identified. Use train_on: last, or {advice}"
        )
    content = (messages[number].get("content") or "").strip()
    if content and after.endswith(content):
        raise DataError(
            f"the chat template writes nothing after the content of messages[{number}], so that the model would not "
            f"learn to end its turn. To train the token that follows it, {advice}"
        )
    return len(before), len(after)


def _first_difference(expected: str, found: str) -> str:
    start = next(
        (n for n, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other),
        min(len(expected), len(found)),
    )
    return f"{expected[start : start + 20]!r} and {found[start : start + 20]!r}"


def _mark_tokens(spans: Sequence[Span], ranges: Sequence[Span]) -> list[bool]:
    """Returns for each token whether it contains a character of a range; both are in ascending order."""
    is_trained, number = [], 0
    for start, end in spans:
        while number < len(ranges) and ranges[number][1] <= start:
            number += 1
        is_trained.append(number < len(ranges) and end > start and end > ranges[number][0])
    return is_trained
