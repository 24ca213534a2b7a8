"""The best anchors for every number of them: layers that select, so that those between need not.

gains[a][l] is what layer l recovers of its attention with the selection of layer a, as a share of what it would with
its own: 1 for a = l, -inf for a > l. The layers between two anchors reuse the lower one, and dynamic
programming finds the anchors with the largest sum of gains. Each layer then takes the best anchor below it, which need
not be the nearest.

Source: Kascade (arXiv 2512.16391).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from kvsift.errors import InvalidValue

Gains = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Choice:
    """Anchors, and what the other layers are expected to recover.

    Attributes:
        anchors: indices into the gains, ascending.
        reuse: anchors and gains of the other indices.
        num_layers: anchors included.
    """

    anchors: tuple[int, ...]
    reuse: dict[int, tuple[int, float]]
    num_layers: int

    @property
    def mean(self) -> float:
        """Mean gain of all layers; anchors gain 1."""
        return (len(self.anchors) + sum(gain for _, gain in self.reuse.values())) / self.num_layers

    @property
    def least(self) -> float:
        """The smallest gain of a layer that reuses; 1 if none does."""
        return min((gain for _, gain in self.reuse.values()), default=1.0)


def choices(gains: Gains, least: float = -inf) -> list[Choice]:
    """The best anchors of every number from 1 up, where no layer would gain less than ``least`` from the nearest."""
    allowed = [[gain if gain >= least else -inf for gain in row] for row in gains]
    return [_assigned(gains, anchors) for anchors in best_anchors(allowed) if anchors]


def choose(gains: Gains, number: int | None, min_recovery: float) -> Choice:
    """The best so many anchors, or as few as leave no layer with less than ``min_recovery``.

    Raises:
        InputError: for more anchors than layers, or too few for layers that differ in heads.
    """
    if number is None:
        return choices(gains, min_recovery)[0]
    if number > len(gains):
        raise InvalidValue(
            f"{number} anchors are more than the {len(gains)} layers that are not dense. Give at most {len(gains)}; "
            "with that many every layer selects."
        )
    possible = choices(gains)
    for choice in possible:
        if len(choice.anchors) == number:
            return choice
    raise InvalidValue(
        f"{number} anchors are too few: layers reuse selections of layers with as many heads alone. Give at least "
        f"{len(possible[0].anchors)}."
    )


def best_anchors(gains: Gains) -> list[tuple[int, ...]]:
    """For 1, 2, ... anchors: those with the largest sum of gains where every layer takes the nearest anchor below;
    empty where no sum is finite. The first layer is always one."""
    count = len(gains)
    sums = [[0.0, *accumulate(row[first:])] for first, row in enumerate(gains)]  # of layers first to first + i - 1
    best, found = [0.0] + [-inf] * count, []  # of the first so many layers, with the anchors of this round
    sets: list[tuple[int, ...]] = [()] * (count + 1)
    for _ in range(count):
        ends = [max(range(stop), key=lambda a: best[a] + sums[a][stop - a]) for stop in range(1, count + 1)]
        totals = [best[a] + sums[a][stop - a] for stop, a in enumerate(ends, 1)]
        best, sets = [-inf, *totals], [(), *((*sets[a], a) for a in ends)]
        found.append(sets[count] if best[count] > -inf else ())
    return found


def _assigned(gains: Gains, anchors: tuple[int, ...]) -> Choice:
    reuse = {}
    for layer in sorted(set(range(len(gains))) - set(anchors)):
        gain, anchor = max((gains[anchor][layer], anchor) for anchor in anchors if anchor < layer)
        reuse[layer] = anchor, gain
    return Choice(anchors, reuse, len(gains))
