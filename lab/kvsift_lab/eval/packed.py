"""Results compressed with xz, about twenty times smaller: every reader accepts ``name.xz`` for ``name``.

The plain file is removed after the packed one is on the disk, so a killed process may leave both.
"""

from __future__ import annotations

from pathlib import Path

from kvsift.engine.atomic_files import settle, write_atomically
from kvsift.errors import InputError

LARGE = 20_000  # bytes of text; smaller files stay plain, for ``git diff`` and editors


def packed_path(path: Path) -> Path:
    """Return the path of a packed file."""
    return path.with_name(path.name + ".xz")


def stored(path: Path) -> Path:
    """Return the path, or that of the packed file if only that exists."""
    return packed_path(path) if not path.exists() and packed_path(path).exists() else path


def pack_large(path: Path, least: int | None = None) -> bool:
    """Pack a file of at least so many bytes, ``LARGE`` by default, and return whether it was. The same text gives the
    same bytes.

    Raises:
        OSError: if the disk is full; the plain file stays.
    """
    if not path.exists() or path.stat().st_size < (LARGE if least is None else least):
        return False
    try:
        import lzma
    except ImportError:  # some builds of Python have none
        return False
    write_atomically(packed_path(path), lzma.compress(path.read_bytes(), preset=6 | lzma.PRESET_EXTREME))
    path.unlink()
    settle(path.parent)
    return True


def unpacked(path: Path) -> bytes:
    """Return the content of a packed file.

    Raises:
        OSError: if it cannot be read.
        InputError: if it is damaged.
    """
    data = path.read_bytes()
    try:
        import lzma

        return lzma.decompress(data)
    except ImportError:
        raise InputError(f"{path} is packed and this Python has no lzma. Unpack it: xz -d {path}") from None
    except lzma.LZMAError as error:
        raise InputError(f"{path} cannot be unpacked ({error}). Copy it from its source again.") from None


def read_stored(path: Path) -> bytes:
    """Return the content of a file, plain or packed; of both, the plain one, which is at least as new.

    Raises:
        OSError: if it cannot be read.
        InputError: if it is damaged.
    """
    source = stored(path)
    return unpacked(source) if source.suffix == ".xz" else source.read_bytes()
