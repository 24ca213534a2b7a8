"""What a dump holds is what attention saw: keys as stored, queries at their positions, turned back and forth."""

from pathlib import Path

import pytest
import torch
from engine.tiny_directory import text_of, write_model
from kvsift_lab.bench.qk_dump import Dump, DumpInput, LayerRecord, dump_attention
from refusals import refused
from safetensors.torch import save_file

from kvsift import LLM
from kvsift.types import LayerShape

LENGTH = 300
QUESTIONS = ("How many sacks?", "Which mill?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def made(model: Path, output: Path, chunk_size: int | None = None, samples: int = 64, **options: object) -> Dump:
    llm = LLM(model, "dense", device="cpu", dtype="float32", chunk_size=chunk_size, path="composed", probe_every=0)
    ids = llm.tokenizer(text_of(LENGTH - 1))["input_ids"]
    assert len(ids) == LENGTH

    def encode(question: str) -> list[int]:
        return [*ids, *llm.tokenizer(question, add_special_tokens=False)["input_ids"]]

    source = DumpInput(ids, encode, QUESTIONS, "a text")
    dump_attention(llm, source, output, samples=samples, max_new_tokens=4, **options)  # type: ignore[arg-type]
    return Dump(output)


def test_a_dump_says_what_it_holds_and_holds_it(model: Path, tmp_path: Path) -> None:
    found = made(model, tmp_path / "tiny.safetensors")
    assert (found.name, found.length, found.layers) == ("tiny", LENGTH, [0, 1, 2])
    assert found.about["questions"] == list(QUESTIONS)
    assert len(found.about["answers"]) == 2
    held = found.layer(1)
    num_kv_heads, head_dim = held.shape.num_kv_heads, held.shape.head_dim
    assert held.keys.shape == held.values.shape == (num_kv_heads, LENGTH, head_dim)
    assert held.queries.shape == (held.shape.num_query_heads, len(held.positions), head_dim)
    assert held.keys.dtype == held.queries.dtype == torch.bfloat16
    # every question starts behind the document; the last token generated is not fed, so it asks nothing
    asked = torch.cat([torch.arange(LENGTH, LENGTH + len(question) + 3) for question in QUESTIONS])
    assert torch.equal(held.decode_positions, asked)
    assert held.decode_queries.shape[1] == len(asked)


def test_queries_are_those_of_their_positions(model: Path, tmp_path: Path) -> None:
    """All queries are kept here: the sampled ones of another dump are found among them."""
    whole = made(model, tmp_path / "whole.safetensors", samples=LENGTH).layer(2)
    few = made(model, tmp_path / "few.safetensors", samples=40).layer(2)
    assert torch.equal(whole.positions, torch.arange(LENGTH))
    assert 20 <= len(few.positions) <= 40
    assert torch.equal(few.queries, whole.queries[:, few.positions])


def test_the_rotation_is_written_down(model: Path, tmp_path: Path) -> None:
    """Without their rotation, the keys of a token that recurs would be the same in the first layer."""
    held = made(model, tmp_path / "tiny.safetensors", samples=LENGTH).layer(0)
    rope = held.shape.rope
    assert 2 * len(rope.inv_freq) == held.shape.head_dim
    first, second, *_ = (1 + place for place, letter in enumerate(text_of(LENGTH - 1)) if letter == "T")  # after <bos>
    angle = (first - second) * rope.inv_freq
    a, b = held.keys[:, second].float().chunk(2, -1)
    turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
    torch.testing.assert_close(turned, held.keys[:, first].float(), rtol=0.05, atol=0.02)
    assert not torch.allclose(held.keys[:, second].float(), held.keys[:, first].float(), rtol=0.05, atol=0.02)


def test_a_record_tells_prompt_from_decode_inside_a_chunk() -> None:
    shape = LayerShape(0, 2, 1, 8, 1.0)
    record = LayerRecord(shape, torch.tensor([0, 3, 9]), 10)
    numbers = torch.arange(16.0).view(1, 16, 1).expand(2, 16, 8)
    for start, stop in ((0, 2), (2, 4), (4, 8), (8, 13), (13, 16)):
        record.take(numbers[:, start:stop], start)
    assert torch.cat(record.queries, 1)[0, :, 0].tolist() == [0, 3, 9]
    assert torch.cat(record.decode_positions).tolist() == list(range(10, 16))
    assert torch.cat(record.decode_queries, 1)[1, :, 0].tolist() == list(range(10, 16))


def test_files_that_are_no_dumps_are_refused(tmp_path: Path) -> None:
    with refused("missing_file"):
        Dump(tmp_path / "missing.safetensors")
    (tmp_path / "text.safetensors").write_text("not tensors")
    with refused("unreadable_file"):
        Dump(tmp_path / "text.safetensors")
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights.safetensors")
    with refused("wrong_file"):
        Dump(tmp_path / "weights.safetensors")
