"""Reads the file that wandb writes offline: records of protocol buffers in the log format of LevelDB.

The file begins with 7 bytes of its own. Blocks of 32 KiB follow; a record that does not fit is split over several.
"""

import json
import struct
from collections import defaultdict

from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER, _START = 32768, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(path):
    """Returns the complete records of a file by kind."""
    content = path.read_bytes()
    assert content.startswith(b":W&B")
    records, joined, position = defaultdict(list), b"", _START
    while position + _HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:  # padding at the end of a block
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            break
        part = content[position + _HEADER : position + _HEADER + length]
        if len(part) < length:
            break  # the process was killed
        joined = part if kind in (_FULL, _FIRST) else joined + part
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record.FromString(joined)
            name = record.WhichOneof("record_type")
            records[name].append(getattr(record, name))
        position += _HEADER + length
    return records


def read_history(folder):
    """Returns the logged rows of the newest offline run in a run folder, as name → value."""
    newest = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))[-1]
    rows = read_records(newest)["history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]
