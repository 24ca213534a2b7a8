"""Report of results: one HTML page without scripts or requests, light or dark like the screen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from kvsift.errors import WrongFile
from kvsift_lab.eval.page import costs, maps, pareto, scores
from kvsift_lab.eval.page.means import PlanMean, headline, means_of, short_names
from kvsift_lab.eval.page.parts import Fold, Parts, Table, rendered, text_cell

SETUPS = {
    "question_decoded": "the question decoded token by token after the context (set-up B)",
    "whole_prompt": "the whole prompt prefilled densely, the answer decoded under the plan (set-up A)",
    "sparse_prefill": "context and question prefilled under the plan",
}


def page(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return the page of results of ``results.load_result``, by name.

    Raises:
        InputError: if a result has no scores.
    """
    reports = []
    for number, (name, result) in enumerate(results):
        if "cells" not in result:
            raise WrongFile(f"{name} has no scores, only recall. kvsift report draws results of kvsift eval.")
        result, shared = short_names(result)
        means = means_of(result)
        sections = [(title, render(result, means)) for title, render in SECTIONS]
        left = len(result["left_out"])
        reports.append({
            "id": f"r{number}",
            "name": name,
            "headline": headline(result, means),
            "about": _about(result, shared),
            "warnings": [
                *result["warnings"],
                *([f"{left} contexts are not finished; the same command resumes them."] if left else []),
            ],
            "sections": [(title, parts) for title, parts in sections if parts],
        })  # fmt: skip
    title = f"kvsift: {', '.join(name for name, _ in results)}"
    return str(rendered("report.html", title=title, reports=reports))


def _about(result: dict[str, Any], shared: Sequence[str]) -> str:
    model = result["recipe"].get("model") or "the embedded model"
    text = f"{len(result['samples']):,} answers of {model}, {SETUPS[result['recipe']['setup']]}."
    return text + (f" Every plan has {', '.join(shared)}, which the names omit." if shared else "")


def _provenance(result: dict[str, Any], means: Sequence[PlanMean]) -> Parts:
    """Return the recipe's keys, the sessions and their machines, the rows, and unfinished contexts."""
    recipe = {key: value for key, value in result["recipe"].items() if key not in ("rows", "digests") and value != []}
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in recipe.items() if value is not None)
    sessions = [
        [session["started"] or "-", text_cell(session["machine"]), session["commit"][:12], session["workers"],
         session.get("samples", "-"), session.get("seconds", "-"),
         text_cell(", ".join(f"{name} {version}" for name, version in session["versions"].items()))]
        for session in result["sessions"]
    ]  # fmt: skip
    head = ["session", "machine", "commit", "workers", "samples", "seconds", "versions"]
    plans = Table(
        ["plan", "budget", "role"], [[row["plan"], row["budget"] or "-", row["role"]] for row in result["rows"]]
    )
    left = [[job["task"], job.get("length") or "-", job["seed"]] for job in result["left_out"]]
    return [
        Markup("<pre>{}</pre>").format(keys),
        *([f"Fingerprint {result['fingerprint'][:16]}"] if "fingerprint" in result else []),
        Table(head, sessions),
        Fold("Every plan as it ran", [plans]),
        *([Fold(f"{len(left)} contexts not finished", [Table(["task", "length", "seed"], left)])] if left else []),
    ]


SECTIONS = (
    ("Mean scores", scores.mean_scores),
    ("Quality against visible tokens", scores.against_tokens),
    ("Quality against time per token", pareto.render),
    ("Memory", costs.memory),
    ("Times", costs.times),
    ("Score by depth", maps.depths),
    ("Layer by layer", maps.layers),
    ("Recipe and machine", _provenance),
)
