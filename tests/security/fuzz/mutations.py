"""Random changes to the bytes of a valid file."""

import json
import random
from typing import Any

TOKENS = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b'"', b"'", b",", b";", b"\t", b"[", b"{", b"}", b"]", b":",
    b"null", b"NaN", b"1e999",
    b"-1", b"18446744073709551616", b"true", b"\\u0000", b"\\ud800", b"&a", b"*a", b"!!python/object",
    b"../", b"/etc/passwd", b"PK\x03\x04", b"PAR1", b"\x1f\x8b\x08", b"ustar", b"\x89PNG", b"\xff\xd8\xff",
    b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\xff\xff\xff\x7f", "é".encode(), "\u202e".encode(),
)  # fmt: skip
"""Bytes with a meaning in some format."""
MAX_BYTES = 1 << 20
"""Maximum size of a changed file."""


VALUES = (
    None, True, -1, 0, 2**31, 2**64, -(2**63), 10**400, 1e308, 5e-324, "", "x" * 5000, "\x00", "\ud800", "1", "nan",
    "../../etc/passwd", "\x1b[2J", [], {}, [[]], {"a": {}}, ["a"] * 3000, {str(n): n for n in range(3000)},
)  # fmt: skip
"""Values that replace a value of a JSON document."""


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Return `data` with one to eight changed bytes or, for two of three JSON documents, with changed values."""
    if data[:1] in b"{[" and rng.random() < 2 / 3:
        lines = data.splitlines()
        place = rng.randrange(len(lines))
        try:
            lines[place] = _mutate_json(rng, lines[place])
            return b"\n".join(lines)
        except (ValueError, RecursionError):  # UTF-16, or nested or long beyond what the encoder writes
            pass
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        rng.choice(CHANGES)(rng, changed)
        del changed[MAX_BYTES:]
    return bytes(changed)


def _mutate_json(rng: random.Random, data: bytes) -> bytes:
    document = json.loads(data)
    for _ in range(rng.randint(1, 4)):
        document = _with_changed_value(rng, document)
    return json.dumps(document).encode()[:MAX_BYTES]


def _with_changed_value(rng: random.Random, value: Any) -> Any:
    """Replace, remove, copy, nest or rename one value at a random depth."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        inner = value[key]
        change = rng.randrange(6)
        if change == 0:
            return {name: one for name, one in value.items() if name != key}
        if change == 1:
            return {**value, rng.choice(("x", "", "model_type", "quantization_config", "\x00")): inner}
        return {**value, key: _with_changed_value(rng, inner)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        return [*value[:place], _with_changed_value(rng, value[place]), *value[place + rng.randrange(2) :]]
    if rng.random() < 0.1:
        for _ in range(rng.choice((10, 100, 900))):
            value = [value]
        return value
    if isinstance(value, int) and rng.random() < 0.5:
        return rng.choice((-value, value * 10**9, value + 1, value % 2**62 / 2, str(value)))
    return rng.choice(VALUES)


def _flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 4, 32))):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _truncate(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _remove(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.choice((1, 4, 64, 1024))]


def _repeat(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    block = bytes(data[start : start + rng.choice((1, 2, 16, 256, 4096))])
    data[start:start] = block * rng.choice((1, 2, 50, 3000))


def _insert_token(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = rng.choice(TOKENS) * rng.choice((1, 1, 2, 100, 5000))


def _write_length(rng: random.Random, data: bytearray) -> None:
    """Overwrite a field of 2, 4 or 8 bytes by an extreme value, as a length or an offset may be."""
    size = rng.choice((2, 4, 8))
    value = rng.choice((0, 1, (1 << (8 * size - 1)) - 1, (1 << (8 * size)) - 1, rng.getrandbits(8 * size)))
    start = rng.randrange(max(1, len(data) - size))
    data[start : start + size] = value.to_bytes(size, rng.choice(("little", "big")))


def _swap(rng: random.Random, data: bytearray) -> None:
    size = rng.choice((1, 8, 128))
    a, b = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def _fill(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    for place in range(start, min(len(data), start + rng.choice((4, 64, 512)))):
        data[place] = rng.randrange(256)


CHANGES = (_flip, _truncate, _remove, _repeat, _insert_token, _write_length, _swap, _fill)
