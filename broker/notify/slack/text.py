"""Escapes text for Slack, so that text of users and rented machines cannot mention, link or break the layout.

Whitespace is one space, and other control characters are shown as escapes (`broker.domain.formatting`).

Slack's rule is to escape `&`, `<` and `>`, so that no `<!channel>`, `<@U…>` or `<https://…|…>` can result. Every text
object is also `verbatim`, so that Slack makes no link or mention out of bare words.
"""

from typing import Any

from broker.domain.formatting import visible

SECTION_MAX = 3000
HEADER_MAX = 150
MESSAGE_MAX = 4000
CONFIRM_MAX = 300
CUT = "…"
_ESCAPED = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_ZERO_WIDTH = dict.fromkeys((*range(0x200B, 0x200E), 0xFEFF))
"""Characters without width, which would hide a difference between two names."""

Json = dict[str, Any]


def escape(text: str, limit: int = SECTION_MAX) -> str:
    """Return at most `limit` characters after escaping, never cut inside an entity."""
    pieces = [_ESCAPED.get(character, character) for character in text]
    if sum(map(len, pieces)) <= limit:
        return "".join(pieces)
    parts, length = [], len(CUT)
    for piece in pieces:
        length += len(piece)
        if length > limit:
            break
        parts.append(piece)
    return "".join(parts) + CUT


def line(text: str, limit: int = SECTION_MAX) -> str:
    """Return one escaped line; control characters are visible escapes."""
    return escape(_clean(text), limit)


def code(text: str, limit: int = SECTION_MAX) -> str:
    """Return one line as code. Backticks are replaced, because a backtick would end the code."""
    return f"`{line(text.replace('`', chr(39)), limit - 2) or ' '}`"


def _clean(text: str) -> str:
    return visible(" ".join(text.split()).translate(_ZERO_WIDTH)).strip()


def plain(text: str, limit: int) -> Json:
    """Return a plain text object, which Slack does not interpret."""
    cleaned = _clean(text) or "–"
    shortened = cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + CUT
    return {"type": "plain_text", "text": shortened, "emoji": False}


def mrkdwn(text: str) -> Json:
    """Return a text object of escaped parts."""
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def section(*lines: str) -> Json:
    """Return a section of escaped lines. Lines beyond the limit are left out whole."""
    return {"type": "section", "text": mrkdwn(_fitting(lines, SECTION_MAX))}


def context(*lines: str) -> Json:
    return {"type": "context", "elements": [mrkdwn(_fitting(lines, SECTION_MAX))]}


def _fitting(lines: tuple[str, ...], limit: int) -> str:
    fitting: list[str] = []
    for text in lines:
        if sum(map(len, fitting)) + len(fitting) + len(text) + len(CUT) + 1 > limit:
            fitting.append(CUT)
            break
        fitting.append(text)
    return "\n".join(fitting)


def bar(share: float, width: int = 20) -> str:
    """Return `█████░░░░░` for a share of 0 to 1; other values are drawn as 0 or 1."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)
