"""Reader of specs and configurations: YAML 1.2 as plain data, without duplicate keys, with the line of every key."""

import re
from dataclasses import dataclass
from typing import Any

import yaml

Path = tuple[str, ...]
MAX_NODES = 20_000


class BadYaml(ValueError):
    """The text cannot be used; `line` counts from 1."""

    def __init__(self, name: str, line: int, message: str) -> None:
        super().__init__(f"{name}:{line}: {message}")
        self.line, self.message = line, message


class _Loader(yaml.SafeLoader):
    """Loader with YAML 1.2's scalars: `on` and `no` are strings, `1e-4` is a number, a date stays a string."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own attribute)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node. PyYAML raises other errors for a value that its explicit tag does not allow."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            kind = node.tag.rpartition(":")[2]
            message = f"a value that is not of its type {kind}"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from None


def _integer(_: _Loader, node: yaml.ScalarNode) -> int:
    try:
        return int(node.value)
    except ValueError:
        raise yaml.constructor.ConstructorError(None, None, "a number of too many digits", node.start_mark) from None


def _add(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_add("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_add("int", r"^[-+]?[0-9]+$", "-+0123456789")
_add("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789")
_add("null", r"^(?:~|null|Null|NULL|)$", "~nN\0")
_Loader.yaml_implicit_resolvers.setdefault("", []).append(("tag:yaml.org,2002:null", re.compile(r"^$")))
_add("merge", r"^(?:<<)$", "<")
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", lambda _, node: float(node.value))


@dataclass(frozen=True, kw_only=True)
class YamlDocument:
    """Parsed YAML. `lines` maps a path (keys and indices as strings) to its 1-based line; () is the document.

    `texts` maps the path of a number, a boolean or a null to its text in the file.
    """

    name: str
    data: Any
    lines: dict[Path, int]
    texts: dict[Path, str]

    def place(self, path: Path) -> str:
        """Return `file:line` of the deepest part of `path` that the file contains."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.name}:{self.lines.get(path, 1)}"


def parse(text: str, name: str, *, may_be_empty: bool = False) -> YamlDocument:
    """Parse a document. With `may_be_empty` an empty text is a mapping without keys.

    Raises: BadYaml if the text is not YAML, holds a key twice, or is not a mapping.
    """
    if name.endswith(".json"):
        text = re.sub(r"^\t+", lambda tabs: " " * len(tabs[0]), text, flags=re.MULTILINE)  # JSON may indent by tabs
    try:
        loader = _Loader(text)
    except yaml.YAMLError as e:  # a character that YAML does not allow
        raise BadYaml(name, _line_of(e, text), f"not YAML: {str(e).splitlines()[0]}") from None
    try:
        node = loader.get_single_node()
        if node is None and may_be_empty:
            return YamlDocument(name=name, data={}, lines={}, texts={})
        if not isinstance(node, yaml.MappingNode):
            raise BadYaml(name, 1, "must be a mapping of keys to values, each as `key: value`")
        lines: dict[Path, int] = {}
        texts: dict[Path, str] = {}
        _walk(node, (), lines, texts, name)
        return YamlDocument(name=name, data=loader.construct_document(node), lines=lines, texts=texts)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        raise BadYaml(name, mark.line + 1 if mark else 1, f"not YAML: {e.problem or e.context}") from None
    except RecursionError:
        raise BadYaml(name, 1, "nested too deep, or an alias that contains itself") from None
    except yaml.YAMLError as e:
        raise BadYaml(name, 1, f"not YAML: {str(e).splitlines()[0]}") from None
    finally:
        loader.dispose()


def parse_value(text: str) -> Any:
    """Parse one value by the same rules, as in `--set key=value`; text that is not YAML stays a string."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError):
        return text


def _line_of(error: yaml.YAMLError, text: str) -> int:
    """Return the line of the character that the reader refused, from 1."""
    return text.count("\n", 0, getattr(error, "position", 0)) + 1


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], texts: dict[Path, str], name: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:str":
        texts[path] = node.value
    if len(lines) > MAX_NODES:
        line = node.start_mark.line + 1
        raise BadYaml(name, line, f"more than {MAX_NODES} values (aliases counted in full); make it a short file")
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            word, line = str(key.value), key.start_mark.line + 1
            if word in keys:
                raise BadYaml(name, line, f"{'.'.join((*path, word))}: the key is given twice; keep one")
            keys.add(word)
            lines[(*path, word)] = line
            _walk(value, (*path, word), lines, texts, name)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            _walk(value, (*path, str(number)), lines, texts, name)
