"""The protocol of a measurement, and the loop over its points."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any

import torch

from kvsift.errors import InputError
from kvsift_lab.bench.recipe import BenchRecipe


class Bench(ABC):
    """A measurement of ``kvsift bench``.

    Attributes:
        kind: of the result file.
        recipe: what is measured.
    """

    kind: str
    recipe: BenchRecipe

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe

    @classmethod
    def of(cls, recipe: Any) -> Bench:
        """Return the bench of a recipe on this machine.

        Raises:
            InputError: if this machine cannot run it.
        """
        return cls(recipe)

    @abstractmethod
    def environment(self) -> dict[str, Any]:
        """Return machine and versions for the result file."""

    @abstractmethod
    def points(self) -> Iterable[Any]:
        """Return what is measured, in order."""

    def facts(self, point: Any) -> dict[str, Any]:
        """Return what identifies a point in the result file; a number is a context."""
        return {"context": point}

    @abstractmethod
    def measure(self, point: Any) -> dict[str, Any]:
        """Measure a point.

        Raises:
            InputError: if this point cannot be measured.
        """

    @abstractmethod
    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        """Render the last point of a result for a terminal."""

    def closing(self, result: dict[str, Any]) -> str:
        """Render what follows from all points; "" for nothing."""
        return ""

    def chart(self, result: dict[str, Any]) -> bytes:
        """Draw the result; for recipes with a ``chart_path``."""
        raise NotImplementedError

    def head(self) -> dict[str, Any]:
        """Return the start of a result file."""
        return {"kind": self.kind, "recipe": self.recipe.stored(), **self.environment()}

    def run(self) -> Iterator[dict[str, Any]]:
        """Measure point by point; a point that is not measured has its reason."""
        started, limit = perf_counter(), self.recipe.max_seconds
        for point in self.points():
            if limit is not None and perf_counter() - started > limit:
                measured = {"reason": f"--max-seconds {limit:g} had passed"}
            else:
                measured = self._measured(point)
            yield self.facts(point) | measured

    def _measured(self, point: Any) -> dict[str, Any]:
        try:
            with torch.inference_mode():
                return self.measure(point)
        except (InputError, torch.OutOfMemoryError) as error:
            return {"reason": first_line(error)}
        finally:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    """Return why something failed, in at most 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
