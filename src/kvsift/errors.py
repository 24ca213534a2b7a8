"""Errors that say what was given, what is possible and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable


class KVSiftError(Exception):
    """Anything kvsift refuses: the message is for the user, and complete without a traceback."""


class InputError(KVSiftError, ValueError):
    """Something the user gave cannot be used. The subclasses say what is wrong, and messages with what.

    Attributes:
        code: the name of the class in lower case, ``invalid_value``, for programs; it stays when wordings change.
    """

    code = "input_error"

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()


class UnknownName(InputError):
    """A name that there is not; see ``unknown``."""


class InvalidValue(InputError):
    """An option or argument of a value or type that it cannot have."""


class Conflict(InputError):
    """Options that exclude each other."""


class UnusedOption(InputError):
    """An option that has no effect where it is given."""


class MissingInput(InputError):
    """Something that is needed and was not given, or is not there yet."""


class EmptyText(InputError):
    """A prompt, question, context or file without text."""


class InvalidText(InputError):
    """A text in another encoding than UTF-8, or no text."""


class TooShort(InputError):
    """A text or context that is too short for what is to be measured in it."""


class ContextLengthExceeded(InputError):
    """A prompt and its answer for which the model has no positions."""


class UnsupportedPrompt(InputError):
    """A prompt that the tokenizer or the chat template of the model cannot express."""


class MissingFile(InputError):
    """A file or directory that does not exist."""


class UnreadableFile(InputError):
    """A file that the system, or the package that reads its format, does not read."""


class DamagedFile(InputError):
    """A file that is incomplete, or contradicts itself."""


class WrongFile(InputError):
    """A file of another kind or version."""


class OtherModel(InputError):
    """A file or cache that was made for another model, or for other settings."""


class UnwritableFile(InputError):
    """A file that cannot be written, or would replace another."""


class NotEnoughMemory(InputError):
    """A model, context or measurement that does not fit in memory."""


class MissingPackage(InputError):
    """A package, or the compiled core, that is not installed."""


class UnsupportedDevice(InputError):
    """A device that there is not, or that cannot do what is asked."""


class UnsupportedPlan(InputError):
    """A plan or placement that cannot run on the model, or as it was asked to."""


class UnsupportedModel(InputError, AttributeError):
    """A model that kvsift does not run, with the reason."""


class UnsupportedCall(InputError):
    """A call of a model, or a cache, that kvsift cannot answer correctly."""


class EvictedTokens(InputError):
    """Tokens that are needed again and were evicted for good."""


class InvalidTensor(InputError):
    """Tensors whose shapes, dtypes, strides or devices do not fit."""


class NotFinite(InputError):
    """Keys or queries with NaN or infinite numbers."""


class InvalidMethod(InputError):
    """The class of a method that lacks something, or cannot be imported."""


class Unavailable(InputError):
    """Something that is in use, full or closed."""


class FailedProcess(InputError):
    """Another process or server that failed, or refused."""


class LogitsError(KVSiftError, ArithmeticError):
    """The logits of a model are such that no token can be chosen from them; the answer ends with this error."""


class NothingSkipped(KVSiftError, RuntimeError):
    """A sparse plan ran and read everything; raised under ``strict``."""


def unknown(what: str, given: str, known: Iterable[str]) -> UnknownName:
    """The error for a name that is not known, with the nearest known one."""
    from difflib import get_close_matches

    names = sorted(known)
    near = get_close_matches(str(given), names, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return UnknownName(f"unknown {what} {given!r}{hint} Known: {', '.join(names)}")


def one_line(error: Exception) -> str:
    """The message of an error on one line of at most 300 characters, without the full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    detail = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])  # "Validation error for field 'x':\n    ..."
    text = " ".join(detail.split()).rstrip(".")
    if isinstance(error, KeyError):
        text = f"it has no {text}"
    return text if len(text) <= 300 else text[:300] + " ..."
