"""Sizes of the tree that it stands in: folders, functions, store types, class names, words of the docs.

    python lab/house_counts.py                     the tree
    python lab/house_counts.py --against dedc8a5   a revision and the tree, side by side
    python lab/house_counts.py --json              one JSON document

Tracked files only. A function's length is that of its definition, decorators aside; self counts as a parameter. Words
are those of ``wc -w``; rendered ones stand between the markers of ``kvsift_lab.docs.render``.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = "src/kvsift/"
CODE = (".py", ".cu", ".cuh", ".cpp", ".hpp", ".h")
CORE = {
    "native",
    "kernels",
    "indexes",
    "methods",
    "stores",
    "plan",
    "layer",
    "placement",
    "runtime",
    "models",
    "batching",
    "engine",
}
CORE_FILES = {"types.py", "errors.py", "locks.py", "threads.py"}
MANY_PARAMETERS, LISTED = 8, 10
RENDERED = re.compile(r"<!-- ([\w-]+):begin -->(.*?)<!-- \1:end -->", re.DOTALL)

Tree = Mapping[str, str]  # path -> text


class Function(NamedTuple):
    """A function of the package."""

    path: str
    name: str
    lines: int
    parameters: int


def tree(revision: str | None) -> dict[str, str]:
    """Texts of the working tree, or of a revision."""
    if revision is None:
        names = _git("ls-files", "-z").decode().split("\0")
        paths = {name: ROOT / name for name in names if name and _is_counted(name)}
        return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision, ":(exclude)src/kvsift/embedded"))) as archive:
        members = [member for member in archive if member.isfile() and _is_counted(member.name)]
        return {member.name: archive.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def _is_counted(name: str) -> bool:
    is_code = name.startswith((PACKAGE, "csrc/", "tests/")) and name.endswith(CODE)
    return is_code or name == "README.md" or (name.startswith("docs/") and name.endswith(".md"))


def counts(files: Tree) -> dict[str, Any]:
    """Every number of a tree."""
    package = {name.removeprefix(PACKAGE): text for name, text in files.items() if name.startswith(PACKAGE)}
    modules = {name: ast.parse(text) for name, text in package.items() if name.endswith(".py")}
    found = [function for name, module in modules.items() for function in functions(name, module)]
    lines = {name: text.count("\n") for name, text in files.items()}
    own = {name: text.count("\n") for name, text in package.items()}
    core = sum(count for name, count in own.items() if name.split("/")[0] in CORE | CORE_FILES)
    return {
        "folders": folders(lines, found),
        "package": {**sizes(found), "files": len(package), "lines": sum(own.values()), "core_lines": core},
        "largest_files": dict(Counter({name: own[name] for name in modules}).most_common(LISTED)),
        "longest_functions": longest(found),
        "functions_with_8_or_more_parameters": sum(each.parameters >= MANY_PARAMETERS for each in found),
        "isinstance_on_stores": len(isinstance_on_stores(modules)),
        "reaches_through_a_store": len(reaches_through_a_store(modules)),
        "reaches_of_a_page_table": len(reaches_through_a_store(modules, "table")),
        "class_names_twice": {name: paths for name, paths in class_names(modules).items() if len(paths) > 1},
        "words": words(files),
    }


def functions(path: str, module: ast.Module) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
            yield Function(path, node.name, (node.end_lineno or node.lineno) - node.lineno + 1, parameters)


def sizes(found: list[Function]) -> dict[str, float]:
    """Number, median, 95th percentile and maximum of lengths; of parameters the 95th percentile and maximum."""
    lengths, parameters = (sorted(getattr(each, key) for each in found) or [0] for key in ("lines", "parameters"))
    late = int(0.95 * (len(lengths) - 1))
    numbers = {"functions": len(found), "median": median(lengths), "p95": lengths[late], "max": lengths[-1]}
    return {**numbers, "parameters_p95": parameters[late], "parameters_max": parameters[-1]}


def folders(lines: Mapping[str, int], found: list[Function]) -> dict[str, dict[str, float]]:
    """Files, lines and functions per folder of the package, and files and lines of csrc and tests."""
    per_folder: dict[str, list[int]] = defaultdict(list)
    for name, count in lines.items():
        if name.endswith(CODE):
            per_folder[_folder(name)].append(count)
    own: dict[str, list[Function]] = defaultdict(list)
    for function in found:
        own[_folder(PACKAGE + function.path)].append(function)
    rows = {name: {"files": len(per), "lines": sum(per)} for name, per in per_folder.items()}
    ordered = sorted(rows, key=lambda name: -rows[name]["lines"])
    return {name: {**rows[name], **(sizes(own[name]) if name in own else {})} for name in ordered}


def _folder(name: str) -> str:
    first, *rest = name.removeprefix(PACKAGE).split("/")
    return first if rest or not name.startswith(PACKAGE) else "(top)"


def longest(found: list[Function]) -> dict[str, int]:
    """The longest functions by path and name."""
    ordered = sorted(found, key=lambda each: -each.lines)[:LISTED]
    return {f"{each.path}:{each.name}": each.lines for each in ordered}


def isinstance_on_stores(modules: Mapping[str, ast.Module]) -> list[str]:
    """Type checks against a class of a store, where a method of the store would do."""
    return [
        f"{name}:{node.lineno}"
        for name, module in modules.items()
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        if re.search(r"\b\w*Store\b", ast.unparse(node.args[1]))
    ]


def reaches_through_a_store(modules: Mapping[str, ast.Module], name: str | None = None) -> list[str]:
    """Lines of the outer folders that use an attribute, or that of a ``name``, of an attribute ``store``."""
    return sorted(
        {
            f"{path}:{node.lineno}"
            for path, module in modules.items()
            if path.split("/")[0] in ("engine", "models", "benchmarks", "eval")
            for node in ast.walk(module)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "store"
            if name in (None, node.attr)
        }
    )


def class_names(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Class -> the modules that define one of that name."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, module in sorted(modules.items()):
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    return dict(sorted(found.items()))


def words(files: Tree) -> dict[str, int]:
    """Words of README and docs, outside rendered blocks and inside, and lines of the README."""
    pages = {name: text for name, text in files.items() if name.endswith(".md")}
    inside = sum(len(block[1].split()) for text in pages.values() for block in RENDERED.findall(text))
    prose = sum(len(RENDERED.sub("", text).split()) for text in pages.values())
    return {"prose": prose, "rendered": inside, "readme_lines": pages["README.md"].count("\n")}


def text_of(trees: list[dict[str, Any]]) -> str:
    """A table of folders, then a line per number; "before -> after" where two trees differ."""
    names = dict.fromkeys(name for numbers in trees for name in numbers["folders"])
    columns = ["files", "lines", "functions", "median", "p95", "max", "parameters_p95", "parameters_max"]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        cells = [_cell([numbers["folders"].get(name, {}).get(column) for numbers in trees]) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    for key, value in trees[-1].items():
        values = [numbers[key] for numbers in trees]
        if key in ("largest_files", "longest_functions", "class_names_twice"):
            lines.append(f"{key}:")
            lines += [f"  {', '.join(f'{name} {_short(each)}' for name, each in own.items()) or '-'}" for own in values]
        elif isinstance(value, Mapping) and key != "folders":
            lines += [f"{key} {name}: {_cell([own[name] for own in values])}" for name in value]
        elif key != "folders":
            lines.append(f"{key}: {_cell(values)}")
    return "\n".join(lines)


def _cell(values: list[float | None]) -> str:
    texts = ["-" if value is None else f"{value:,.0f}" for value in values]
    return " -> ".join(dict.fromkeys(texts))


def _short(value: int | list[str]) -> str:
    return f"x{len(value)}" if isinstance(value, list) else f"{value:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--against", metavar="REV", help="a revision to print beside the tree")
    given = parser.parse_args()
    revisions = [given.against] if given.against else []
    trees = [counts(tree(revision)) for revision in (*revisions, None)]
    print(json.dumps(dict(zip((*revisions, "tree"), trees)), indent=1) if given.json else text_of(trees))


if __name__ == "__main__":
    main()
