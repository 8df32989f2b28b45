"""The format of a chat: the prompt of a conversation, and what ends an answer."""

from __future__ import annotations

import json

import pytest
import torch
from tests.data.chats import MARKED_TEMPLATE, PREFIX_TEMPLATE, REASONING_TEMPLATE, chat, make_tokenizer_folder
from tests.export.runs import train_run
from tests.messages import raises
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trainwright.data.chat import render_prompt
from trainwright.data.tokenizer import auto_tokenizer, load_tokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.export.chat import chat_format, find_chat_template
from trainwright.export.huggingface import export_run

pytest.importorskip("transformers")

BYTES = load_tokenizer("bytes")


class Scripted(torch.nn.Module):
    """Answers with a text in tokens, whatever it is asked, and goes on with the last one."""

    def __init__(self, tokens, vocab_size=400):
        super().__init__()
        self.tokens, self.vocab_size, self.asked = list(tokens), vocab_size, []

    def forward(self, input_ids):
        if not self.asked or input_ids.shape[1] <= self.last:
            self.asked.append(input_ids[0].tolist())
            self.number = 0
        self.last = input_ids.shape[1]
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        logits[:, -1, self.tokens[min(self.number, len(self.tokens) - 1)]] = 9.0
        self.number += 1
        return {"logits": logits}


def answered(layout, model, messages, **options):
    made = layout.answer(model, messages, temperature=0.0, max_new_tokens=40, **options)
    return "".join(made), made.is_stopped


@pytest.mark.parametrize("template", [PREFIX_TEMPLATE, MARKED_TEMPLATE, REASONING_TEMPLATE])
@pytest.mark.parametrize("load", [load_tokenizer, auto_tokenizer])
def test_an_answer_ends_at_the_end_of_a_turn_of_the_template(tmp_path, template, load):
    folder = make_tokenizer_folder(tmp_path, template)
    tokenizer = load(str(folder))
    plain = load_tokenizer(folder)
    layout = chat_format(tokenizer)
    [end] = plain.encode("<|im_end|>")
    assert layout.stop_ids == {end}
    assert layout.stop_texts == ()
    messages = chat("the cat", "sat", "the dog", system="on the mat")
    model = Scripted([*plain.encode("the mat"), end, *plain.encode("more")])
    assert answered(layout, model, messages) == ("the mat", True)
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert model.asked == [expected] == [layout.prompt(messages)]


def test_a_tokenizer_of_the_tokenizers_library_has_chat_ml(tmp_path):
    plain = load_tokenizer(make_tokenizer_folder(tmp_path))
    layout = chat_format(Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    assert layout.stop_ids == set(plain.encode("<|im_end|>"))
    assert layout.prompt(chat("the cat")) == plain.encode(
        "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    )
    model = Scripted([*plain.encode("sat"), plain.encode("<eos>")[0]])
    assert answered(layout, model, chat("the cat")) == ("sat", True)


def test_without_a_template_chats_are_chat_ml_and_end_at_its_text():
    layout = chat_format(BYTES)
    assert layout.stop_ids == frozenset()
    assert layout.stop_texts == ("<|im_end|>",)
    model = Scripted(b"Gr\xc3\xbc\xc3\x9fe <|im_<|im_end|>\nmore")
    assert answered(layout, model, chat("Hi", system="Be brief.")) == ("Grüße <|im_", True)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert bytes(model.asked[0]).decode() == expected
    assert answered(layout, Scripted(b"Hi there"), chat("Hi"), stop_texts=["there"]) == ("Hi ", True)
    assert answered(layout, Scripted([ord("a"), BYTES.eos_id]), chat("Hi")) == ("a", True)


def test_a_given_template_replaces_that_of_the_tokenizer(tmp_path):
    tokenizer = load_tokenizer(make_tokenizer_folder(tmp_path, PREFIX_TEMPLATE))
    layout = chat_format(tokenizer, "{% for m in messages %}[{{ m.role }}] {{ m.content }}<eos>{% endfor %}")
    assert layout.stop_ids == {tokenizer.eos_id}
    assert tokenizer.decode(layout.prompt(chat("the cat")), skip_special_tokens=False) == "[user] the cat<eos>"


def test_a_template_that_fails_is_an_error_with_its_reason(tmp_path):
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('No system.') }}{% endif %}{{ messages[0].content }}"
    )
    tokenizer = load_tokenizer(make_tokenizer_folder(tmp_path, template))
    layout = chat_format(tokenizer)
    with raises(DataError, "No system."):
        layout.prompt(chat("the cat", system="Be brief."))
    with raises(ConfigError, "--tokenizer"):
        chat_format(object())


CHAT_RUN = """
name: chats
model: {type: llama, vocab_size: 260, hidden_size: 32, num_layers: 1, num_heads: 2, max_positions: 64}
data:
  train: {type: parts.py:Chats, chat_template: TEMPLATE}
trainer: {type: language_model, max_steps: 1, global_batch_size: 2, optimizer: {type: adamw, lr: 1e-2}}
checkpoint: {every_steps: 1}
runtime: {device: cpu}
"""
PARTS = """
import torch
from trainwright.data.chat import render_prompt
from trainwright.data.tokenizer import load_tokenizer


class Chats(torch.utils.data.Dataset):
    def __init__(self, chat_template: str) -> None:
        self.tokenizer = load_tokenizer("bytes")

    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.arange(9) + index
        return {"input_ids": ids, "labels": ids}
"""


def test_the_template_of_a_run_is_found(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    for number, (given, expected) in enumerate(
        [("own.jinja", "{{ messages[0].content }}"), ("'{{ messages }}'", "{{ messages }}"), ("absent.jinja", None)]
    ):
        folder, _ = train_run(tmp_path, CHAT_RUN.replace("TEMPLATE", given), [f"name=chats{number}"])
        if expected is None:
            with raises(DataError, "chat_template", at="absent.jinja"):
                find_chat_template(folder)
        else:
            assert find_chat_template(folder) == expected
    exported = export_run(tmp_path / "runs" / "chats0", tmp_path / "hf")
    assert find_chat_template(exported) is None
    assert (exported / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


@pytest.mark.parametrize("given", [None, "own"], ids=["ChatML", "own"])
def test_an_export_renders_chats_as_its_run_did(tmp_path, given):
    base = tmp_path / "base"
    base.mkdir()
    tokenizer = Tokenizer(models.BPE({one: at for at, one in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<end>"])
    tokenizer.save(str(base / "tokenizer.json"))
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}] * 4
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.jinja").write_text(
        "{% for one in messages %}{{ one.role }}: {{ one.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    train = "{type: chat, path: chats.jsonl, tokenizer: base" + (", chat_template: own.jinja}" if given else "}")
    text = CHAT_RUN.replace("{type: parts.py:Chats, chat_template: TEMPLATE}", train)
    text = text.replace(
        "trainer: {type: language_model", "  collator: {type: padded, pad_token_id: 0}\ntrainer: {type: sft"
    )
    run_folder, _ = train_run(tmp_path, text)
    exported = export_run(run_folder, tmp_path / "hf")

    from transformers import AutoTokenizer, GenerationConfig

    theirs = AutoTokenizer.from_pretrained(exported)
    own = load_tokenizer(str(base))
    template = (tmp_path / "own.jinja").read_text() if given else None
    question = [{"role": "user", "content": "Hi"}]
    prompt = theirs.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert prompt == render_prompt(question, own, chat_template=template)
    [end] = own.encode("<end>" if given else "<|im_end|>")
    assert end in GenerationConfig.from_pretrained(exported).eos_token_id
