"""Kernels on queries and keys of the embedded model: they select what the composed path selects."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, crossed, needs_triton
from kernels.decode_cases import DecodeCase, Lists
from kernels.decode_checks import by_twins, check_step
from kvsift_lab.eval.tasks import make_sample
from torch import Tensor

from kvsift import LLM
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.sifted_attention import sifted_attention
from kvsift.layer.paged_decode import list_capacity, page_spans
from kvsift.methods.quest import Quest
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.stores.paged import PagedStore
from kvsift.tokenization.prompt import question_text
from kvsift.types import LayerShape, Limit

STEPS = 2
LENGTHS = [
    2500,
    pytest.param(
        32_000,
        marks=[pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes without an NVIDIA GPU")],
    ),
]


class Asked(NamedTuple):
    """What one layer was asked at one step, and all it holds."""

    shape: LayerShape
    queries: Tensor  # [num_query_heads, 1, head_dim]
    keys: Tensor  # [num_kv_heads, length, head_dim]
    values: Tensor


@cache
def asked(length: int) -> list[Asked]:
    """The last tokens of a question about a document, in every layer of the embedded model."""
    method, heard = Quest(), dict[int, tuple[LayerShape, Tensor]]()
    select = method.select

    def listen(state: Any, shape: LayerShape, queries: Tensor, *rest: Any) -> Any:
        heard[shape.layer] = shape, queries.clone()
        return select(state, shape, queries, *rest)

    object.__setattr__(method, "select", listen)
    plan = Plan(decode=Rule(method, Budget(tokens=256, dense_layers=())))
    llm = LLM(plan=plan, device=DEVICE, dtype="auto" if DEVICE == "cuda" else "float32", path="composed", probe_every=0)

    def encode(text: str) -> list[int]:
        return llm.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]

    sample = make_sample("needle", length, 0, encode, 1, [llm.tokenizer.bos_token_id])
    ids = [*sample.context_ids, *encode(question_text(sample.questions[0].text))]
    store = llm.new_cache(plan, len(ids))
    llm.feed(store, ids[:-STEPS])
    found = []
    for token in ids[-STEPS:]:
        llm.feed(store, [token], phase="decode")
        for attention in store.attentions:
            row = attention.store.reader(0)
            found.append(Asked(*heard[attention.shape.layer], row.keys().clone(), row.values().clone()))
    return found


def step_of(question: Asked, kind: str, budget: Budget, dtype: torch.dtype) -> tuple[DecodeCase, Lists]:
    """A kernel's view of the question, and the composed path's list."""
    shape, length, method = question.shape, question.keys.shape[1], Quest(score_by=kind)
    store = PagedStore(shape, 1, method.page_size, question.keys.to(dtype), method.summaries)
    store.append(0, question.keys.to(dtype), question.values.to(dtype))
    table = torch.tensor([store.table.planned(0)[: store.table.num_pages(0)]], dtype=torch.int32, device=DEVICE)
    kv = PagedKV(store.keys, store.values, table, torch.tensor([length], dtype=torch.int32, device=DEVICE))
    queries, spans = question.queries.to(dtype), page_spans(budget, kv.lengths, method.page_size)
    case = DecodeCase(queries[None, :, 0], kv, store.summaries[kind], spans, kind)
    assert case.scale == shape.scale
    start, candidates = length - 1, budget.candidates(length - 1, method.page_size)
    limit = Limit(budget.units(start, method.page_size))
    selection = method.select(None, shape, queries, start, candidates, limit, store.reader(0))
    held = range(table.shape[1])
    spans_of = [
        torch.tensor(list(pages), device=DEVICE) for pages in (held[: candidates.first], held[candidates.stop :])
    ]
    always = [pages.expand(shape.num_kv_heads, -1) for pages in spans_of]
    pages = torch.cat([always[0], selection.units, always[1]], 1).int()
    return case, (pages[None], torch.full((1, shape.num_kv_heads), pages.shape[1], dtype=torch.int32, device=DEVICE))


@needs_triton
@pytest.mark.parametrize("length", LENGTHS)
@crossed(budget=[256, 1024], dtype=DTYPES, function=[sifted_attention, by_twins])
def test_kernels_select_what_the_composed_path_selects(
    function: Any, budget: int, dtype: torch.dtype, length: int
) -> None:
    rule = Budget(tokens=budget)
    capacity = list_capacity(rule, -(-asked(length)[0].keys.shape[1] // 16) + STEPS, 16)
    for question in asked(length):
        case, expected = step_of(question, "minmax", rule, dtype)
        check_step(function, case, capacity=capacity, expected=expected)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["minmax_fp8", "mean_std", "log_mass"])
def test_other_summaries_select_alike(kind: str, length: int) -> None:
    for question in asked(length)[-2:]:
        case, expected = step_of(question, kind, Budget(tokens=1024), DTYPES[-1])
        check_step(sifted_attention, case, expected=expected)
