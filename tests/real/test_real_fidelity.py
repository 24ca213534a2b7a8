"""How far the predictions of a real model under a plan are from dense ones, over documentation of Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from kvsift_lab.eval.fidelity import fidelity, predictions
from real.conftest import EXCERPTS, excerpt
from torch import Tensor

from kvsift import LLM
from kvsift.api.document import Document
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan

pytestmark = pytest.mark.real
CONTEXT, NUM_TARGETS, DENSE = 3_000, 96, Plan()
# in nats; measured over the two texts: sketch 0.00023 and 0.00018, Quest 0.021 and 0.012
LARGEST_KL = {"sketch:budget=1024": 0.001, "quest:budget=1024": 0.1}
LARGEST_KL_IN_8_BITS = 0.001  # keys and values, dense; measured: 0.00037 and 0.00032


class Read(NamedTuple):
    """A text of which the first ``CONTEXT`` tokens were read, and dense predictions of some that follow."""

    ids: list[int]
    document: Document
    dense: Tensor

    @property
    def targets(self) -> list[int]:
        return self.ids[CONTEXT + 1 : CONTEXT + 1 + NUM_TARGETS]

    def predicted(self, llm: LLM, document: Document, plan: Plan = DENSE) -> Tensor:
        return predictions(llm, document, self.ids[CONTEXT], self.targets, plan)[0]


def document_of(llm: LLM, ids: list[int]) -> Document:
    return Document(llm, ids[:CONTEXT], lambda question: ids, DENSE)


@pytest.fixture(scope="module", params=EXCERPTS)
def read(request: pytest.FixtureRequest, llm: LLM) -> Read:
    ids = llm.tokenizer(excerpt(request.param))["input_ids"]
    made = Read(ids, document_of(llm, ids), torch.empty(0))
    return made._replace(dense=made.predicted(llm, made.document))


def test_a_budget_of_1024_keeps_predictions_close_to_dense(
    read: Read, llm: LLM, record_property: Callable[[str, object], None]
) -> None:
    found = {plan: read.predicted(llm, read.document, parse_plan(plan)) for plan in LARGEST_KL}
    measured = {plan: fidelity(each, read.dense, read.targets) for plan, each in found.items()}
    record_property("measured", ", ".join(f"{plan}: KL {each.kl:.2g}" for plan, each in measured.items()))
    for plan, bound in LARGEST_KL.items():
        assert 0 < measured[plan].kl < bound, plan


@pytest.mark.parametrize("read", ["compound_statements"], indirect=True)  # reading takes 20 s of a processor
def test_keys_and_values_in_8_bits_keep_predictions_close(
    read: Read, smol: Path, record_property: Callable[[str, object], None]
) -> None:
    with LLM(smol, "dense", device="cpu", dtype="float32", kv_dtype="int8", probe_every=0) as rounded:
        measured = fidelity(read.predicted(rounded, document_of(rounded, read.ids)), read.dense, read.targets)
    record_property("measured", f"KL {measured.kl:.2g}")
    assert 0 < measured.kl < LARGEST_KL_IN_8_BITS
