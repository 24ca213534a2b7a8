"""Results as xz, at a twentieth of their room: ``name.xz`` stands for ``name`` wherever one is read.

Packing puts the packed file on the disk before it takes the plain one away, so a kill in between leaves both.
"""

from __future__ import annotations

from pathlib import Path

from kvsift.errors import InputError
from kvsift.eval.durable import settle, write_atomically

LARGE = 50_000  # bytes of text; smaller files stay as they are, for ``git diff`` and editors


def packed_path(path: Path) -> Path:
    """Where a file lies when it is packed."""
    return path.with_name(path.name + ".xz")


def stored(path: Path) -> Path:
    """A file, or the packed one beside it if that is all there is."""
    return packed_path(path) if not path.exists() and packed_path(path).exists() else path


def pack_large(path: Path) -> bool:
    """Pack a file that is worth it, and take the plain one away. The same text gives the same bytes.

    Returns:
        Whether it was.

    Raises:
        OSError: if there is no room; the plain file stays.
    """
    if not path.exists() or path.stat().st_size < LARGE:
        return False
    try:
        import lzma
    except ImportError:  # Python may be built without it
        return False
    write_atomically(packed_path(path), lzma.compress(path.read_bytes(), preset=6 | lzma.PRESET_EXTREME))
    path.unlink()
    settle(path.parent)
    return True


def unpacked(path: Path) -> bytes:
    """What a packed file holds.

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
        raise InputError(f"{path} cannot be unpacked ({error}). Take it from where it came from again.") from None


def read_stored(path: Path) -> bytes:
    """What is in a file, plain or packed; the plain one where both are, which is the newer or the same.

    Raises:
        OSError: if it cannot be read.
        InputError: if it is damaged.
    """
    found = stored(path)
    return unpacked(found) if found.suffix == ".xz" else found.read_bytes()
