"""Answers to judge: preference pairs, a chosen and a rejected answer to one prompt; chats whose last turn counts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch

from trainer.batching.examples import IGNORED, Example, collate, encode
from trainer.contract.architectures import NEXT_TOKEN
from trainer.dataset import cells
from trainer.dataset.prompts import DataError, fill_prompt, render_preference, template_columns, whole_column
from trainer.tasks.common import chat_template
from trainer.tasks.common.example_reader import Row
from trainer.tasks.common.task_data import Batch, E, TaskData


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """Chosen and rejected answer to one prompt."""

    chosen: Example
    rejected: Example
    chat: bool = False
    """True if the answers are an assistant's turns, rendered by the model's chat template."""


class AnswerData(TaskData[E], Generic[E]):
    """Rows with answers to a prompt: texts, or chats whose last turn is the answer."""

    answers: tuple[str, ...]
    """Settings of `train.data` with the answers of a row."""
    has_chats = False
    """True if the rows are chats. Set by `read`."""

    @property
    def _template_columns(self) -> set[str]:
        """Columns that the task reads."""
        data = self.config.data
        templates = {f"data.{name}": getattr(data, name) for name in ("prompt", *self.answers)}
        named = {name for field, template in templates.items() for name in template_columns(template, field)}
        return named | ({data.label} if data.label else set())

    def chat_answers(self, row: Row, number: int) -> list[Example] | None:
        """Return the row's answers if all are chats; otherwise None. Raises DataError."""
        columns = [whole_column(getattr(self.config.data, name)) or "" for name in self.answers]
        if any(cells.as_messages(row.get(column)) is None for column in columns):
            return None
        texts: dict[str, None] = {}
        answers = [self._chat_answer(row, number, name, texts) for name in self.answers]
        self.reader.notices.update(texts.keys())
        return answers

    def _chat_answer(self, row: Row, number: int, setting: str, notices: dict[str, None]) -> Example:
        """Return the last turn of a chat after its other turns and `data.prompt`. Raises DataError.

        `notices`: receives texts for users as keys.
        """
        data, where = self.config.data, f"{self.where} row {number}"
        column = whole_column(getattr(data, setting)) or ""
        answer = cells.chat_of_row(row, column, self.where, number, used=self._template_columns)
        system = answer.messages[:1] if answer.has_given_system else []
        turns = answer.messages[len(system) :]
        prompt = cells.asked(row.get(whole_column(data.prompt) or ""))
        before = prompt.messages if prompt else []
        if prompt is None and data.prompt:
            before = [{"role": "user", "content": fill_prompt(data, row, number)}]
        if before and turns[0]["role"] != "assistant":
            problem = f"column {column!r} begins with the question, which data.prompt holds too; remove one of them"
            raise DataError(f"{where}: {problem}")
        if system and before and before[0]["role"] in ("system", "developer"):
            notices["'system' in the row is not used, because data.prompt begins with a system message"] = None
            system = []
        full_chat = replace(answer, messages=[*system, *before, *turns], muted=frozenset())
        if prompt is not None:
            notices |= dict.fromkeys(prompt.notices)
            full_chat = full_chat.given_by(prompt)
        notices |= dict.fromkeys((*answer.notices, *chat_template.unused(self.tokenizer, full_chat)))
        return chat_template.encode(self.tokenizer, full_chat, self.config.max_length, where, last=True)

    def _survey(self, parsed: Sequence[Any]) -> None:
        self.has_chats = bool(parsed) and parsed[0].chat


class PreferenceData(AnswerData[Preference]):
    """Pairs of answers as token ids."""

    parsed_type = Preference
    answers = ("chosen", "rejected")

    def parse_row(self, row: Row, number: int) -> Preference:
        config = self.config
        if (chats := self.chat_answers(row, number)) is not None:
            return Preference(chosen=chats[0], rejected=chats[1], chat=True)
        prompt, better, worse = render_preference(config.data, row, number)
        if not prompt and config.task in NEXT_TOKEN:
            prompt = shared_start(better, worse)
            better, worse = better[len(prompt) :], worse[len(prompt) :]
        return Preference(
            chosen=encode(self.tokenizer, prompt, better, config.max_length),
            rejected=encode(self.tokenizer, prompt, worse, config.max_length),
        )

    def sequences(self, parsed: Preference) -> tuple[Sequence[int], ...]:
        return parsed.chosen.ids, parsed.rejected.ids

    def _no_target_message(self) -> str:
        return f"data: no row has two answers within max_length {self.config.max_length}; raise train.max_length"

    def size(self, example: Preference) -> int:
        return len(example.chosen.ids) + len(example.rejected.ids)

    def targets(self, example: Preference) -> int:
        return int(example.chosen.targets > 0 and example.rejected.targets > 0)

    def collate(self, examples: Sequence[Preference], device: torch.device) -> Batch:
        """Return `input_ids`, `attention_mask` and `labels`: 2 x pairs rows.

        The chosen answers are the first half, the rejected answers the second half in the same order.
        """
        return collate([e.chosen for e in examples] + [e.rejected for e in examples], self.pad, device)


def shared_start(better: str, worse: str) -> str:
    """Return the text that two different answers begin with, as their prompt: HH-RLHF has whole dialogues in each.

    As in TRL, both answers keep a character, and the space before the first difference. Empty if the answers are equal.
    """
    if better == worse:
        return ""
    shorter = min(len(better), len(worse))
    end = next((at for at in range(shorter) if better[at] != worse[at]), max(0, shorter - 1))
    return better[: end - 1 if end and better[end - 1] == " " else end]


def describe_pair(tokenizer: Any, pair: Preference) -> tuple[str, str]:
    """Return the prompt with the chosen answer, and the rejected answer, as text."""
    answer = tokenizer.decode([i for i in pair.rejected.labels if i != IGNORED])
    return tokenizer.decode(pair.chosen.ids), f"rather than {answer}"
