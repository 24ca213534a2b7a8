"""Every family of models answers as stock transformers wherever docs/models.md says that it runs.

Where what a family can do is meant to change: ``python tests/models/families.py``, ``make docs``, and read the
difference.
"""

import json

import pytest
from models.families import FILE, HEAD_DIMS, PARTS, found, found_by_head_dim, names
from models.tiny import VERSION

from kvsift import native

STORED = json.loads(FILE.read_text())
OF_THE_CORE = "native", "exact"
RECORDED = tuple(map(int, STORED["transformers"].split(".")[:2]))
# One of each kind: the others have the same layers, and find the same, in the slow suite
EVERY_TIME = {"Bamba", "FalconH1", "Gemma2", "Gemma3", "Gemma3n", "Gemma4", "GptOss", "HYV3", "Lfm2", "Llama"}
EVERY_TIME |= {"MiMoV2Flash", "Mixtral", "NemotronH", "Qwen3_5Moe", "Zaya"}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in EVERY_TIME else [pytest.mark.slow]) for name in names()]
)
def test_a_family_answers_as_stock_and_does_what_its_page_says(family: str) -> None:
    parts = [part for part in PARTS if native.available() or part not in OF_THE_CORE]
    if VERSION < RECORDED:
        parts = ["block"]
    done = found(family, parts)
    stored = STORED["families"][family]
    assert done == {part: stored[part] for part in parts}


@pytest.mark.skipif(VERSION < RECORDED or not native.available(), reason="the page was recorded elsewhere")
@pytest.mark.parametrize(
    "head_dim", [pytest.param(each, marks=[] if each in (80, 512) else [pytest.mark.slow]) for each in HEAD_DIMS]
)
def test_a_head_dim_does_what_the_page_says(head_dim: int) -> None:
    assert found_by_head_dim(head_dim) == STORED["head_dims"][str(head_dim)]


def test_the_page_has_the_families_of_this_transformers() -> None:
    assert VERSION < RECORDED or names() == list(STORED["families"])
