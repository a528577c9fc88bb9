"""Suggestions for misspelt names: useful for names that people write, and bounded for all others."""

import random

import pytest

from trainer.contract.suggestions import CHOICES_CHARACTERS, WORD_CHARACTERS, close_matches, short_list
from trainer.dataset.prompts import missing_column_message


def permutations(length: int, count: int) -> list[str]:
    letters, rng = [chr(0x4E00 + i) for i in range(length)], random.Random(1)
    return ["".join(rng.sample(letters, length)) for _ in range(count)]


def test_long_names_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 columns of 8,000 characters held the event loop for 85 s: difflib is quadratic in the length."""
    compared: list[str] = []
    monkeypatch.setattr("difflib.get_close_matches", lambda word, choices, **_: compared.extend([word, *choices]) or [])
    column, *columns = permutations(200, 301)
    message = missing_column_message(column, columns)
    assert compared == []
    assert len(message) < 3000
    close_matches("word", ["x" * WORD_CHARACTERS] * 10_000)
    assert sum(map(len, compared)) <= CHOICES_CHARACTERS + len("word")


def test_a_misspelt_column_gets_a_suggestion() -> None:
    assert missing_column_message("Promt", ["prompt", "answer"]).endswith("did you mean 'prompt'?")


def test_a_long_list_says_how_many_it_leaves_out() -> None:
    assert short_list(["a", "b"]) == "a, b"
    assert short_list([f"c{i}" for i in range(45)], limit=2) == "c0, c1, … (43 more)"
    assert short_list(["x" * 100]) == "x" * WORD_CHARACTERS + "…"
