"""Random corruption of files: values and bytes are replaced, moved, removed or overwritten."""

from __future__ import annotations

import copy
import json
import math
import random

ODD_VALUES = [
    None, True, False, 0, -1, 1, 10**17, 10**400, -(10**19), 2**31, 0.0, -0.0, 5e-324, 1e-7, 1e308, math.inf, -math.inf,
    math.nan, -0.5, "", "inf", "nan", "auto", "a:bf16", "fast:fp8", "fast:fp8>", "a:fp8>a:bf16", ">", "\x00",
    "\x1b]0;x\x07", "\ud800", "\u202e", "x" * 3000, [], {}, [[]], [None], {"": {}}, {"left": -1}, {"normal": 0},
    {"__proto__": 1}, "../../etc/passwd", "__import__('os')",
]  # fmt: skip
TOKENS = [
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\x00", b"\xff", b"NaN", b"1e999", b"-", b"9" * 30, b"null",
    b'"batch": 7, ', b'"fp8": true, ', b"\\u0000", b"\\ud800", b"\xef\xbb\xbf", b"[" * 50, b"\n" * 40, b"0.0", b"-1",
    b"true",
]  # fmt: skip


def nodes(data: object) -> list[tuple[object, object]]:
    """Every (container, key) in the data, recursively."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    return [found for key in keys for found in ((data, key), *nodes(data[key]))]


def restructure_json(whole: bytes, chance: random.Random) -> bytes:
    """JSON with some of its values replaced, removed, renamed, moved, repeated or multiplied."""
    data = json.loads(whole)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        places = nodes(data)
        if not places:
            break
        container, key = chance.choice(places)
        move = chance.randrange(6)
        if move == 0:
            del container[key]
        elif move == 1 and isinstance(container, dict):
            container[str(chance.choice(ODD_VALUES))] = container.pop(key)
        elif move == 2:
            other, place = chance.choice(places)
            container[key] = copy.deepcopy(other[place])
        elif move == 3 and isinstance(container, list):
            container.extend(copy.deepcopy(container) * chance.choice([1, 3]))
        elif move == 4 and isinstance(container[key], (int, float)) and abs(container[key]) < 1e300:
            container[key] = container[key] * chance.choice([-1, 0, 1e-9, 1e-3, 7, 1e9, 2**40])
        else:
            container[key] = chance.choice(ODD_VALUES)
    return json.dumps(data, indent=chance.choice([None, 1])).encode("utf-8", "surrogatepass")


def flip_bits(whole: bytes, chance: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(chance.choice([1, 1, 2, 8])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def splice(whole: bytes, chance: random.Random) -> bytes:
    """Replaces a piece of the file by another piece or a token."""
    start, stop, here = (chance.randrange(len(whole)) for _ in range(3))
    piece = chance.choice([whole[start:stop], chance.choice(TOKENS), chance.choice(TOKENS) * 5])
    return whole[:here] + piece + whole[here + chance.choice([0, len(piece), 1, 40]) :]
