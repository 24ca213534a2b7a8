"""Small runs of both benchmarks on a GPU, captured."""

import pytest
import torch
from kvsift_lab.bench import attention_variants, machine
from kvsift_lab.bench.attention import AttentionRecipe
from kvsift_lab.bench.attention_measure import AttentionBench
from kvsift_lab.bench.decode import DecodeRecipe
from kvsift_lab.bench.decode_measure import DecodeBench
from kvsift_lab.bench.timing import graph_clock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_is_timed_and_right(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_variants, "COLD_BYTES", 1 << 26)
    dense = ("sdpa-flash", "sdpa-cudnn", "ours-dense")
    recipe = AttentionRecipe(((8, 8), (8, 2)), (4096, 8192), batch, repeats=3, baselines=dense, breakdown=True)
    for point in AttentionBench(recipe, graph_clock, DEVICE).run():
        timed = {variant["name"]: variant for variant in point["variants"] if "samples_s" in variant}
        assert {"quest-minmax", "quest-minmax_fp8", "ours-dense"} <= set(timed)
        assert len(timed) > 3, "no kernel of torch ran"
        assert all(1e-7 < sample < 1e-2 for variant in timed.values() for sample in variant["samples_s"])
        for name in ("quest-minmax", "quest-minmax_fp8"):
            assert timed[name]["same_pages"] > 0.99
        assert all("samples_s" in piece for piece in point["breakdown"])


def test_decoding_is_timed_dense_and_sifted() -> None:
    plan = "quest:budget=512:dense_layers=none"
    recipe = DecodeRecipe("tiny", True, contexts=(8192,), batches=(1, 2), plan=plan, steps=4, repeats=2, profile=True)
    for point in DecodeBench.of(recipe).run():
        assert "reason" not in point
        dense, sifted = point["variants"][:2]
        assert dense["density"] == 1
        assert sifted["density"] == pytest.approx(512 / 8194, rel=0.05)
        for variant in (dense, sifted):
            assert all(seconds > 0 for seconds in variant["tpot_s"] + variant["replay_s"])
            assert variant["kernels"]


def test_the_machine_says_what_it_is_and_how_fast_it_reads() -> None:
    facts, speed = machine.gpu_facts(), machine.bandwidth(1e12)
    assert facts["name"] == torch.cuda.get_device_name(0)
    assert speed["used"] == 1e12
    assert 1e10 < speed["measured"] < 1e14
