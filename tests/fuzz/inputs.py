"""Changes files at random: bytes, values in JSON and YAML, headers of safetensors. The same number, the same input."""

from __future__ import annotations

import json

import yaml

VALUES = [
    *(None, True, False, 0, 1, -1, 7, 255, 2**31, 2**63, 10**9, 10**18, 10**30, -(10**18)),
    *(0.0, -0.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")),
    *(
        "",
        " ",
        "x",
        "a" * 5000,
        "\0",
        "\ud800",
        "é€",
        "-",
        "*",
        "${HOME}",
        "${seed}",
        "${model}",
        "a${name}b",
        "$${x}",
        "${",
        "{}",
        "%s",
        "1e5",
        "null",
        "0x10",
        "\r\n",
    ),
    *("..", "../x", "../../etc/passwd", "/etc/passwd", "/dev/zero", "~", "C:\\x", "file:///etc/passwd", "memory://x"),
    *("evil.py:act", "evil:act", "evil.act", "os:system", "builtins:eval", "subprocess:Popen", "in_code:evil.act"),
    *("float32", "bfloat16", "O", "V9999999999", "<f8", "latest", "best", "cuda:99", "auto", "text", "adamw", "llama"),
    *([], {}, [[]], [None], [0, 0], [10**9], [-1], ["evil.py:act"], [10**12, 10**12], {"type": "evil.py:act"}),
    *({"type": "every", "steps": 1, "call": "evil.py:act"}, {"type": "text", "path": "/etc/passwd"}, {"": {}}),
    *({"$tensor": "x"}, {"$eval": "1"}, {"$array": "x", "dtype": "O", "shape": [1]}, {"$int": "zz"}, {"$dict": 5}),
]
KEYS = [
    "type",
    "imports",
    "extends",
    "~type",
    "~hooks",
    "~model",
    "model",
    "hooks",
    "call",
    "shape",
    "dtype",
    "files",
    "weight_map",
    "$tensor",
    "",
]
WORDS = [
    b"\0",
    b"\xff",
    b"\n",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b"- ",
    b"&a ",
    b"*a",
    b"!!python/name:os.system ",
    b"%",
    b"${seed}",
    b"${env:HOME}",
    b"~",
]
WORDS += [
    b"9" * 30,
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"evil.py:act",
    b"../",
    b"\xed\xa0\x80",
    b"<<: ",
    b"? ",
    b"|\n",
    b"\t",
]


def change_bytes(raw, rng):
    """Returns the bytes with one to four changes: flips, cuts, copies, insertions."""
    content = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        size = len(content)
        first = rng.randrange(size + 1)
        last = min(size, first + rng.choice((1, 2, 8, 64, 1000)))
        kind = rng.randrange(6)
        if kind == 0 and size:
            content[rng.randrange(size)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del content[first:last]
        elif kind == 2:
            content[first:first] = content[first:last] * rng.choice((1, 2, 20))
        elif kind == 3:
            content[first:first] = rng.choice(WORDS)
        elif kind == 4:
            content[first:last] = rng.choice(WORDS)
        elif kind == 5 and rng.random() < 0.3:
            del content[first:]
    return bytes(content)


def change_value(value, rng):
    """Returns a plain value with one to three changes at random places."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _change(value, rng)
    return value


def _change(value, rng):
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        if isinstance(value, dict):
            key, copy = rng.choice(list(value)), dict(value)
        else:
            key, copy = rng.randrange(len(value)), list(value)
        kind = rng.randrange(12)
        if kind == 0:
            del copy[key]
        elif kind == 1 and isinstance(copy, dict):
            copy[rng.choice(KEYS)] = rng.choice(VALUES)
        elif kind == 2 and isinstance(copy, dict):
            copy = {rng.choice(VALUES[20:40]) if each == key else each: item for each, item in copy.items()}
        elif kind == 3:
            copy[key] = copy[rng.choice(list(value))] if isinstance(copy, dict) else copy[rng.randrange(len(copy))]
        else:
            copy[key] = _change(copy[key], rng)
        return copy
    if rng.random() < 0.02:
        deep = value
        for _ in range(rng.choice((50, 3000))):
            deep = [deep] if rng.random() < 0.5 else {"x": deep}
        return deep
    return rng.choice(VALUES)


def change_json(raw, rng):
    """Returns JSON with a changed value, or, less often, with changed bytes."""
    if rng.random() < 0.3:
        return change_bytes(raw, rng)
    return to_json(change_value(json.loads(raw), rng))


def to_json(value):
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 5000 + b"]" * 5000


def change_yaml(raw, rng):
    """Returns YAML with a changed value, or with changed bytes, or with aliases of aliases."""
    kind = rng.random()
    if kind < 0.4:
        return change_bytes(raw, rng)
    if kind < 0.405:
        width, depth = rng.choice((2, 9)), rng.choice((3, 30))
        lines = ["x0: &x0 [a, b]"] + [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * width)}]" for n in range(1, depth)]
        return "\n".join(lines).encode() + b"\n" + raw
    try:
        changed = change_value(yaml.load(raw, yaml.CSafeLoader), rng)
        return yaml.dump(changed, Dumper=yaml.CSafeDumper, allow_unicode=True).encode("utf-8", "replace")
    except RecursionError:
        return b"a: " + b"[" * 5000 + b"]" * 5000
    except UnicodeEncodeError:  # half a character, which YAML can only have as an escape
        return b'name: "\\ud800"\n' + raw


def change_safetensors(raw, rng):
    """Returns a safetensors file with a changed header of the right length, or with changed bytes."""
    if rng.random() < 0.3:
        return change_bytes(raw[:4096], rng) + raw[4096:]
    size = int.from_bytes(raw[:8], "little")
    header = to_json(change_value(json.loads(raw[8 : 8 + size]), rng))
    if rng.random() < 0.1:
        return rng.choice((0, 1, size + 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little") + header + raw[8 + size :]
    return len(header).to_bytes(8, "little") + header + raw[8 + size :]
