"""The page of models: what was found by running a tiny one of every family (``tests/models/families.py``)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsift_lab.numbers import table

FILE = Path(__file__).parents[3] / "tests" / "models" / "families.json"
COLUMNS = {
    "block": "`kvsift.sparse`",
    "composed": "engine",
    "captured": "captured",
    "native": "native",
    "exact": "exact",
    "reuse": "shared prefixes",
    "saved": "saved",
}


def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(FILE.read_text())
    return facts


def families() -> str:
    """Return a line for each family: its layers, and what it can do."""
    found = _facts()["families"]
    rows = [[f"`{name}`", each["layers"], *(_mark(each, part) for part in COLUMNS)] for name, each in found.items()]
    return table(["family", "layers", *COLUMNS.values()], rows)


def _mark(found: dict[str, Any], part: str) -> str:
    """What a cell says: yes, or nothing where it was declined; of captured steps also on which cards they were."""
    if found[part] != "yes":
        return ""
    cards = [card for card, verdict in found.get("gpu", {}).items() if verdict == "yes"]
    return f"yes ({', '.join(cards)})" if part == "captured" and cards else "yes"


def declined() -> str:
    """Return the sentences with which something was declined, and for which families."""
    families, told = _facts()["families"], defaultdict[tuple[str, str], list[str]](list)
    for part in COLUMNS:
        for name, found in families.items():
            if found[part] != "yes":
                told[part, found[part]].append(f"`{name}`")
    rows = [
        [COLUMNS[part], why, ", ".join(names) if len(names) <= len(families) // 2 else "all others"]
        for (part, why), names in told.items()
    ]
    return table(["", "why not", "families"], rows)


def head_dims() -> str:
    """Return what Llama can do with each head_dim."""
    found = _facts()["head_dims"]
    parts = ("composed", "captured", "native")
    rows = [[head_dim, *(_mark(each, part) for part in parts)] for head_dim, each in found.items()]
    return table(["head_dim", *(COLUMNS[part] for part in parts)], rows)


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/models.md": {"families": families, "head-dims": head_dims, "declined": declined}
}
