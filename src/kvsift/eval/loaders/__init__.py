"""Samples from local files in the formats their benchmarks publish them in. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from kvsift.errors import InputError, unknown
from kvsift.eval.loaders import documents, infinitebench, longbench, pg19, ruler
from kvsift.eval.loaders.fitting import Fitting
from kvsift.eval.tasks.sample import Encode, Sample

Loader = Callable[[Path, Fitting], Iterator[Sample]]

LOADERS: dict[str, Loader] = {
    "ruler": ruler.load,
    "longbench": longbench.load,
    "infinitebench": infinitebench.load,
    "pg19": pg19.load,
    "squad": documents.load_squad,
    "hotpotqa": documents.load_hotpotqa,
}


def load_file(
    kind: str,
    path: str | Path,
    encode: Encode,
    limit: int | None = None,
    max_tokens: int | None = None,
    prefix: Sequence[int] = (),
) -> list[Sample]:
    """The samples of a file, in its order.

    Args:
        kind: a name in ``LOADERS``.
        path: a file; for pg19 a directory of .txt files, or one of them.
        encode: token ids of a piece of text without special tokens.
        limit: at most so many samples, from the first on.
        max_tokens: of a whole prompt, the answer not counted. Longer contexts lose their middle, as LongBench cuts
            them, and the sample's ``notes`` say so. It is the exact length where the length is a choice: pg19 (targets
            included), squad and hotpotqa (question not included); 32,768 unless told otherwise.
        prefix: ids to start every context with, such as bos.

    Raises:
        InputError: if a line is not what the format wants, with file and line; if nothing is there to load.
    """
    if kind not in LOADERS:
        raise unknown("kind of file", kind, LOADERS)
    for name, number in (("limit", limit), ("max_tokens", max_tokens)):
        if number is not None and number < 1:
            raise InputError(f"{name}={number}: give a number above 0, or leave it out.")
    path = Path(path).expanduser()
    if not path.exists():
        raise InputError(f"there is no {path}.")
    samples = list(islice(LOADERS[kind](path, Fitting(encode, max_tokens, tuple(prefix))), limit))
    if not samples:
        raise InputError(f"{path} has no samples.")
    return samples
