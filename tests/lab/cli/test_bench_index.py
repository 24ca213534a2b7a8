"""kvsift bench dump, index and host: one feeds the next, and what makes no sense is refused before anything runs."""

import json
import sys
from pathlib import Path

import pytest
from cli.watched import Refused, Run
from kvsift_lab.bench.qk_dump import Dump

SMALL = ("--heads", "2/1", "--head-dim", 32, "--samples", 80, "--repeats", 1, "--threads", 1)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidths are not what is tested."""
    monkeypatch.setattr("kvsift_lab.bench.host_timing.READ_BYTES", 8 << 20)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("dump", "--out", "no/a.safetensors"), "the directory no does not exist."),
        (("dump", "--out", "a", "--question", "Who?"), "give it with --context"),
        (("dump", "--out", "a", "--context", "{text}"), "needs at least one --question"),
        (("dump", "--out", "a", "--layers", "x"), "give all, or numbers from 0 on"),
        (("dump", "--out", "a", "--layers", "9"), "there is no layer 9"),
        (("dump", "--out", "a", "--length", "1K,2K"), "give one number of tokens"),
        (("dump", "--out", "a", "--task", "needl"), "did you mean 'needle'?"),
        (("dump", "--out", "a", "--length", "10"), "cannot be made"),
        (
            ("dump", "--out", "a", "--context", "{text}", "--question", "Who?", "--length", "2K"),
            "the text has only 900 tokens",
        ),
        (("index", "--data", "X"), "unknown data set 'X'"),
        (("index", "--data", "P"), "kvsift bench dump --out FILE makes one"),
        (("index", "--data", "P", "--dump", "no.safetensors"), "the dump no.safetensors does not exist."),
        (("index", "--indexes", "hns"), "did you mean 'hnsw'?"),
        (("index", "--dump", "a.safetensors"), "belong together"),
        (("index", "--data", ""), "there is nothing to measure"),
        (("index", "--contexts", ""), "at least one context"),
        (("index", "--heads", "32"), "--heads 32: give query heads/KV heads"),
        (("index", "--heads", "32/5"), "must be a multiple of the KV heads"),
        (("index", "--head-dim", "100"), "must be a multiple of 8"),
        (("index", "--k", "x"), "'x' is not a token count"),
        (("index", "--target", "2"), "--target 2 must be a recall above 0, and 1 at most"),
        (("host", "--contexts", "1K"), "less than twice the budget"),
        (("host", "--contexts", ""), "at least one context"),
        (("host", "--budget", "8"), "less than a page of 16"),
        (("host", "--heads", "4/3"), "must be a multiple of the KV heads"),
        (("host", "--data", "P"), "unknown data set 'P'"),
        (("host", "--tokens", "0"), "--tokens 0: give whole numbers"),
        (("host", "--index", "tree"), "unknown index 'tree'"),
        (("host", "--out", "no/a.json"), "the directory no does not exist."),
    ],
)
def test_what_makes_no_sense_is_refused(
    refused: Refused, model: Path, text: Path, arguments: tuple[str, ...], says: str
) -> None:
    given = tuple(str(each).replace("{text}", str(text)) for each in arguments)
    of_model = ("--model", model) if given[0] == "dump" else ()
    assert says in refused("bench", *given, *of_model)


def test_a_dump_of_a_text_is_searched(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    asked = ("--question", "How many sacks?", "--question", "Which mill?")
    made = run(
        "bench", "dump", "--model", model, "--context", text, *asked, "--length", 800, "--layers", "1,2",
        "--max-new-tokens", 2, "--out", "text.safetensors",
    )  # fmt: skip
    assert made.code == 0, made.err
    assert made.out.startswith("text.safetensors: 800 tokens of ")
    dump = Dump(tmp_path / "text.safetensors")
    assert (dump.length, dump.layers) == (800, [1, 2])
    assert dump.about["questions"] == ["How many sacks?", "Which mill?"]
    found = run(
        "bench", "index", "--data", "P", "--dump", "text.safetensors", "--k", "5", "--indexes", "flat",
        "--tokens", 4, "--repeats", 1, "--out", "result.json",
    )  # fmt: skip
    assert found.code == 0, found.err
    assert "P text layer 1, 160 keys" in found.out
    assert "medians" in found.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert [point["case"] for point in result["points"]] == ["P text layer 1", "P text layer 2"]
    assert all(point["indexes"][0]["recall"] == 1 for point in result["points"])
    assert result["recipe"]["ks"] == [5]


def test_a_generated_document_is_dumped(run: Run, model: Path, tmp_path: Path) -> None:
    made = run("bench", "dump", "--model", model, "--length", "1K", "--questions", 2, "--out", "kv.safetensors")
    assert made.code == 0, made.err
    assert Dump(tmp_path / "kv.safetensors").length == 1024
    assert "key_value, seed 0" in made.out


def test_what_is_not_installed_is_said_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    told = run(
        "bench", "index", *SMALL, "--data", "T", "--contexts", 256, "--k", "4,8", "--tokens", 2,
        "--indexes", "flat,faiss_flat,ivf,hnsw",
    ).out  # fmt: skip
    assert told.count("faiss_flat, ivf, hnsw: the indexes ivf, hnsw and faiss_flat need faiss") == 1
    assert told.count("pip install") == told.count("pip install faiss-cpu") == 1


def test_index_and_host_end_with_one_document(run: Run) -> None:
    of_index = run(
        "bench", "index", *SMALL, "--data", "T", "--contexts", 256, "--k", 4, "--indexes", "flat", "--tokens", 2,
        "--json",
    ).document  # fmt: skip
    assert [point["keys"] for point in of_index["points"]] == [256]
    assert of_index["threads"] == 1
    of_host = run(
        "bench", "host", *SMALL, "--contexts", 256, "--budget", 32, "--tokens", 9, "--top", 4, "--index", "flat",
        "--json",
    ).document  # fmt: skip
    assert [point["context"] for point in of_host["points"]] == [256]
    assert {"commit", "versions", "machine", "recipe"} <= set(of_host)
