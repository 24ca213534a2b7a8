"""--placement and kvsift bench split, as their user meets them."""

import json
import re
from pathlib import Path

import pytest
from cli.watched import Refused, Run

from kvsift import native

ASK = ("ask", "--plan", "quest:budget=128", "--question", "How many sacks?", "--max-new-tokens", 4, "--json")


def test_the_same_answer_comes_from_anywhere(run: Run, model: Path, text: Path) -> None:
    given = (*ASK, "--model", model, "--context", text, "--dtype", "float32")
    answers = {
        placement: run(*given, "--placement", placement).document
        for placement in ("device", "split", "offload:device_cache=64", "host")
    }
    assert len({answer["answers"][0]["text"] for answer in answers.values()}) == 1
    hits = {place: answer["phases"][0]["decode"]["device_cache_hits"] for place, answer in answers.items()}
    assert 0 < hits.pop("offload:device_cache=64") < 1
    assert set(hits.values()) == {None}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--placement", "of"), "unknown placement 'of'"),
        (("--placement", "offload:device_cach=5"), "did you mean 'device_cache'?"),
        (("--placement", "device:host_values=int8"), "is an option of placement=split and placement=offload"),
        (("--placement", "host", "--device", "cuda"), "not on cuda"),
        (("--kv-dtype", "int4"), "unknown kv_dtype 'int4'; did you mean 'int8'?"),
        (("--kv-dtype", "int8", "--placement", "split"), "in host memory. Leave the placement out, or kv_dtype."),
        (("--kv-dtype", "int8", "--plan", "h2o:budget=256:evict=true"), "keys and values are kept in 8 bits"),
        (("--placement", "offload", "--plan", "prefill=quoka:budget=256"), "with placement=offload prefill is dense"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(
    refused: Refused, model: Path, text: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in refused(*ASK, "--model", model, "--context", text, *arguments)


@pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--kinds", "flta"), "did you mean 'flat'?"),
        (("--shape", "tini"), "did you mean 'tiny'?"),
        (("--host-values", "int4"), "unknown host_values 'int4'"),
        (("--contexts", "1000M"), "of host memory"),
    ],
)
def test_what_cannot_be_measured_is_refused(refused: Refused, arguments: tuple[str, ...], says: str) -> None:
    assert says in refused("bench", "split", "--device", "cpu", *arguments)


@pytest.mark.skipif(not native.available(), reason="the compiled core is missing")
def test_split_and_offload_are_measured_beside_each_other(run: Run, tmp_path: Path) -> None:
    done = run(
        "bench", "split", "--shape", "tiny", "--contexts", "2K", "--kinds", "quest,offload", "--tokens", 1,
        "--layers", 1, "--device", "cpu", "--out", "split.json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert re.search(r"selected tokens on the device .*\n.*\n.*\n\| offload \|.* \d+% \|", done.out)
    result = json.loads((tmp_path / "split.json").read_text())
    assert [each["name"] for each in result["points"][0]["variants"]] == ["quest", "offload"]
    assert result["recipe"]["layers"] == 1
