"""Tokenizers with chat templates, and rows of chats, for tests."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]

# In the style of common templates: no markers, the turn's end is a special token.
PREFIX_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like the templates of reasoning models: only the last turn keeps what it thought.
REASONING_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The system prompt is part of the user's first turn, which has to be first, and roles alternate.
MERGED_TEMPLATE = (
    "{% set begin = 1 if messages[0].role == 'system' else 0 %}{% for message in messages[begin:] %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}{{ '<bos>[INST] ' }}"
    "{% if loop.first and begin %}{{ '<<SYS>>' + messages[0].content + '<</SYS>>' }}{% endif %}"
    "{{ message.content + ' [/INST]' }}{% else %}{{ ' ' + message.content + ' <eos>' }}{% endif %}{% endfor %}"
)
# Another name for the assistant, and no system prompt.
RENAMED_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|im_start|>' + message.role.replace('assistant', 'model') + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
# Tools come first, and the results of one turn's calls are one turn of the user.
TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user\n' }}{% endif %}"
    "{{ '<result>' + message.content + '</result>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer_folder(folder, template=None, *, has_end=True):
    """Writes a byte-level BPE of about 300 tokens, as transformers saves one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user\nassistant\nthe cat sat on the mat\n\n", "the dog and the cat"], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<bos>"}
    if has_end:
        settings["eos_token"] = "<eos>"
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def chat(*contents, system=None):
    """Returns messages of the user and the assistant in turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return messages + [{"role": roles[number % 2], "content": text} for number, text in enumerate(contents)]


def trained_text(rendered, tokenizer):
    """Returns the text of each run of trained tokens."""
    runs, is_new = [], True
    for number, is_trained in zip(rendered.ids, rendered.is_trained, strict=True):
        if is_trained and is_new:
            runs.append([])
        if is_trained:
            runs[-1].append(number)
        is_new = not is_trained
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]
