"""Imports point down: cli > eval | benchmarks > engine > models > runtime > methods | placement > indexes > kernels >
native > types.

Folders side by side never import each other, only the transformers adapter imports transformers, and what a user waits
for first, ``import kvsift`` and ``kvsift --help``, loads neither transformers nor torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvsift

SOURCE = Path(kvsift.__file__).parent

# Lower numbers may not import higher ones; folders with one number stand side by side and import neither way.
LAYERS = {
    "types": 0,
    "errors": 0,
    "threads": 0,
    "native": 1,
    "kernels": 2,
    "indexes": 3,
    "methods": 4,
    "placement": 4,
    "runtime": 5,
    "models": 6,
    "engine": 7,
    "eval": 8,
    "benchmarks": 8,
    "cli": 9,
    "__init__": 10,  # re-exports; of it others may read __version__ alone
    "__main__": 10,
}


def _modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(SOURCE.parent))


def _folder(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, in functions and for type checkers too."""
    package = path.relative_to(SOURCE.parent).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def violations(path: Path) -> list[str]:
    """What a module imports against the law."""
    found, here = [], _folder(path)
    for line, dotted in _imports(path):
        root, *rest = dotted.split(".")
        if root == "transformers" and not (here == "models" and path.name.startswith("transformers")):
            found.append(f"line {line}: {dotted}, which only models/transformers*.py may import")
        if root != "kvsift" or here in ("__init__", "__main__") or rest == ["__version__"]:
            continue
        there = rest[0] if rest and rest[0] in LAYERS else "__init__"
        if there != here and LAYERS[there] >= LAYERS[here]:
            found.append(f"line {line}: {dotted}, which does not lie below {here}")
    return found


def test_imports_point_down() -> None:
    for path in _modules():
        assert _folder(path) in LAYERS, f"{_name(path)} has no place in the import law: give its folder one in LAYERS"
        assert violations(path) == [], _name(path)


@pytest.mark.parametrize(
    ("folder", "line", "lawful"),
    [
        ("runtime/x.py", "from kvsift.methods.base import Method", True),
        ("runtime/x.py", "from kvsift.runtime.plan import Plan", True),
        ("methods/x.py", "from kvsift.placement.device import DeviceStore", False),  # side by side
        ("placement/x.py", "def f():\n    import kvsift.methods", False),  # in a function
        ("kernels/x.py", "if TYPE_CHECKING:\n    from kvsift.runtime import plan", False),  # for type checkers
        ("methods/x.py", "from kvsift.indexes.base import Index", True),
        ("indexes/x.py", "from kvsift.methods.base import Method", False),
        ("indexes/x.py", "from kvsift import native", True),
        ("kernels/x.py", "from kvsift.native import attend_dense", True),
        ("native/x.py", "from kvsift.kernels import merge", False),
        ("kernels/x.py", "from ..engine import llm", False),  # relative
        ("methods/x.py", "import_module('kvsift.runtime.plan')", False),  # by name
        ("errors.py", "from kvsift import types", False),
        ("engine/x.py", "from kvsift import sparse", False),  # through the front door
        ("eval/x.py", "from kvsift import __version__", True),
        ("engine/x.py", "import transformers", False),
        ("models/transformers_x.py", "from transformers import Cache", True),
        ("models/x.py", "from transformers.cache_utils import Cache", False),
    ],
)
def test_the_law_is_read_from_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, line: str, lawful: bool
) -> None:
    path = tmp_path / "kvsift" / folder
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path / "kvsift")
    assert (violations(path) == []) is lawful


@pytest.mark.parametrize(
    "statement",
    [
        "import kvsift",
        "import kvsift.methods; kvsift.methods.catalogue()",
        "import runpy; sys.argv = ['kvsift', '--help']; runpy.run_module('kvsift', run_name='__main__')",
    ],
    ids=["import", "catalogue", "help"],
)
def test_what_a_user_waits_for_loads_neither_torch_nor_transformers(statement: str) -> None:
    code = (
        f"import sys\ntry:\n    {statement}\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_names_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvsift", "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
