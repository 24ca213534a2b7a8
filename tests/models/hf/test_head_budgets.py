"""Heads of a layer that share a budget: the model sees as much as the plan says, and other tokens than without."""

import pytest
import torch
from models.tiny import greedy, prompt, ragged, tiny

import kvsift


@pytest.mark.parametrize("spec", ["oracle_tokens", "h2o", "h2o:mode=oneshot:recent=0", "snapkv:queries=16",
                                  "snapkv:queries=16:heads=query"])  # fmt: skip
def test_a_model_sees_the_budget_in_the_mean_of_its_heads(spec: str) -> None:
    model, outputs = tiny(num_hidden_layers=3), []
    for how in ("equal", "adaptive"):
        plan = f"{spec}:budget=40:sinks=2:window=6:dense_layers=0:head_budgets={how}"
        with torch.no_grad(), kvsift.sparse(model, plan) as run:
            outputs.append(greedy(model, prompt(200), 20))
        rows = [row for row in run.report()["layers"] if row["phase"] == "decode" and row["sparse_queries"]]
        assert [(row["layer"], row["visible_tokens"]) for row in rows] == [(1, 40), (2, 40)]
    assert not torch.equal(outputs[0], outputs[1]), "sharing changed nothing"


@pytest.mark.parametrize("spec", ["h2o", "snapkv:queries=16"])
def test_rows_of_a_batch_and_beams_share_as_they_do_alone(spec: str) -> None:
    model = tiny(num_hidden_layers=3)
    plan = f"{spec}:budget=40:sinks=2:window=6:dense_layers=0:head_budgets=adaptive"
    batch = ragged(150, 113)
    with kvsift.sparse(model, plan):
        for beams in (1, 2):
            together = greedy(model, batch["input_ids"], attention_mask=batch["attention_mask"], num_beams=beams)
            alone = [greedy(model, prompt(length, seed=row), num_beams=beams) for row, length in enumerate((150, 113))]
            assert torch.equal(together, torch.cat(alone))
