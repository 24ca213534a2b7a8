"""Decode over vLLM's packed blocks against float32: by reference kernels here, by the single launches on a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused

from kvsift.kernels.block_pages import BlockPages
from kvsift.kernels.page_attention import listed_tokens, split_count
from kvsift.kernels.page_summary import row_format
from kvsift.kernels.summarise_slots import summarise_slots
from kvsift.layer.accounting import Tally
from kvsift.layer.paged_decode import DecodeLayer
from kvsift.methods.common.anchors import Reuse
from kvsift.plan.syntax import parse_plan
from kvsift.types import LayerShape
from kvsift.vllm.gpu_counters import WHOLE, GpuCounters
from kvsift.vllm.gpu_decode import DENSE_BELOW, BlockBatch, LayerPages, dense_below_of
from kvsift.vllm.settings import Settings, summaries_of

HEADS, GROUP = 2, 4
REUSE = {3: Reuse(2, (1, 0), 1.0), 6: Reuse(2, (1, 1), 1.0), 7: Reuse(5, (0, 1), 1.0)}  # 4 is nobody's anchor
ANCHORED = [1500, 900, 1200, 200]  # lengths
GPU = pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
])  # fmt: skip


class Server:
    """A cache of vLLM's shape, filled with prompts in chunks, and our batch over it."""

    def __init__(self, spec: str, lengths: list[int], layout: str, block_size: int, device: str, **more: Any) -> None:
        torch.manual_seed(0)
        self.dtype, self.dim = dtype, _ = (torch.bfloat16, 128) if device == "cuda" else (torch.float32, 32)
        plan = parse_plan(spec)
        assert plan.decode is not None
        self.kind, page_size = summaries_of(plan)[0]
        self.lengths, self.block_size = lengths, block_size
        held = [-(-length // block_size) for length in lengths]
        num_blocks = sum(held) + 3
        shape = (HEADS, block_size) if layout == "HND" else (block_size, HEADS)
        cache = torch.randn(num_blocks, *shape, 2 * self.dim, device=device).to(dtype)
        cache = cache.to(more.get("kept_as", dtype)).to(more.get("read_as", more.get("kept_as", dtype)))
        self.cache = cache if layout == "HND" else cache.transpose(1, 2)
        order = torch.randperm(num_blocks - 1) + 1
        self.blocks = torch.zeros(len(lengths), max(held) + 1, dtype=torch.int32)
        for row, blocks in enumerate(order[: sum(held)].split(held)):
            self.blocks[row, : len(blocks)] = blocks
        pages = BlockPages.of(self.cache, page_size)
        width, own = row_format(self.kind, self.dim, page_size)
        rows = pages.new_rows(num_blocks, HEADS, width, own or dtype, self.cache.device)
        self.layer = LayerPages(pages, *pages.split(self.cache), rows)
        self.shape = LayerShape(2, HEADS * GROUP, HEADS, self.dim, self.dim**-0.5)
        self.batch = BlockBatch(
            [plan.decode], self.shape, len(lengths) + 1, max(held) * block_size, more.get("dense_below", 0),
            cache.device, more.get("allows_dense", False), more.get("anchors", ()), more.get("kept"),
        )  # fmt: skip
        self.attention = self.batch.layer(self.layer, self.shape)
        slots = torch.cat([self.slots(row, torch.arange(length - 1)) for row, length in enumerate(lengths)])
        last = [self.slots(row, torch.tensor([length - 1])) for row, length in enumerate(lengths)]
        for chunk in (*slots.split(1000), torch.cat([*last, torch.tensor([-1])])):
            layer = self.layer
            summarise_slots(self.kind, chunk.to(device), layer.keys, layer.values, layer.rows, layer.pages)

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        return self.blocks[row].long()[positions // self.block_size] * self.block_size + positions % self.block_size

    def decode(self, queries: torch.Tensor) -> torch.Tensor:
        """One step, in which a row of padding follows the others."""
        padded = torch.cat([queries, torch.zeros_like(queries[:1])])
        out = torch.full_like(padded, 7.0)
        self._begin()
        self.batch.layers["a layer"] = True
        self.attention.attend(padded, self.batch.mode, out=out)
        return out[:-1]

    def stack(self) -> dict[int, DecodeLayer]:
        """Layers over this one cache, some of which reuse what others have selected, and read no summaries."""
        layers = {}
        for index in range(2, 8):
            reuse, rows = REUSE.get(index), None if index in REUSE else self.layer.rows
            layers[index] = self.batch.layer(replace(self.layer, rows=rows), self.shape, index=index, reuse=reuse)
        return layers

    def decode_stack(self, layers: dict[int, DecodeLayer], queries: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """One step of a stack, in which a row of padding follows the others."""
        self._begin()
        answers = {}
        for index, layer in layers.items():
            self.batch.layers[f"layer {index}"] = layer.summary is not None
            padded = torch.cat([queries[index], torch.zeros_like(queries[index][:1])])
            out = torch.full_like(padded, 7.0)
            layer.attend(padded, self.batch.mode, out=out)
            answers[index] = out[:-1]
        return answers

    def _begin(self) -> None:
        lengths = torch.tensor([*self.lengths, 0], dtype=torch.int32, device=self.cache.device)
        blocks = torch.cat([self.blocks, torch.zeros_like(self.blocks[:1])]).to(self.cache.device)
        self.batch.begin(blocks, lengths, self.layer.pages)

    def listed(self, layer: DecodeLayer, row: int) -> torch.Tensor:
        """Tokens that a layer attends in a row, bool [num_query_heads, length]."""
        units, counts = layer.lists_of(slice(row, row + 1))
        listed = listed_tokens(units[0], counts[0], self.lengths[row], self.batch.unit_size)
        return listed.repeat_interleave(GROUP, 0)

    def counters(self, layers: list[str], every: int = 1) -> GpuCounters:
        return GpuCounters(self.batch, layers, every, self.dtype, 1024, 32.0)

    def dense(self, queries: torch.Tensor, row: int, listed: torch.Tensor | None = None) -> torch.Tensor:
        """Exact attention of a row, over ``listed`` tokens alone."""
        slots = self.slots(row, torch.arange(self.lengths[row])).to(self.cache.device)
        packed = self.cache.transpose(1, 2)[slots // self.block_size, slots % self.block_size].float()
        keys, values = packed.transpose(0, 1).repeat_interleave(GROUP, 0).chunk(2, -1)
        weights = torch.einsum("hd,hnd->hn", queries[row].float(), keys) * self.shape.scale
        weights = weights if listed is None else weights.masked_fill(~listed, -torch.inf)
        return torch.einsum("hn,hnd->hd", weights.softmax(-1), values)

    def queries(self) -> torch.Tensor:
        return torch.randn(len(self.lengths), HEADS * GROUP, self.dim).to(self.cache.device, self.dtype)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(("layout", "block_size"), [("NHD", 16), ("HND", 16), ("NHD", 64), ("HND", 128)])
@pytest.mark.parametrize("plan", ["quest:budget=256", "quest:budget=256:score_by=minmax_fp8", "sketch:budget=256"])
def test_rows_within_the_budget_see_everything(plan: str, layout: str, block_size: int, device: str) -> None:
    server = Server(plan, [1, 16, 17, 250], layout, block_size, device)
    queries = server.queries()
    found = server.decode(queries)
    for row in range(len(server.lengths)):
        expected = server.dense(queries, row)
        assert (found[row].float() - expected).norm() < 0.02 * expected.norm(), row


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(("layout", "block_size"), [("NHD", 16), ("HND", 64)])
@pytest.mark.parametrize("plan", ["quest:budget=256", "quest:budget=256:score_by=minmax_fp8", "sketch:budget=256"])
def test_a_cache_of_fp8_gives_the_bits_of_its_numbers(plan: str, layout: str, block_size: int, device: str) -> None:
    lengths, how = [1, 17, 250, 900, 1500], {"kept_as": torch.float8_e4m3fn, "allows_dense": True}
    server = Server(plan, lengths, layout, block_size, device, **how)
    wide = Server(plan, lengths, layout, block_size, device, **how, read_as=server.dtype)
    assert server.cache.element_size() == 1 < wide.cache.element_size()
    for each in (server, wide):
        each.batch.set_rules([*[parse_plan(plan).decode] * 3, None, parse_plan(plan).decode])
    if "sketch" in plan:  # products of wider keys are added up in another order
        assert (server.layer.rows != wide.layer.rows).float().mean() < 1e-3
        wide.layer.rows.copy_(server.layer.rows)
    queries = server.queries()
    found = server.decode(queries)
    assert torch.equal(found, wide.decode(queries))
    assert server.batch.visible.tolist() == wide.batch.visible.tolist()
    for row in range(4):  # the last of them by its own rule
        expected = server.dense(queries, row)
        assert (found[row].float() - expected).norm() < 0.02 * expected.norm(), row
    if device == "cuda":
        assert server.batch.single_launches == "batches of up to 6 rows"


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("plan", ["quest:budget=256", "sketch:budget=256"])
def test_each_row_is_dense_or_sparse_by_its_own_length(plan: str, device: str) -> None:
    server = Server(plan, [500, 1500, 999], "HND", 32, device, dense_below=1000)
    queries = server.queries()
    found = server.decode(queries)
    errors = [float((found[i].float() - server.dense(queries, i)).norm() / found[i].float().norm()) for i in range(3)]
    assert errors[0] < 0.02
    assert errors[2] < 0.02
    assert errors[1] > 0.05
    assert server.batch.totals.sum(0).tolist() == [3, 2999, 1, 1500]
    visible = (server.batch.visible[:3] / HEADS).tolist()
    assert visible[0] == 500
    assert visible[2] == 999
    assert 200 < visible[1] <= 256


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"plan": "quest:budget=512"}, DENSE_BELOW),
        ({"plan": "dense", "plans": ["quest:ratio=0.1"]}, DENSE_BELOW),
        ({"plan": "sketch:budget=512"}, 0),
        ({"plan": "quest:budget=512", "dense_below": 0}, 0),
        ({"plan": "sketch:budget=512", "dense_below": 700}, 700),
    ],
)
def test_short_rows_are_dense_where_that_is_as_fast(settings: dict[str, Any], expected: int) -> None:
    read = Settings.read({"kvsift": settings})
    assert read is not None
    assert dense_below_of(read) == expected


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", ["quest", "sketch"])
def test_each_row_has_the_budget_of_its_own_plan_or_is_dense(name: str, device: str) -> None:
    lengths = [900, 1500, 1200, 700]
    server = Server(f"{name}:budget=512", lengths, "NHD", 16, device, allows_dense=True)
    queries = server.queries()
    rules = [None, *(parse_plan(f"{name}:budget={budget}").decode for budget in (512, 128)), None]
    server.batch.set_rules(rules)
    found = server.decode(queries)
    for row in (0, 3):
        expected = server.dense(queries, row)
        assert (found[row].float() - expected).norm() < 0.02 * expected.norm(), row
    visible = (server.batch.visible[:4] / HEADS).tolist()
    assert (visible[0], visible[3]) == (0, 0), "they have no lists"
    assert 400 < visible[1] <= 512
    assert 64 < visible[2] <= 128
    assert server.batch.totals.sum(0).tolist() == [4, 4300, 2, 2700]
    counters = server.counters([])
    tally = counters.counted(counters.sums().tolist())
    assert (tally.queries, tally.sparse_queries, tally.context_tokens) == (4, 2, 4300)
    assert tally.visible_tokens == 900 + visible[1] + visible[2] + 700
    assert (tally.kv_bytes_read, tally.index_bytes_read) == (1024 * float(tally.visible_tokens), 32.0 * 2700)
    assert tally.kv_bytes_dense == 1024 * 4300
    assert counters.counted(counters.sums().tolist()) == Tally()
    server.batch.set_rules([rules[1]] * 4)
    alone = Server(f"{name}:budget=512", lengths, "NHD", 16, device)
    if device == "cpu":  # on a GPU parts are added in any order
        assert torch.equal(server.decode(queries), alone.decode(queries))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("plan", ["quest:budget=256", "sketch:budget=256"])
def test_the_layout_of_the_cache_changes_nothing(plan: str, device: str) -> None:
    first, second = (Server(plan, [700, 1300], layout, 16, device) for layout in ("NHD", "HND"))
    second.cache.copy_(first.cache)
    second.blocks.copy_(first.blocks)
    slots = torch.cat([second.slots(row, torch.arange(length)) for row, length in enumerate(second.lengths)])
    layer = second.layer
    summarise_slots(second.kind, slots.to(device), layer.keys, layer.values, layer.rows, layer.pages)
    queries = first.queries()
    assert torch.allclose(first.decode(queries).float(), second.decode(queries).float(), atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("plan", ["quest:budget=1024", "sketch:budget=1024"])
def test_a_captured_step_follows_tables_and_lengths(plan: str) -> None:
    server = Server(plan, [3000, 9000], "NHD", 16, "cuda")
    queries = server.queries()
    blocks, lengths = server.blocks.cuda(), torch.tensor(server.lengths, dtype=torch.int32, device="cuda")
    out = torch.empty_like(queries)

    def step() -> None:
        server.batch.begin(blocks, lengths, server.layer.pages)
        server.attention.attend(queries, server.batch.mode, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for changed in ([3000, 9000], [2999, 500], [1, 8000]):
        lengths.copy_(torch.tensor(changed))
        graph.replay()
        replayed = out.clone()
        step()
        assert torch.equal(replayed, out)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("plan", ["quest:budget=1024", "sketch:budget=1024"])
def test_layers_start_early_behind_the_kernel_that_writes_their_token(plan: str) -> None:
    server = Server(plan, [9000, 4096, 300], "NHD", 16, "cuda")
    slots = torch.cat([server.slots(row, torch.tensor([length - 1])) for row, length in enumerate(server.lengths)])
    slots, layer, queries = torch.cat([slots, torch.tensor([-1])]).cuda(), server.layer, server.queries()
    padded = torch.cat([queries, torch.zeros_like(queries[:1])])
    lengths = torch.tensor([*server.lengths, 0], dtype=torch.int32, device="cuda")
    blocks = torch.cat([server.blocks, torch.zeros_like(server.blocks[:1])]).cuda()
    new = torch.randn(2, len(slots), HEADS, server.dim, device="cuda", dtype=server.dtype)

    def step(early: bool) -> torch.Tensor:
        server.batch.begin(blocks, lengths, layer.pages)
        out = torch.zeros(8, *padded.shape, device="cuda", dtype=server.dtype)
        for number, answer in enumerate(out, 1):
            tokens, scaled = (new[0] * number, new[1] * number), padded * number
            pools = layer.keys, layer.values, layer.rows, layer.pages
            summarise_slots(server.kind, slots, *pools, tokens, pdl=early)
            server.attention.attend(scaled, server.batch.mode, early=early and number > 1, out=answer)
        return out

    expected = step(False)
    assert torch.equal(expected, step(True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(True)
    for _ in range(50):
        graph.replay()
        assert torch.equal(expected, found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_counters_are_read_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsift.vllm import gpu_counters

    monkeypatch.setattr(gpu_counters, "EVERY_S", 0.0)
    server = Server("quest:budget=256", [2000], "NHD", 16, "cuda")
    counters, tally, queries = server.counters(["a layer"]), Tally(), server.queries()
    server.decode(queries)
    counters.keep("a layer", queries, server.attention)
    counters.probe(1)
    counters.poll(tally)
    torch.cuda.synchronize()
    counters.poll(tally)
    assert (tally.queries, tally.sparse_queries, tally.context_tokens) == (1, 1, 2000)
    assert 200 < tally.visible_tokens <= 256
    assert tally.probes == 1
    assert 0.1 < tally.recovery < 1


def shares_of(server: Server, queries: torch.Tensor, row: int) -> torch.Tensor:
    """Exact attention of a row to each token, [num_query_heads, length]."""
    slots = server.slots(row, torch.arange(server.lengths[row])).to(server.cache.device)
    keys = server.cache.transpose(1, 2)[slots // server.block_size, slots % server.block_size].float()[
        ..., : server.dim
    ]
    keys = keys.transpose(0, 1).repeat_interleave(GROUP, 0)
    return (torch.einsum("hd,hnd->hn", queries[row].float(), keys) * server.shape.scale).softmax(-1)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("allows_dense", [False, True])
@pytest.mark.parametrize("plan", ["quest:budget=256", "sketch:budget=256"])
def test_probes_tell_the_softmax_mass_on_what_a_row_saw(plan: str, allows_dense: bool, device: str) -> None:
    server = Server(plan, [1500, 250, 900], "NHD", 16, device, allows_dense=allows_dense)
    counters = server.counters([f"layer {i}" for i in range(9)], 3)
    layers = {name: server.queries() for name in ("layer 0", "layer 1", "layer 2")}  # 0, 2, 5 and 8 are probed
    found = []
    for turn in range(19):
        for name, queries in layers.items():
            server.decode(queries)
            counters.keep(name, queries, server.attention)
        lists = server.batch.visible.clone(), server.batch.totals.clone()
        before = counters.probed.tolist()
        counters.probe(3)
        assert turn % 3 == 0 or counters.probed.tolist() == before
        assert torch.equal(lists[0], server.batch.visible)
        assert torch.equal(lists[1], server.batch.totals)
        if turn % 3 == 0:
            found.append([now - then for now, then in zip(counters.probed.tolist(), before)])
    order = [("layer 0", 0), ("layer 2", 0), ("layer 0", 1), ("layer 2", 1), ("layer 0", 2), ("layer 2", 2)]
    for (name, row), (count, recovery) in zip([*order, order[0]], found, strict=True):
        if row == 1:  # it saw everything
            assert (count, recovery) == (0, 0)
            continue
        server.decode(layers[name])
        assert server.attention.lists is not None
        units, counts = (each[row] for each in server.attention.lists)
        listed = listed_tokens(units, counts, server.lengths[row], server.batch.unit_size)
        mass = (shares_of(server, layers[name], row) * listed.repeat_interleave(GROUP, 0)).sum(-1).mean()
        assert count == 1
        assert abs(recovery / WHOLE - float(mass)) < (0.01 if device == "cuda" else 1e-5), (name, row)
        assert mass < 0.9


def anchored(device: str, allows_dense: bool) -> tuple[Server, dict[int, DecodeLayer], dict[int, torch.Tensor]]:
    """A server, layers, and their queries: rows of two budgets, one that is dense if that is allowed, a short one."""
    server = Server("sketch:budget=256", ANCHORED, "NHD", 16, device, allows_dense=allows_dense, anchors={2, 5})
    rules = [parse_plan(f"sketch:budget={budget}").decode for budget in (256, 256, 128, 256)]
    server.batch.set_rules([rules[0], None if allows_dense else rules[1], *rules[2:]])
    layers = server.stack()
    return server, layers, {index: server.queries() for index in layers}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("allows_dense", [False, True])
def test_layers_attend_the_lists_of_their_anchors_by_mapped_heads(allows_dense: bool, device: str) -> None:
    server, layers, queries = anchored(device, allows_dense)
    assert [layer.summary is None for layer in layers.values()] == [index in REUSE for index in layers]
    found = server.decode_stack(layers, queries)
    alone = Server("sketch:budget=256", ANCHORED, "NHD", 16, device, allows_dense=allows_dense)
    alone.batch.set_rules(server.batch._rules)
    for index in (2, 5):
        alone.decode(queries[index])
        for row in (0, 2):
            differ = server.listed(layers[index], row) != alone.listed(alone.attention, row)
            assert differ.sum() <= (20 if device == "cuda" else 0), (index, row)  # a GPU adds in any order
    for index, reuse in REUSE.items():
        heads = [head * GROUP + place for head in reuse.heads for place in range(GROUP)]
        for row in range(4):
            listed = None
            if row in (0, 2) or (row == 1 and not allows_dense):
                listed = server.listed(layers[reuse.anchor], row)[heads]
                assert 64 < int(listed[0].sum()) <= (128 if row == 2 else 256)
                assert not torch.equal(listed, server.listed(layers[4], row))
            expected = server.dense(queries[index], row, listed)
            assert (found[index][row].float() - expected).norm() < 0.02 * expected.norm(), (index, row)
    assert server.batch.visible[4] == 0, "padding sees nothing"
    again = server.decode_stack(layers, queries)
    assert all(torch.allclose(found[index].float(), again[index].float(), atol=1e-2) for index in layers)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("allows_dense", [False, True])
def test_layers_that_reuse_count_no_bytes_of_an_index_and_probe_what_they_attended(
    allows_dense: bool, device: str
) -> None:
    server, layers, queries = anchored(device, allows_dense)
    counters = server.counters([f"layer {index}" for index in layers])  # 2, 3, 5 and 7 are probed
    for index in (2, 5):  # what another sequence has left where this one is dense
        memory = layers[index].memory
        assert memory is not None
        memory[0][1].fill_(1499)
        memory[1][1].fill_(memory[0].shape[2])
    found = []
    for _ in range(16):
        server.decode_stack(layers, queries)
        for index, layer in layers.items():
            counters.keep(f"layer {index}", queries[index], layer)
        before = counters.probed.tolist()
        counters.probe(4)
        found.append([now - then for now, then in zip(counters.probed.tolist(), before)])
    for turn, (count, recovery) in enumerate(found):
        row, index = turn // 4, (2, 3, 5, 7)[turn % 4]
        if row == 3 or (row == 1 and allows_dense):
            assert (count, recovery) == (0, 0), turn
            continue
        mass = (shares_of(server, queries[index], row) * server.listed(layers[index], row)).sum(-1).mean()
        assert count == 1
        assert abs(recovery / WHOLE - float(mass)) < (0.01 if device == "cuda" else 1e-5), turn
    tally = counters.counted(counters.sums().tolist())
    sparse = [1500, 1200] if allows_dense else [1500, 900, 1200]
    assert (tally.queries, tally.sparse_queries) == (16 * 4 * 6, 16 * len(sparse) * 6)
    assert tally.index_bytes_read == 32.0 * 16 * sum(sparse) * 3  # of the layers that select
    assert tally.kv_bytes_read == 1024 * float(tally.visible_tokens)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_dense_rows_beside_reused_lists_of_as_many_splits(device: str) -> None:
    """Both launches run at once on a GPU; lists of more than 2048 tokens are left to Triton, in a workspace."""
    server = Server("sketch:budget=2900", [2940, 2939], "NHD", 16, device, allows_dense=True, anchors={2, 5})
    assert split_count(server.attention.kv, 2900, 2, 1) == split_count(server.attention.kv, None, HEADS)
    server.batch.set_rules([parse_plan("sketch:budget=2900").decode, None])
    layers = server.stack()
    queries = {index: server.queries() for index in layers}
    for _ in range(20 if device == "cuda" else 1):
        found = server.decode_stack(layers, queries)
        for index, reuse in REUSE.items():
            heads = [head * GROUP + place for head in reuse.heads for place in range(GROUP)]
            for row, listed in enumerate((server.listed(layers[reuse.anchor], 0)[heads], None)):
                expected = server.dense(queries[index], row, listed)
                assert (found[index][row].float() - expected).norm() < 0.02 * expected.norm(), (index, row)


def test_lists_outlive_the_batch_of_trial_steps_and_a_dense_anchor_is_refused() -> None:
    kept: dict[int, Any] = {}
    first, second = (Server("sketch", [300], "NHD", 16, "cpu", anchors={2, 5}, kept=kept) for _ in range(2))
    trial, later = first.stack(), second.stack()
    assert sorted(kept) == [2, 5]
    assert trial[2].memory is later[2].memory is later[3].memory
    assert trial[4].memory is not later[4].memory
    with refused("unsupported_plan"):
        first.batch.layer(first.layer, first.shape, index=9, reuse=Reuse(8, (0, 1), 1.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("allows_dense", [False, True])
def test_a_captured_step_of_anchors_follows_tables_and_lengths(allows_dense: bool) -> None:
    server, layers, queries = anchored("cuda", allows_dense)
    blocks, lengths = server.blocks.cuda(), torch.tensor(ANCHORED, dtype=torch.int32, device="cuda")
    out = {index: torch.empty_like(each) for index, each in queries.items()}

    def step() -> None:
        server.batch.begin(blocks, lengths, server.layer.pages)
        for index, layer in layers.items():
            layer.attend(queries[index], server.batch.mode, out=out[index])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for changed in (ANCHORED, [1499, 800, 300, 100], [700, 30, 1200, 1]):
        lengths.copy_(torch.tensor(changed))
        graph.replay()
        replayed = {index: each.clone() for index, each in out.items()}
        step()
        for index, each in out.items():
            assert (replayed[index] - each).float().norm() < 0.01 * each.float().norm(), index


def test_trial_steps_and_replaced_caches_are_not_probed() -> None:
    server = Server("quest:budget=256", [1500], "NHD", 16, "cpu")
    counters, queries = server.counters(["a layer"]), server.queries()
    server.blocks.zero_()  # as in steps that vLLM runs to warm up
    server.decode(queries)
    counters.keep("a layer", queries, server.attention)
    counters.probe(1)
    counters.probe(0)
    del server.attention
    counters.probe(1)
    assert counters.probed.tolist() == [0, 0]


@pytest.mark.vllm
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or "KVSIFT_VLLM_MODEL" not in os.environ, reason=(
    "needs an NVIDIA GPU, vLLM for it, and KVSIFT_VLLM_MODEL, a model to serve"
))  # fmt: skip
def test_a_budget_that_covers_the_context_gives_the_tokens_of_the_stock_backend() -> None:
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (900, 40, 300)]
    answers = []
    for backend, more in (("FLASH_ATTN", {}), ("CUSTOM", {"kvsift": {"plan": "quest:budget=4096"}})):
        llm = LLM(
            os.environ["KVSIFT_VLLM_MODEL"], dtype="float16", max_model_len=2048, attention_backend=backend,
            additional_config=more, gpu_memory_utilization=0.3, max_num_seqs=4,
        )  # fmt: skip
        sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        answers.append([list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling)])
        del llm
    assert answers[0] == answers[1]
