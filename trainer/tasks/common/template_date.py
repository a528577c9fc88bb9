"""Date that chat templates render by `strftime_now`: that of the job, so that a resume on another day has equal tokens.

`answer_spans` passes it to the templates, and the token cache has it in its identity.
"""

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

FUNCTION = "strftime_now"
"""Function of templates that formats the current time."""
CALL = re.compile(FUNCTION + r"""\(\s*(['"])([^'"\\]*)\1\s*\)""")
"""Call of the function with a literal format, as all published templates have it."""
ATTRIBUTE = "gpubroker_date"
"""Attribute of a tokenizer with the date, as YYYY-MM-DD; it is not saved with the tokenizer."""


def fix(tokenizer: Any, date: str) -> None:
    """Let the tokenizer's chat template render a date, at midnight. `date`: YYYY-MM-DD; empty: the machine's date."""
    setattr(tokenizer, ATTRIBUTE, date)


def rendered_date(tokenizer: Any, today: str = "") -> str:
    """Return the date that the template renders; empty: it renders none. `today`: the machine's date, for tests."""
    if FUNCTION not in str(getattr(tokenizer, "chat_template", "")):
        return ""
    return getattr(tokenizer, ATTRIBUTE, "") or today or datetime.now(UTC).date().isoformat()


def fixed_template(tokenizer: Any, tools: Any) -> str | None:
    """Return the chat template with the fixed date in place of its calls; None: the tokenizer's own is right.

    transformers accepts no function among the variables of a template, so that the calls are replaced.
    """
    date = rendered_date(tokenizer) if getattr(tokenizer, ATTRIBUTE, "") else ""
    return _replaced(tokenizer.get_chat_template(tools=tools), date) if date else None


@lru_cache(maxsize=8)
def _replaced(template: str, date: str) -> str:
    moment = datetime.fromisoformat(date)
    return CALL.sub(lambda call: repr(moment.strftime(call[2])), template)
