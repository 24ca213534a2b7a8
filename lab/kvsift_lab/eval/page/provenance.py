"""Recipe, sessions and machines of a result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvsift_lab.eval.page.html import details, escaped, table, text_cell
from kvsift_lab.eval.page.means import PlanMean


def render(result: dict[str, Any], means: Sequence[PlanMean]) -> str:
    """Return the recipe's keys, its rows, the sessions, and unfinished contexts."""
    recipe = {key: value for key, value in result["recipe"].items() if key not in ("rows", "digests") and value != []}
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in recipe.items() if value is not None)
    sessions = [
        [session["started"] or "-", text_cell(session["machine"]), session["commit"][:12], session["workers"],
         session.get("samples", "-"), session.get("seconds", "-"),
         text_cell(", ".join(f"{name} {version}" for name, version in session["versions"].items()))]
        for session in result["sessions"]
    ]  # fmt: skip
    head = ["session", "machine", "commit", "workers", "samples", "seconds", "versions"]
    plans = table(
        ["plan", "budget", "role"], [[row["plan"], row["budget"] or "-", row["role"]] for row in result["rows"]]
    )
    left = [[job["task"], job.get("length") or "-", job["seed"]] for job in result["left_out"]]
    missing = details(f"{len(left)} contexts not finished", table(["task", "length", "seed"], left)) if left else ""
    mark = f"<p class=soft>Fingerprint {escaped(result['fingerprint'][:16])}</p>" if "fingerprint" in result else ""
    return f"<pre>{escaped(keys)}</pre>{mark}{table(head, sessions)}{details('Every plan as it ran', plans)}{missing}"
