"""Rows of chats as messages, and messages as tokens of which some are trained."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chats import (
    MARKED_TEMPLATE,
    MERGED_TEMPLATE,
    PREFIX_TEMPLATE,
    REASONING_TEMPLATE,
    RENAMED_TEMPLATE,
    TOOLS_TEMPLATE,
    chat,
    make_tokenizer_folder,
    trained_text,
)
from tests.messages import raises
from transformers import AutoTokenizer

from trainwright.data.chat import CHATML, Chat, TextPair, read_row, render, render_chat, render_prompt, render_text
from trainwright.data.tokenizer import load_tokenizer
from trainwright.errors import ConfigError, DataError

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TURNS = chat("the cat", "sat on", "the mat", "and the dog", system="be kind")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    templates = {"prefix": PREFIX_TEMPLATE, "marked": MARKED_TEMPLATE, "reasoning": REASONING_TEMPLATE, "none": None}
    return {name: make_tokenizer_folder(root / name, template) for name, template in templates.items()}


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


def user_and_assistant(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": user_and_assistant("q", "a")}, Chat(user_and_assistant("q", "a"))),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            Chat(user_and_assistant("q", "a")),
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
            Chat([{"role": "system", "content": "s"}, *user_and_assistant("q", "a")]),
        ),
        ({"instruction": "add", "input": "1 2", "output": "3"}, Chat(user_and_assistant("add\n\n1 2", "3"))),
        ({"instruction": "add", "input": "", "output": "3"}, Chat(user_and_assistant("add", "3"))),
        ({"prompt": "q", "completion": "a"}, TextPair("q", "a")),
        (
            {"prompt": user_and_assistant("q", "a")[:1], "completion": user_and_assistant("q", "a")[1:]},
            Chat(user_and_assistant("q", "a"), num_prompt=1),
        ),
        (
            {"prompt": user_and_assistant("q", "a")[:1], "completion": user_and_assistant("q", "a")[1:], "system": "s"},
            Chat([{"role": "system", "content": "s"}, *user_and_assistant("q", "a")], num_prompt=2),
        ),
        # A table has a column of every field, None where a row has none.
        ({"messages": user_and_assistant("q", "a"), "prompt": None, "tools": None}, Chat(user_and_assistant("q", "a"))),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}], "name": None}]},
            Chat([{"role": "user", "content": "q"}]),
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": '[{"name": "add"}]'},
            Chat([{"role": "assistant", "tool_calls": [CALL]}], tools=[{"name": "add"}]),
        ),
    ],
)
def test_every_layout_of_rows_is_read(row, expected):
    assert read_row(row) == expected


def test_the_arguments_of_tool_calls_are_mappings_however_they_are_given():
    as_json = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    sharegpt = {"from": "function_call", "value": json.dumps(CALL["function"])}
    for message in ({"role": "assistant", "tool_calls": [as_json]}, sharegpt):
        assert read_row({"messages": [message]}).messages[0]["tool_calls"] == [CALL]


@pytest.mark.parametrize(
    ("row", "mentions"),
    [
        ({"text": "a"}, ["text", "messages"]),
        ("a", ["str"]),
        ({"messages": []}, ["messages", "empty"]),
        ({"messages": "hello"}, ["messages", "a text"]),
        ({"messages": ["hello"]}, ["messages[0]"]),
        ({"messages": [{"role": "asistant", "content": "a"}]}, ["messages[0].role", "asistant", "assistant"]),
        ({"messages": [{"role": "user"}]}, ["messages[0].content"]),
        ({"messages": [{"role": "user", "content": 3}]}, ["messages[0].content", "int"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["image"]),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, ["weight"]),
        ({"messages": [{"role": "assistant", "tool_calls": ["{"]}]}, ["tool_calls", "JSON"]),
        ({"messages": [{"role": "assistant", "tool_calls": [{"arguments": {}}]}]}, ["tool_calls", "name"]),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "add"}, ["tools"]),
        ({"conversations": [{"from": "robot", "value": "a"}]}, ["conversations[0].from", "robot"]),
        ({"instruction": "a"}, ["output"]),
        ({"instruction": "a", "output": "b", "system": 1}, ["system", "int"]),
        ({"prompt": "a", "completion": "b", "tools": [{"name": "add"}]}, ["tools", "completion"]),
        ({"prompt": "a", "completion": "b", "system": "c"}, ["system", "completion"]),
        ({"instruction": 1, "output": "a"}, ["instruction", "int"]),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, ["prompt", "completion"]),
    ],
)
def test_an_invalid_row_is_rejected_by_its_field(row, mentions):
    with raises(DataError, *mentions):
        read_row(row)


@pytest.mark.parametrize("name", ["prefix", "marked"])
def test_the_tokens_are_those_of_transformers(name, folders, tokenizers):
    theirs = AutoTokenizer.from_pretrained(str(folders[name]))
    expected = theirs.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=name == "marked")
    rendered = render_chat(TURNS, tokenizers[name])
    assert rendered.ids == expected["input_ids"]
    if name == "marked":
        assert [int(each) for each in rendered.is_trained] == expected["assistant_masks"]
    prompt = theirs.apply_chat_template(TURNS[:-1], add_generation_prompt=True)["input_ids"]
    assert render_prompt(TURNS[:-1], tokenizers[name]) == prompt


@pytest.mark.parametrize(
    ("name", "end"), [("prefix", "<|im_end|>\n"), ("marked", "<|im_end|>"), ("none", "<|im_end|>")]
)
def test_trained_are_the_turns_of_the_assistant_with_their_ends(name, end, tokenizers):
    tokenizer = tokenizers[name]
    assert trained_text(render_chat(TURNS, tokenizer), tokenizer) == [f"sat on{end}", f"and the dog{end}"]
    last = render_chat(TURNS, tokenizer, train_on="last")
    assert trained_text(last, tokenizer) == [f"and the dog{end}"]
    after_prompt = render_chat(TURNS, tokenizer, num_prompt=3)
    assert after_prompt == last
    assert all(render_chat(TURNS, tokenizer, train_on="all").is_trained)
    assert not any(render_chat(TURNS[:2], tokenizer).is_trained)


def test_a_tokenizer_without_template_renders_chatml(tokenizers, folders):
    for tokenizer in (tokenizers["none"], load_tokenizer("bytes"), load_tokenizer(folders["none"] / "tokenizer.json")):
        rendered = render_chat(chat("hé", "ho"), tokenizer)
        expected = "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
        assert tokenizer.decode(rendered.ids, skip_special_tokens=False) == expected
        assert trained_text(rendered, tokenizer) == ["ho<|im_end|>"]


def test_chatml_rejects_tools_which_it_cannot_describe(tokenizers):
    with raises(DataError, "tools", "chat_template"):
        render_chat(chat("a", "b"), tokenizers["none"], tools=[{"name": "add"}])
    with raises(DataError, "tool calls", "chat_template"):
        render_chat([*chat("a"), {"role": "assistant", "tool_calls": [CALL]}], tokenizers["none"])


def test_a_template_that_drops_reasoning_is_rejected_unless_the_last_turn_is_trained(tokenizers):
    tokenizer = tokenizers["reasoning"]
    messages = chat("the cat", "<think>sat</think>on", "the mat", "<think>and</think>the dog")
    with raises(DataError, "messages[1]", "train_on: last", "generation"):
        render_chat(messages, tokenizer)
    rendered = render_chat(messages, tokenizer, train_on="last")
    assert trained_text(rendered, tokenizer) == ["<think>and</think>the dog<|im_end|>\n"]
    # Without reasoning there is nothing to drop.
    assert len(trained_text(render_chat(chat("a", "b", "c", "d"), tokenizer), tokenizer)) == 2


def test_a_turn_whose_borders_are_unknown_is_rejected(tokenizers):
    template = (
        "{% for message in messages %}{{ '[' + message.role + ']' + message.content + 'END' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]BEGIN' }}{% endif %}"
    )
    begins_reasoning = template.replace("END", "<end>").replace("BEGIN", "<think>")
    with raises(DataError, "messages[1]", "<think>", "reasoning", "generation"):
        render_chat(chat("a", "b"), tokenizers["none"], chat_template=begins_reasoning)
    without_end = template.replace("END", "").replace("BEGIN", "")
    with raises(DataError, "messages[1]", "end", "generation"):
        render_chat(chat("a", "b"), tokenizers["none"], chat_template=without_end)


@pytest.mark.parametrize("filter_", ["| tojson", ""])
def test_a_template_receives_arguments_of_tool_calls_as_it_needs_them(filter_, tokenizers):
    template = (
        "{% for message in messages %}{{ message.role + ':' + (message.content or '') }}"
        "{% for call in message.tool_calls %}{{ call.function.name + '(' + call.function.arguments FILTER + ')' }}"
        "{% endfor %}{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    ).replace("FILTER", filter_)
    messages = [*chat("a"), {"role": "assistant", "tool_calls": [CALL]}]
    rendered = render_chat(messages, tokenizers["none"], chat_template=template)
    assert trained_text(rendered, tokenizers["none"]) == ['add({"a": 1, "b": 2})<|im_end|>']


CALLED = '<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call>'
RESULTS = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
WITH_CALL = [*chat("add"), {"role": "assistant", "tool_calls": [CALL]}, *RESULTS, *chat("", "it is 3")[1:]]


@pytest.mark.parametrize(
    ("template", "messages", "turns"),
    [
        (MERGED_TEMPLATE, TURNS, [" sat on <eos>", " and the dog <eos>"]),
        (MERGED_TEMPLATE, TURNS[1:], [" sat on <eos>", " and the dog <eos>"]),
        (RENAMED_TEMPLATE, TURNS[1:], ["sat on<|im_end|>\n", "and the dog<|im_end|>\n"]),
        (TOOLS_TEMPLATE, WITH_CALL, [f"{CALLED}<|im_end|>\n", "it is 3<|im_end|>\n"]),
        (TOOLS_TEMPLATE, WITH_CALL[:-1], [f"{CALLED}<|im_end|>\n"]),
    ],
    ids=["merged system", "merged without system", "renamed", "results", "result at the end"],
)
def test_the_turns_of_usual_templates_are_found(template, messages, turns, tokenizers):
    tokenizer, tools = tokenizers["none"], [{"name": "add"}] if template is TOOLS_TEMPLATE else None

    def trained(**options):
        return trained_text(render_chat(messages, tokenizer, tools=tools, chat_template=template, **options), tokenizer)

    assert trained() == turns
    assert trained(train_on="last") == turns[-1:]
    end = next(number for number, each in enumerate(messages) if each["role"] == "assistant") + 1
    assert trained(num_prompt=end) == turns[1:]


@pytest.mark.parametrize("template", [MERGED_TEMPLATE, RENAMED_TEMPLATE])
def test_a_role_that_a_template_rejects_is_an_error_of_the_row(template, tokenizers):
    messages = [*chat("a", "b"), {"role": "system", "content": "c"}, *chat("d", "e")]
    problem = "Roles must alternate" if template is MERGED_TEMPLATE else "System role not supported"
    with raises(DataError, "user, assistant, system", problem):
        render_chat(messages, tokenizers["none"], chat_template=template)


def test_another_template_replaces_the_tokenizers(tokenizers):
    messages = chat("the cat", "<think>sat</think>on", "the mat", "the dog")
    replaced = render_chat(messages, tokenizers["reasoning"], chat_template=CHATML)
    assert replaced == render_chat(messages, tokenizers["none"])


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_template": PREFIX_TEMPLATE, "bos_token": "<bos>"},
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>"},
    ],
)
def test_a_template_is_found_wherever_transformers_saves_it(settings, tokenizers, tmp_path):
    folder = make_tokenizer_folder(tmp_path / "base")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if "chat_template" not in settings:
        (folder / "chat_template.jinja").write_text(PREFIX_TEMPLATE)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(MARKED_TEMPLATE)
    expected = render_chat(TURNS, tokenizers["prefix"])
    for path in (folder, folder / "tokenizer.json"):
        assert render_chat(TURNS, load_tokenizer(path)) == expected
    if "chat_template" not in settings:
        tools = [{"name": "add"}]
        assert render_chat(TURNS, load_tokenizer(folder), tools=tools) == render_chat(TURNS, tokenizers["marked"])


def test_errors_of_a_template_are_explained(tokenizers):
    with raises(DataError, "user", "Use another role"):
        render_chat(chat("a"), tokenizers["none"], chat_template="{{ raise_exception('Use another role') }}")
    with raises(DataError, "first message"):
        render_chat(chat("a", "b")[1:], tokenizers["prefix"])
    with raises(ConfigError, "train_on", "assistant"):
        render_chat(chat("a", "b"), tokenizers["prefix"], train_on="user")


def test_a_text_pair_ends_with_the_end_of_a_text(tokenizers, tmp_path):
    tokenizer = tokenizers["prefix"]
    rendered = render(TextPair("the cat ", "sat"), tokenizer)
    assert rendered.ids == [*tokenizer.encode("the cat sat"), tokenizer.eos_id]
    # " sat" is one token, which begins in the prompt.
    assert trained_text(rendered, tokenizer) == [" sat<eos>"]
    assert all(render_text("the cat ", "sat", tokenizer, train_on="all").is_trained)
    with raises(DataError, "eos_token"):
        render_text("a", "b", load_tokenizer(make_tokenizer_folder(tmp_path / "words", has_end=False)))


CONTENT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(CONTENT, min_size=2, max_size=6), st.booleans())
def test_what_is_trained_is_what_the_assistant_writes(tokenizers, contents, is_marked):
    tokenizer = tokenizers["marked" if is_marked else "prefix"]
    end = "<|im_end|>" if is_marked else "<|im_end|>\n"
    rendered = render_chat(chat(*contents), tokenizer)
    runs = trained_text(rendered, tokenizer)
    assert len(runs) == len(contents) // 2
    for run, content in zip(runs, contents[1::2], strict=True):
        # A token may begin with the line break before the turn.
        assert run in (content + end, f"\n{content}{end}")


WORDS = st.text("abé日 \n", min_size=1, max_size=8).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([MERGED_TEMPLATE, RENAMED_TEMPLATE, TOOLS_TEMPLATE, PREFIX_TEMPLATE, MARKED_TEMPLATE, CHATML]),
    st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3),
    st.sampled_from(["assistant", "last"]),
)
def test_trained_turns_are_the_answers_with_any_template(tokenizers, template, turns, train_on):
    tokenizer = tokenizers["none"]
    messages = chat(*(text for turn in turns for text in turn))
    rendered = render_chat(messages, tokenizer, chat_template=template, train_on=train_on)
    answers = [answer for _, answer in (turns if train_on == "assistant" else turns[-1:])]
    assert len(trained_text(rendered, tokenizer)) == len(answers)
    for run, answer in zip(trained_text(rendered, tokenizer), answers, strict=True):
        end = {MERGED_TEMPLATE: " <eos>", MARKED_TEMPLATE: "<|im_end|>", CHATML: "<|im_end|>"}.get(template)
        # A token may begin with the space or the line break before the turn.
        assert run.removesuffix(end or "<|im_end|>\n").lstrip(" \n") == answer.lstrip(" \n")
    # A turn is rendered as it is generated: what comes before it is the prompt for it.
    prompt = render_prompt(messages[:-1], tokenizer, chat_template=template)
    assert tokenizer.decode(rendered.ids, skip_special_tokens=False).startswith(
        tokenizer.decode(prompt, skip_special_tokens=False)
    )


@settings(max_examples=60, deadline=None)
@given(CONTENT, CONTENT)
def test_trained_tokens_of_a_text_pair_are_those_of_the_completion(prompt, completion):
    tokenizer = load_tokenizer("bytes")
    rendered = render_text(prompt, completion, tokenizer)
    trained = [each for each, is_trained in zip(rendered.ids, rendered.is_trained, strict=True) if is_trained]
    assert trained == [*completion.encode(), tokenizer.eos_id]
