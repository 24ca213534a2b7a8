"""The prefill of a document, kept on the disk: a saved document (``api.saved_document``) of a row of the loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from kvsift.api.llm import LLM
from kvsift.api.saved_document import SavedDocument, check_saving, save
from kvsift.engine.prefill_sharing import learns_from_prompt
from kvsift.engine.row import Row
from kvsift.errors import InputError
from kvsift.models.hf.cache import SparseCache
from kvsift.tokenization.prompt import DocumentText


def source_of(path: Path, llm: LLM, row: Row) -> Callable[[SparseCache], None] | None:
    """Return the source of a row whose prompt was kept; None, which is logged, if it cannot be used."""
    if not path.exists():
        return None
    try:
        with SavedDocument(path) as saved:
            saved.check(llm, row.request.plan)
            if saved.ids != row.request.ids or saved.rotation != llm.rotation(row.request.length):
                raise InputError("it has other tokens, or other positions.")
    except InputError as error:
        drop(path, error)
        return None

    def fill(cache: SparseCache) -> None:
        with SavedDocument(path) as saved:
            saved.fill(cache, llm)

    return fill


def keep(path: Path, llm: LLM, row: Row, text: str) -> None:
    """Save the prompt of a row whose prefill has just ended; a failure is logged."""
    assert row.cache is not None
    if row.no_reuse or learns_from_prompt(row.request.plan):
        return
    try:
        check_saving(llm, row.request.plan, len(row.request.ids), path)
        save(path, llm, row.cache, DocumentText(text), row.request.ids, 0.0, {})
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
