"""Plans that skip in prefill too: the prompt is read as the plan says, however it is cut, padded or batched."""

import pytest
import torch
from models.tiny import CACHED, FAMILIES, WITH_SLIDING_LAYERS, greedy, logits, prompt, ragged, tiny
from torch import Tensor
from turns import in_turns

import kvsift

QUEST = "decode=quest:budget=112:dense_layers=none"
STREAMING = "prefill=streaming_llm:budget=32:sinks=4:dense_layers=none"
PLANS = {
    "streaming": STREAMING,
    "streaming over a share of the context": "prefill=streaming_llm:ratio=0.3:dense_layers=none",
    "both phases": f"{STREAMING},decode=quest:budget=48:page_size=8:window=8:dense_layers=none",
}
SELECTING = {
    "pages by exact logits": "prefill=oracle_pages:budget=320:page_size=8:window=8:dense_layers=none",
    "random pages": "prefill=random:budget=320:page_size=8:window=8:dense_layers=none",
    "quoka": f"prefill=quoka:budget=64:chunk=64:window=8:dense_layers=none,{QUEST}",
    "critiprefill, fused": f"prefill=critiprefill:budget=160:segment=128:window=8:dense_layers=none,{QUEST}",
}


def additive(seen: Tensor) -> Tensor:
    """A mask with a row per query, [1, 1, queries, tokens], as eager attention takes it."""
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.parametrize("family", FAMILIES)
def test_streaming_prefill_is_eager_attention_over_sinks_and_window(family: str) -> None:
    model = tiny(family)
    query, key = torch.arange(150).unsqueeze(1), torch.arange(150)
    mask = additive((key <= query) & ((key < 4) | (key > query - 28)))  # 4 sinks and 28 recent ones: a budget of 32
    if family in WITH_SLIDING_LAYERS:
        mask = {"full_attention": mask, "sliding_attention": additive((key <= query) & (key > query - 32))}
    expected = logits(model, prompt(), attention_mask=mask)
    with kvsift.sparse(model, STREAMING) as run:
        torch.testing.assert_close(logits(model, prompt()), expected, atol=2e-5, rtol=1e-4)
    assert run.report()["phases"]["prefill"]["density"] < 0.6


@pytest.mark.parametrize(
    ("family", "plan", "lengths", "sizes"),
    [(*pair, (150, 121, 33), (7, 64)) for pair in in_turns(CACHED, list(PLANS.values()))]
    + [(*pair, (700, 641), (256, 512)) for pair in in_turns(CACHED, list(SELECTING.values()))],  # whole segments
)
def test_padding_batch_and_chunks_change_no_token(
    family: str, plan: str, lengths: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    model = tiny(family)
    with kvsift.sparse(model, plan) as run:
        together = greedy(model, **ragged(*lengths))
        alone = [greedy(model, prompt(length, seed=row)) for row, length in enumerate(lengths)]
        cut = lengths if plan in PLANS.values() else lengths[:1]  # chunks begin inside of segments that are padded
        chunked = [greedy(model, **ragged(*cut), prefill_chunk_size=size) for size in sizes]
    assert torch.equal(together, torch.cat(alone))
    assert all(torch.equal(tokens, together[: len(cut)]) for tokens in chunked)
    phase = run.report()["phases"]["prefill"]
    assert phase["sparse_queries"] > 0
    assert plan not in PLANS.values() or phase["density"] < 0.6


def test_prompts_and_questions_follow_the_prefill_rule_and_drafts_the_decode_rule() -> None:
    model = tiny()
    ids = prompt(50).repeat(1, 3)
    with kvsift.sparse(model, PLANS["both phases"]) as run:
        expected = greedy(model, ids, num_new=16)
        run.stats.clear()
        assert torch.equal(greedy(model, ids, num_new=16, prompt_lookup_num_tokens=4), expected)
    phases = run.report()["phases"]
    assert phases["prefill"]["queries"] == 150 * 2
    assert phases["decode"]["sparse_queries"] == phases["decode"]["queries"] >= 15 * 2


def test_a_prefill_rule_that_skipped_nothing_says_so() -> None:
    model = tiny()
    plan = "prefill=streaming_llm:budget=512:dense_layers=none"
    with pytest.warns(UserWarning, match="skipped nothing in prefill"), kvsift.sparse(model, plan):
        logits(model, prompt())


def test_a_prompt_of_one_segment_is_named_among_the_causes() -> None:
    model = tiny()
    plan = "prefill=quoka:budget=20:sinks=0:window=4:chunk=1024:dense_layers=none"
    with pytest.warns(UserWarning, match="it lies within a segment of 1,024 queries"), kvsift.sparse(model, plan):
        logits(model, prompt())
