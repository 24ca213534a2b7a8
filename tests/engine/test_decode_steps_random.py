"""Random plans, batches, samplings and stops: captured steps, run as they are, against the composed path."""

import random
from pathlib import Path
from typing import Any

import pytest
from engine.tiny_directory import text_of, write_model

from kvsift import LLM, Sampling
from kvsift.engine.graphs import sequence_groups

COUNTERS = ("queries", "visible_tokens", "density", "sparse_queries", "kv_bytes_dense", "recall")


def random_plan(rng: random.Random) -> str:
    page_size = rng.choice([4, 8, 16, 32])
    size = rng.choice(
        [f"budget={rng.randint(5, 12) * page_size + rng.randint(0, page_size)}", "ratio=0.1", "ratio=0.5"]
    )
    knobs = {
        "page_size": page_size,
        "window": rng.choice([1, page_size, 2 * page_size]),
        "sinks": rng.choice([0, 4, page_size]),
        "score_by": rng.choice(["minmax", "mean_std", "log_mass", "centroid_radius", "minmax_fp8"]),
        "heads": rng.choice(["auto", "query", "kv"]),
        "dense_layers": rng.choice(["none", "0", "0+1", "2"]),
        "min_context": rng.choice([0, 100]),
    }
    return f"quest:{size}:" + ":".join(f"{key}={value}" for key, value in knobs.items())


def random_batch(rng: random.Random) -> tuple[list[str], dict[str, Any]]:
    seqs = rng.choice([1, 2, 3, 5])
    sampling = [Sampling(rng.choice([0, 0, 0.7, 1.3]), rng.choice([1.0, 0.8]), rng.randint(0, 99)) for _ in range(seqs)]
    stop = rng.choice([None, "e", ["a", "th"]])
    texts = [text_of(rng.randint(3, 400)) for _ in range(seqs)]
    return texts, {"max_new_tokens": rng.randint(1, 40), "sampling": sampling, "stop": stop}


@pytest.mark.parametrize("seed", range(3))
def test_random_batches_answer_as_on_the_composed_path(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    directory = write_model(tmp_path, ["Llama", "Qwen3", "Phi3"][seed % 3], num_key_value_heads=rng.choice([1, 2, 4]))
    fast, slow = LLM(directory, path="eager"), LLM(directory)
    for _ in range(5):
        monkeypatch.setattr(sequence_groups, "MOVE_STEPS", rng.choice([1, 512]))
        plan, (texts, options) = random_plan(rng), random_batch(rng)
        for one, other in zip(fast.generate(texts, plan=plan, **options), slow.generate(texts, plan=plan, **options)):
            said = plan, len(texts), options
            assert (one.path, one.token_ids, one.text) == ("eager", other.token_ids, other.text), said
            for key in COUNTERS:
                assert one.decode(key) == (other.decode(key) and pytest.approx(other.decode(key))), (key, *said)
