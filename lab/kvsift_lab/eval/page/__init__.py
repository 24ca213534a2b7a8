"""Report of results: one HTML page without scripts or requests, light or dark like the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsift.errors import InputError
from kvsift_lab.eval.page import depths, layers, memory, pareto, provenance, quality, scores, speed
from kvsift_lab.eval.page.html import document, escaped, plan_name, section
from kvsift_lab.eval.page.means import headline, means_of, short_names

SECTIONS = (
    ("Mean scores", scores.render),
    ("Quality against visible tokens", quality.render),
    ("Quality against time per token", pareto.render),
    ("Memory", memory.render),
    ("Times", speed.render),
    ("Score by depth", depths.render),
    ("Layer by layer", layers.render),
    ("Recipe and machine", provenance.render),
)
INTERVALS = (
    "Intervals are 95 %; questions that share a context count as fewer. Visible tokens are counted in selections, "
    "not taken from the budget."
)


def page(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return the page of results of ``result_files.load_result``, by name.

    Raises:
        InputError: if a result has no scores.
    """
    leads, parts = [], []
    for number, (name, result) in enumerate(results):
        if "cells" not in result:
            raise InputError(f"{name} has no scores, only recall. kvsift report draws results of kvsift eval.")
        result, shared = short_names(result)
        means = means_of(result)
        bodies = {title: render(result, means) for title, render in SECTIONS}
        sections = [(f"r{number}-{index}", *item) for index, item in enumerate(bodies.items()) if item[1]]
        link = f'<a href="#r{number}">{escaped(name)}</a>: ' if len(results) > 1 else ""
        leads.append(f"<p class=lead>{link}{plan_name(headline(result, means))}</p>")
        head = f'<h2 class=result id="r{number}">{escaped(name)}</h2>' if len(results) > 1 else ""
        links = "".join(f'<a href="#{anchor}">{escaped(title)}</a>' for anchor, title, _ in sections)
        nav = f'<nav aria-label="Sections of {escaped(name)}">{links}</nav>'
        parts.append(head + _summary(result, shared) + nav + "".join(section(t, body, a) for a, t, body in sections))
    title = f"kvsift: {', '.join(name for name, _ in results)}"
    body = f"<h1>{escaped(title)}</h1>{''.join(leads)}{''.join(parts)}<p class=soft>{INTERVALS}</p>"
    return document(title, body)


def _summary(result: dict[str, Any], shared: Sequence[str]) -> str:
    recipe = result["recipe"]
    model = recipe.get("model") or "the embedded model"
    text = f"{len(result['samples']):,} answers of {model}, {SETUPS[recipe['setup']]}."
    text += f" Every plan has {', '.join(shared)}, which the names omit." if shared else ""
    notes = [*result["warnings"], *_left(result["left_out"])]
    listed = "".join(f"<li>{escaped(note)}</li>" for note in notes)
    return f"<p>{escaped(text)}</p>" + (f"<ul class=warnings>{listed}</ul>" if listed else "")


SETUPS = {
    "question_decoded": "the question decoded token by token after the context (set-up B)",
    "whole_prompt": "the whole prompt prefilled densely, the answer decoded under the plan (set-up A)",
    "sparse_prefill": "context and question prefilled under the plan",
}


def _left(left_out: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{len(left_out)} contexts are not finished; the same command resumes them."] if left_out else []
