"""The backend for GPUs over a stock one that only writes tokens, on a CPU: what layers keep, and what they attend."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvsift.methods.common.anchors import AnchorMap, Reuse, write
from kvsift.types import LayerShape
from kvsift.vllm.engine_state import EngineState
from kvsift.vllm.gpu_counters import GpuCounters
from kvsift.vllm.gpu_decode import BlockBatch
from kvsift.vllm.settings import Settings

HEADS, GROUP, DIM, BLOCK, BLOCKS, LENGTHS = 2, 4, 32, 16, 80, [900, 40, 300]
REUSE = {3: Reuse(2, (1, 0), 1.0), 5: Reuse(4, (0, 1), 1.0)}  # layers 0 and 1 are dense


class Model:
    """Six layers under a plan with anchors, whose file is gone."""

    def __init__(self, backend: Any, file: Any) -> None:
        write(file, AnchorMap(("tiny", [1.0]), (2, 4), REUSE, (0, 1), {}))
        settings = Settings.read({"kvsift": {"plan": f"sketch:budget=128:anchors={file}", "plans": ["dense"]}})
        assert settings is not None
        assert settings.anchor_layers == {2, 4}
        file.unlink()
        self.state = EngineState(settings, max_length=1024, on_gpu=True)
        shape = LayerShape(-1, HEADS * GROUP, HEADS, DIM, DIM**-0.5)
        self.batch = BlockBatch(
            settings.decode_rules, shape, 4, 1024, 0, torch.device("cpu"), True, settings.anchor_layers,
            self.state.lists,
        )  # fmt: skip
        facts = {
            "_config": SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4)), "_dtype": torch.float32,
            "_state": self.state, "_sparse": None, "_index": -1, "_reuse": None, "_layer": None, "_attention": None,
            "_cache": None, "num_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_size": DIM, "scale": DIM**-0.5,
            "logits_soft_cap": 0, "sinks": None, "kv_cache_dtype": "auto", "_pdl": False,
        }  # fmt: skip
        self.layers = [object.__new__(backend.SparseFlashImpl) for _ in range(6)]
        for layer in self.layers:
            layer.__dict__.update(facts)
        self.names = [f"model.layers.{index}.self_attn.attn" for index in range(6)]
        self.counters = GpuCounters(self.batch, self.names[2:], 1, torch.float32, 1.0, 1.0)
        self.caches = [torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM).transpose(1, 2) for _ in self.layers]
        self.table = torch.zeros(len(LENGTHS), 64, dtype=torch.int32)
        held = [-(-length // BLOCK) for length in LENGTHS]
        for row, blocks in enumerate((torch.randperm(BLOCKS - 1) + 1)[: sum(held)].split(held)):
            self.table[row, : len(blocks)] = blocks

    def write(self, index: int, row: int, cache: torch.Tensor | None = None) -> None:
        positions = torch.arange(LENGTHS[row])
        slots = self.table[row].long()[positions // BLOCK] * BLOCK + positions % BLOCK
        tokens = torch.randn(2, len(positions), HEADS, DIM)
        name = SimpleNamespace(layer_name=self.names[index])
        self.layers[index].do_kv_cache_update(name, *tokens, self.caches[index] if cache is None else cache, slots)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
    from kvsift.vllm import gpu_backend

    def update(self: Any, layer: Any, keys: Any, values: Any, cache: Any, slots: torch.Tensor) -> None:
        cache.transpose(1, 2)[slots // BLOCK, slots % BLOCK] = torch.cat([keys, values], -1)

    def forward(self: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any) -> Any:
        return output.fill_(-1)

    monkeypatch.setattr(gpu_backend.FlashAttentionImpl, "do_kv_cache_update", update)
    monkeypatch.setattr(gpu_backend.FlashAttentionImpl, "forward", forward)
    monkeypatch.setattr(gpu_backend, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return gpu_backend


@pytest.mark.vllm
def test_layers_that_reuse_keep_no_summaries_and_attend_what_others_chose(backend: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Model(backend, tmp_path / "anchors.json")
    for index in range(6):
        for row in range(len(LENGTHS)):
            model.write(index, row)
    assert [layer._layer and layer._layer.rows is not None for layer in model.layers] == [
        None,
        None,
        *[True, False] * 2,
    ]
    rule = model.state.settings.plan.decode
    model.batch.set_rules([rule, rule, None])
    step = backend.GpuStep(len(LENGTHS), model.batch, model.counters)
    metadata = SimpleNamespace(kvsift=step, block_table=model.table, seq_lens=torch.tensor(LENGTHS).int())
    scales = {"_q_scale_float": 1.0, "_k_scale_float": 1.0, "_v_scale_float": 1.0}
    for index, (layer, name) in enumerate(zip(model.layers, model.names)):
        query = torch.randn(len(LENGTHS), HEADS * GROUP, DIM)
        output, own = torch.zeros_like(query), query[:, :HEADS]
        layer.forward(
            SimpleNamespace(layer_name=name, **scales), query, own, own, model.caches[index], metadata, output
        )
        if index < 2:
            assert bool((output == -1).all())
            continue
        positions = torch.arange(LENGTHS[0])
        keys, values = model.caches[index].transpose(1, 2)[
            model.table[0].long()[positions // BLOCK], positions % BLOCK
        ].transpose(0, 1).chunk(2, -1)  # fmt: skip
        if (reuse := REUSE.get(index)) is not None:
            units, counts = (memory[0, list(reuse.heads)] for memory in model.state.lists[reuse.anchor])
            listed = torch.zeros(HEADS, LENGTHS[0], dtype=torch.bool).scatter(1, units[:, : counts[0]].long(), True)
            assert listed.sum(1).tolist() == [128, 128]
            logits = torch.einsum("hgd,hnd->hgn", query[0].view(HEADS, GROUP, DIM), keys) * DIM**-0.5
            weights = logits.masked_fill(~listed.unsqueeze(1), -torch.inf).softmax(-1)
            expected = torch.einsum("hgn,hnd->hgd", weights, values).flatten(0, 1)
            torch.testing.assert_close(output[0], expected, atol=1e-5, rtol=1e-5)
    tally = model.counters.counted(model.counters.sums().tolist())
    assert (tally.queries, tally.sparse_queries, tally.index_bytes_read) == (12, 4, 900 * 2)
    kept = sum(memory.nbytes for lists in model.state.lists.values() for memory in lists)
    assert model.layers[0]._kept_list_bytes() == kept
    assert model.state.settings.summarised_share == pytest.approx(4 / 6)
    for index in (2, 3):  # vLLM replaces a cache after its trial steps
        old = weakref.ref(model.layers[index]._layer)
        model.write(index, 1, torch.zeros(BLOCKS + 1, BLOCK, HEADS, 2 * DIM).transpose(1, 2))
        gc.collect()
        assert old() is None


@pytest.mark.vllm
def test_attention_starts_early_where_no_prompt_is_read(
    backend: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, begins = Model(backend, tmp_path / "anchors.json"), list[bool]()
    attend = backend.DecodeLayer.attend

    def noted(self: Any, queries: torch.Tensor, mode: Any, early: bool, out: torch.Tensor) -> None:
        begins.append(early)
        attend(self, queries, mode, out=out)

    monkeypatch.setattr(backend.DecodeLayer, "attend", noted)
    for layer in model.layers:
        layer._pdl = True
    scales = {"_q_scale_float": 1.0, "_k_scale_float": 1.0, "_v_scale_float": 1.0}
    for rest in (None, object()):  # a prompt that is read in the same step
        step = backend.GpuStep(len(LENGTHS), model.batch, model.counters, rest)
        metadata = SimpleNamespace(kvsift=step, block_table=model.table, seq_lens=torch.tensor(LENGTHS).int())
        for layer, name, cache in zip(model.layers, model.names, model.caches):
            query, key = torch.randn(4, HEADS * GROUP, DIM), torch.randn(4, HEADS, DIM)
            of_layer = SimpleNamespace(layer_name=name, **scales)
            layer.forward(of_layer, query, key, key, cache, metadata, torch.zeros_like(query))
    assert begins == [False, True, True, True] + [False] * 4
