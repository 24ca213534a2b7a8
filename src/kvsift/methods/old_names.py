"""Former spellings in method files, accepted for one release with a DeprecationWarning."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from kvsift.methods.traits import Traits

FLAGS = {name: name for name in Traits._fields} | {"moves": "repositions"}  # attribute -> trait

MOVED = {  # from kvsift.methods.base: module and name now
    "Asked": ("segment_batch", "SegmentRequest"),
    "HeadSharing": ("scoring", "HeadSharing"),
    "SegmentRequest": ("segment_batch", "SegmentRequest"),
    "ScoringMethod": ("scoring", "ScoringMethod"),
    "chosen_units": ("scoring", "chosen_units"),
    "enough": ("scoring", "units_for_mass"),
    "top_units": ("scoring", "top_units"),
    "wanted": ("scoring", "units_per_head"),
}


def adopt(cls: Any) -> None:
    """Read the flags and methods that a class defines in their former spelling. One that defines ``traits`` as well
    supports both spellings, and needs nothing."""
    former = set() if "traits" in vars(cls) else vars(cls).keys() & FLAGS.keys()
    if former:
        spelled = ", ".join(f"{FLAGS[name]}=..." for name in FLAGS if name in former)
        _warn(f"{cls.__name__} states {', '.join(sorted(former))}: write traits = Traits({spelled})")

        def traits(self: Any) -> Traits:
            stated = {FLAGS[name]: getattr(self, name) for name in former}
            if stated.get("estimates_mass") is False:  # scores that are no logits cannot be compared over heads
                stated = {"compares_heads": False, **stated}
            return super(cls, self).traits._replace(**stated)

        cls.traits = property(traits)
    if "move" in vars(cls) and "reposition" not in vars(cls):
        _warn(f"{cls.__name__}.move is now called reposition")
        cls.reposition = cls.move


def read(method: Any, name: str) -> Any:
    """Return an attribute by its former name.

    Raises:
        AttributeError: if there was none.
    """
    if name in FLAGS:
        _warn(f"{type(method).__name__}.{name} is now traits.{FLAGS[name]}")
        return getattr(method.traits, FLAGS[name])
    if name == "move":
        _warn(f"{type(method).__name__}.move is now called reposition")
        return method.reposition
    raise AttributeError(f"{type(method).__name__!r} object has no attribute {name!r}")


def moved(name: str) -> Any:
    """Return what ``kvsift.methods.base`` held by this name.

    Raises:
        AttributeError: if there was none.
    """
    if name not in MOVED:
        raise AttributeError(f"module 'kvsift.methods.base' has no attribute {name!r}")
    module, present = MOVED[name]
    _warn(f"kvsift.methods.base.{name} is now kvsift.methods.{module}.{present}")
    return getattr(import_module(f"kvsift.methods.{module}"), present)


def mark(state: Any) -> None:
    """Call the ``mark`` of a state whose method does not define ``checkpoint``."""
    if hasattr(state, "mark"):
        _warn(f"{type(state).__name__}.mark is called by Method.checkpoint(state): override that")
        state.mark()


def _warn(message: str) -> None:
    warnings.warn(f"{message}. The former spelling works for one release.", DeprecationWarning, stacklevel=4)
