"""Check docstrings and comments against the writing rules: `python .ci/prose.py [--list] PATH...`.

A docstring begins with a verb or a noun phrase; words that hide the subject, and metaphors of this project's first
version, are refused. Prints one line per finding and one JSON object; exits with 1 if there is any finding.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FIRST_WORDS = frozenset(
    {
        *("Of", "What", "Whose", "By", "Where", "That", "As", "And", "But", "Or", "For", "From", "With", "Without"),
        *("Before", "Beside", "Until", "Because", "Since", "Whether", "Which", "Who", "Whom", "How", "So", "Else"),
        *("In", "On", "At", "To", "Than", "Those", "Such"),
    }
)
WORDS = re.compile(
    r"\b(house|houses|doors?|rooms?|nobody|somebody|anybody|whoever|whatever|whom|stands|stood|beside|anew|likewise"
    r"|told|heard|likeness|else(?! \w*[:(])|tells|hears|gone by|at rest|takes? for|taken for|tempo|patience)\b"
)
"""Words with a standard term: see CONTRIBUTING.md."""
MAX_WORDS = 30
"""Words in a sentence. The writing guide asks for 25; a name in backticks counts as one word."""
SENTENCE = re.compile(r"(?<=[.;:!?])\s+(?=[A-Z`0-9(])|\n\s*\n|\n\s*[-*|├└│]")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it documents a definition (not an attribute) for each docstring of a module."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for position, child in enumerate(body):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                text = child.value.value
                if isinstance(text, str):
                    yield child.lineno, text, position == 0


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|fmt:|pragma|ruff:|!)", token.string):
            yield token.start[0], token.string.lstrip("# ")


def findings(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text()
    texts = [(line, text, True) for line, text, _ in docstrings(ast.parse(source))]
    texts += [(line, text, False) for line, text in comments(source)]
    for line, text, is_docstring in texts:
        prose = re.sub(r"``.*?``|`[^`]*`", "NAME", text, flags=re.DOTALL)
        words = prose.split()
        if is_docstring and words and words[0].strip(":,.") in FIRST_WORDS:
            yield line, f"begins with {words[0]!r}"
        for match in WORDS.finditer(prose):
            yield line, f"has {match.group(0)!r}"
        for sentence in SENTENCE.split(prose):
            count = len(re.findall(r"[A-Za-z0-9'-]+", sentence))
            if count > MAX_WORDS:
                yield line, f"has a sentence of {count} words"


def main() -> int:
    roots = [Path(word) for word in sys.argv[1:] if not word.startswith("-")]
    paths = sorted(p for root in roots for p in ([root] if root.is_file() else root.rglob("*.py")))
    paths = [p for p in paths if "_pb2" not in p.name]
    total = 0
    for path in paths:
        for line, message in findings(path):
            total += 1
            print(f"{path}:{line}: {message}")
    print(json.dumps({"files": len(paths), "findings": total}))
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
