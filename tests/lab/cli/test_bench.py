"""kvsift bench: refused without a GPU, told point by point, kept in a file."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from cli.watched import Refused, Run
from kvsift_lab.bench.attention_measure import AttentionBench
from kvsift_lab.bench.decode_measure import DecodeBench
from lab.bench.fake_results import BANDWIDTH, attention_result, decode_result

GPU = "times an NVIDIA GPU, and torch sees none here"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that answers at once."""
    name = "kvsift_lab.bench.machine"
    monkeypatch.setattr(f"{name}.require_gpu", lambda what: None)
    monkeypatch.setattr(f"{name}.bandwidth", lambda given: BANDWIDTH)
    monkeypatch.setattr(f"{name}.gpu_facts", lambda: attention_result()["gpu"])
    versions = {key: attention_result()[key] for key in ("commit", "versions", "machine")}
    monkeypatch.setattr("kvsift.engine.provenance.versions_and_machine", lambda device: versions)


@pytest.fixture
def attention(machine: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    result = attention_result()
    monkeypatch.setattr(AttentionBench, "run", lambda bench: iter(result["points"]))
    return result


@pytest.fixture
def decode(machine: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    result = decode_result()
    monkeypatch.setattr(DecodeBench, "of", lambda recipe: DecodeBench(recipe, None, None))  # type: ignore[arg-type]
    monkeypatch.setattr(DecodeBench, "run", lambda bench: iter(result["points"]))
    return result


@pytest.mark.parametrize("what", ["attention", "decode"])
def test_a_machine_without_a_gpu_is_refused(refused: Refused, what: str) -> None:
    assert refused("bench", what, "--out", "result.json").startswith(f"kvsift bench {what} {GPU}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("attention", "--contexts", "8K,3z"), "'3z' is not a token count. Write, for instance, 8K,32K,128K."),
        (("attention", "--shapes", "32"), "--shapes 32: give query heads/KV heads, for instance 32/8."),
        (("attention", "--shapes", "32/x"), "--shapes 32/x: give query heads/KV heads"),
        (("attention", "--shapes", "32/"), "--shapes 32/: give query heads/KV heads"),
        (("attention", "--shapes", "32/5"), "must be a multiple of the KV heads"),
        (("attention", "--score-by", "minmx"), "did you mean 'minmax'?"),
        (("attention", "--baselines", "flash"), "unknown baseline 'flash'"),
        (("attention", "--contexts", "130"), "must be a multiple of the page size"),
        (("attention", "--budget", "64"), "leaves nothing to select"),
        (("attention", "--score-by", ""), "there is nothing to measure"),
        (("attention", "--bandwidth", "0"), "--bandwidth 0 must be bytes per second"),
        (("attention", "--chart", "no/chart.svg"), "--chart no/chart.svg: the directory no does not exist."),
        (("attention", "--contexts", ""), "there is nothing to measure"),
        (("decode", "--shape", "llama-3-80b"), "did you mean 'llama-3-8b'?"),
        (("decode", "--batch", "1,0"), "--batch 1,0: give whole numbers, 1 or more"),
        (("decode", "--plan", "dense"), "it skips nothing"),
        (("decode", "--plan", "prefill=quoka"), "it has a rule for prefill alone, which kvsift bench prefill measures"),
        (("decode", "--plan", "quest:budget=16"), "leaves nothing to select"),
        (("decode", "--plan", "oracle_tokens:budget=128"), "does not rank pages by a summary"),
        (("decode", "--contexts", ""), "there is nothing to measure"),
        (("decode", "--out", "no/result.json"), "the directory no does not exist."),
        (("prefill", "--part", "head"), "--part head must be ttft, layer or chunk."),
        (("prefill", "--plans", "quest:budget=1024"), "prefills densely"),
        (("prefill", "--part", "chunk", "--plans", "prefill=quka"), "did you mean 'quoka'?"),
        (("prefill", "--chunk", "0"), "--chunk 0: give whole numbers, 1 or more"),
        (("prefill", "--shape", "huge"), "unknown shape 'huge'"),
        (("prefill", "--plans", ";"), "there is nothing to measure"),
        (("prefill", "--part", "layer", "--max-seconds", "9"), "--max-seconds works with --part ttft only"),
        (("prefill", "--part", "layer", "--contexts", ""), "there is nothing to measure"),
        (("prefill", "--part", "layer", "--heads", "4/3"), "must be a multiple of the KV heads"),
        (("serve", "--contexts", "3z"), "'3z' is not a token count"),
        (("serve", "--contexts", "64"), "give 256 tokens or more"),
        (("serve", "--contexts", "512", "--unread", "512"), "--unread 512 must be less than the shortest context, 512"),
        (("serve", "--contexts", "128K"), "the model has 65536. Give shorter --contexts"),
        (("serve", "--plans", "qest"), "did you mean 'quest'?"),
        (("serve", "--plans", "dense"), "dense is measured in any case"),
        (("serve", "--plans", "quest;quest"), "names a plan twice"),
        (("serve", "--plans", ";"), "there is nothing to measure"),
        (("serve", "--rate", "-1"), "--rate -1 must be a number of questions per second"),
        (("serve", "--rate", "nan"), "--rate nan must be"),
        (("serve", "--url", "localhost:8000"), "must begin with http://"),
        (("serve", "--url", "http://localhost:1", "--direct"), "Leave out --url or --direct"),
        (("serve", "--url", "http://localhost:1", "--threads", "1"), "Leave out --url or --threads"),
        (("serve", "--model", "no/model/here"), "no/model/here"),
        (("split", "--kinds", "offlaod"), "did you mean 'offload'?"),
        (("split", "--host-values", "int4"), "int8"),
        (("split", "--shape", "llama"), "llama-3-8b"),
        (("split", "--contexts", ""), "at least one context"),
        (("split", "--scanned", "1"), "must be a share of the keys"),
        (("chart", "no.json", "--out", "chart.svg"), "the result file no.json does not exist."),
    ],
)
def test_what_makes_no_sense_is_refused(refused: Refused, arguments: tuple[str, ...], says: str) -> None:
    assert says in refused("bench", *arguments)


def test_the_help_of_a_bench_says_that_it_needs_a_gpu(run: Run) -> None:
    assert "on an NVIDIA GPU" in " ".join(run("bench", "decode", "--help").out.split())


def test_attention_tells_every_point_and_ends_with_tables_of_all(
    run: Run, attention: dict[str, Any], tmp_path: Path
) -> None:
    outcome = run("bench", "attention", "--contexts", "4K,32K", "--out", "result.json", "--chart", "chart.svg")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("floors at 4.50 TB/s (given); a large read here reached 4.40 TB/s\n")
    assert outcome.out.count("best dense sdpa-cudnn:\n") == 4
    assert "32 query heads, 8 KV heads, microseconds:" in outcome.out
    assert "faster than the best dense kernel from" in outcome.out
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["points"] == json.loads(json.dumps(attention["points"]))
    assert written["recipe"]["contexts"] == [4096, 32768]
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "chart.svg"}


def test_a_run_that_is_cut_short_leaves_what_was_measured(
    run: Run, attention: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(bench: AttentionBench) -> Any:
        yield attention["points"][0]
        raise KeyboardInterrupt

    monkeypatch.setattr(AttentionBench, "run", cut_short)
    assert run("bench", "attention", "--out", "result.json").code == 130
    assert len(json.loads((tmp_path / "result.json").read_text())["points"]) == 1


def test_decode_tells_every_point_and_ends_with_a_table(run: Run, decode: dict[str, Any], tmp_path: Path) -> None:
    outcome = run("bench", "decode", "--contexts", "4K,128K", "--batch", "1", "--out", "result.json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("the engine sifts from 9,000 tokens on") == 2
    assert outcome.out.splitlines()[-1].startswith("| 128K | 1 | ")
    assert json.loads((tmp_path / "result.json").read_text())["points"] == decode["points"]


def test_prefill_runs_anywhere_and_keeps_what_it_measured(run: Run, tmp_path: Path) -> None:
    kept, plan = tmp_path / "prefill.json", "prefill=quoka:budget=160:chunk=128:dense_layers=none"
    arguments = ("--contexts", "512", "--chunk", "128", "--repeats", "1", "--plans", plan, "--device", "cpu")
    found = run("bench", "prefill", "--shape", "tiny", *arguments, "--out", kept)
    assert "ms" in found.out
    assert plan in found.out
    assert json.loads(kept.read_text())["points"][0]["context"] == 512
    for part in ("layer", "chunk"):
        found = run("bench", "prefill", "--part", part, "--heads", "4/2", *arguments, "--json")
        assert json.loads(found.out)["recipe"]["whole"] == (part == "layer")


def test_a_result_is_drawn_later(run: Run, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(attention_result()))
    assert run("bench", "chart", "result.json", "--out", "chart.svg").code == 0
    assert (tmp_path / "chart.svg").read_text().startswith("<?xml")
    (tmp_path / "packed.json.xz").write_bytes(lzma.compress(json.dumps(attention_result()).encode()))
    for name in ("packed.json", "packed.json.xz"):
        assert run("bench", "chart", name, "--out", "packed.svg").code == 0
        assert (tmp_path / "packed.svg").read_bytes() == (tmp_path / "chart.svg").read_bytes()
    assert "charts are drawn as .svg or .png" in refused("bench", "chart", "result.json", "--out", "chart.pdf")
    (tmp_path / "result.json").write_text(json.dumps(decode_result()))
    assert "is not a result of kvsift bench attention" in refused("bench", "chart", "result.json", "--out", "other.svg")
    (tmp_path / "result.json").write_text("{")
    assert "is not JSON" in refused("bench", "chart", "result.json", "--out", "other.svg")
