"""Studies run by their command, their points say what was measured, and their tables what the points say."""

import sys
from pathlib import Path
from typing import Any

import pytest
from cli.watched import Refused, Run
from kvsift_lab import stored
from kvsift_lab.studies.long_answers import parts_at, repeated
from kvsift_lab.studies.vllm_engine import LLAMA_3_8B, with_anchors
from models.gguf_files import write_gguf

from kvsift.methods.common.anchors import Reuse
from kvsift.types import LayerShape
from kvsift.vllm.settings import Settings

RECIPE = """
tasks = ["passkey"]
length = 700
questions_per_task = 1
questions_per_context = 1
device = "cpu"
dtype = "bfloat16"
references = false
plans = [
  "quest:budget={budget}",
  "quest:score_by=minmax_fp8:budget={budget}",
  "quest:prefilter=1:block_pages=4:budget={budget}",
]
budgets = [64, 690]
settings = ":sinks=4:window=16"
"""


def test_long_answers_are_compared_with_dense_ones() -> None:
    assert parts_at([1, 2, 3], [1, 2, 3]) is None
    assert parts_at([1, 5, 3], [1, 2, 3]) == 1
    assert parts_at([1, 2], [1, 2, 3]) == 2
    assert repeated(list(range(40))) == 0.0
    assert repeated([7] * 116) == 1 - 1 / 101
    assert repeated([1, 2]) == 0.0


@pytest.mark.parametrize("plan", ["sketch:budget={budget}", "streaming_llm:budget={budget}", "dense"])
def test_plans_that_rank_no_pages_are_not_compared_by_their_pages(plan: str, refused: Refused, tmp_path: Path) -> None:
    lines = RECIPE.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("plans"))
    lines.insert(first + 1, f'  "{plan}",')
    (tmp_path / "recipe.toml").write_text("\n".join(lines))
    assert "compares which pages plans choose in decode" in refused(
        "bench", "summary-recall", "--recipe", "recipe.toml"
    )


def test_anchors_of_random_weights_fit_their_model(tmp_path: Path) -> None:
    settings = Settings.read({"kvsift": {"plan": with_anchors("sketch:budget=1024", 6, tmp_path / "anchors.json")}})
    assert settings is not None
    assert sorted(settings.anchor_layers) == [2, 7, 12, 17, 22, 27]
    heads = tuple(reversed(range(LLAMA_3_8B["num_key_value_heads"])))
    shape = LayerShape(LLAMA_3_8B["num_hidden_layers"] - 1, 32, len(heads), 128, 1.0)
    assert settings.reuse(settings.plan.decode, shape) == Reuse(27, heads, 1.0)


@pytest.mark.slow
def test_plans_are_compared_on_the_same_queries(run: Run, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    assert run("bench", "summary-recall", "--recipe", "recipe.toml", "--out", "result").code == 0
    result = stored.load(tmp_path / "result")
    assert {"recipe", "evaluation", "commit", "versions", "machine"} <= result.keys()
    quest, large, eighth, _, blocks, all_blocks = result["points"]
    steps = {sample["steps"] for point in result["points"] for sample in point["samples"]}
    assert len(steps) == 1
    assert steps.pop() >= 3
    assert eighth["bytes_read"] == quest["bytes_read"] / 2
    assert blocks["bytes_read"] < quest["bytes_read"]
    assert quest["overlap"] == large["overlap"] == all_blocks["overlap"] == 1.0
    assert blocks["overlap"] < 1.0
    assert quest["recovery"] < large["recovery"] <= 1.0
    assert quest["recall"] < large["recall"] <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (
            ("exact", "--tokens", 1500, "--new", 8, "--rounds", 1, "--plans", "sketch:budget=256:dense_layers=none"),
            "| facts | `sketch:budget=256:dense_layers=none` | ",
        ),
        (("exact-acceptance", "--lengths", 2048, "--tasks", "needle", "--plans", "sketch"), "| 2,048 | needle | "),
        (
            ("exact-captured", "--embedded", "--contexts", "1024x1", "--accepted", "0.9", "--rounds", 1, "--new", 16,
             "--plans", "quest:budget=256:dense_layers=none"),
            "| 1K | 1 | `quest:budget=256:dense_layers=none` | 0.9 | ",
        ),
        (
            ("chats", "--tokens", 1024, "--documents", 1, "--chats", 2, "--rounds", 1, "--plans", "dense"),
            "cores | 2 | 1 of 1K | `dense` | ",
        ),
        (("generation-recall", "--length", 2048, "--tokens", 20), "| graph, never audited | "),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_a_study_ends_with_its_table(run: Run, tmp_path: Path, arguments: tuple[Any, ...], row: str) -> None:
    outcome = run("bench", *arguments, "--out", "result")
    assert outcome.code == 0, outcome.err
    assert row in outcome.out
    assert stored.load(tmp_path / "result")["kind"] == arguments[0]


LLAMA_BENCH = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if given["-ctk"] == "q8_0" and {fails}:
    sys.exit("no such type")
tokens = int(given["-n"]) or int(given["-p"])
ns = tokens * (2_000_000 if given["-ctk"] == "q8_0" else 1_000_000)
facts = dict(build_commit="abc", build_number=1, model_type="tiny", model_size=1, cpu_info="a CPU")
print(json.dumps([facts | dict(samples_ns=[ns] * int(given["-r"]))]))
"""


def test_a_file_is_measured_beside_llama_cpp(run: Run, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    binary = tmp_path / "llama-bench"
    arguments = "--model", "tiny.gguf", "--binary", str(binary), "--contexts", "80,150", "--tokens", 4, "--rounds", 2
    binary.write_text(LLAMA_BENCH.format(python=sys.executable, fails=False))
    binary.chmod(0o755)
    outcome = run("bench", "llama-cpp", *arguments, "--plans", "dense,quest:budget=112", "--out", "result")
    assert outcome.code == 0, outcome.err
    assert (
        "| context | llama.cpp | `dense` | `quest:budget=112` | prefill, llama.cpp | prefill, kvsift |" in outcome.out
    )
    assert "| 80 | 1.0 |" in outcome.out  # ms of its fastest settings
    points = stored.load(tmp_path / "result")["points"]
    assert [len(point["llama_cpp"]) for point in points] == [3, 3, 1, 1]  # all settings in the first round
    assert points[2]["llama_cpp"].keys() <= points[0]["llama_cpp"].keys() - {"flash attention on, q8_0"}
    binary.write_text(LLAMA_BENCH.format(python=sys.executable, fails=True))
    assert "failed: ['no such type']" in run("bench", "llama-cpp", *arguments).err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("chats", "--load", "gp"), "did you mean 'gpu'?"),
        (("chats", "--engine", "sglang"), "--engine sglang must be kvsift or vllm."),
        (("chats", "--load", "gpu"), "kvsift bench chats --load gpu times an NVIDIA GPU"),
        (("chats", "--engine", "vllm"), "this bench measures vLLM, which is not installed"),
        (("exact-captured",), "kvsift bench exact-captured times an NVIDIA GPU"),
        (("exact-captured", "--contexts", "4096"), "--contexts 4096: give contexts x batches"),
        (("exact-captured", "--accepted", "2"), "--accepted 2: give numbers between 0 and 1"),
        (("exact-acceptance", "--tasks", "needl"), "did you mean 'needle'?"),
        (("busy", "--settings", "spinn"), "did you mean 'spin'?"),
        (("summary-recall", "--recipe", "no.toml"), "the recipe no.toml cannot be read"),
        (("vllm-decode",), "this bench measures vLLM, which is not installed"),
        (("vllm-decode", "--plans", "stock;quest", "--anchors", 3), "no layer reuses selections under 'quest'"),
        (("llama-cpp", "--binary", "no-such"), "no-such is not a file. Build llama.cpp's llama-bench"),
    ],
)  # fmt: skip
def test_what_a_study_cannot_do_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr("kvsift_lab.studies.vllm_engine.find_spec", lambda name: None)
    assert says in refused("bench", *arguments)
