"""The layout rules of CONTRIBUTING.md; `pytest -s` shows the counts."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("broker", "providers", "trainer")
MAX_FILES = 16
MAX_LINES = 400
MAX_FUNCTION_LINES = 40
MAX_CONTROLLER_LINES = 200
MIN_CODE_LINES = 15
MAX_TEST_NAME = 70
VAGUE = frozenset({"one", "found", "made", "told", "said", "seen", "kept"})
RETIRED = frozenset(
    {
        *("alone", "beside", "born", "care", "door", "doors", "each", "else", "found", "guests", "hands", "haste"),
        *(
            "hollow",
            "house",
            "judge",
            "keeper",
            "kept",
            "likeness",
            "lives",
            "look",
            "looker",
            "meeting",
            "pace",
            "pair",
        ),
        *("patience", "play", "player", "rhythm", "room", "seat", "sheet", "shelf", "sieve", "stood", "story", "tempo"),
        *("through", "told", "whose"),
    }
)
"""Words that no folder or module is named by any more."""


def _sources(*roots: str) -> list[Path]:
    paths = (path for root in roots for path in (ROOT / root).rglob("*.py"))
    return sorted(path for path in paths if "_pb2" not in path.name)


SOURCES = _sources(*PACKAGES)


@cache
def _trees() -> dict[Path, ast.Module]:
    """Return the parsed sources. They are parsed by the one process that needs them, not by all that collect tests."""
    return {path: ast.parse(path.read_text()) for path in SOURCES}


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _code_lines(path: Path, tree: ast.Module) -> int:
    """Return the number of lines that are neither blank, comment nor docstring."""
    text_lines = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for n, line in lines if n not in text_lines)


def _cycles(graph: grimp.ImportGraph) -> Iterator[list[str]]:
    """Yield each strongly connected set of two or more modules (Tarjan 1972), smallest names first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in graph.find_modules_directly_imported_by(module):
            if imported not in index:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in stack:
                low[module] = min(low[module], index[imported])
        if low[module] == index[module]:
            members = [stack.pop()]
            while members[-1] != module:
                members.append(stack.pop())
            if len(members) > 1:
                found.append(sorted(members))

    for module in sorted(graph.modules):
        if module not in index:
            visit(module)
    yield from found


def test_no_import_cycles() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    print(f"{len(graph.modules)} modules")
    assert list(_cycles(graph)) == []


def test_folders_are_small() -> None:
    counts = Counter(path.parent for path in SOURCES)
    print(f"{len(counts)} folders, at most {max(counts.values())} files")
    assert {_shown(folder): count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(_shown(path))
    print(f"{len(places)} classes")
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_files_are_short() -> None:
    lengths = {_shown(path): len(path.read_text().splitlines()) for path in SOURCES}
    print(f"{len(lengths)} files, at most {max(lengths.values())} lines")
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_functions_are_short() -> None:
    lengths = {
        f"{_shown(path)}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, tree in _trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    print(f"{len(lengths)} functions, at most {max(lengths.values())} lines")
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_controllers_are_short_and_state_their_decisions() -> None:
    """A controller gathers facts, calls pure rules and applies the answer; its docstring lists the three."""
    controllers = {path: tree for path, tree in _trees().items() if (ROOT / "broker/controllers") in path.parents}
    lengths = {_shown(path): len(path.read_text().splitlines()) for path in controllers}
    assert {path: length for path, length in lengths.items() if length >= MAX_CONTROLLER_LINES} == {}
    with_step = {
        _shown(path): ast.get_docstring(tree) or ""
        for path, tree in controllers.items()
        if any(isinstance(node, ast.AsyncFunctionDef) and node.name == "step" for node in ast.walk(tree))
    }
    print(f"{len(with_step)} controllers, at most {max(lengths.values())} lines")
    assert len(with_step) > 10
    lacking = {
        path: word for path, text in with_step.items() for word in ("Steps", "Facts:", "Decisions:") if word not in text
    }
    assert lacking == {}


def test_variables_of_long_functions_have_telling_names() -> None:
    """A word such as `found` must be decoded in a scope of more than five lines: see CONTRIBUTING.md."""
    vague = [
        f"{_shown(path)}:{name.lineno} {name.id}"
        for path, tree in _trees().items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.end_lineno - function.lineno > 5
        for name in ast.walk(function)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name.id in VAGUE
    ]
    assert vague == []


def test_no_exception_object_is_raised_twice() -> None:
    """Each raise of a module's exception object adds its frames to the object, so that memory grows forever."""
    raised = [
        f"{_shown(path)}:{node.lineno}"
        for path, tree in _trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id.isupper()
    ]
    assert raised == []


def test_modules_are_no_fragments() -> None:
    exempt = ("__init__.py", "__main__.py")
    lines = {_shown(path): _code_lines(path, tree) for path, tree in _trees().items() if path.name not in exempt}
    print(f"{len(lines)} modules, at least {min(lines.values())} lines of code")
    assert {path: count for path, count in lines.items() if count < MIN_CODE_LINES} == {}


def test_no_retired_word_names_a_module() -> None:
    parts = {
        _shown(path): set(_shown(path).removesuffix(".py").replace("_", "/").split("/"))
        for path in [*SOURCES, *(path.parent for path in SOURCES)]
    }
    assert {path: words & RETIRED for path, words in parts.items() if words & RETIRED} == {}


@pytest.mark.parametrize("root", sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir()))
def test_test_names_are_short(root: str) -> None:
    long = [
        f"{_shown(path)}:{node.name}"
        for path in _sources(f"tests/{root}")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME
    ]
    assert long == []
