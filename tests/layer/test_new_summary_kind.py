"""A new kind of page summary is one entry, registered here without touching another file.

Places: 1, the entry of ``SUMMARIES`` with two functions in torch. Stores then keep it, the composed path and captured
steps score by it, and ``quest:score_by=`` takes its name. Its Triton twins are two more functions of the same entry,
which make a captured step faster and change no answer.
"""

from pathlib import Path

import pytest
import torch
from engine.tiny_directory import text_of, write_model
from kernels.conftest import DEVICE, needs_triton
from kernels.decode_cases import draw_case, exact_scores, of_candidates
from kernels.decode_checks import by_twins, check_step, error_ratio
from kernels.paged_cases import copy_of, distance, paged_kv, pools_of
from layer.test_paged_decode import SideBySide
from torch import Tensor
from turns import in_turns

from kvsift import LLM
from kvsift.kernels.append import append_reference, append_triton
from kvsift.kernels.page_summary import SUMMARIES, SummaryKind
from kvsift.kernels.score_pages import score_pages_reference, score_pages_triton
from kvsift.kernels.summary_twins import mean_of
from kvsift.kernels.triton_shim import jit, tl
from kvsift.layer.paged_decode import reason_against
from kvsift.plan.syntax import parse_plan

PLAN = "quest:budget=40:sinks=4:window=5:page_size=4:dense_layers=none:score_by=mean_only"


def mean_rows(keys: Tensor, valid: Tensor | None) -> Tensor:
    if valid is None:
        return keys.float().mean(-2).to(keys.dtype)
    return (keys.float().masked_fill(~valid, 0.0).sum(-2) / valid.sum(-2)).to(keys.dtype)


@jit
def mean_row(row, keys, valid, D: tl.constexpr, DP: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.arange(0, DP)
    tl.store(row + d, mean_of(keys, valid).to(row.dtype.element_ty), mask=d < D)


@jit
def mean_features(q):  # type: ignore[no-untyped-def]
    return q, q  # the second half of a row is empty


MEAN_ONLY = SummaryKind(width=lambda head_dim: head_dim, rows=mean_rows, features=lambda q: q)
WITH_TWINS = MEAN_ONLY._replace(row_twin=mean_row, features_twin=mean_features)


@pytest.fixture(params=[MEAN_ONLY, WITH_TWINS], ids=["torch", "twins"], autouse=True)
def registered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUMMARIES, "mean_only", request.param)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_it_is_written_beside_other_kinds(dtype: torch.dtype) -> None:
    before = paged_kv([1, 5, 8, 10], 2, 4, 16, dtype, DEVICE)
    keys, values = torch.randn(2, 4, 2, 16, device=DEVICE).to(dtype)
    found, expected = (pools_of(["minmax", "mean_only", "minmax_fp8"], before) for _ in range(2))
    append_triton(copy_of(before), keys, values, found)
    append_reference(copy_of(before), keys, values, expected)
    for kind, pool in found.items():
        size = float(expected[kind].float().norm())
        assert distance(pool, expected[kind]) <= 4 * torch.finfo(dtype).eps * size, kind


@needs_triton
@pytest.mark.parametrize(
    ("heads", "dtype"), in_turns([(3, True), (1, True), (3, False)], [torch.float16, torch.float32]), ids=str
)
def test_it_is_scored_by_reference_and_triton(heads: tuple[int, bool], dtype: torch.dtype) -> None:
    group, shared = heads
    case = draw_case([300, 1, 61], 2, group, 16, 4, dtype, kind="mean_only")
    exact, formula = exact_scores(case, shared), exact_scores(case, shared, dtype)
    for function in (score_pages_reference, score_pages_triton):
        scores = function(
            case.queries, case.summary, case.kv.table, case.spans, kind="mean_only", scale=case.scale, shared=shared
        )
        assert error_ratio(of_candidates(case, scores), formula, exact) <= 2
    check_step(by_twins, case, shared)


def test_steps_answer_as_the_composed_path_does() -> None:
    assert reason_against(parse_plan(PLAN)) is None
    SideBySide(PLAN).check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_captured_steps_answer_as_the_composed_path_does(tmp_path: Path) -> None:
    directory = write_model(tmp_path, hidden_size=128, intermediate_size=256, head_dim=64, num_attention_heads=8)
    answers = []
    for path in ("captured", "eager", "composed"):
        model = LLM(directory, PLAN, device="cuda", dtype="float32", path=path, dense_below=0)
        answers.append(model.generate(text_of(1500), max_new_tokens=40))
    assert [answer.path for answer in answers][:2] == ["captured", "eager"]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert answers[0].decode("density") == answers[2].decode("density")
