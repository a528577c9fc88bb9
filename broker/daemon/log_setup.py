"""Logging of the daemon: one line per record, without control characters, tokens, passwords and keys."""

import copy
import logging
import re
import sys

from broker.domain.formatting import visible

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SECRET = re.compile(
    r"(?P<token>\bgb_[A-Za-z0-9]+_)[A-Za-z0-9_\-]+"  # bearer tokens of gpubroker
    r"|(?P<bearer>[Bb]earer\s+)[^\s\"']+"
    r"|(?P<url>://[^/\s:@]*:)[^@\s/]+(?=@)"  # passwords in URLs
    r"|(?P<option>(?i:secret|password|token|access_key|api_key)[A-Za-z_]*[\"']?\s*[=:]\s*[\"']?)[^\s\"',}&]+"
)


def redact(text: str) -> str:
    """Return `text` without tokens, passwords and keys."""
    return _SECRET.sub(lambda m: next(g for g in m.groups() if g is not None) + "[redacted]", text)


class RedactingFormatter(logging.Formatter):
    """Formatter that redacts secrets and escapes control characters, tracebacks included.

    A message is one line. Lines of a traceback are indented, so that no text of a host can look like a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        visible_record = copy.copy(record)  # other handlers get the record as it is
        visible_record.msg, visible_record.args = visible(record.getMessage()), None
        first, *traceback = super().format(visible_record).split("\n")
        return redact("\n".join([visible(first), *(f"  {visible(line, keep=chr(9))}" for line in traceback)]))


def set_up(level: str) -> None:
    """Log to stderr. Raises ValueError for an unknown level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter(FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
