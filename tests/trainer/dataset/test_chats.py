"""Chats in the forms that data sets have: what is read, what is refused, and in which words."""

import inspect
import json
from typing import Any

import pytest

from trainer.dataset import cells, chats
from trainer.dataset.chats import BadChat
from trainer.dataset.prompts import DataError

ASK = {"role": "user", "content": "Tide?"}
ANSWER = {"role": "assistant", "content": "1.2 m"}
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Lund"}}}
PLAIN = [ASK, ANSWER]


@pytest.mark.parametrize(
    ("cell", "notice"),
    [
        (PLAIN, ""),
        ([{**ASK, "tool_calls": None, "name": None}, {**ANSWER, "tool_calls": []}], ""),
        ([{"from": "human", "value": "Tide?"}, {"from": "gpt", "value": "1.2 m"}], "from and value"),
        ([{"role": "user", "content": [{"type": "text", "text": "Tide?"}]}, ANSWER], "content parts"),
        ([{"role": "user", "content": ["Ti", {"type": "text", "text": "de?"}]}, ANSWER], "content parts"),
        (json.dumps(PLAIN), "JSON text"),
        ({"messages": PLAIN}, "'messages'"),
        ({"conversations": PLAIN}, "'conversations'"),
    ],
)
def test_forms_of_other_tools_are_read_with_a_notice(cell: Any, notice: str) -> None:
    chat = chats.parse(cell)
    assert chat.messages == PLAIN
    assert [notice in text for text in chat.notices] == ([True] if notice else [])


TOOLS = [{"type": "function", "function": {"name": "tide"}}]


def test_the_other_keys_of_a_cell_are_used_or_named() -> None:
    cell = {"messages": PLAIN, "tools": TOOLS, "system": "Be brief.", "source": "x", "id": None}
    for written in (cell, json.dumps(cell)):
        chat = chats.parse(written, {"tools": [{"name": "other"}], "lang": "en", "note": None})
        assert chat.messages == [{"role": "system", "content": "Be brief."}, *PLAIN]
        assert (chat.tools, chat.learned) == (TOOLS, [2])
        notices = "; ".join(chat.notices)
        assert "the key 'source' next to the messages is not used" in notices
        assert "the column 'tools' is not used" in notices
        assert "the column 'lang' is not used" in notices
        assert "'system' next to the messages is read as the system message" in notices
        assert "'id'" not in notices
        assert "'note'" not in notices


def test_a_system_column_comes_first_unless_the_chat_has_its_own() -> None:
    muted = chats.parse([ASK, {**ANSWER, "weight": 0}], {"system": "Be brief."})
    assert muted.messages[0]["content"] == "Be brief."
    assert muted.muted == {2}
    own = [{"role": "system", "content": "Be long."}, *PLAIN]
    chat = chats.parse(own, {"system": "Be brief."})
    assert chat.messages == own
    assert any("'system' next to the messages is not used" in text for text in chat.notices)
    assert chats.parse(own, {"system": "Be long."}).notices == chats.parse(PLAIN, {"system": " "}).notices == ()
    with pytest.raises(BadChat, match="'system' next to the messages, which is a list; give a text, or remove it"):
        chats.parse(PLAIN, {"system": ["Be brief."]})


def test_many_unused_columns_are_counted() -> None:
    notices = chats.parse(PLAIN, {f"c{n}": n for n in range(chats.NAMED_UNUSED + 3)}).notices
    assert (len(notices), notices[-1]) == (chats.NAMED_UNUSED + 1, "3 more columns are not used")


@pytest.mark.parametrize(
    "written",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {
            "role": "assistant",
            "tool_calls": [{"id": None, "function": {"name": "tide", "arguments": '{"port": "Lund"}'}}],
        },
        {"role": "assistant", "content": "", "tool_calls": CALL},
        {"role": "assistant", "content": None, "function_call": {"name": "tide", "arguments": '{"port": "Lund"}'}},
        {"from": "gpt", "value": None, "tool_calls": [{"name": "tide", "arguments": {"port": "Lund"}}]},
    ],
)
def test_tool_calls_of_apis_become_those_of_templates(written: dict[str, Any]) -> None:
    message = chats.parse([ASK, written]).messages[1]
    assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("cell", "trait"),
    [
        ("hello", "is text and no JSON list"),
        ([], "has no message"),
        (7, "is a number, no list"),
        ({"a": 1}, "is one mapping"),
        ([ASK, "no"], "message 2 is text, no mapping"),
        ([{"content": "a"}], "message 1 has no role"),
        ([{"role": "narrator", "content": "a"}], "message 1 has the role 'narrator'"),
        ([ASK, {"role": "assistant"}], "message 2 has no content"),
        ([ASK, {"role": "assistant", "content": 3}], "message 2 has a number as content"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "has a content part of type 'image'"),
        ([ASK, {"role": "assistant", "tool_calls": [{"id": "x"}]}], "a tool call without a function's name"),
        ([ASK, {"role": "assistant", "tool_calls": ["x"]}], "message 2 has tool_calls that are not a list"),
        ([ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "arguments are not JSON"),
        ([ASK, {**ANSWER, "weight": 0.5}], "message 2 has weight '0.5'"),
        ([ASK], "has no message of the assistant"),
    ],
)  # fmt: skip
def test_refusal_names_message_and_trait_and_a_fix(cell: Any, trait: str) -> None:
    problem = cells.chat_problem(cell)
    assert problem is not None
    assert trait in problem
    assert ";" in problem, "a fix follows"
    with pytest.raises(DataError, match=r"^f\.csv row 3: column 'c' "):
        cells.chat_of_row({"c": cell}, "c", "f.csv", 3)
    assert not cells.is_a("chat", cell)


def test_muted_answers_are_those_without_weight() -> None:
    chat = chats.parse([ASK, {**ANSWER, "weight": 0}, ASK, {**ANSWER, "weight": 1}, ASK, {**ANSWER, "train": False}])
    assert chat.muted == {1, 5}
    assert all(message.keys() == {"role", "content"} for message in chat.messages)


def test_columns_of_the_row_reach_the_chat() -> None:
    tools = [{"type": "function", "function": {"name": "tide"}}]
    row = {"c": PLAIN, "tools": json.dumps(tools), "chat_template_kwargs": {"enable_thinking": False, "x": None}}
    chat = cells.chat_of_row(row, "c", "f", 1)
    assert (chat.tools, chat.documents, chat.options) == (tools, None, {"enable_thinking": False})
    for key, value in (("tools", "{"), ("tools", 3), ("documents", ["a"]), ("chat_template_kwargs", "[]")):
        with pytest.raises(DataError, match=f"row 1: column 'c' has a column '{key}' in its row"):
            cells.chat_of_row({"c": PLAIN, key: value}, "c", "f", 1)


def test_a_row_sets_no_arguments_of_the_renderer() -> None:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments = {"messages"}
    for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template):
        arguments |= set(inspect.signature(function).parameters)
    for key in arguments:
        with pytest.raises(BadChat, match=f"with the key '{key}', which a row may not set; remove it"):
            chats.parse(PLAIN, {"chat_template_kwargs": {key: "x"}})


def test_a_null_cell_is_refused_by_column() -> None:
    with pytest.raises(DataError, match="f row 2: no column 'c', or it is null"):
        cells.chat_of_row({"c": None}, "c", "f", 2)


def test_deep_json_text_is_refused_and_not_a_crash() -> None:
    with pytest.raises(BadChat, match="no JSON list"):
        chats.parse("[" * 100_000)
