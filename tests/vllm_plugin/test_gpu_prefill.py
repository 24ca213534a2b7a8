"""Sparse prefill over vLLM's packed blocks against the composed path over a store of our own."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from turns import in_turns
from vllm_plugin.test_gpu_decode import GPU, GROUP, HEADS, Server

from kvsift.layer.accounting import RunStats, Tally
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.sparse_attention import SparseAttention
from kvsift.plan.plan import Plan
from kvsift.plan.syntax import parse_plan
from kvsift.types import Chunk
from kvsift.vllm.gpu_decode import LayerPages
from kvsift.vllm.gpu_prefill import PromptRow, attend_prompt, compile_ahead, workspace_bytes

PLANS = (
    "prefill=quoka:budget=512:dense_layers=0",
    "prefill=quoka:budget=512:mode=max_of_mean_exact:dense_layers=0",
    "prefill=quoka:ratio=0.25:score=dot:dense_layers=0",
    "prefill=critiprefill:budget=512",
    "prefill=critiprefill:budget=512:estimator=bound:segment=256",
)

# on a GPU the composed path rounds scores otherwise where segments of a chunk differ in size
CHUNKS = {"cpu": (0, 300, 1100, 2432, 2433, 2500), "cuda": (0, 512, 1152, 2432, 2433, 2500)}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(("spec", "layout"), in_turns(PLANS, ["NHD", "HND"]))
def test_chunks_of_any_size_are_attended_as_by_the_composed_path(spec: str, layout: str, device: str) -> None:
    server = Server("quest:budget=256", [2500], layout, 32, device)
    plan = parse_plan(spec)
    assert plan.prefill is not None
    slots = server.slots(0, torch.arange(2500)).to(device)
    packed = server.cache.transpose(1, 2)[slots // 32, slots % 32]
    keys, values = packed.transpose(0, 1).chunk(2, -1)
    queries = torch.randn(2500, HEADS * GROUP, server.dim).to(server.cache)
    stats, tally, messages = RunStats(), Tally(), [LayerMessages(), LayerMessages()]
    layers = [
        SparseAttention(server.shape._replace(layer=layer), plan, 1, keys[:, :0], stats, messages=messages[0])
        for layer in (1, 2)
    ]
    for layer in layers:
        layer.joins = True
    blocks = server.blocks[0].to(device)
    for start, stop in pairwise(CHUNKS[device]):
        own = queries[start:stop].transpose(0, 1).unsqueeze(0)
        chunk = Chunk(own, keys[None, :, start:stop], values[None, :, start:stop], [stop - start])
        prompt = PromptRow(7, slice(0, stop - start), start, plan.prefill, blocks)
        assert prompt.is_dense == (stop <= 512 and "budget" in spec)  # a ratio leaves out from the beginning
        for layer in layers:  # the second hears of the first
            expected = layer.attend(chunk)[0].transpose(0, 1)
            found = torch.full_like(queries[start:stop], 7.0)
            attend_prompt(
                prompt, layer.shape, server.layer, server.kind, queries[start:stop], messages[1], tally, None, found
            )
            assert (found - expected).norm() < (0.02 if device == "cuda" else 1e-5) * expected.norm(), (start, layer)
    total = stats.phase("prefill")
    assert (tally.queries, tally.sparse_queries) == (total.queries, total.sparse_queries)
    assert 0 < tally.sparse_queries < tally.queries
    assert tally.visible_tokens == float(total.visible_tokens) < tally.context_tokens == total.context_tokens


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("spec", PLANS)
def test_prompts_over_a_cache_of_fp8_get_the_bits_of_its_numbers(spec: str, device: str) -> None:
    how = {"kept_as": torch.float8_e4m3fn}
    narrow = Server("quest:budget=256", [2500], "NHD", 32, device, **how)
    wide = Server("quest:budget=256", [2500], "NHD", 32, device, **how, read_as=narrow.dtype)
    rule = parse_plan(spec).prefill
    assert rule is not None
    queries = torch.randn(900, HEADS * GROUP, narrow.dim).to(narrow.cache.device, narrow.dtype)
    outputs = []
    for server in (narrow, wide):
        tally, found = Tally(), torch.empty_like(queries)
        prompt = PromptRow(0, slice(0, 900), 1600, rule, server.blocks[0].to(device))
        messages = LayerMessages()
        attend_prompt(prompt, server.shape, server.layer, server.kind, queries, messages, tally, None, found)
        assert tally.sparse_queries == 900
        outputs.append(found)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("spec", [*PLANS, "prefill=quoka:budget=1024:queries=4:chunk=256"])
def test_a_prompt_finds_its_kernels_compiled(spec: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beside rows that decode begin and end anywhere."""
    knobs, length = pytest.importorskip("triton").knobs.runtime, 24000  # longer than LONG_ROW
    server = Server("quest:budget=256", [length], "NHD", 32, device)
    prefill, compiled = parse_plan(spec).prefill, list[str]()
    compile_ahead(prefill, server.shape, server.layer, server.kind, length, server.dtype)
    torch.cuda.synchronize()
    monkeypatch.setattr(knobs, "jit_post_compile_hook", lambda *_, fn, **__: compiled.append(fn.name))
    draw, start, size = random.Random(1), 0, prefill.method.segment_size
    while start < length:
        count = min(draw.choice([1, 15, 16, size, 2 * size, 4096, 8192 - draw.randrange(1, 40)]), length - start)
        queries = torch.randn(count, HEADS * GROUP, server.dim).to(server.cache)
        prompt = PromptRow(0, slice(0, count), start, prefill, server.blocks[0].to(device))
        if not prompt.is_dense:
            attend_prompt(
                prompt, server.shape, server.layer, server.kind, queries, LayerMessages(), Tally(), None,
                torch.empty_like(queries),
            )  # fmt: skip
        start += count
    assert not compiled


def test_a_learned_sink_logit_takes_its_share() -> None:
    server = Server("quest:budget=256", [900], "NHD", 16, "cpu")
    prefill = parse_plan("prefill=quoka:budget=256").prefill
    assert prefill is not None
    queries, prompt = (
        torch.randn(900, HEADS * GROUP, server.dim),
        PromptRow(0, slice(0, 900), 0, prefill, server.blocks[0]),
    )
    found = [torch.zeros_like(queries) for _ in range(2)]
    for out, sink in zip(found, (None, torch.full((HEADS * GROUP,), 50.0))):
        attend_prompt(
            prompt, server.shape, server.layer, server.kind, queries, LayerMessages(), Tally(), sink, out
        )  # fmt: skip
    assert found[0].norm() > 1
    assert found[1].norm() < 1e-3 * found[0].norm()


def test_the_workspace_is_bounded_for_any_chunk() -> None:
    plan = parse_plan("prefill=quoka:budget=4096")
    assert isinstance(plan, Plan)
    assert plan.prefill is not None
    shape = Server("quest:budget=256", [16], "NHD", 16, "cpu").shape._replace(
        num_query_heads=32, num_kv_heads=8, head_dim=128
    )
    assert 1 << 28 < workspace_bytes(plan.prefill, shape, 131072, 16384, 2) < 3 << 29
    assert workspace_bytes(plan.prefill, shape, 1 << 20, 16384, 2) < 5 << 30
    exact = parse_plan("prefill=quoka:budget=4096:mode=max_of_mean_exact").prefill
    assert exact is not None
    assert 1 << 30 < workspace_bytes(exact, shape, 131072, 16384, 2) < 2 << 30, "scores of every query head"


@pytest.mark.parametrize("spec", PLANS)
def test_a_rank_with_half_of_the_heads_gives_half_of_the_output(spec: str) -> None:
    server = Server("quest:budget=256", [2000], "NHD", 32, "cpu")
    prefill, layer = parse_plan(spec).prefill, server.layer
    assert prefill is not None
    queries, found = torch.randn(2000, HEADS * GROUP, server.dim), []
    for heads in (slice(0, HEADS), slice(0, 1), slice(1, 2)):
        num_kv_heads = heads.stop - heads.start
        shape = server.shape._replace(num_query_heads=num_kv_heads * GROUP, num_kv_heads=num_kv_heads)
        own = LayerPages(layer.pages, layer.keys[heads], layer.values[heads], layer.rows[heads])
        mine = queries[:, heads.start * GROUP : heads.stop * GROUP].contiguous()
        out = torch.zeros_like(mine)
        prompt = PromptRow(0, slice(0, 2000), 0, prefill, server.blocks[0])
        attend_prompt(prompt, shape, own, server.kind, mine, LayerMessages(), Tally(), None, out)
        found.append(out)
    assert torch.allclose(found[0], torch.cat(found[1:], 1), atol=1e-5)
