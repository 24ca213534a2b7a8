"""The protocol of a measurement, and the loop over points of which each stands alone."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any

import torch

from kvsift.errors import InputError
from kvsift_lab.bench import machine


class Study(ABC):
    """A measurement of ``kvsift bench`` that yields its points itself.

    Attributes:
        kind: of the result.
        recipe: what is measured.
    """

    kind: str
    recipe: Any

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe

    @classmethod
    def of(cls, recipe: Any) -> Study:
        """Return the measurement of a recipe on this machine.

        Raises:
            InputError: if this machine cannot run it.
        """
        return cls(recipe)

    def environment(self) -> dict[str, Any]:
        """Return machine and versions for the result."""
        return machine.host_environment()

    def head(self) -> dict[str, Any]:
        """Return the start of a result."""
        return {"kind": self.kind, "recipe": self.recipe.stored(), **self.environment()}

    @abstractmethod
    def run(self) -> Iterator[dict[str, Any]]:
        """Measure, and yield point by point."""

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        """Render the last point of a result for a terminal: its names and numbers, by default."""
        shown = {key: value for key, value in point.items() if isinstance(value, str | int | float)}
        return ", ".join(
            f"{key} {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in shown.items()
        )

    def closing(self, result: dict[str, Any]) -> str:
        """Render what follows from all points; "" for nothing."""
        return ""

    def chart(self, result: dict[str, Any]) -> bytes:
        """Draw the result; for recipes with a ``chart_path``."""
        raise NotImplementedError


class Bench(Study):
    """A study of points of which each is measured alone, and of which one may fail."""

    def points(self) -> Iterable[Any]:
        """Return what is measured, in order: the contexts, by default."""
        return sorted(self.recipe.contexts)

    def facts(self, point: Any) -> dict[str, Any]:
        """Return what identifies a point in the result; a number is a context."""
        return {"context": point}

    @abstractmethod
    def measure(self, point: Any) -> dict[str, Any]:
        """Measure a point.

        Raises:
            InputError: if this point cannot be measured.
        """

    def run(self) -> Iterator[dict[str, Any]]:
        """Measure point by point; a point that is not measured has its reason."""
        started, limit = perf_counter(), getattr(self.recipe, "max_seconds", None)
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
