"""Recipes and samples that tests of the runner share."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from kvsift_lab.eval.recipe import EvalRecipe

RECIPE = """
tasks = ["passkey", "key_value"]
lengths = [700]
questions_per_task = 2
questions_per_context = 2
plans = ["dense", "quest:budget={budget}:window=16", "streaming_llm:budget={budget}"]
budgets = [64, 256]
settings = ":sinks=4:dense_layers=none"
references = false
seed = 5
"""


def recipe_text(*changes: tuple[str, str], model: Path | None = None) -> str:
    """The recipe above with some of its text exchanged."""
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text + (f"model = '{model}'\n" if model else "")


def recipe_of(folder: Path, *changes: tuple[str, str], model: Path | None = None) -> EvalRecipe:
    """That recipe, from a file."""
    path = folder / "recipe.toml"
    path.write_text(recipe_text(*changes, model=model))
    return EvalRecipe.load(path)


def sample(plan: str = "dense", budget: int | None = None, score: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A sample as a run writes it."""
    return {
        "task": "passkey", "length": 700, "seed": 5, "question": 0, "questions": 1, "setup": "question_decoded",
        "plan": plan, "budget": budget, "depth": 0.5, "asked": "Which?", "expected": "12", "references": ["12"],
        "scorer": "exact", "answer": "12", "score": score, "visible_tokens": 60.0, "density": 0.1, "recall": 0.5,
        "recovery": 0.7, "sparse_layer_visible_tokens": 60.0, "prefill_visible_tokens": None,
        "layers": [[0, 60.0, 0.5, 0.7], [1, 60.0, 0.6, 0.8]], "read_s": 1.0, "ttft_s": 0.2, "tpot_s": 0.01,
        "kv_bytes": 1 << 20, "peak_memory_bytes": 1 << 30, "path": "composed", **changes,
    }  # fmt: skip


class Tags(HTMLParser):
    """Tags that are open, links, and text outside of tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
