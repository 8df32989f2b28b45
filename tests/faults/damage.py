"""Ways to damage a file."""


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place(len(content))] ^= 4
    path.write_bytes(content)


def cut(path, size):
    with path.open("r+b") as file:
        file.truncate(size(path.stat().st_size))


DAMAGE = {
    "cut to half": lambda path: cut(path, lambda size: size // 2),
    "cut to nothing": lambda path: cut(path, lambda size: 0),
    "one byte short": lambda path: cut(path, lambda size: size - 1),
    "a bit flipped in the first byte": lambda path: flip(path, lambda size: 0),
    "a bit flipped in the middle": lambda path: flip(path, lambda size: size // 2),
    "a bit flipped in the last byte": lambda path: flip(path, lambda size: size - 1),
    "deleted": lambda path: path.unlink(),
}
