"""The method that docs/adding-a-method.md shows keeps the contracts like any other."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from contracts.checks import ALL_CHECKS
from contracts.harness import Check

from kvsift.methods.base import Method, Phase

EXAMPLE = Path(__file__).parents[2] / "examples" / "page_mean.py"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.usefixtures("fewer_examples")
def test_the_documented_example_keeps_the_contracts(check: Check, phase: Phase) -> None:
    page_mean: Any = runpy.run_path(str(EXAMPLE))["PageMean"]

    def make() -> Method:
        return page_mean(page_size=4)

    check(make, phase)
