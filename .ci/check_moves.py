"""Check that a commit which moves modules changes imports only: `python .ci/check_moves.py OLD NEW`.

OLD and NEW are git revisions before and after the move; `.ci/moves.tsv` lists the moved files. Both versions of each
Python file are compared as syntax trees, without import statements, docstrings and module paths inside string literals.
Prints one line per file with any other difference, and one JSON object; exits with 1 if a file differs that is not in
ADAPTED.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

MOVES = Path(__file__).with_name("moves.tsv")
ADAPTED = {
    "broker/__init__.py": "module paths of the public names",
    "broker/cli/docs_reference.py": "its own name in the pages that it writes",
    "broker/daemon/trainer_bundle.py": "depth of the checkout's root",
    "broker/model_catalog/catalog.py": "name of the data file",
    "broker/model_catalog/trace_tables.py": "name of the data file",
    "broker/store/embedded/child.py": "name of the script",
    "broker/store/postgres/pool.py": "folder of the SQL files",
    "providers/local/process_backend.py": "command line of the hypervisor as a constant",
    "providers/skypilot/server.py": "depth of the package's root",
    "providers/skypilot/shared.py": "files that make up the plugin",
    "tests/crash/nursery.py": "a plain import of a moved module",
    "tests/clouds/test_sky_remote.py": "a line that became too long",
    "tests/mutation.py": "groups of modules",
    "tests/sim/mutants.py": "names of patched functions",
    "tests/unit/broker/daemon/test_trainer_bundle.py": "depth of the checkout's root",
    "tests/unit/broker/notify/test_documented.py": "depth of the checkout's root",
    "tests/unit/broker/preflight/test_dataset.py": "depth of the checkout's root",
    "tests/unit/broker/preflight/test_examples.py": "depth of the checkout's root",
    "tests/unit/broker/runtime/test_provider_gate_run.py": "depth of the checkout's root",
    "tests/unit/providers/aws/test_iam.py": "depth of the checkout's root",
    "tests/unit/providers/skypilot/test_server_locks.py": "files that make up the plugin",
}
MODULE = re.compile(r"\b(?:broker|providers|trainer|tests)(?:[./]\w+)+(?:\.py)?")


class _Stripped(ast.NodeTransformer):
    """A syntax tree without imports and docstrings, and with module paths replaced by a placeholder."""

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        return None

    visit_ImportFrom = visit_Import  # type: ignore[assignment]  # noqa: N815

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            return ast.Constant(value=MODULE.sub("MODULE", node.value))
        return node


def at(revision: str, path: str) -> str | None:
    """Return the file's text at a revision, or None if it does not exist there."""
    result = subprocess.run(["git", "show", f"{revision}:{path}"], capture_output=True, text=True)
    return result.stdout if result.returncode == 0 else None


def stripped(text: str) -> str:
    return ast.dump(_Stripped().visit(ast.parse(text)))


def main() -> int:
    old, new = sys.argv[1:3]
    moves = dict(line.split("\t") for line in MOVES.read_text().splitlines()[1:])
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", old], capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.splitlines() if path.endswith(".py")]
    compared = differing = unexpected = 0
    for path in paths:
        target = moves.get(path, path)
        before, after = at(old, path), at(new, target)
        if after is None or before is None:
            if before:
                print(f"{path}: {target} does not exist at {new}")
                unexpected += 1
            continue
        compared += 1
        if stripped(before) != stripped(after):
            differing += 1
            reason = ADAPTED.get(target)
            unexpected += reason is None
            print(f"{target}: {reason or 'differs in more than imports'}")
    print(json.dumps({"compared": compared, "adapted": differing, "unexpected": unexpected}))
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
