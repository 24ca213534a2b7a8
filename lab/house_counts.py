"""Sizes of the tree that it stands in: package, laboratory, scripts, tests; writers of tables, and circles of imports.

    python lab/house_counts.py                     the tree
    python lab/house_counts.py --against 76cdb8c   a revision and the tree, side by side
    python lab/house_counts.py --json              one JSON document

Tracked files only. The laboratory is lab/, and what was one before it had that folder: eval/, benchmarks/ and their
commands, scripts/*.py and recipes/. A writer of tables is a function that spells the line below a heading, "|---". A
circle is a set of modules that import each other, in functions too.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
CODE = (".py", ".toml", ".cu", ".cuh", ".cpp", ".hpp", ".h")
LABORATORY = re.compile(
    r"lab/(?:kvsift_lab/)?(?P<folder>\w+/)?|src/kvsift/(?:(?P<old>eval|benchmarks)/|cli/(?:bench|dump|eval|report|explain)\.py)"
    r"|(?P<loose>scripts|recipes)/"
)
FOLDER = re.compile(r"src/kvsift/(\w+)/|(csrc|tests|examples)/")

Counts = dict[str, dict[str, float]]  # name of a row -> column -> number


def tree(revision: str) -> dict[str, str]:
    """Return the texts of a revision by path; "" is the working tree."""
    if not revision:
        names = [name for name in _git("ls-files", "-z").decode().split("\0") if name.endswith(CODE)]
        return {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision, ":(exclude)src/kvsift/embedded"))) as archive:
        members = [member for member in archive if member.isfile() and member.name.endswith(CODE)]
        return {member.name: archive.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def groups_of(path: str) -> list[str]:
    """Return the rows that a file counts in."""
    if match := LABORATORY.match(path):
        folder = match["folder"] or match["old"] or match["loose"] or "other"
        return ["laboratory", f"laboratory {folder.strip('/')}"]
    match = FOLDER.match(path)
    folder = (match[1] or match[2]) if match else "(top)" if path.startswith("src/kvsift/") else "(build)"
    return ["package", folder] if path.startswith("src/kvsift/") else [folder]


def counts(files: Mapping[str, str]) -> Counts:
    """Return files, lines and functions of all groups, the largest first."""
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path, text in files.items():
        functions = list(functions_of(text)) if path.endswith(".py") else []
        for group in groups_of(path):
            row = found[group]
            row["lines"].append(text.count("\n"))
            row["functions"] += [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
            row["writers"] += [1 for node in functions if any(map(_is_line_of_a_table, ast.walk(node)))]
    rows: Counts = {}
    for group, row in sorted(found.items(), key=lambda item: -sum(item[1]["lines"])):
        lengths = row["functions"] or [0]
        sizes = {"functions": len(row["functions"]), "median": median(lengths), "longest": max(lengths)}
        rows[group] = {"files": len(row["lines"]), "lines": sum(row["lines"]), **sizes, "writers": len(row["writers"])}
    return rows | {"circles of imports": {"files": len(circles(files))}}


def functions_of(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _is_line_of_a_table(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and "|---" in node.value


def circles(files: Mapping[str, str]) -> list[set[str]]:
    """Return sets of modules of the package and the laboratory that reach each other by imports."""
    roots = re.compile(r"(?:src|lab)/(kvsift\w*/.*?)(?:/__init__)?\.py")
    modules = {match[1].replace("/", "."): text for path, text in files.items() if (match := roots.fullmatch(path))}
    reached = {name: _imports(text) & modules.keys() - {name} for name, text in modules.items()}
    for middle in modules:  # the transitive closure
        for name in [name for name in modules if middle in reached[name]]:
            reached[name] = reached[name] | reached[middle]
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in modules}
    return [set(each) for each in found if len(each) > 1]


def _imports(text: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def text_of(trees: list[Counts]) -> str:
    """Return a table of all rows; "before -> after" where two trees differ."""
    columns = ["files", "lines", "functions", "median", "longest", "writers"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(name for rows in reversed(trees) for name in rows):
        cells = [[f"{rows.get(name, {}).get(column, 0):,.0f}" for rows in trees] for column in columns]
        lines.append(f"| {name} | {' | '.join(' -> '.join(dict.fromkeys(cell)) for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--against", metavar="REV", help="a revision to print beside the tree")
    given = parser.parse_args()
    trees = {revision: counts(tree(revision)) for revision in ([given.against] if given.against else []) + [""]}
    print(json.dumps(trees, indent=1) if given.json else text_of(list(trees.values())))


if __name__ == "__main__":
    main()
