"""A document on disk: the text, its tokens, and the keys, values and page summaries that its prefill has left.

One safetensors file (``saved_header``). What methods remember of a prompt is not in it: it is made again from the keys,
and methods that learn from the queries of a prompt cannot continue with it.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kvsift import __version__
from kvsift.api import saved_header
from kvsift.api.saved_header import CHECKSUM_BYTES, CHECKSUMS, TensorEntry, damaged
from kvsift.atomic_files import reason, replacement
from kvsift.checkpoint import fingerprint, tokenizer_fingerprint
from kvsift.engine.memory import kv_bytes
from kvsift.engine.model_runner import ModelRunner
from kvsift.engine.prefill_sharing import learns_from_prompt
from kvsift.errors import InputError, OtherModel, UnsupportedPlan, UnwritableFile
from kvsift.models.hf.contents import fill, numbers_of, tensors_of
from kvsift.models.hf.sparse import SparseCache
from kvsift.plan.capabilities import check
from kvsift.plan.plan import Plan
from kvsift.tokenization.prompt import DocumentText
from kvsift.types import Objections

MIB = 1 << 20
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip


def check_target(path: Path) -> None:
    """Refuse a path where no file can be written.

    Raises:
        InputError: naming the reason.
    """
    try:
        exists, folder_exists = path.exists(), path.parent.is_dir()
    except OSError as error:
        raise UnwritableFile(f"a document cannot be saved as {path}: {error.strerror}.") from None
    if exists and not path.is_file():
        raise UnwritableFile(f"a document cannot be saved as {path}, which is no file. Name one, such as book.kvsift.")
    if not folder_exists:
        raise UnwritableFile(f"a document cannot be saved as {path}: the directory {path.parent} does not exist.")
    if not os.access(path.parent, os.W_OK):
        raise UnwritableFile(f"a document cannot be saved as {path}: no file can be written in {path.parent}.")
    saved_header.check_replaceable(path)


def check_same(path: Path, runner: ModelRunner, text: DocumentText) -> None:
    """Refuse to replace a saved document of another text or model, or one that cannot be opened (``InputError``)."""
    if not saved_header.is_saved_document(path):
        return
    with suppress(InputError), SavedDocument(path) as saved:
        if saved.is_of(runner, text):
            return
    raise UnwritableFile(
        f"a document cannot be saved as {path}: a saved document of another text or model is there, or a damaged one, "
        "and would be lost. Give another name, or remove it."
    )


NOT_SAVED: Objections = (
    (lambda plan: plan.evicts_prompt,
     "the plan {it} drops tokens of the document for good (evict=true), so not all of it can be saved. Leave "
     "evict=true out."),
    (lambda plan: plan.prefill is not None and plan.prefill.method.traits.wants_queries,
     "the plan {it} learns from the document's queries while it is read, and those are not saved. A document that is "
     "read without a rule of prefill can be saved."),
)  # fmt: skip


def check_saving(runner: ModelRunner, plan: Plan, num_tokens: int, path: Path) -> None:
    """Refuse a plan or placement whose documents cannot be saved, and a disk without room, before anything is read.

    Raises:
        InputError: naming the reason.
    """
    _check_place(runner, "saved")
    check(plan, NOT_SAVED)
    directory, dtype = runner.directory, runner.dtype
    kv = kv_bytes(directory, dtype, num_tokens, runner.place)
    _check_room(path, kv + directory.window_bytes(dtype, num_tokens))


def save(
    path: Path, runner: ModelRunner, cache: SparseCache, text: DocumentText, ids: Sequence[int], read_s: float,
    read_stats: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write a document atomically.

    Args:
        path: path of the file.
        runner: runner of the model.
        cache: has the document and nothing else.
        text: the document and its prompt.
        ids: the document's tokens.
        read_s, read_stats: those of ``Document``.

    Raises:
        InputError: if the cache cannot be saved, or writing fails; nothing is left then, and an older file stays.
    """
    document = {
        "format": saved_header.FORMAT,
        "kvsift": __version__,
        **_identity(runner),
        "model_name": runner.directory.name,
        "prefill": str(cache.run.plan.prefill),
        "rotation": cache.rotation,
        "layers": numbers_of(cache),
        **{name: getattr(text, name) for name in ("template", "system", "stop")},
        "read_s": read_s,
        "read_stats": read_stats,
    }
    tensors = tensors_of(cache)
    tensors["tokens"] = lambda: torch.tensor(ids, dtype=torch.int32)
    tensors["context"] = lambda: torch.tensor(bytearray(text.context.encode()), dtype=torch.uint8)
    entries = [_entry(name, tensor()) for name, tensor in tensors.items()]
    entries.sort(key=lambda entry: -entry.itemsize)  # so that all are aligned
    header = saved_header.header_bytes(document, entries)
    _check_room(path, len(header) + sum(entry.num_bytes for entry in entries))
    try:
        with replacement(path) as file:
            file.write(header)
            checksums = [zlib.crc32(header)]
            for entry in entries:
                data = _bytes_of(tensors[entry.name]().detach().cpu().contiguous())
                checksums.append(zlib.crc32(data))
                file.write(data)
            file.write(b"".join(number.to_bytes(CHECKSUM_BYTES, "little") for number in checksums))
    except OSError as error:
        raise UnwritableFile(
            f"{path} is not written: {reason(error)}. Make room or name another place, and save the document again."
        ) from None


class SavedDocument(AbstractContextManager["SavedDocument"]):
    """A saved document whose file is open; its tensors are mapped from the file until the block ends.

    Args:
        path: path of the file.

    Attributes:
        read_s, read_stats: seconds that its prefill took, and counters of it.
        rotation: see ``SparseCache.rotation``.

    Raises:
        InputError: if it cannot be read, is not a saved document, or is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = saved_header.read_header(path)
        self._document = saved_header.document_of(path, self._header)
        try:
            self._file = safe_open(path, framework="pt", device="cpu").__enter__()
            self._names: list[str] = self._file.offset_keys()
            checksums = self._file.get_tensor(CHECKSUMS).numpy().tobytes()
        except Exception as error:  # SafetensorError has no public type of each reason
            raise damaged(path, str(error)) from None
        starts = range(0, len(checksums), CHECKSUM_BYTES)
        numbers = [int.from_bytes(checksums[start : start + CHECKSUM_BYTES], "little") for start in starts]
        self._names.remove(CHECKSUMS)
        self._checksums = dict(zip(self._names, numbers[1:]))
        if len(numbers) != len(self._names) + 1 or zlib.crc32(self._header) != numbers[0]:
            raise damaged(path, "the checksum of its header is another")
        self.read_s, self.read_stats = float(self._document["read_s"]), dict(self._document["read_stats"])
        self.rotation: int | None = self._document["rotation"]

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(None, None, None)

    @property
    def ids(self) -> list[int]:
        """The document's tokens."""
        ids: list[int] = self._checked("tokens").tolist()
        return ids

    @property
    def text(self) -> DocumentText:
        """The document and its prompt."""
        context = self._checked("context").numpy().tobytes().decode()
        return DocumentText(context, *(self._document[name] for name in ("template", "system", "stop")))

    def is_of(self, runner: ModelRunner, text: DocumentText) -> bool:
        """Return whether it has this text, as this model has read it."""
        same_model: bool = self._document["model"] == fingerprint(runner.directory.path)
        return same_model and self.text.context == text.context

    def check(self, runner: ModelRunner, plan: Plan) -> None:
        """Refuse a model or plan for which the saved keys would be other ones, before the weights are loaded.

        Raises:
            InputError: with what was saved, what was given, and what to do.
        """
        for is_same, was, now, remedy in self._conditions(runner, plan):
            if not is_same:
                raise OtherModel(
                    f"the document {self.path} was read {was}, and {now}. {remedy}, or read its text again."
                )
        _check_place(runner, "opened")

    def _conditions(self, runner: ModelRunner, plan: Plan) -> Iterator[tuple[bool, str, str, str]]:
        """Yield whether something is the same, how the document was read, what is given now, and what to do."""
        given, name = _identity(runner), runner.directory.name
        saved = {"quantize": None, "kv_dtype": "auto", **self._document}
        same = {key: saved[key] == value for key, value in given.items()}
        reader = saved["model_name"] if saved["model_name"] != name else f"another model or version named {name}"
        yield same["model"], f"by {reader}", f"this LLM is {name}", "Open it with the model that read it"
        yield (
            same["tokenizer"], "with another tokenizer or chat template", f"that of {name} has changed",
            "Restore the tokenizer's files",
        )  # fmt: skip
        yield (
            same["dtype"], f"in {saved['dtype']}", f"this LLM computes in {given['dtype']}",
            f"Give dtype={saved['dtype']} (--dtype)",
        )  # fmt: skip
        for key in ("quantize", "kv_dtype", "chunk_size"):
            was, now, option = f"{key}={saved[key]}", f"{key}={given[key]}", f"--{key.replace('_', '-')}"
            yield same[key], f"with {was}", f"this LLM has {now}", f"Give {was} ({option})"
        yield (
            saved["prefill"] == str(plan.prefill), f"under {_named(saved['prefill'])}",
            f"the plan {plan} has {_named(str(plan.prefill))}", "Give a plan with the saved rule of prefill",
        )  # fmt: skip
        yield (
            not learns_from_prompt(plan), "without what this method remembers of it",
            f"{plan} learns from the queries of the prompt, which are not saved", "Give one that does not",
        )  # fmt: skip

    def fill(self, cache: SparseCache, runner: ModelRunner) -> None:
        """Fill an empty cache with the document.

        Raises:
            InputError: if a checksum is wrong.
        """
        layers: dict[int, list[str]] = {}
        for name in self._names:
            if name.startswith("layers."):
                layers.setdefault(int(name.split(".")[1]), []).append(name)
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as threads:  # checked ahead of the copies
            checked = {
                index: {name.split(".", 2)[2]: threads.submit(self._checked, name) for name in names}
                for index, names in sorted(layers.items())
            }
            try:
                fill(
                    cache, self._document["layers"],
                    lambda index: {name: tensor.result() for name, tensor in checked.get(index, {}).items()},
                    runner.device, runner.dtype, runner.chunk_size,
                )  # fmt: skip
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _checked(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        if zlib.crc32(_bytes_of(tensor)) != self._checksums[name]:
            raise damaged(self.path, f"the checksum of {name} is another")
        return tensor


def _identity(runner: ModelRunner) -> dict[str, Any]:
    """Return what must be the same for the keys to be the same."""
    return {
        "model": fingerprint(runner.directory.path),
        "tokenizer": tokenizer_fingerprint(runner.directory.path),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "quantize": runner.directory.quantize,
        "kv_dtype": runner.place.kv_dtype,
        "chunk_size": runner.chunk_size,
    }


def _named(rule: str) -> str:
    return "dense prefill" if rule == "None" else f"prefill={rule}"


def _check_place(runner: ModelRunner, what: str) -> None:
    if runner.place.in_host_memory and runner.place.knob("host_values") != "model":
        raise UnsupportedPlan(
            f"placement={runner.place} rounds values, and a document is {what} with the values of the model. Leave out "
            f"host_values={runner.place.knob('host_values')}."
        )


def _check_room(path: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise UnwritableFile(
            f"{path} would take {num_bytes / MIB:,.1f} MiB, and {free / MIB:,.1f} MiB is free there. Make room or name "
            "another place."
        )


def _entry(name: str, tensor: Tensor) -> TensorEntry:
    return TensorEntry(name, DTYPES[tensor.dtype], tuple(tensor.shape), tensor.element_size())


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host."""
    return tensor.flatten().view(torch.uint8).numpy().data
