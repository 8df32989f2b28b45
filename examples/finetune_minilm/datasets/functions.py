"""Pairs of a function of Python's standard library and a sentence, which describes this or another function."""

import ast
import hashlib
import sysconfig
from functools import cached_property
from pathlib import Path

from trainwright.data.tokenizer import load_tokenizer


class FunctionPairs:
    """A sample is [CLS] name (arguments) [SEP] sentence [SEP]; half of the sentences are another function's."""

    draws_nothing = True

    def __init__(self, *, tokenizer, part="train", project_dir="."):
        self.part, self.tokenizer = part, load_tokenizer(tokenizer, project_dir=project_dir)

    @cached_property
    def functions(self):
        return [one for one in read_functions() if (one[0] % 5 == 0) == (self.part == "valid")]

    def __len__(self):
        return 2 * len(self.functions)

    def __getitem__(self, index):
        number, label = index // 2, 1 - index % 2
        function, sentence = self.functions[number][1], self.functions[number - (1 - label)][2]
        one, other = self.tokenizer.encode(function), self.tokenizer.encode(sentence)[1:]  # the second needs no [CLS]
        return {"input_ids": one + other, "token_type_ids": [0] * len(one) + [1] * len(other), "labels": label}


def read_functions():
    """Returns (hash, name and arguments, first sentence) of each function with a docstring, in the order of the
    hashes."""
    found = set()
    for path in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).split(". ")[0]
                function = f"{node.name.replace('_', ' ')} ({', '.join(one.arg for one in node.args.args)})"
                if 4 <= len(sentence.split()) <= 30:
                    found.add((int(hashlib.sha256((function + sentence).encode()).hexdigest(), 16), function, sentence))
    return sorted(found)
