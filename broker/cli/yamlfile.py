"""YAML with places: a document as plain data, and the line of every key, so that an error can name it."""

import re
from dataclasses import dataclass
from typing import Any

import yaml

from broker.cli.exits import BadInput

Path = tuple[str, ...]
MAX_NODES = 20_000


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: `on` and `no` are words, `1e-4` is a number, a date stays as it is written."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own attribute)


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
    """`lines` maps a path (keys and indices as strings) to its 1-based line; () is the document."""

    name: str
    data: Any
    lines: dict[Path, int]

    def place(self, path: Path) -> str:
        """`file:line` of the deepest part of `path` that is written in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.name}:{self.lines.get(path, 1)}"


def parse(text: str, name: str) -> YamlDocument:
    """Raises BadInput with file and line for what is not YAML, holds a key twice, or is no mapping."""
    if name.endswith(".json"):
        text = re.sub(r"^\t+", lambda tabs: " " * len(tabs[0]), text, flags=re.MULTILINE)  # JSON may indent by tabs
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise BadInput(f"{name}:1: must be a mapping of keys to values; `gpubroker init` writes a spec")
        lines: dict[Path, int] = {}
        _walk(node, (), lines, name)
        return YamlDocument(name=name, data=loader.construct_document(node), lines=lines)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        raise BadInput(f"{name}:{mark.line + 1 if mark else 1}: not YAML: {e.problem or e.context}") from None
    except RecursionError:
        raise BadInput(f"{name}:1: nested too deep, or an alias that contains itself") from None
    except yaml.YAMLError as e:
        raise BadInput(f"{name}:1: not YAML: {str(e).splitlines()[0]}") from None
    finally:
        loader.dispose()


def parse_value(text: str) -> Any:
    """One value by the same rules, as in `--set key=value`; what is not YAML stays a string."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], name: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if len(lines) > MAX_NODES:
        raise BadInput(f"{name}: more than {MAX_NODES} values (aliases counted in full); a spec is a short file")
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            word, line = str(key.value), key.start_mark.line + 1
            if word in seen:
                raise BadInput(f"{name}:{line}: {'.'.join((*path, word))}: the key is given twice; keep one")
            seen.add(word)
            lines[(*path, word)] = line
            _walk(value, (*path, word), lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            _walk(value, (*path, str(number)), lines, name)
