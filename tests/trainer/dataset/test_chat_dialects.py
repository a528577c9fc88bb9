"""Chats as the files and API dumps of other tools hold them: LLaMA-Factory, ms-swift, Anthropic, Arrow, pandas."""

import contextlib
import json
from typing import Any

import pytest

from trainer.dataset import chats
from trainer.dataset.chats import BadChat

ASK = {"role": "user", "content": "Tide?"}
ANSWER = {"role": "assistant", "content": "1.2 m"}
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Lund"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "1.2"}
WRITTEN_CALL = json.dumps({"name": "tide", "arguments": {"port": "Lund"}})
LLAMA_FACTORY = [
    {"from": "human", "value": "Tide?"}, {"from": "function_call", "value": WRITTEN_CALL},
    {"from": "observation", "value": "1.2"}, {"from": "gpt", "value": "1.2 m"},
]  # fmt: skip
MS_SWIFT = [
    {"role": "user", "content": "Tide?"}, {"role": "tool_call", "content": WRITTEN_CALL},
    {"role": "tool_response", "content": "1.2"}, {"role": "assistant", "content": "1.2 m"},
]  # fmt: skip


@pytest.mark.parametrize("cell", [LLAMA_FACTORY, MS_SWIFT, json.dumps(LLAMA_FACTORY)], ids=["factory", "swift", "text"])
def test_messages_of_calls_become_tool_calls(cell: Any) -> None:
    chat = chats.parse(cell)
    assert chat.messages == [ASK, CALLED, RESULT, ANSWER]
    assert any("messages of calls are read as tool_calls" in notice for notice in chat.notices)


def test_a_call_without_a_name_is_refused_by_its_role() -> None:
    for written in ("Lund", "{}", "[[]]", "7"):
        with pytest.raises(BadChat, match="message 1 has the role 'tool_call'; give one of system"):
            chats.parse([{"role": "tool_call", "content": written}])


def test_blocks_of_anthropic_become_calls_results_and_reasoning() -> None:
    """The result of a tool is a message of its own, so later messages move; loss and numbers follow them."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1.2"}]}
    written = [
        ASK,
        {"role": "assistant", "weight": 0, "content": [
            {"type": "thinking", "thinking": "Look it up.", "signature": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "tide", "input": {"port": "Lund", "unit": None}},
        ]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        {"role": "assistant", "train": False, "content": [
            {"type": "redacted_thinking"}, {"type": "text", "text": "1.2 m"},
        ]},
    ]  # fmt: skip
    chat = chats.parse(written, {"system": [{"type": "text", "text": "Be brief."}]})
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        ASK,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Look it up.",
         "tool_calls": [{"id": "t1", **CALL}]},
        {"role": "tool", "content": "1.2", "tool_call_id": "t1"},
        {"role": "user", "content": "And?"},
        ANSWER,
    ]  # fmt: skip
    assert chat.muted == {2, 5}
    assert any("redacted_thinking is not used" in notice for notice in chat.notices)
    with pytest.raises(BadChat, match="message 3 has a content part of type 'image'"):
        chats.parse([*written[:2], {"role": "user", "content": [result, {"type": "image", "source": {}}]}])


def test_a_chat_of_encrypted_reasoning_alone_is_refused() -> None:
    hidden = [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]
    with pytest.raises(BadChat, match="has no message with a text, a call or a result; add one or drop the row"):
        chats.parse(hidden, {"system": "Be brief."})


def test_tools_of_anthropic_are_described_as_templates_expect() -> None:
    schema = {"type": "object", "properties": {"port": {"type": "string"}}}
    own = {"type": "function", "function": {"name": "f"}}
    chat = chats.parse([ASK, ANSWER], {"tools": [{"name": "tide", "description": "d", "input_schema": schema}, own]})
    assert chat.tools == [
        {"type": "function", "function": {"name": "tide", "description": "d", "parameters": schema}}, own,
    ]  # fmt: skip
    assert "input_schema of tools is read as parameters" in chat.notices


def test_functions_of_openai_are_tools() -> None:
    function = {"name": "tide", "parameters": {"type": "object"}}
    for row in ({"functions": [function]}, {"functions": json.dumps([function]), "tools": None}):
        chat = chats.parse([ASK, ANSWER], row)
        assert chat.tools == [{"type": "function", "function": function}]
        assert chat.notices == ("functions are read as tools",)
    both = chats.parse([ASK, ANSWER], {"functions": [function], "tools": [{"name": "other"}]})
    assert both.tools == [{"name": "other"}]
    assert both.notices == ("the column 'functions' is not used",)
    assert chats.parse([ASK, ANSWER], {"functions": "none"}).notices == ("the column 'functions' is not used",)


def test_nulls_that_arrow_adds_to_tools_and_arguments_are_absent() -> None:
    """Arrow gives all mappings of a column the same keys; JSON text keeps its nulls."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}
    arrow = {"type": "function", "function": {
        "name": "f", "description": None, "parameters": {"properties": {"a": {"type": "x", "enum": None}, "b": None}},
    }}  # fmt: skip
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    chat = chats.parse([ASK, {"role": "assistant", "content": None, "tool_calls": [call]}], {"tools": [arrow]})
    assert chat.tools == [tool]
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    texts = chats.parse([ASK, ANSWER], {"tools": [json.dumps(arrow)]})
    assert texts.tools == [arrow]
    call["function"]["arguments"] = '{"b": null}'
    written = chats.parse([ASK, {"role": "assistant", "tool_calls": [call]}])
    assert written.messages[1]["tool_calls"][0]["function"]["arguments"] == {"b": None}


def test_nan_of_pandas_is_a_missing_value() -> None:
    nan = float("nan")
    chat = chats.parse([{**ASK, "tool_calls": nan}, {**ANSWER, "name": nan}], {"system": nan, "tools": nan, "id": nan})
    assert (chat.messages, chat.tools, chat.notices) == ([ASK, ANSWER], None, ())


@pytest.mark.parametrize("column", ["tools", "documents", "chat_template_kwargs", "system"])
@pytest.mark.parametrize("blank", ["", "  ", "null"])
def test_blank_cells_of_a_csv_are_absent(column: str, blank: str) -> None:
    if (column, blank) != ("system", "null"):
        assert chats.parse([ASK, ANSWER], {column: blank}) == chats.parse([ASK, ANSWER])


@pytest.mark.parametrize(
    ("role", "known"),
    [("User", "user"), ("ASSISTANT", "assistant"), ("prompter", "user"), ("AI", "assistant"), ("ipython", "tool")],
)
def test_roles_are_read_in_any_case(role: str, known: str) -> None:
    assert chats.parse([{"role": role, "text": "x"}]).messages == [{"role": known, "content": "x"}]


def test_an_answer_of_one_mapping_is_read_with_a_notice() -> None:
    """Preference pairs of LLaMA-Factory have one message in `chosen`."""
    chat = chats.parse({"from": "gpt", "value": "1.2 m"})
    assert chat.messages == [ANSWER]
    assert "one message is read as a list of one" in chat.notices


def test_an_empty_answer_is_noticed() -> None:
    empty = {"role": "assistant", "content": " "}
    assert chats.parse([ASK, empty]).notices == ("an answer is empty, and only its end is learned",)
    for more in ({"weight": 0}, {"reasoning_content": "x"}, {"tool_calls": [CALL]}):
        assert not chats.parse([ASK, {**empty, **more}]).notices


def test_a_result_that_is_a_mapping_is_written_as_json() -> None:
    chat = chats.parse([ASK, CALLED, {"role": "tool", "content": {"m": 1.2, "port": "Malmö", "x": None}}, ANSWER])
    assert chat.messages[2]["content"] == '{"m": 1.2, "port": "Malmö"}'


@pytest.mark.parametrize("depth", [300, 500, 900])
def test_deep_arguments_and_results_are_no_crash(depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    called = f'{{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", "arguments": {deep}}}}}]}}'
    result = f'{{"role": "tool", "content": {deep}}}'
    with contextlib.suppress(BadChat):
        chat = chats.parse(f'[{{"role": "user", "content": "a"}}, {called}, {result}]', {"tools": f"[{deep}]"})
        assert len(chat.messages) == 3


@pytest.mark.parametrize("text", ["[{'role': 'user', 'content': 'a'}]", "[{'role': 'user'}\n {'role': 'x'}]"])
def test_python_notation_is_named_and_the_fix_works(text: str) -> None:
    with pytest.raises(BadChat, match=r"is in Python's notation and no JSON; write the column with json\.dumps"):
        chats.parse(text)
    assert chats.parse(json.dumps([ASK, ANSWER])).messages == [ASK, ANSWER]
