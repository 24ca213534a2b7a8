"""kvsift: sparse attention for long-context LLM inference; every query reads only the part of the KV cache it needs.

    import kvsift

    with kvsift.sparse(model, "sketch:budget=1024") as run:   # a transformers model
        model.generate(**inputs)
    print(run.report())

Names are imported on first use: ``import kvsift`` loads neither torch nor transformers. It does set how long OpenMP's
threads spin, which torch reads when it is loaded: see ``kvsift.threads``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvsift import errors, threads  # threads sets what torch reads when it is loaded
from kvsift.collector import collector_paused

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvsift.api.llm import LLM
    from kvsift.engine.sampling import Sampling
    from kvsift.errors import KVSiftError, NothingSkipped
    from kvsift.models.hf.sparse import make_cache, register, sparse
    from kvsift.plan.budget import Budget
    from kvsift.plan.plan import Plan, Rule
    from kvsift.plan.syntax import parse_plan
    from kvsift.tokenization.grammar import Grammar

_HOMES = {
    "Budget": "kvsift.plan.budget",
    "Grammar": "kvsift.tokenization.grammar",
    "InputError": "kvsift.errors",
    "LLM": "kvsift.api.llm",
    "Sampling": "kvsift.engine.sampling",
    "KVSiftError": "kvsift.errors",
    "NothingSkipped": "kvsift.errors",
    "Plan": "kvsift.plan.plan",
    "Rule": "kvsift.plan.plan",
    "make_cache": "kvsift.models.hf.sparse",
    "parse_plan": "kvsift.plan.syntax",
    "register": "kvsift.models.hf.sparse",
    "sparse": "kvsift.models.hf.sparse",
}

__all__ = [*_HOMES, "__version__"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvsift' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    with collector_paused():
        return getattr(import_module(_HOMES[name]), name)
