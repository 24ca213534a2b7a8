"""Sequences under RetrievalAttention by blocks share prefixes: what was learned of a prompt is learned once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_exact import write_wide
from engine.test_sequences import GRID, SMALL, assert_equal, finish, new_llm, new_sequence, run
from engine.tiny_directory import text_of
from refusals import refused

from kvsift import LLM, native
from kvsift.engine.sequence import EngineSequence
from kvsift.indexes.graph import GraphIndex
from kvsift.server.kept_prompts import keep

BLOCK = 160  # of two and a half chunks
PLAN = f"retrieval_attention:{SMALL}:index=graph:block={BLOCK}:beam=9"
TEXT = text_of(6 * GRID + 30)
OTHER = TEXT[: 4 * GRID + 5] + text_of(400)[::-1][: 3 * GRID]  # four chunks in common

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no graphs: {native.why_missing()}")


@pytest.fixture(scope="module")
def alone(llama: Path) -> dict[str, EngineSequence]:
    """Sequences that share nothing."""
    return {text: run(llm := new_llm(llama), new_sequence(llm, text, PLAN, 40)) for text in (TEXT, OTHER)}


def keeping(directory: Path) -> LLM:
    return new_llm(directory, keep_tokens=10_000)


def built(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of the sequences of each graph that is built from now on."""
    seqs, build = [], GraphIndex.build

    def spy(keys: torch.Tensor, *given: Any, **settings: Any) -> Any:
        seqs.append(keys.shape[1])
        return build(keys, *given, **settings)

    monkeypatch.setattr(GraphIndex, "build", spy)
    return seqs


def test_sequences_that_begin_alike_and_diverge(
    llama: Path, alone: dict[str, EngineSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = keeping(llama)
    graphs = built(llm, monkeypatch)
    first, second = (new_sequence(llm, text, PLAN, 40) for text in (TEXT, OTHER))
    run(llm, first, second)
    layers = 3
    assert graphs == [BLOCK - 4] * layers + [BLOCK] * 2 * layers, "the first block once, the second by each"
    assert (first.num_reused, second.num_reused) == (0, 4 * GRID)
    for seq, text in ((first, TEXT), (second, OTHER)):
        assert_equal(seq, alone[text])
    again = run(llm, new_sequence(llm, TEXT, PLAN, 40))
    assert_equal(again, alone[TEXT])
    assert again.num_reused == 6 * GRID
    assert len(graphs) == 3 * layers, "nothing was built again"


def test_what_a_cancelled_sequence_has_read_is_of_use(llama: Path, alone: dict[str, EngineSequence]) -> None:
    llm = keeping(llama)
    cancelled = new_sequence(llm, TEXT, PLAN, 40)
    llm.loop.submit(cancelled)
    while cancelled.num_cached < 3 * GRID:
        llm.loop.step()
    llm.loop.cancel(cancelled)
    seq = run(llm, new_sequence(llm, TEXT, PLAN, 40))
    assert seq.num_reused == 3 * GRID
    assert_equal(seq, alone[TEXT])


def test_sequences_that_decode_and_widen_change_nothing_for_others(
    llama: Path, alone: dict[str, EngineSequence]
) -> None:
    llm = keeping(llama)
    seqs = [new_sequence(llm, TEXT, PLAN, number) for number in (40, 7, 40)]
    for seq in seqs:
        llm.loop.submit(seq)
        while seq.state in ("waiting", "prefilling"):
            llm.loop.step()
    finish(llm, seqs)
    for seq in seqs:
        assert_equal(seq, alone[TEXT])
    for node in llm.loop.pages.tree._nodes.values():
        for state in (layer["decode"] for layer in node.sealed):
            assert (state.audits.log, state.searched_from) == ([], None), "a sequence wrote into what is shared"
            assert all(span.stop < GRID * (node.depth + 1) for span in state.spans)


def test_a_chunk_that_failed_is_read_again(
    llama: Path, alone: dict[str, EngineSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = keeping(llama)
    run(llm, new_sequence(llm, text_of(400)[::-1], "dense"))
    prefill, failures = llm.feed, [torch.OutOfMemoryError("no memory")]

    def short_of_memory(cache: Any, ids: Any, *args: Any, **options: Any) -> Any:
        logits = prefill(cache, ids, *args, **options)
        if failures and cache.get_seq_length() > 2 * GRID:  # the first block is complete
            raise failures.pop()
        return logits

    monkeypatch.setattr(llm, "feed", short_of_memory)
    assert_equal(run(llm, new_sequence(llm, TEXT, PLAN, 40)), alone[TEXT])
    assert not failures


def test_dense_sequences_share_with_others_than_they_do(llama: Path, alone: dict[str, EngineSequence]) -> None:
    llm = keeping(llama)
    run(llm, new_sequence(llm, TEXT, "dense"))
    seq, wider = new_sequence(llm, TEXT, PLAN, 40), new_sequence(llm, TEXT, PLAN.replace("budget=80", "budget=90"))
    assert_equal(run(llm, seq), alone[TEXT])
    assert run(llm, wider).num_reused == seq.num_reused == 0, "indexes are of one rule"


@pytest.mark.usefixtures("eager_pace")
def test_exact_sequences_share_what_was_learned(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "exact": True, "plan": PLAN}
    directory = write_wide(tmp_path, "Qwen3")
    llm = LLM(directory, "dense", device="cpu", dtype="float32", chunk_size=GRID, keep_tokens=10_000)
    dense = llm.generate(TEXT, max_new_tokens=24)
    answers = [llm.generate(TEXT, **options) for _ in range(2)]
    assert [answer.token_ids for answer in answers] == [dense.token_ids] * 2
    assert [answer.new_prompt_tokens for answer in answers] == [len(TEXT) + 1, len(TEXT) + 1 - 6 * GRID]
    one, other = (answer.exact for answer in answers)
    assert other is not None
    assert one["drafts_accepted"] + one["repeats_accepted"] > 0


def test_documents_are_saved_without_queries(llama: Path, tmp_path: Path) -> None:
    path, llm = tmp_path / "text.kvsift", new_llm(llama)
    document = llm.read(TEXT, plan=PLAN)
    before = document.ask("Who?", max_new_tokens=8).token_ids
    document.ask("What?", max_new_tokens=60, question_phase="decode")
    assert document.ask("Who?", max_new_tokens=8).token_ids == before
    document.save(path)
    with refused("other_model: learns from the queries of the prompt, which are not saved"):
        llm.open(path, plan=PLAN)
    flat = f"retrieval_attention:{SMALL}:index=flat"
    expected = llm.read(TEXT).ask("Who?", max_new_tokens=8, plan=flat).token_ids
    assert llm.open(path, plan=flat).ask("Who?", max_new_tokens=8).token_ids == expected


def test_a_server_keeps_no_file_that_it_could_not_use(llama: Path, tmp_path: Path) -> None:
    llm = new_llm(llama)
    for plan, is_kept in ((PLAN, False), ("dense", True)):
        seq = new_sequence(llm, TEXT, plan)
        llm.loop.submit(seq)
        while seq.state != "decoding":
            llm.loop.step()
        keep(tmp_path / "kept", llm, seq, TEXT)
        assert (tmp_path / "kept").exists() == is_kept
        llm.loop.close(seq)
