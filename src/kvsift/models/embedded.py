"""The small long-context model that ships with kvsift, whose weights are packed without loss.

The exponents of bfloat16 weights repeat: apart from signs and mantissas they compress to a third, and the file to two
thirds. The first use writes an ordinary model directory into the user's cache.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from zipfile import ZipFile

import numpy as np

from kvsift.atomic_files import user_cache
from kvsift.errors import UnwritableFile

PACKED, WEIGHTS = "weights.npz", "model.safetensors"


@cache
def embedded_model() -> Path:
    """Return the model's directory, in the form of Hugging Face.

    Raises:
        InputError: if it has to be written and the cache of the user cannot be.
    """
    source = Path(str(files("kvsift") / "embedded"))
    target = user_cache() / _digest(source) / "embedded"
    if not target.is_dir():
        try:
            _write(source, target)
        except OSError as error:
            raise UnwritableFile(
                f"the embedded model cannot be unpacked into {target.parent} ({error.strerror}). Name a folder that "
                "can be written in XDG_CACHE_HOME."
            ) from error
    return target


def unpack(packed: Path, weights: Path) -> None:
    """Write the safetensors file of packed weights, byte for byte: their exponents, their signs and mantissas."""
    with np.load(packed) as planes:
        exponents, others = (planes[name].astype(np.uint16) for name in ("exponents", "others"))
        bits = (others & 0x80) << 8 | exponents << 7 | others & 0x7F
        weights.write_bytes(planes["header"].tobytes() + bits.tobytes())


def _digest(source: Path) -> str:
    """Name the contents of all files, so that a newer kvsift never takes up what an older one unpacked. The packed
    weights are named by the checksums in their archive: reading them took longer than the rest of ``LLM()``.
    """
    digest = hashlib.sha256()
    for file in sorted(path for path in source.iterdir() if path.is_file()):
        if file.name == PACKED:
            with ZipFile(file) as archive:
                contents = repr([(member.filename, member.CRC) for member in archive.infolist()]).encode()
        else:
            contents = file.read_bytes()
        digest.update(f"{file.name} {file.stat().st_size}\n".encode() + contents)
    return digest.hexdigest()[:16]


def _write(source: Path, target: Path) -> None:
    """Write the directory beside its place and move it there as a whole, since several processes may do so at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        for file in source.iterdir():
            if file.is_file() and file.name != PACKED:
                shutil.copyfile(file, made / file.name)
        unpack(source / PACKED, made / WEIGHTS)
        made.chmod(0o755)
        made.rename(target)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not target.is_dir():  # another process was faster
            raise
