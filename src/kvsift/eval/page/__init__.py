"""Results as one HTML page: no script, no request, light or dark as the reader's screen is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsift.eval.page import depths, layers, provenance, quality, scores, speed
from kvsift.eval.page.html import document, escaped, section

SECTIONS = (
    ("Quality against visible tokens", quality.render),
    ("Scores", scores.render),
    ("Where the answer stood", depths.render),
    ("Layer by layer", layers.render),
    ("Time and memory", speed.render),
    ("Recipe and machine", provenance.render),
)


def page(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """A page over results of ``reading.load_result``, by name."""
    parts = []
    for name, result in results:
        found = [(title, body) for title, render in SECTIONS if (body := render(result))]
        intro = f"<h2 class=result>{escaped(name)}</h2>{_summary(result)}"
        parts.append(intro + "".join(section(title, body) for title, body in found))
    title = ", ".join(name for name, _ in results)
    return document(f"kvsift: {title}", "".join(parts))


def _summary(result: dict[str, Any]) -> str:
    recipe = result["recipe"]
    model = recipe.get("model") or "the embedded model"
    asked = f"{len(result['samples']):,} answers of {model}, {SETUPS[recipe['setup']]}."
    notes = [*result["warnings"], *_left(result["left_out"])]
    listed = "".join(f"<li>{escaped(note)}</li>" for note in notes)
    return f"<p>{escaped(asked)}</p>" + (f"<ul class=warnings>{listed}</ul>" if listed else "")


SETUPS = {
    "question_decoded": "the question decoded token by token after the context (set-up B)",
    "whole_prompt": "the whole prompt prefilled densely, the answer decoded under the plan (set-up A)",
    "sparse_prefill": "context and question prefilled under the plan",
}


def _left(left_out: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{len(left_out)} contexts are not finished; the same command goes on with them."] if left_out else []
