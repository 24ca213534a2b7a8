"""Results as a fast machine might give them: the floor, a share more, and a few microseconds."""

from typing import Any

from kvsift_lab.bench.attention import NOT_EARLY, SEPARATE, AttentionRecipe, sparse_name
from kvsift_lab.bench.attention_variants import AttentionPoint
from kvsift_lab.bench.prefill import CEILING, PrefillLayerRecipe, PrefillRecipe
from kvsift_lab.bench.recipe import BenchRecipe

BANDWIDTH = {"used": 4.5e12, "measured": 4.4e12, "source": "given"}
MADE = {
    "commit": "0123456789abcdef",
    "versions": {"kvsift": "0.1", "python": "3.12.3", "torch": "2.11.0", "transformers": "5.17.0"},
    "machine": "NVIDIA H200",
    "gpu": {"name": "NVIDIA H200", "power.limit": "700.00 W", "libraries": {"cudnn": "91002", "flashinfer": "0.6.2"}},
    "bandwidth": BANDWIDTH,
}


def attention_result(contexts: tuple[int, ...] = (4096, 32768), fixed_us: float = 8.0) -> dict[str, Any]:
    """Sparse launches take ``fixed_us`` more than their floor, dense ones 2."""
    recipe = AttentionRecipe(contexts=contexts, repeats=3, breakdown=True)
    return _result("attention", recipe, [_attention_point(point, recipe, fixed_us) for point in recipe.points()])


def _result(kind: str, recipe: BenchRecipe, points: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": kind, "recipe": recipe.stored(), **MADE, "points": points}


def _attention_point(point: AttentionPoint, recipe: AttentionRecipe, fixed_us: float) -> dict[str, Any]:
    def samples(num_bytes: float, more_us: float) -> list[float]:
        return [(num_bytes / 4.5e12 + more_us / 1e6) * factor for factor in (1.0, 1.01, 0.99)]

    dense = {"role": "dense", "bytes": point.dense_bytes}
    variants: list[dict[str, Any]] = [
        {
            "name": sparse_name(kind), "role": "sparse", "bytes": point.sparse_bytes(kind), "error": 2e-3,
            "same_pages": 1.0, "score_gap": 0.0, "samples_s": samples(point.sparse_bytes(kind), fixed_us),
        }
        for kind in recipe.score_by
    ]  # fmt: skip
    variants += [
        dense | {"name": "sdpa-cudnn", "error": 1e-3, "samples_s": samples(point.dense_bytes, 2)},
        dense | {"name": "flashinfer", "reason": "flashinfer cannot be imported"},
        dense | {"name": "ours-dense", "error": 1e-3, "samples_s": samples(point.dense_bytes, 3)},
    ]
    breakdown = [
        {"name": name, "score_by": kind, "bytes": 1 << 20, "samples_s": [5e-6] * 3}
        for kind in recipe.score_by
        for name in (*SEPARATE, NOT_EARLY)
    ]
    return {
        "num_query_heads": point.num_query_heads, "num_kv_heads": point.num_kv_heads, "context": point.context,
        "batch": 1, "candidate_pages": point.counted[0], "visible_tokens": point.counted[1] * 16, "num_sets": 9,
        "variants": variants, "breakdown": breakdown, "seconds": 1.0,
    }  # fmt: skip


def decode_result() -> dict[str, Any]:
    """A context where the engine shows everything by itself, and one where it sifts."""
    recipe = {"model": "llama-3-8b", "random": True, "plan": "quest:budget=2048", "repeats": 3}
    return {"kind": "decode", "recipe": recipe, **MADE, "points": [_decode_point(4096, True), _decode_point(1 << 17)]}


def _decode_point(context: int, auto: bool = False) -> dict[str, Any]:
    def variant(name: str, num_bytes: float, factor: float) -> dict[str, Any]:
        samples = [num_bytes / 4.5e12 * factor * each for each in (1.0, 1.01, 0.99)]
        kernels = [
            {"name": "gemv", "launches": 64.0, "seconds": 3e-3},
            {"name": "sift", "launches": 30.0, "seconds": 1e-3},
        ]
        return {
            "name": name, "plan": name, "bytes": num_bytes, "kv_bytes": num_bytes - 15e9, "visible_tokens": 2048.0,
            "density": 0.02, "tpot_s": samples, "replay_s": samples, "kernels": kernels,
        }  # fmt: skip

    kv = 131072.0 * context
    variants = [variant("dense", 15e9 + kv, 1.1), variant("sifted", 15e9 + kv / 9, 1.2)]
    variants += [variant("auto", 15e9 + kv, 1.11)] if auto else []
    return {"context": context, "batch": 1, "dense_below": 9000, "variants": variants, "seconds": 2.0}


PREFILL_PLAN = "prefill=quoka:budget=1024"


def prefill_result(contexts: tuple[int, ...] = (32768,)) -> dict[str, Any]:
    """Twice as fast as dense, of a ceiling of four."""
    recipe = PrefillRecipe(contexts, (PREFILL_PLAN,), chunks=(8192,))
    seconds = {"dense, chunks of 8192": 1.2, PREFILL_PLAN: 0.6, CEILING: 0.3}
    variants = [{"name": name, "plan": name, "ttft_s": [each] * 3} for name, each in seconds.items()]
    points = [{"context": context, "variants": variants} for context in contexts]
    return _result("prefill", recipe, points)


def prefill_layer_result(whole: bool = True) -> dict[str, Any]:
    """Ten times as fast as the best dense kernel."""
    recipe = PrefillLayerRecipe((32768,), (PREFILL_PLAN,), 8192, whole)
    seconds = {"sdpa-flash": 2e-2, "sdpa-cudnn": 1e-2, PREFILL_PLAN: 1e-3}
    variants = [{"name": name, "samples_s": [each] * 3} for name, each in seconds.items()]
    return _result("prefill layer", recipe, [{"context": 32768, "variants": variants, "flops": 1e12}])
