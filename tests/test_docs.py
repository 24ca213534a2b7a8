"""Docs say what the code does: generated parts are fresh, links lead somewhere, plans in them parse."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvsift.runtime.spec import parse_plan

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_rendered_tables_and_examples_are_fresh():
    script = ROOT / "scripts" / "render_docs.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_plans_in_docs_parse(page):
    for plan in re.findall(r"[`\"]((?:prefill=|decode=|quest:|streaming_llm:)[a-z0-9_=:,.+]+)[`\"]", page.read_text()):
        parse_plan(plan)


def test_readme_commands_exist_in_the_makefile():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    wanted = re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text())
    assert wanted
    assert set(wanted) <= set(targets)
