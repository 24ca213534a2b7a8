"""The budget: how many tokens a query may see, and which of them are always visible.

Sinks, local window, dense layers and rounding to units are defined here, so that no method repeats them and methods
compare at equal measured tokens. The captured path has the same arithmetic on the device (``kernels.page_spans``), held
to this one by tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from kvsift.errors import Conflict, InvalidValue
from kvsift.methods import checks
from kvsift.types import Candidates, LayerShape

DEFAULT_TOKENS = 1024


class Room(NamedTuple):
    """What queries from a position on may see: [0, sinks_stop), everything from ``window_start`` on, and so many
    ``units`` of the candidates, which may be more than there are."""

    sinks_stop: int
    window_start: int
    candidates: Candidates
    units: int


@dataclass(frozen=True)
class Budget:
    """Visible tokens per head and query: sinks, window and selected ones together.

    In prefill the queries of a segment share a selection. The budget is that of the first of them; the others see the
    tokens of the segment up to their own besides, as the papers count.

    Attributes:
        tokens: visible tokens, at most. 1024 when neither ``tokens``, ``ratio`` nor ``mass`` is given.
        ratio: the same as a share of the context, 0 < ratio <= 1; at least one unit is selected.
        mass: choose the smallest set whose estimated share of attention, always-visible tokens included, reaches
            this; 0 < mass <= 1. ``tokens`` or ``ratio`` beside it are a ceiling.
        sinks: first tokens of the sequence, always visible; rounded up to units.
        window: most recent tokens, the query's own included, always visible; rounded up to units. 0 forces nothing:
            even the unit being filled competes (decode only).
        dense_layers: layers that always see everything, counted from 0 among those with full attention.
        min_context: with fewer cached tokens everything is visible.
        layer_budgets: "equal", or "pyramid": lower layers see more tokens and upper ones fewer, the same in the mean
            (``plan.layer_budgets``).
        head_budgets: "equal", or "adaptive": the heads of a layer that choose share what they would have in all, by
            their estimated shares of attention (``methods.common.head_budgets``). ``tokens`` is then the mean of the
            heads of a layer.
        min_recovery: decode steps are probed, and where less attention than this share is recovered, the budget of the
            sequence doubles (``plan.guard``); None: it stays.
    """

    tokens: int | None = None
    ratio: float | None = None
    mass: float | None = None
    sinks: int = 4
    window: int = 64
    dense_layers: tuple[int, ...] = (0, 1)
    min_context: int = 0
    layer_budgets: Literal["equal", "pyramid"] = "equal"
    head_budgets: Literal["equal", "adaptive"] = "equal"
    min_recovery: float | None = None

    def __post_init__(self) -> None:
        checks.use_python_numbers(self)
        if self.tokens is not None:
            checks.whole("budget", self.tokens, 1)
        for name in ("sinks", "window", "min_context"):
            checks.whole(name, getattr(self, name), 0)
        _share("ratio", self.ratio)
        _share("mass", self.mass)
        _share("min_recovery", self.min_recovery)
        try:
            layers = tuple(self.dense_layers)
        except TypeError:
            raise InvalidValue(f"dense_layers={self.dense_layers!r} must be layer numbers such as (0, 1).") from None
        object.__setattr__(self, "dense_layers", tuple(checks.whole("dense_layers", layer, 0) for layer in layers))
        if self.tokens is not None and self.ratio is not None:
            raise Conflict(f"budget={self.tokens} and ratio={self.ratio} both set the size; give one of them.")
        if self.tokens is None and self.ratio is None and self.mass is None:
            object.__setattr__(self, "tokens", DEFAULT_TOKENS)
        checks.one_of("layer_budgets", self.layer_budgets, ("equal", "pyramid"))
        checks.one_of("head_budgets", self.head_budgets, ("equal", "adaptive"))
        if self.layer_budgets == "pyramid" and self.tokens is None and self.ratio is None:
            raise Conflict("layer_budgets='pyramid' divides a number of tokens, and mass= has none; add budget=.")
        if self.head_budgets == "adaptive" and self.mass is not None:
            raise Conflict(
                "head_budgets='adaptive' divides a number of tokens among heads; with mass= each takes what it needs "
                "already. Leave out one of them."
            )

    def check(self, unit_size: int, selects: bool) -> None:
        """Refuse a budget that can never select anything, in units of ``unit_size`` (``InputError``)."""
        if self.tokens is None:
            return
        if not selects and self.tokens <= self.sinks:
            raise InvalidValue(f"budget={self.tokens} leaves no window: sinks={self.sinks} take it all. Give more.")
        always = _round_up(self.sinks, unit_size) + (self.window + unit_size - 1 if self.window else 0)
        if selects and self.tokens < always + unit_size:
            raise InvalidValue(
                f"budget={self.tokens} leaves nothing to select: sinks={self.sinks} and window={self.window} take up "
                f"to {always} tokens in units of {unit_size}. Give at least {always + unit_size}, or shrink window, "
                "sinks or page_size."
            )

    def is_dense(self, layer: LayerShape) -> bool:
        """Whether a layer always sees everything."""
        return layer.attention_index in self.dense_layers

    def limit(self, context: int) -> int:
        """Visible tokens allowed at a context length."""
        if self.tokens is not None:
            return self.tokens
        return ceil(self.ratio * context) if self.ratio is not None else context

    def always(self, start: int, unit_size: int, fill: bool = False) -> tuple[int, int]:
        """(sinks_stop, window_start): a query at ``start`` always sees [0, sinks_stop) and [window_start, start].

        With ``fill`` the window is all that sinks leave of the budget (methods that select nothing).
        """
        window = max(self.limit(start + 1) - self.sinks, 1) if fill else self.window
        window_start = max(start + 1 - window, 0) // unit_size * unit_size
        if window == 0:
            window_start = _round_up(start + 1, unit_size)
        return min(-(-self.sinks // unit_size) * unit_size, window_start), window_start

    def room(self, start: int, unit_size: int) -> Room:
        """Return what queries from position ``start`` on may see."""
        sinks_stop, window_start = self.always(start, unit_size)
        first, context, limit = sinks_stop // unit_size, start + 1, self.limit(start + 1)
        candidates = Candidates(first, window_start // unit_size - first, unit_size)
        if limit >= context:  # with window=0 the unit being filled competes, and none may be left out
            units = (window_start - sinks_stop) // unit_size
        else:
            selected = limit - sinks_stop - max(context - window_start, 0)
            units = max(selected // unit_size, 1 if self.tokens is None else 0)
        return Room(sinks_stop, window_start, candidates, units)

    def candidates(self, start: int, unit_size: int) -> Candidates:
        """Units that queries from position ``start`` on may choose from."""
        return self.room(start, unit_size).candidates

    def units(self, start: int, unit_size: int) -> int:
        """How many units queries from position ``start`` on may select."""
        return self.room(start, unit_size).units


def _round_up(tokens: int, unit_size: int) -> int:
    return -(-tokens // unit_size) * unit_size


def _share(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise InvalidValue(f"{name}={value!r} must be a share: greater than 0 and at most 1.")
