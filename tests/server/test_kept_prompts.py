"""What was read of a document, kept in a file: another engine goes on from it, and the answers are the same."""

from pathlib import Path
from typing import Any

import pytest
from engine.hybrids import write_hybrid
from engine.tiny_directory import text_of

from kvsift import LLM
from kvsift.engine.executor import Executor
from kvsift.engine.request import Request
from kvsift.engine.sequence import EngineSequence
from kvsift.engine.transcript import TextOutput
from kvsift.plan.plan import Plan
from kvsift.server.held_documents import DocumentPrefill
from kvsift.server.kept_prompts import keep, source_of
from kvsift.tokenization.prompt import DocumentPrompts, PromptFormat

PLANS = ["quest:budget=96:window=32", "sketch:budget=80:window=16:dense_layers=none", "dense",
         "prefill=quoka:budget=80:window=16,decode=quest:budget=96:window=32"]  # fmt: skip
TEXT = text_of(700)


def new_llm(model: Path, plan: str, **options: Any) -> LLM:
    return LLM(model, plan, device="cpu", path="composed", **{"chunk_size": 64, "dtype": "float32", **options})


def run(llm: LLM, seq: EngineSequence) -> EngineSequence:
    llm.loop.submit(seq)
    while not seq.is_ended:
        llm.loop.step()
        llm.loop.check()
    return seq


def reading(llm: LLM, kept: Path, plan: Plan | None = None) -> EngineSequence:
    """Read the document, from the file if there is one."""
    ids = DocumentPrompts(PromptFormat(llm.tokenizer), TEXT).ids

    def on_end() -> None:
        if seq.source is None:
            keep(kept, llm, seq, TEXT)

    seq = EngineSequence(Request(ids, 1, plan or llm.plan), DocumentPrefill(on_end), holds=True)
    seq.source = source_of(kept, llm, seq)
    return run(llm, seq)


def answer(llm: LLM) -> tuple[list[int], int]:
    """Tokens of an answer about it, and how many of its prompt were cached."""
    ids = PromptFormat(llm.tokenizer).encode(TEXT, "Which mill?")
    request = Request(ids, 12, llm.plan)
    output = TextOutput(request, llm.tokenizer, llm.device)
    seq = run(llm, EngineSequence(request, output))
    llm.loop.close(seq)
    return output.transcript.new_ids, seq.num_reused


@pytest.mark.parametrize("plan", PLANS)
def test_another_engine_goes_on_from_the_file(
    model: Path, tmp_path: Path, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "doc-1.kvsift"
    first = new_llm(model, plan)
    seq = reading(first, kept)
    assert kept.stat().st_mode & 0o077 == 0
    expected = answer(first)
    whole_chunks = len(seq.request.ids) // 64 * 64
    assert expected[1] == whole_chunks

    read: list[int] = []
    original = Executor.prefill
    monkeypatch.setattr(
        Executor,
        "prefill",
        lambda self, cache, ids, pause=None: (read.append(len(ids)), original(self, cache, ids, pause))[1],
    )
    second = new_llm(model, plan)
    again = reading(second, kept)
    assert again.error is None
    assert sum(read) == len(seq.request.ids) - whole_chunks < 64, "the rest of a chunk is read again"
    assert answer(second) == expected
    second.loop.close(again)
    assert second.loop.pages.kv.pages.num_used == 0


@pytest.mark.parametrize("family", ["Qwen3Next", "Gemma3"])
def test_documents_of_hybrids_are_read_again_after_a_restart(family: str, tmp_path: Path) -> None:
    """Their states belong to the end of the document, and a sequence goes on from the end of a chunk."""
    model, kept = write_hybrid(tmp_path, family), tmp_path / "doc-1.kvsift"
    answers = []
    for _ in range(2):
        llm = new_llm(model, PLANS[0])
        seq = reading(llm, kept)
        assert seq.error is None
        answers.append(answer(llm))
        assert answers[-1][1] == len(seq.request.ids) // 64 * 64
    assert answers[0] == answers[1]
    assert not kept.exists()


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"chunk_size": 128}, {"plan": PLANS[3]}])
def test_a_file_of_other_settings_is_removed_with_a_reason(
    model: Path, tmp_path: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "doc-1.kvsift"
    reading(new_llm(model, PLANS[0]), kept)
    llm = new_llm(model, **{"plan": PLANS[0], **change})
    ids = DocumentPrompts(PromptFormat(llm.tokenizer), TEXT).ids
    seq = EngineSequence(Request(ids, 1, llm.plan), DocumentPrefill(lambda: None), holds=True)
    assert source_of(kept, llm, seq) is None
    assert "doc-1 is read again from its text: the document" in capsys.readouterr().err
    assert not kept.exists()


def test_a_damaged_file_ends_its_row_alone(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "doc-1.kvsift"
    reading(new_llm(model, PLANS[0]), kept)
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    llm = new_llm(model, PLANS[0])
    seq = reading(llm, kept)
    assert "checksum" in str(seq.error)
    assert llm.loop.pages.kv.pages.num_used == 0
    assert answer(llm)[1] == 0
