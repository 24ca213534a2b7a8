"""What made the numbers: the recipe, and where and when it ran."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvsift.eval.page.html import details, escaped, table, text_cell
from kvsift.eval.page.means import Mean


def render(result: dict[str, Any], means: Sequence[Mean]) -> str:
    """The recipe's keys, its rows, the sessions, and what is left out."""
    recipe = {key: value for key, value in result["recipe"].items() if key not in ("rows", "digests") and value != []}
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in recipe.items() if value is not None)
    sessions = [
        [each["started"] or "-", text_cell(each["machine"]), each["commit"][:12], each["workers"],
         each.get("samples", "-"), each.get("seconds", "-"),
         text_cell(", ".join(f"{name} {version}" for name, version in each["versions"].items()))]
        for each in result["sessions"]
    ]  # fmt: skip
    head = ["session", "machine", "commit", "at a time", "samples", "seconds", "versions"]
    plans = table(
        ["plan", "budget", "role"], [[row["plan"], row["budget"] or "-", row["role"]] for row in result["rows"]]
    )
    left = [[each["task"], each.get("length") or "-", each["seed"]] for each in result["left_out"]]
    missing = details(f"{len(left)} contexts not finished", table(["task", "length", "seed"], left)) if left else ""
    mark = f"<p class=soft>Fingerprint {escaped(result['fingerprint'][:16])}</p>" if "fingerprint" in result else ""
    return f"<pre>{escaped(keys)}</pre>{mark}{table(head, sessions)}{details('Every plan as it ran', plans)}{missing}"
