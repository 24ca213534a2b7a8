"""A pyramid over the layers of a model that are kvsift's and sparse, and over no others."""

import pytest
import torch
from models.tiny import FAMILIES, prompt, tiny
from transformers import DynamicCache

import kvsift

BUDGET = "budget=40:sinks=2:window=6"  # 32 tokens differ


def visible_tokens(family: str, dense: str, cache: DynamicCache | None = None) -> list[int | None]:
    """Of every layer of six in decode; None where nothing was sparse."""
    types = ["sliding_attention", "full_attention"] * 3
    changes = {"layer_types": types} if "layer_types" in FAMILIES[family] else {}
    model = tiny(family, num_hidden_layers=6, **changes)
    plan = f"oracle_tokens:{BUDGET}:dense_layers={dense}:layer_budgets=pyramid"
    with torch.no_grad(), kvsift.sparse(model, plan) as run:
        model.generate(prompt(200), max_new_tokens=4, do_sample=False, past_key_values=cache)
    assert run.report()["plan"] == plan
    rows = {row["layer"]: row for row in run.report()["layers"] if row["phase"] == "decode"}
    return [rows[i]["visible_tokens"] if i in rows and rows[i]["sparse_queries"] else None for i in range(6)]


@pytest.mark.parametrize(
    ("family", "dense", "expected"),
    [
        ("Llama", "none", [71, 59, 47, 35, 23, 11]),  # 8 and 63 to 1 in steps of 62 // 5 = 12
        ("Llama", "0+5", [None, 71, 51, 31, 11, None]),  # steps of 62 // 3 = 20
        ("Gemma2", "none", [None, 71, None, 40, None, 9]),  # every other layer slides; steps of 62 // 2 = 31
    ],
    ids=["all layers", "dense ends", "sliding layers between"],
)
def test_layers_see_a_pyramid_and_the_budget_in_the_mean(family: str, dense: str, expected: list[int | None]) -> None:
    assert visible_tokens(family, dense) == expected
    sparse = [tokens for tokens in expected if tokens is not None]
    assert 40 <= sum(sparse) / len(sparse) <= 40 + len(sparse) / 2 - 1


def test_layers_that_a_cache_makes_on_the_go_are_known_too() -> None:
    assert visible_tokens("Llama", "none", DynamicCache()) == [71, 59, 47, 35, 23, 11]
