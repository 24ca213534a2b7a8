"""Former names of ``kvsift_lab.eval.results``, to be removed once ``bench``, ``docs`` and their tests use that."""

from __future__ import annotations

from pathlib import Path

from kvsift.engine.atomic_files import write_atomically
from kvsift_lab.eval.results import compressed as packed_path
from kvsift_lab.eval.results import read_stored, stored

__all__ = ["pack_large", "packed_path", "read_stored", "stored", "unpacked"]


def unpacked(path: Path) -> bytes:
    return read_stored(path.with_suffix(""))


def pack_large(path: Path, least: int = 20_000) -> bool:
    import lzma

    if not path.exists() or path.stat().st_size < least:
        return False
    write_atomically(packed_path(path), lzma.compress(path.read_bytes(), preset=6 | lzma.PRESET_EXTREME))
    path.unlink()
    return True
