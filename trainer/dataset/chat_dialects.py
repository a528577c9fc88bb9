"""Dialects of chats: content blocks and tools of Anthropic's API, calls as messages of their own, nulls of Arrow.

`trainer.dataset.chats` reads the messages that result.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CALL_ROLES = ("function_call", "tool_call")
"""Roles of messages that are a call, in files of LLaMA-Factory and ms-swift."""
CALLS, RESULT, REASONING = "tool_use", "tool_result", "thinking"
"""Types of Anthropic's content blocks that are no text."""
HIDDEN = "redacted_thinking"
"""Type of a block with reasoning that is encrypted."""
PYTHON_STARTS = ("[{'", "{'", '[{"', '{"')
"""First characters of a list of messages in Python's notation."""


def is_given(value: Any) -> bool:
    """Return False for null, and for NaN, which pandas writes for a missing value."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def without_nulls(value: Any) -> Any:
    """Return a value without the null keys of its mappings: Arrow gives all mappings of a column the same keys.

    A value that is nested too deep is returned unchanged.
    """
    try:
        return _without_nulls(value)
    except RecursionError:
        return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def is_python(text: str) -> bool:
    """Return True if a text that is no JSON looks like messages in Python's notation, as pandas writes them."""
    return text.lstrip().startswith(PYTHON_STARTS) and "'" in text


def expanded(message: Any, notices: list[str]) -> Iterator[Any]:
    """Yield a message as messages of chat templates. Other values are yielded unchanged."""
    if not isinstance(message, Mapping):
        yield message
        return
    content = message.get("content", message.get("value"))
    if message.get("role", message.get("from")) in CALL_ROLES and (calls := _calls_of(content)):
        notices.append("messages of calls are read as tool_calls of the assistant")
        yield {**_rest(message), "role": "assistant", "tool_calls": calls}
        return
    types = (
        {str(block.get("type")) for block in content if isinstance(block, Mapping)} if isinstance(content, list) else ()
    )
    if not {CALLS, RESULT, REASONING, HIDDEN}.intersection(types):
        yield message
        return
    notices.append("content blocks of Anthropic's API are read as tool_calls, tool results and reasoning")
    yield from _of_blocks(message, content, notices)


def _rest(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without its role and content."""
    return {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}


def _calls_of(content: Any) -> list[Any]:
    """Return the calls that a content describes, as JSON text or as mappings; empty if it is no call."""
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError):
            return []
    calls = content if isinstance(content, list) else [content]
    return calls if all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls) else []


def _of_blocks(message: Mapping[str, Any], blocks: Sequence[Any], notices: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the results of tools as messages of their own, then a message with the other blocks, if there are any."""
    calls, thoughts, others = [], [], []
    for block in blocks:
        match block.get("type") if isinstance(block, Mapping) else None:
            case "tool_result":
                result = block.get("content")
                identity = {"tool_call_id": block["tool_use_id"]} if is_given(block.get("tool_use_id")) else {}
                yield {**identity, "role": "tool", "content": "" if result is None else result}
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                notices.append("redacted_thinking is not used, because it is encrypted")
            case _:
                others.append(block)
    if not (calls or thoughts or others):
        return
    rest = {**_rest(message), "role": message.get("role", message.get("from")), "content": others or ""}
    rest |= {"tool_calls": calls} if calls else {}
    yield rest | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})


def with_tools(given: Mapping[str, Any], notices: list[str]) -> Mapping[str, Any]:
    """Return a row's cells with `functions`, the former name of OpenAI's API, as `tools`."""
    functions = given.get("functions")
    if isinstance(functions, str):
        try:
            functions = json.loads(functions)
        except (ValueError, RecursionError):
            return given
    is_list = isinstance(functions, list) and all(isinstance(function, Mapping) for function in functions)
    if not functions or not is_list or is_given(given.get("tools")):
        return given
    notices.append("functions are read as tools")
    tools = [{"type": "function", "function": function} for function in functions]
    return {**{key: value for key, value in given.items() if key != "functions"}, "tools": tools}


def described_tools(tools: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Return tools in the form of chat templates, also those with the `input_schema` of Anthropic's API."""
    if not any("input_schema" in tool for tool in tools):
        return tools
    notices.append("input_schema of tools is read as parameters")
    return [_described(tool) for tool in tools]


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        return tool
    function = {"parameters" if key == "input_schema" else key: part for key, part in tool.items() if key != "type"}
    return {"type": "function", "function": function}
