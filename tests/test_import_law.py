"""Imports point down: cli > server | texts > calibration > api > engine > tokenization > models | vllm > layer > plan >
methods | stores > indexes > kernels | checkpoint > native | gguf_file > types | errors | atomic_files | collector |
threads; and the laboratory is above everything: cli > docs > probe | studies > bench > eval > stored > numbers.

Folders side by side never import each other and nothing below imports the laboratory. Outside it, only ``models/hf``
imports transformers and only the plugin vllm. What a user waits for first, ``import kvsift`` and ``kvsift
--help``, loads neither transformers nor torch.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import kvsift_lab
import pytest

import kvsift

SOURCE = Path(kvsift.__file__).parent
LABORATORY = Path(kvsift_lab.__file__).parent

# Lower numbers may not import higher ones; folders with one number stand side by side and import neither way.
LAYERS = {
    "types": 0,
    "errors": 0,
    "atomic_files": 0,
    "gguf_file": 1,
    "checkpoint": 2,
    "collector": 0,
    "threads": 0,
    "native": 1,
    "kernels": 2,
    "indexes": 3,
    "methods": 4,
    "stores": 4,
    "plan": 5,
    "layer": 6,
    "models": 7,
    "vllm": 7,
    "tokenization": 8,
    "engine": 9,
    "api": 10,
    "calibration": 11,
    "texts": 12,
    "server": 12,
    "cli": 13,
    "__init__": 14,  # re-exports; of it others may read __version__ alone
    "__main__": 14,
    # the laboratory
    "lab.numbers": 15,
    "lab.stored": 16,
    "lab.eval": 17,
    "lab.bench": 18,
    "lab.studies": 19,
    "lab.probe": 19,
    "lab.docs": 20,
    "lab.cli": 21,
    "lab.__init__": 22,
}


def _modules() -> list[Path]:
    return sorted([*SOURCE.rglob("*.py"), *LABORATORY.rglob("*.py")])


def _package(path: Path) -> Path:
    return LABORATORY if path.is_relative_to(LABORATORY) else SOURCE


def _name(path: Path) -> str:
    return str(path.relative_to(_package(path).parent))


def _folder(path: Path) -> str:
    return _layer([_package(path).name, path.relative_to(_package(path)).parts[0].removesuffix(".py")])


def _layer(names: list[str]) -> str:
    """The key in LAYERS of a dotted name; that of its package for a name which is no folder."""
    package = {"kvsift": "", "kvsift_lab": "lab."}[names[0]]
    folder = package + (names[1] if len(names) > 1 else "")
    return folder if folder in LAYERS else f"{package}__init__"


_parsed = cache(ast.parse)


def _imports(path: Path, in_functions: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, for type checkers too, and in functions."""
    package = path.relative_to(_package(path).parent).with_suffix("").parts[:-1]
    tree = _parsed(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = set() if in_functions else {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if node in inner:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, "id", ""),
            getattr(node.func, "attr", ""),
        ):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def violations(path: Path) -> list[str]:
    """What a module imports against the law."""
    found, here = [], _folder(path)
    for line, dotted in _imports(path):
        root, *rest = dotted.split(".")
        is_of_the_laboratory = here.startswith("lab.")
        is_adapter = path.parts[-3:-1] == ("models", "hf")
        if root == "transformers" and not (is_adapter or is_of_the_laboratory):
            found.append(f"line {line}: {dotted}, which only models/hf/ may import")
        if root == "vllm" and here != "vllm" and not is_of_the_laboratory:
            found.append(f"line {line}: {dotted}, which only kvsift.vllm may import")
        if root not in ("kvsift", "kvsift_lab") or here in ("__init__", "__main__") or rest == ["__version__"]:
            continue
        there = _layer([root, *rest])
        if there != here and LAYERS[there] >= LAYERS[here]:
            found.append(f"line {line}: {dotted}, which does not lie below {here}")
    return found


def test_imports_point_down() -> None:
    for path in _modules():
        assert _folder(path) in LAYERS, f"{_name(path)} has no place in the import law: give its folder one in LAYERS"
        assert violations(path) == [], _name(path)


def _module_of(dotted: str) -> Path | None:
    """The file of a dotted name inside kvsift: its own, or that of the module which defines it; None outside."""
    root = {"kvsift": SOURCE, "kvsift_lab": LABORATORY}.get(dotted.partition(".")[0])
    if root is None:
        return None
    path = root.parent.joinpath(*dotted.split("."))
    if any(path.parent.glob(f"{path.name}.*.so")):  # compiled: imports nothing
        return None
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None) or (
        _module_of(dotted.rpartition(".")[0])
    )


def import_cycle() -> list[str]:
    """Names of modules that import each other in a circle, for type checkers too; empty if there are none.

    Imports in functions count in the laboratory alone: a light module of kvsift may import what it runs when it runs
    it, and there, a recipe names what measures it by a string.
    """
    front, graph = SOURCE / "__init__.py", {}
    for path in _modules():
        in_functions = _package(path) == LABORATORY
        modules = {_module_of(dotted) for _, dotted in _imports(path, in_functions)}
        graph[path] = modules - {None, path, front}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [_name(path) for path in error.args[1]]
    return []


def test_imports_form_no_cycle() -> None:
    assert import_cycle() == []


def test_a_cycle_for_type_checkers_alone_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path / "kvsift")
    folder = tmp_path / "kvsift" / "engine"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("from kvsift.engine.b import B\n")
    (folder / "b.py").write_text("from kvsift.engine import c\n")
    (folder / "c.py").write_text("from types import ModuleType\n")
    assert import_cycle() == []
    (folder / "c.py").write_text("if TYPE_CHECKING:\n    from kvsift.engine.a import A\n")
    assert sorted(set(import_cycle())) == [f"kvsift/engine/{name}.py" for name in "abc"]


@pytest.mark.parametrize("package", ["kvsift", "kvsift_lab"])
def test_a_cycle_through_a_function_is_found_in_the_laboratory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path / "kvsift")
    monkeypatch.setattr(sys.modules[__name__], "LABORATORY", tmp_path / "kvsift_lab")
    folder = tmp_path / package / "bench"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text(f"def f():\n    from {package}.bench.b import B\n")
    (folder / "b.py").write_text(f"from {package}.bench.a import f\n")
    assert bool(import_cycle()) is (package == "kvsift_lab")


@pytest.mark.parametrize(
    ("folder", "line", "lawful"),
    [
        ("plan/x.py", "from kvsift.methods.base import Method", True),
        ("plan/x.py", "from kvsift.plan.plan import Plan", True),
        ("methods/x.py", "from kvsift.stores.paged import PagedStore", False),  # side by side
        ("stores/x.py", "def f():\n    import kvsift.methods", False),  # in a function
        ("kernels/x.py", "if TYPE_CHECKING:\n    from kvsift.plan import budget", False),  # for type checkers
        ("methods/x.py", "from kvsift.indexes.base import Index", True),
        ("indexes/x.py", "from kvsift.methods.base import Method", False),
        ("indexes/x.py", "from kvsift import native", True),
        ("kernels/x.py", "from kvsift.native import attend_dense", True),
        ("native/x.py", "from kvsift.kernels import merge", False),
        ("kernels/x.py", "from ..engine import llm", False),  # relative
        ("methods/x.py", "import_module('kvsift.plan.plan')", False),  # by name
        ("errors.py", "from kvsift import types", False),
        ("engine/x.py", "from kvsift import sparse", False),  # through the public API
        ("server/x.py", "from kvsift import __version__", True),
        ("cli/x.py", "from kvsift_lab.eval.tasks import TASKS", False),
        ("texts/x.py", "def f():\n    import kvsift_lab", False),
        ("engine/x.py", "import transformers", False),
        ("models/hf/x.py", "from transformers import Cache", True),
        ("models/x.py", "from transformers.cache_utils import Cache", False),
        ("vllm/x.py", "from vllm.config import VllmConfig", True),
        ("vllm/x.py", "from kvsift.models.captured_step import Step", False),  # side by side
        ("tokenization/x.py", "from kvsift.models.captured_step import Step", True),
        ("engine/x.py", "from kvsift.api.llm import LLM", False),
        ("cli/x.py", "def f():\n    import vllm", False),
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
        "import kvsift; kvsift.errors.InputError",
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
