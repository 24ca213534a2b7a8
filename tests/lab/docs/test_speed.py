"""Pages about speed: rendered from results, and sensible without."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from kvsift_lab import stored
from kvsift_lab.bench import BENCHES
from kvsift_lab.docs import speed
from lab.bench.fake_results import attention_result, decode_result, prefill_layer_result, prefill_result

IN_VLLM = {
    "machine": "NVIDIA H200", "versions": {"vllm": "0.26.0"}, "points": [
        {"call": call, "plan": plan, "context": 32768, "batch": 4, "tpot_ms": call * times}
        for call, plan, times in ((1, "sketch", 3.0), (1, "stock", 6.0), (2, "stock", 4.0), (2, "quest", 4.5))
    ],
}  # fmt: skip
BESIDE_VLLM = {"call": 2, "points": [
    {"context": 32768, "batch": 4, "variants": [{"plan": "quest", "tpot_s": [0.007, 0.005, 0.006]}]}
]}  # fmt: skip
CHATS = {
    "machine": "NVIDIA H200", "commit": "0123456789",
    "recipe": {"chats": 8, "documents": 2, "tokens": 131072, "plans": ["dense", "quest"]}, "points": [
        {"part": "round", "plan": plan, "all_tokens_per_s": speed, "second_question_alone_s": 0.1,
         "second_question_s": 0.2}
        for plan, speed in (("dense", 300), ("quest", 900), ("dense", 300), ("quest", 960), ("quest", 100))
    ],
}  # fmt: skip
ACCEPTED = {
    "points": [
        {"length": 4096, "task": task, "plan": "sketch", "tokens": tokens, "drafts_accepted": right,
         "drafts_wrong": wrong, "repeats_accepted": repeats, "repeated": 2 * repeats}
        for task, tokens, right, wrong, repeats in (("needle", 9, 3, 0, 0), ("vt", 10, 9, 1, 4), ("cwe", 20, 6, 4, 0))
    ]
}  # fmt: skip
EXACT = {
    "recipe": {"tokens": 32000}, "threads": 2, "level": "avx512", "commit": "0123456789", "points": [
        {"task": "prose", "plan": plan, "tokens": 30, "accepted": share, "speedup": 1.5,
         "speedup_without_repeats": 1.25, "dense_seconds": [0.010, 0.011], "last": [{"verified": {"0": 2, "3": 8}}]}
        for plan, share in (("sketch", 0.95), ("dense", None))
    ],
}  # fmt: skip
RESULTS = Path(__file__).parents[3] / "results"
ALSO = (  # results that the table of a page is made of as they are
    "serve-cpu", "busy-machine", "generation-recall-cpu", "host-cpu", "host-sketch-cpu",
    "index-st-cpu", "index-p-cpu", "split-h200", "split-sketch-h200",
)  # fmt: skip


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, over results of its own; there are none yet."""
    monkeypatch.setattr(speed, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "docs").mkdir()
    return speed


CAPTURED_EXACT = {
    "machine": "NVIDIA H200", "commit": "0123456789ab", "versions": {"torch": "2.11.0"},
    "gpu": {"power.limit": "700.00 W"},
    "points": [
        {"tokens": 131072, "rows": 4, "run": "dense", "ratio": 1.0, "samples": [{"seconds": 0.02}] * 2},
        {
            "tokens": 131072, "rows": 4, "run": "sketch 0.94", "ratio": 2.0,
            "samples": [{"seconds": 0.01, "verified": {"3": 1, "7": 1}, "draft_s": 0.005, "verify_s": 0.021}],
        },
    ],
}  # fmt: skip


def measured(folder: Path) -> None:
    results = {
        "attention-h200": attention_result(), "decode-h200": decode_result(), "prefill-h200": prefill_result(),
        "prefill-256k-h200": prefill_result((262144,)), "prefill-layer-h200": prefill_layer_result(),
        "prefill-chunk-cpu": prefill_layer_result(whole=False),
        "prefill-layer-cpu": prefill_layer_result(),
        "attention-sketch-h200": attention_result(), "decode-sketch-h200": decode_result(),
        "decode-anchors-h200": decode_result(), "vllm-h200": IN_VLLM, "vllm-sketch-h200": IN_VLLM,
        "decode-beside-vllm-h200": BESIDE_VLLM,
        "chats-h200": CHATS, "exact-native-cpu": EXACT, "exact-acceptance-cpu": ACCEPTED,
        "exact-h200": CAPTURED_EXACT, "exact-acceptance-h200": ACCEPTED,
        **{name: stored.load(RESULTS / name) for name in ALSO},
    }  # fmt: skip
    for name, result in results.items():
        stored.save(folder / "results" / name, result)


def rendered(pages: ModuleType) -> dict[str, str]:
    """Every block that a bench makes: not those of evaluations, and of studies that are history."""
    own = {name for blocks in pages.BLOCKS.values() for name in blocks} - {"answers", "by-block", "by-block-answers"}
    return {name: render() for blocks in pages.BLOCKS.values() for name, render in blocks.items() if name in own}


def test_without_results_pages_say_how_to_make_them(pages: ModuleType) -> None:
    for text in rendered(pages).values():
        for line in text.splitlines():
            bench = re.fullmatch(
                r"Not measured yet: `kvsift bench ([a-z-]+) --out results/\S+`, then `make docs`.", line
            )
            assert bench[1] in BENCHES
    assert list(pages.stale_charts()) == []


def test_results_become_tables(pages: ModuleType, tmp_path: Path) -> None:
    measured(tmp_path)
    text = rendered(pages)
    assert "Not measured yet" not in "".join(text.values())
    assert "](attention-h200.svg)" in text["attention"]
    assert "NVIDIA H200, 700.00 W, torch 2.11.0, commit 0123456789" in text["attention"]
    assert "sparse 2.0e-03" in text["attention"]
    assert "- `sdpa-cudnn`: SDPA cuDNN (torch 2.11.0, cuDNN 9.10.2)" in text["dense"]
    assert "- not measured: flashinfer: flashinfer cannot be imported" in text["dense"]
    assert "Milliseconds per token, the shape of llama-3-8b with random weights" in text["decode"]
    token, layer, first = text["speed"].splitlines()
    assert token.startswith(
        "- **One token** of the shape of llama-3-8b with random weights under `quest:budget=2048`: 4K "
    )
    assert "32/8 heads, 32K: `quest-minmax` " in layer
    assert "fastest dense kernel (sdpa-cudnn) " in layer
    assert "`prefill=quoka:budget=1024` 0.600 s (2.00x); dense 1.200 s. `results/prefill-h200`: NVIDIA H200" in first
    assert "| 32K | 1.200 | chunks of 8192 | 0.600 | 2.00x | 4.00x |" in text["prefill"]
    assert "| 256K | 1.200 |" in text["prefill"]
    assert "| 32K | `prefill=quoka:budget=1024` | 1.00 |  | 10.00x |" in text["prefill-layer"]
    assert (
        "| `sketch` | 32K | 4 | 6.00 | 3.00 | 2.00x |  |\n| `quest` | 32K | 4 | 8.00 | 9.00 | 0.89x | 6.00 |"
        in text["vllm"]
    )
    assert "| H200 | 8 | 2 of 128K | `quest` | 900 | 3.00x | 0.10 s | 0.20 s |" in text["chats"]
    assert "| prose | `sketch` | 0.950 | 1.50x | 1.25x | 3.0 |\n| prose | none |  | 1.50x |" in text["exact"]
    assert "10.0 to 11.0 ms a token" in text["exact"]
    assert "| 4,096 | RULER, 13 tasks | 30 | 0.750 of 20 | 0.50 of 8 |" in text["exact-acceptance"]
    assert "| 4,096 | needle | 9 | 1.000 of 3 |  |" in text["exact-acceptance"]
    assert "| 128K | 4 | dense |  | 20.00 | 1.00x |  |  |  |" in text["exact-captured"]
    assert "| 128K | 4 | `sketch` | 0.94 | 10.00 | 2.00x | 5.0 | 5.00 | 21.00 |" in text["exact-captured"]
    assert "commit 0123456789; 1 to 2 rounds" in text["exact-captured"]
    assert "`results/exact-acceptance-h200`: " in text["exact-acceptance-captured"]
    for name in ("break-even", "serve", "breakdown", "losses", "decode", "engine", "kernels"):
        assert text[name].count("|---") >= 1, name


def test_a_chart_is_drawn_once_for_each_result(pages: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="charts are drawn with matplotlib, of the extra bench")
    measured(tmp_path)
    for path, result in pages.stale_charts():
        pages.draw(path, result)
    assert (tmp_path / pages.CHART).is_file()
    assert list(pages.stale_charts()) == []
    stored.save(tmp_path / "results" / pages.ATTENTION, attention_result(fixed_us=1.0))
    assert [path.name for path, _ in pages.stale_charts()] == ["attention-h200.svg"]
