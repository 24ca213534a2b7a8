"""Sizes of the tree that it stands in: package, laboratory, scripts, tests; writers of tables, and circles of imports.

    python lab/house_counts.py                     the tree
    python lab/house_counts.py --against 76cdb8c   a revision and the tree, side by side
    python lab/house_counts.py --json              one JSON document
    python lab/house_counts.py --step              the Python calls of one decode step on a CPU, of the embedded model
    python lab/house_counts.py --step DIRECTORY    of another one; --chain adds the deepest chain of each plan

Tracked files only. The laboratory is lab/, and what was one before it had that folder: eval/, benchmarks/ and their
commands, scripts/*.py and recipes/. A writer of tables is a function that spells the line below a heading, "|---". A
circle is a set of modules that import each other, in functions too.

A decode step is followed from ``STEP`` on. Frames are the functions of the package on the stack when the compiled core
is called, where they are most; files are those of the functions that are called, and calls of what a layer does
(``LAYER_FOLDERS``) are divided by the layers. Comprehensions count for the function that they stand in.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
STEP = "kvsift.engine.loop", "Loop", "step"  # module, class and method of a step of the engine
PLANS = "quest:budget=256:score_by=mean_std", "sketch:budget=256", "quest:budget=256", "dense"
LAYER_FOLDERS = "layer", "stores", "methods", "kernels", "native", "plan"
PROMPT_TOKENS, STEPS = 600, 16
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


@dataclass
class StepTrace:
    """Calls of functions of the package in one decode step.

    Attributes:
        files: paths below the package.
        calls: by folder of the package.
        chain: functions on the stack at the deepest call of the compiled core, but for the choice of a token.
    """

    files: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    chain: list[str] = field(default_factory=list)

    def row(self, num_layers: int) -> dict[str, float]:
        in_layers = sum(self.calls[folder] for folder in LAYER_FOLDERS)
        sizes = {"frames": len(self.chain), "files": len(self.files), "calls": self.calls.total()}
        return {**sizes, "calls per layer": round(in_layers / num_layers, 1)}


def trace_steps(llm: Any, plan: str) -> StepTrace:
    """Return the trace of a typical decode step of a ``kvsift.LLM`` on a CPU, which takes no probes: the one of
    ``STEPS`` with the median number of calls."""
    from kvsift.texts.prose import document

    prompt = document((), (), PROMPT_TOKENS, lambda text: len(llm.encode(text))) + "\n\n"  # what follows is long
    with traced_steps() as traces:
        answer = llm.generate(prompt, plan=plan, max_new_tokens=STEPS + 1)
    traces = traces[1 - len(answer.token_ids) :]  # the first token came with the end of the prompt
    return sorted(traces, key=lambda trace: trace.calls.total())[len(traces) // 2]


@contextmanager
def traced_steps() -> Iterator[list[StepTrace]]:
    """Trace every step of the engine, in whichever thread it runs."""
    import kvsift
    from kvsift.native import _core

    package, traces = str(Path(kvsift.__file__).parent) + "/", list[StepTrace]()
    module, owner, name = STEP
    loop = getattr(import_module(module), owner)
    step = getattr(loop, name)

    def traced(*arguments: Any, **named: Any) -> Any:
        traces.append(StepTrace())
        sys.setprofile(lambda frame, event, argument: _count(traces[-1], frame, event, package))
        try:
            return step(*arguments, **named)
        finally:
            sys.setprofile(None)

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            if traces:
                chain = _chain(sys._getframe(1), package)
                if "Loop._choose" not in chain:
                    traces[-1].chain = max(traces[-1].chain, chain, key=len)
            return function(*arguments)

        return noted

    functions = {key: noting(each) for key, each in vars(_core).items() if "nb_func" in type(each).__name__}
    with patch.object(loop, name, traced), patch.multiple(_core, **functions):
        yield traces


def _count(trace: StepTrace, frame: FrameType, event: str, package: str) -> None:
    if event == "call" and _is_function(frame, package):
        path = frame.f_code.co_filename.removeprefix(package)
        trace.files.add(path)
        trace.calls[path.rpartition("/")[0] or "(top)"] += 1


def _chain(frame: FrameType | None, package: str) -> list[str]:
    """Functions from the step to this frame."""
    names = list[str]()
    while frame is not None and frame.f_code.co_name != "traced":
        if _is_function(frame, package):
            names.insert(0, frame.f_code.co_qualname)
        frame = frame.f_back
    return names


def _is_function(frame: FrameType, package: str) -> bool:
    code = frame.f_code
    return code.co_filename.startswith(package) and (code.co_name == "<lambda>" or not code.co_name.startswith("<"))


def text_of_steps(rows: Mapping[str, Mapping[str, float]]) -> str:
    columns: Sequence[str] = list(next(iter(rows.values())))
    lines = [f"| one decode step | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {plan} | {' | '.join(f'{row[column]:,}' for column in columns)} |" for plan, row in rows.items()]
    return "\n".join(lines)


def print_steps(model: str | None, as_json: bool, with_chains: bool) -> None:
    """Print the traces of one decode step under each plan."""
    import kvsift

    llm = kvsift.LLM(model, device="cpu", probe_every=0, dense_below=0)
    traces = {plan: trace_steps(llm, plan) for plan in PLANS}
    rows = {plan: trace.row(llm.directory.config.num_hidden_layers) for plan, trace in traces.items()}
    if as_json:
        print(json.dumps({plan: {**row, "chain": traces[plan].chain} for plan, row in rows.items()}, indent=1))
        return
    print(text_of_steps(rows))
    for plan, trace in traces.items() if with_chains else ():
        print(f"{plan}: {' > '.join(trace.chain)}")


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
    parser.add_argument("--step", nargs="?", const="", metavar="MODEL", help="trace one decode step of a model")
    parser.add_argument("--chain", action="store_true", help="print the deepest chain of each traced step")
    given = parser.parse_args()
    if given.step is not None:
        print_steps(given.step or None, given.json, given.chain)
        return
    trees = {revision: counts(tree(revision)) for revision in ([given.against] if given.against else []) + [""]}
    print(json.dumps(trees, indent=1) if given.json else text_of(list(trees.values())))


if __name__ == "__main__":
    main()
