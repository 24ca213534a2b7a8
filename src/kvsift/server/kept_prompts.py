"""The prefill of a document, kept on the disk: a saved document (``api.saved_document``) of a sequence of the loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from kvsift.api.llm import LLM
from kvsift.api.saved_document import SavedDocument, check_saving, save
from kvsift.engine.prefill_sharing import learns_from_prompt
from kvsift.engine.sequence import EngineSequence
from kvsift.errors import InputError, OtherModel
from kvsift.models.hf.cache import SparseCache
from kvsift.tokenization.prompt import DocumentText


def source_of(path: Path, llm: LLM, seq: EngineSequence) -> Callable[[SparseCache], None] | None:
    """Return the source of a sequence whose prompt was kept; None, which is logged, if it cannot be used."""
    if not path.exists():
        return None
    try:
        with SavedDocument(path) as saved:
            saved.check(llm, seq.request.plan)
            if saved.ids != seq.request.ids or saved.rotation != llm.rotation(seq.request.length):
                raise OtherModel("it has other tokens, or other positions.")
    except InputError as error:
        drop(path, error)
        return None

    def fill(cache: SparseCache) -> None:
        with SavedDocument(path) as saved:
            saved.fill(cache, llm)

    return fill


def keep(path: Path, llm: LLM, seq: EngineSequence, text: str) -> None:
    """Save the prompt of a sequence whose prefill has just ended; a failure is logged."""
    assert seq.cache is not None
    if seq.no_reuse or learns_from_prompt(seq.request.plan) or seq.cache.has_states:  # which are not those of a chunk
        return
    try:
        check_saving(llm, seq.request.plan, len(seq.request.ids), path)
        save(path, llm, seq.cache, DocumentText(text), seq.request.ids, 0.0, {})
        path.chmod(0o600)
    except (InputError, OSError) as error:
        print(f"kvsift: what was read of {path.stem} is not kept: {error}", file=sys.stderr)


def drop(path: Path, error: InputError | str) -> None:
    """Remove a file that cannot be used."""
    print(f"kvsift: {path.stem} is read again from its text: {error}", file=sys.stderr)
    remove(path)


def remove(path: Path) -> None:
    """Delete a file; one that cannot be deleted is logged."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        print(f"kvsift: {path} cannot be deleted: {error}", file=sys.stderr)
