"""Docs match the code: rendered blocks are fresh, links resolve, plans parse, and Python runs."""

import ast
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from engine.tiny_directory import text_of, write_model
from models.tiny import tiny

from kvsift.kernels.page_summary import summarise
from kvsift.plan.syntax import parse_plan

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULT_PAGES = sorted((ROOT / "results").rglob("*.md"))
README_LINES = 120


def test_rendered_tables_and_examples_are_fresh():
    command = [sys.executable, "-m", "kvsift_lab.docs.render", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [*PAGES, *RESULT_PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files_and_headings(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text())
    files = {target: page.parent / target if target else page for target, _ in targets}
    assert [target for target, file in files.items() if not file.exists()] == []
    assert [f"{target}#{head}" for target, head in targets if head and head not in anchors(files[target])] == []


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_of_a_result_is_linked_from_the_docs():
    text = "".join(page.read_text() for page in PAGES)
    assert [page for page in RESULT_PAGES if str(page.relative_to(ROOT)) not in text] == []


def test_the_readme_fits_two_screens():
    assert (ROOT / "README.md").read_text().count("\n") <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_plans_in_docs_parse(page):
    begins = "prefill=|decode=|both=|sketch:|quoka:|critiprefill:|quest:|streaming_llm:"
    for plan in re.findall(rf"[`\"]((?:{begins})(?!\.)[a-z0-9_=:,.+]+)[`\"]", page.read_text()):
        parse_plan(plan)


def code_of(page: Path) -> str:
    """The shell blocks and the inline code of a page, a line each."""
    text = page.read_text()
    return "\n".join([*re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.M | re.S), *re.findall(r"`([^`\n]+)`", text)])


def test_commands_scripts_and_results_in_docs_exist():
    from kvsift.cli.main import added_commands, app

    code = "\n".join(code_of(page) for page in [*PAGES, *RESULT_PAGES])
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    made = re.findall(r"^make ([a-z-]+)", code, flags=re.MULTILINE)
    assert {"demo", "test"} <= set(made) <= set(targets)
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    names |= {*added_commands(), "dense"}  # the engine without a plan, in a benchmark
    assert set(re.findall(r"^kvsift ([a-z-]+)", code, flags=re.MULTILINE)) <= names
    files = re.findall(r"\b(?:scripts|lab/recipes|examples)/[\w-]+\.(?:py|toml)", code)
    assert [file for file in files if not (ROOT / file).is_file()] == []
    results = re.findall(r"^results/[\w./-]+$", code, flags=re.MULTILINE)
    assert [result for result in results if not (ROOT / result).exists()] == []


def test_source_files_in_docs_exist():
    folders = [ROOT, ROOT / "src" / "kvsift", ROOT / "lab" / "kvsift_lab"]
    code = "\n".join(code_of(page) for page in [*PAGES, *RESULT_PAGES])
    for file in re.findall(
        r"^(?:cli|eval|api|calibration|tokenization|engine|models|layer|plan|stores|methods|indexes|kernels)/\S+$",
        code,
        re.M,
    ):
        assert any((folder / file).exists() for folder in folders), file


def python_blocks(page: Path) -> str:
    """The Python of a page, one block after the other, on its own lines so that errors name them; fragments are marked
    py instead."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        inside = inside and line != "```"
        lines.append(line if inside else "")
        inside = inside or line == "```python"
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_docs_compiles_and_imports_what_there_is(page: Path) -> None:
    for node in ast.walk(ast.parse(python_blocks(page), str(page))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvsift"):
            module = import_module(node.module)
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []


def test_rows_of_page_summaries_are_laid_out_as_the_page_for_new_methods_says() -> None:
    keys = torch.randn(1, 1, 4, 8)
    mean, per_channel = keys.mean(2), {"correction": 0, "dim": 2}
    expected = {
        "minmax": [keys.amax(2), keys.amin(2)],
        "mean_std": [mean, keys.std(**per_channel)],
        "log_mass": [mean, keys.var(**per_channel)],
        "centroid_radius": [mean, (keys - mean.unsqueeze(2)).norm(dim=-1).amax(2, keepdim=True)],
    }
    for kind, halves in expected.items():
        torch.testing.assert_close(summarise(kind, keys), torch.cat(halves, -1), atol=1e-5, rtol=1e-5)
    eighth = summarise("minmax_fp8", keys).float()
    torch.testing.assert_close(8 * eighth, torch.cat(expected["minmax"], -1), atol=0.1, rtol=0.2)


@pytest.mark.parametrize(
    "name", ["README.md", "docs/functions.md", "docs/python.md", "docs/tasks.md", "docs/transformers.md"]
)
def test_python_in_docs_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model wherever a page names one, and what a reader has: a model, inputs, a text, a file."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    directory = write_model(tmp_path / "Qwen3-4B", eos_token_id=list(range(40)))  # ends early
    for other in ("Qwen/Qwen3-4B", "Llama-3.1-8B"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).symlink_to(directory)
    line = {"input": "Who?", "context": "A mill.", "answers": ["I"], "dataset": "qasper", "all_classes": None}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "qasper.jsonl").write_text(json.dumps(line) + "\n")
    ids = torch.tensor([list(range(100, 200)) * 12])
    turns = {"first_turn": {"input_ids": ids[:, :200]}, "both_turns": {"input_ids": ids[:, :400]}}
    model = tiny("Llama", vocab_size=259, num_hidden_layers=3, max_position_embeddings=4096)
    there = {"model": model, "inputs": {"input_ids": ids}, "text": text_of(2000), **turns}
    exec(compile(python_blocks(ROOT / name), name, "exec"), there)
