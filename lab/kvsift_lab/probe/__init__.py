"""How the embedded model is made: tokenizer, data, training in phases, evaluation, and its card."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def phase(name: str) -> dict[str, Any]:
    """Return the recipe of a phase, "1" to "5": the tables of all phases, with its own in them."""
    shared = tomllib.loads((ROOT / "lab/recipes/probe.toml").read_text())
    own = shared.pop("phases")[name]
    return {table: {**values, **own.get(table, {})} for table, values in shared.items()}
