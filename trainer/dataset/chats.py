"""Chats as data sets hold them: `{role, content}`, ShareGPT's `{from, value}`, content parts, API dumps, JSON text."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.dataset import chat_dialects
from trainer.dataset.chat_dialects import is_given, without_nulls

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "ai": "assistant", "bot": "assistant", "chatbot": "assistant", "prompter": "user",
    "observation": "tool", "function_response": "tool", "tool_response": "tool", "function": "tool", "ipython": "tool",
}  # fmt: skip
"""Names of roles in ShareGPT files and in APIs, in lower case, with the role of a chat template."""
KNOWN_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"}
)
"""Keys of a message that chat templates read."""
LEARN_KEYS = ("weight", "train")
"""Keys that say whether an answer carries loss: OpenAI's and Mistral's, and axolotl's."""
ROW_KEYS = ("tools", "documents", "chat_template_kwargs")
"""Other columns of the row, or other keys of its cell of messages, that the chat template receives."""
SYSTEM = "system"
"""Column of the row, or other key of its cell of messages, with the text of the system message."""
NAMED_UNUSED = 20
"""Unused columns of a row that are named in notices."""
RESERVED = frozenset({
    "self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "tokenize",
    "add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs",
    "strftime_now",
})  # fmt: skip
"""Arguments of transformers' `apply_chat_template`, which are not variables of a template."""


class BadChat(ValueError):
    """Reason why a cell is not a chat, with the number of the message and its key."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Chat with what its row gives the template."""

    messages: list[dict[str, Any]]
    """Messages with a role of ROLES and a text as content; no key is null."""
    muted: frozenset[int] = frozenset()
    """Indices of answers without loss, by `weight: 0` or `train: false`."""
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template: the row's `chat_template_kwargs`."""
    notices: tuple[str, ...] = ()
    """Conversions, and what is not used, in words for users."""
    has_given_system: bool = False
    """True if the first message is the text of SYSTEM."""
    in_parts: bool = False
    """True if the template receives each text as a list of one part, as those of vision models expect."""

    @property
    def learned(self) -> list[int]:
        """Indices of the assistant's messages that carry loss."""
        return [n for n, m in enumerate(self.messages) if m["role"] == "assistant" and n not in self.muted]

    @property
    def last_answer(self) -> int:
        """Index of the assistant's last message; -1: it has none."""
        return max((n for n, m in enumerate(self.messages) if m["role"] == "assistant"), default=-1)

    def upto(self, count: int) -> "Chat":
        """Return the chat of the first `count` messages."""
        return replace(self, messages=self.messages[:count])

    def given_by(self, asked: "Chat") -> "Chat":
        """Return the chat with what the cell of its question gives the template, if it has none of its own."""
        tools, documents = self.tools or asked.tools, self.documents or asked.documents
        return replace(self, tools=tools, documents=documents, options={**asked.options, **self.options})

    def having(self, number: int, message: dict[str, Any]) -> "Chat":
        """Return the chat with another message at an index."""
        return replace(self, messages=[*self.messages[:number], message, *self.messages[number + 1 :]])

    def forms(self) -> "Iterator[Chat]":
        """Yield the chat in the forms that templates differ in: texts or parts; arguments as mappings or as JSON."""
        yield self
        yield replace(self, in_parts=True)
        if any("tool_calls" in message for message in self.messages):
            yield replace(self, messages=[_with_text_arguments(message) for message in self.messages])

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """Messages as the template receives them."""
        if not self.in_parts:
            return self.messages
        return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in self.messages]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def parse(cell: Any, row: Mapping[str, Any] | None = None) -> Chat:
    """Return the chat of a cell. `row`: the row's cells without other use; ROW_KEYS and SYSTEM are read from it.

    A key of the cell goes before the row's column of that name. Raises BadChat.
    """
    notices: list[str] = []
    messages_written, inner = _list(cell, notices)
    fields = _beside(inner, row or {}, notices)
    muted = set()
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(messages_written, 1):
        for part in chat_dialects.expanded(message, notices):
            parsed, has_loss = _message(part, number, notices)
            if not has_loss:
                muted.add(len(messages))
            messages.append(parsed)
    if not messages:
        raise BadChat("has no message with a text, a call or a result; add one or drop the row")
    system = _system(fields, messages, notices)
    tools, documents = (_row_list(fields, key) for key in ROW_KEYS[:2])
    tools = tools and chat_dialects.described_tools(tools, notices)
    return Chat(
        messages=[*system, *messages],
        muted=frozenset(number + len(system) for number in muted),
        tools=tools,
        documents=documents,
        options=_options(fields),
        notices=tuple(dict.fromkeys(notices)),
        has_given_system=bool(system),
    )


def _beside(inner: Mapping[str, Any], row: Mapping[str, Any], notices: list[str]) -> dict[str, Any]:
    """Return what cell and row give in addition to the messages, and name what is not used."""
    known_keys = (*ROW_KEYS, SYSTEM)
    inner, row = (chat_dialects.with_tools(cells, notices) for cells in (inner, row))
    fields = {key: row[key] for key in known_keys if is_given(row.get(key))}
    for key, value in inner.items():
        if not is_given(value):
            continue
        if key not in known_keys:
            notices.append(f"the key {key!r} next to the messages is not used")
            continue
        if key in fields:
            notices.append(f"the column {key!r} is not used, because the cell of messages has its own")
        fields[key] = value
    unused = [name for name, value in row.items() if name not in known_keys and is_given(value)]
    notices += [f"the column {name!r} is not used" for name in unused[:NAMED_UNUSED]]
    if len(unused) > NAMED_UNUSED:
        notices.append(f"{len(unused) - NAMED_UNUSED} more columns are not used")
    return fields


def _system(fields: Mapping[str, Any], messages: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Return the message of SYSTEM, or none if it is blank or the chat begins with its own. Raises BadChat."""
    text = fields.get(SYSTEM, "")
    if isinstance(text, list) and text and all(isinstance(part, Mapping) for part in text):
        text = "".join(_part_text(part, f"{SYSTEM!r} next to the messages") for part in text)
    if not isinstance(text, str):
        raise BadChat(f"has {SYSTEM!r} next to the messages, which is {_kind(text)}; give a text, or remove it")
    if not text.strip():
        return []
    if messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] != text:
            notices.append(f"{SYSTEM!r} next to the messages is not used, because they begin with a system message")
        return []
    notices.append(f"{SYSTEM!r} next to the messages is read as the system message")
    return [{"role": "system", "content": text}]


def _list(cell: Any, notices: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return the messages of a cell, and the other keys of a mapping; JSON text is parsed. Raises BadChat."""
    beside: dict[str, Any] = {}
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            if chat_dialects.is_python(cell):
                raise BadChat("is in Python's notation and no JSON; write the column with json.dumps") from None
            raise BadChat("is text and no JSON list of messages; give a JSON list of {role, content}") from None
        notices.append("JSON text is read as a list of messages")
    if isinstance(cell, Mapping):
        inner = next((key for key in ("messages", "conversations", "conversation") if key in cell), None)
        if inner is None and {"role", "from"} & cell.keys():
            notices.append("one message is read as a list of one")
            return [cell], {}
        if inner is None:
            raise BadChat("is one mapping, no list of messages; put it into a list")
        notices.append(f"the list is read from the key {inner!r}")
        beside = {str(key): value for key, value in cell.items() if key != inner}
        cell = cell[inner]
    if not isinstance(cell, list):
        raise BadChat(f"is {_kind(cell)}, no list of messages; give a list of {{role, content}}")
    if not cell:
        raise BadChat("has no message; add one or drop the row")
    return cell, beside


def _message(entry: Any, number: int, notices: list[str]) -> tuple[dict[str, Any], bool]:
    """Return a message in the form of chat templates, and whether it may carry loss. Raises BadChat."""
    where = f"message {number}"
    if not isinstance(entry, Mapping):
        raise BadChat(f"{where} is {_kind(entry)}, no mapping; give {{role, content}}")
    message = {str(key): value for key, value in entry.items() if is_given(value)}
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
        notices.append("from and value are read as role and content")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    if "content" not in message and "text" in message:
        message["content"] = message.pop("text")
        notices.append("text is read as content")
    message["role"] = _role(message.get("role"), where)
    if isinstance(call := message.pop("function_call", None), Mapping):
        message.setdefault("tool_calls", [{"type": "function", "function": dict(call)}])
        notices.append("function_call is read as tool_calls")
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], where)
    message["content"] = _content(message, where, notices)
    if message["role"] == "assistant" and not (
        message["content"].strip() or message.keys() - {"role", "content", "name"}
    ):
        notices.append("an answer is empty, and only its end is learned")
    return message, _has_loss(message, where)


def _role(role: Any, where: str) -> str:
    name = role.strip().lower() if isinstance(role, str) else role
    mapped_role = SHAREGPT_ROLES.get(name, name) if isinstance(name, str) else name
    if mapped_role in ROLES:
        return str(mapped_role)
    if role is None:
        raise BadChat(f"{where} has no role; give one of {', '.join(ROLES)}")
    raise BadChat(f"{where} has the role {str(role)[:40]!r}; give one of {', '.join(ROLES)}")


def _content(message: Mapping[str, Any], where: str, notices: list[str]) -> str:
    """Return the text of a message. Raises BadChat."""
    content = message.get("content")
    if content is None:
        if message["role"] != "assistant" or not {"tool_calls", *KNOWN_KEYS} & (message.keys() - {"role", "name"}):
            raise BadChat(f"{where} has no content; give a text, or drop the message")
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) and message["role"] == "tool" and not {"type", "text"} & content.keys():
        notices.append("results of tools that are mappings are written as JSON")
        try:
            return json.dumps(without_nulls(content), ensure_ascii=False, default=str)
        except (ValueError, RecursionError):
            raise BadChat(f"{where} has a tool's result that is nested too deep; make it flatter") from None
    if isinstance(content, Mapping):
        content = [content]
    if isinstance(content, list):
        notices.append("content parts are joined to one text")
        return "".join(_part_text(part, where) for part in content)
    raise BadChat(f"{where} has {_kind(content)} as content; give a text")


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text", part.get("content")) if isinstance(part, Mapping) else None
    kind = part.get("type", "text") if isinstance(part, Mapping) else _kind(part)
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise BadChat(f"{where} has a content part of type {str(kind)[:40]!r}; only text can be learned, drop the part")
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls with arguments as mappings, which chat templates expect. Raises BadChat."""
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadChat(f"{where} has tool_calls that are not a list; give [{{function: {{name, arguments}}}}]")
    parsed = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadChat(f"{where} has a tool call without a function's name; give {{function: {{name, arguments}}}}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise BadChat(f"{where} has a tool call whose arguments are not JSON; mend them") from None
        inner = {key: value for key, value in function.items() if value is not None}
        is_written = isinstance(function.get("arguments"), str)
        inner["arguments"] = {} if arguments is None else arguments if is_written else without_nulls(arguments)
        outer = {key: value for key, value in call.items() if value is not None} if "function" in call else {}
        parsed.append({"type": "function", **outer, "function": inner})
    return parsed


def _has_loss(message: dict[str, Any], where: str) -> bool:
    """Remove LEARN_KEYS from a message and return what they say. Raises BadChat."""
    has_loss = True
    for key in LEARN_KEYS:
        value = message.pop(key, None)
        if value is None:
            continue
        if value not in (0, 1):
            raise BadChat(f"{where} has {key} {str(value)[:40]!r}; only 0 and 1, or true and false, are supported")
        has_loss = has_loss and bool(value)
    return has_loss


def _row_list(row: Mapping[str, Any], key: str) -> list[dict[str, Any]] | None:
    """Return the mappings of another column of the row; None if it is absent or empty. Raises BadChat."""
    value = row.get(key)
    try:
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else None
        elif isinstance(value, list):
            value = [json.loads(entry) if isinstance(entry, str) else without_nulls(entry) for entry in value]
    except (ValueError, RecursionError):
        raise BadChat(f"has a column {key!r} in its row that is not JSON; give a list of mappings") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise BadChat(f"has a column {key!r} in its row that is not a list of mappings; mend it, or rename the column")
    return [dict(entry) for entry in value]


def _options(row: Mapping[str, Any]) -> dict[str, Any]:
    value = row.get(ROW_KEYS[2])
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            value = ()
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadChat(f"has a column {ROW_KEYS[2]!r} in its row that is not a mapping; mend it, or rename the column")
    if reserved := sorted(RESERVED & set(map(str, value))):
        raise BadChat(
            f"has a column {ROW_KEYS[2]!r} in its row with the key {reserved[0]!r}, which a row may not set; remove it"
        )
    return {str(key): entry for key, entry in value.items() if entry is not None}


def _kind(value: Any) -> str:
    """Return the kind of a JSON value in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case Mapping():
            return "a mapping"
    return type(value).__name__
