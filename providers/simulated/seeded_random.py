"""Randomness that depends on the seed and on what it is asked for, never on the order of the asking."""

import functools
import random


def rng(seed: int, *what: object) -> random.Random:
    """A generator for one purpose; the same for the same arguments in every process."""
    return random.Random("/".join((str(seed), *(str(part) for part in what))))


@functools.lru_cache(4096)
def unit(seed: int, *what: object) -> float:
    """One draw from [0, 1)."""
    return rng(seed, *what).random()
