"""Check English against the writing rules of CONTRIBUTING.md: `python .ci/prose.py [--counts] PATH...`.

Reads docstrings, notes, comments and text literals of Python files, and paragraphs and table cells of Markdown files.
Of SQL, TOML, shell scripts and the Makefile it reads the comments.
Prints one line per finding and one JSON object, with --counts also the number of texts; exits with 1 on any finding.
"""

from __future__ import annotations

import ast
import collections
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

FIRST_WORDS = frozenset(
    {
        *("Of", "What", "Whose", "By", "Where", "That", "As", "And", "But", "Or", "For", "From", "With", "Without"),
        *("Before", "Beside", "Until", "Because", "Since", "Whether", "Which", "Who", "Whom", "How", "So", "Else"),
        *("In", "On", "At", "To", "Than", "Those", "Such", "When", "Whenever", "Wherever", "If", "Unless", "While"),
        *("After", "Once", "Although", "Though", "Then", "There", "Here", "Also", "Even", "Just", "Only", "Not"),
        *("Among", "Between", "During", "Under", "Over", "Through", "Within", "Is", "Are", "Has", "Was", "Were"),
        *("Can", "Cannot", "May", "Must", "It", "Its", "They", "Their", "Them", "He", "She"),
    }
)
"""Words that begin neither with a verb nor with a noun phrase, and pronouns whose noun is not in the docstring."""
WORDS = re.compile(
    r"\b(house|houses|doors?|rooms?|nobody|somebody|anybody|whoever|whatever|whom|stands|stood|beside|anew|likewise"
    r"|told|heard|likeness|else(?! \w*[:(])|tells|hears|gone by|at rest|takes? for|taken for|took for|tempo|patience"
    r"|insists?|insisted|goes on|went on|go on)\b",
    re.IGNORECASE,
)
"""Words with a standard term: see CONTRIBUTING.md."""
MAX_WORDS = 25
"""Words in a sentence. A name in backticks and a link's text count as they read; a figure is not a word."""
MAX_RELATIVES = 2
"""Relative pronouns in a sentence. Conjunctions ("so that") are not counted."""
SENTENCE = re.compile(
    r"(?<=[.!?]\*\*)\s+|(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)\s+|(?<=[;:])\s+(?=[A-Z0-9(*\[])"
    r"|\n\s*\n|\n\s*[-*|├└│]|\n\s*\w+ {2,}"
)
"""Ends of a sentence, of a paragraph, of an item of a list, and of a row of an aligned table."""
CLAUSE = re.compile(r"(?<=[.;:!?])\s+|\n")
"""Ends of a statement in a cell, an error or a log line, whose form is `where: what; fix`."""
RELATIVE = re.compile(r"(?<!so )\b(that|which|whose)\b", re.IGNORECASE)
CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
COMMAND = re.compile(r"^\s+(?:\.venv/bin/)?(?:python|gpubroker) .*$", re.MULTILINE)
"""Line of a docstring that shows a command."""
NO_ENGLISH = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH|CREATE|ALTER|LOCK|#!)\b|[<>{}\\|]|\w\(\w*\)|://\S+\s*$")
"""SQL, scripts, markup, patterns and templates, which are also string literals."""
DIRECTIVE = re.compile(r"\s*(noqa|type:|fmt:|pragma|ruff:|!|shellcheck|syntax=|name: \w+$)|[-\s]*$")
"""Comments that a tool reads, the names of the store's statements, rulers, and empty lines."""
LINE_COMMENT = {".sql": "--", ".toml": "#", ".sh": "#", "": "#"}
"""Begin of a comment, by suffix. Files without a suffix are the Makefile and the scripts named on the command line."""
DEFINITIONS = "| instead of |"
"""Head of the table that lists the words to avoid."""


class Text(NamedTuple):
    line: int
    kind: str
    """`docstring`, `note` (of an attribute), `comment`, `literal`, `paragraph` or `cell`."""
    text: str


def texts_of_python(source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    documented: set[ast.AST] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for position, child in enumerate(body if isinstance(body, list) else ()):
            match child:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    documented.add(child.value)
                    yield Text(child.lineno, "docstring" if position == 0 else "note", text)
    yield from _literals(tree, documented)
    yield from _comments(source)


def _literals(tree: ast.Module, documented: set[ast.AST]) -> Iterator[Text]:
    parts: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(ast.walk(node))
            yield from _english(node.lineno, "".join(_part(value) for value in node.values))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documented | parts:
            yield from _english(node.lineno, node.value)


def _part(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else "NAME"


def _english(line: int, literal: str) -> Iterator[Text]:
    words = literal.split()
    plain = sum(re.fullmatch(r"\(?[a-z][a-z'-]*\)?[,.;:]?", word) is not None for word in words)
    if len(words) >= 4 and plain * 2 >= len(words) and not NO_ENGLISH.search(literal):
        yield Text(line, "literal", literal)


def _comments(source: str) -> Iterator[Text]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = ((t.start[0], t.line, t.string) for t in tokens if t.type == tokenize.COMMENT)
    return _joined((line, not code.lstrip().startswith("#"), text.lstrip("#")) for line, code, text in comments)


def _joined(comments: Iterable[tuple[int, bool, str]]) -> Iterator[Text]:
    """Yield comments, given line, whether code precedes, and text; comments on consecutive lines are one text."""
    first, last, words = 0, -1, ""
    for line, follows_code, comment in comments:
        if not DIRECTIVE.match(comment):
            if words and (follows_code or line != last + 1):
                yield Text(first, "comment", words)
                words = ""
            first, last = first if words else line, -1 if follows_code else line
            words += comment + "\n"
    if words:
        yield Text(first, "comment", words)


def texts_of_lines(source: str, mark: str) -> Iterator[Text]:
    """Yield the comments of a language whose comments begin with `mark` and end with the line."""
    pattern = re.compile(rf"(?P<code>.*?)(?:(?<!\S){re.escape(mark)}+)(?P<comment>[\s!].*|)$")
    matches = ((number, pattern.fullmatch(line)) for number, line in enumerate(source.splitlines(), 1))
    return _joined((number, bool(m["code"].strip()), m["comment"]) for number, m in matches if m)


def texts_of_markdown(source: str) -> Iterator[Text]:
    """Yield paragraphs, items of lists, and cells; headings, code and the table of words to avoid are left out."""
    first, words, fenced, defines = 0, "", False, False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        fenced ^= line.lstrip().startswith("```")
        starts = not line.strip() or line.startswith(("#", "|", "```")) or re.match(r"\s*([-*]|\d+\.)\s", line)
        if words and (starts or fenced):
            yield Text(first, "paragraph", words)
            words = ""
        defines = line.startswith("|") and (defines or line.startswith(DEFINITIONS))
        if line.startswith("|") and not defines:
            yield from (Text(number, "cell", cell) for cell in CODE.sub("NAME", line).strip("|").split("|"))
        is_code = fenced or line.startswith(("#", "|", "```", "    ", "<")) or not line.strip()
        if not is_code or (words and not starts):
            first = first if words else number
            words += re.sub(r"^\s*([-*]|\d+\.)\s", "", line) + " "


def findings(text: Text) -> Iterator[str]:
    prose = re.sub(r"\]\([^)]*\)", "]", CODE.sub("NAME", COMMAND.sub("", text.text)))
    words = prose.split()
    if text.kind in ("docstring", "note") and words and words[0].strip(":,.") in FIRST_WORDS:
        yield f"begins with {words[0]!r}"
    for match in WORDS.finditer(prose):
        yield f"has {match.group(0)!r}"
    for sentence in (CLAUSE if text.kind in ("literal", "cell") else SENTENCE).split(prose):
        count = len(re.findall(r"[A-Za-z][A-Za-z0-9'-]*", sentence))
        if count > MAX_WORDS:
            yield f"has a sentence of {count} words: {' '.join(sentence.split())[:60]}"
        count = len(RELATIVE.findall(sentence))
        if count > MAX_RELATIVES:
            yield f"has a sentence with {count} relative pronouns: {' '.join(sentence.split())[:60]}"


def texts(path: Path) -> Iterator[Text]:
    """Yield the texts of a file; literals of tests are left out, because most are data."""
    source = path.read_text()
    match path.suffix:
        case ".py":
            texts = texts_of_python(source)
        case ".md":
            texts = texts_of_markdown(source)
        case suffix:
            texts = texts_of_lines(source, LINE_COMMENT[suffix])
    return (text for text in texts if text.kind != "literal" or "tests" not in path.parts)


def main() -> int:
    roots = [Path(word) for word in sys.argv[1:] if not word.startswith("-")]
    paths = sorted(p for root in roots for p in ([root] if root.is_file() else root.rglob("*.*")))
    paths = [p for p in paths if p.suffix in (".py", ".md", *LINE_COMMENT) and "_pb2" not in p.name and p.is_file()]
    total, kinds = 0, collections.Counter[str]()
    for path in paths:
        for text in texts(path):
            kinds[text.kind] += 1
            for message in findings(text):
                total += 1
                print(f"{path}:{text.line}: {message}")
    counts = dict(sorted(kinds.items())) if "--counts" in sys.argv else {}
    print(json.dumps({"files": len(paths), **counts, "findings": total}))
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
