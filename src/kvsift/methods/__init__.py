"""The catalogue: every method by name, one line each. Other packages add theirs through entry points:

[project.entry-points."kvsift.methods"]
my_method = "my_package.my_method:MyMethod"
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, NamedTuple

from kvsift.errors import InvalidMethod, unknown

if TYPE_CHECKING:
    from kvsift.methods.base import Method


log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """The class of a method, and a one-line summary."""

    path: str  # "module:Class"
    summary: str
    package: str = ""  # the installed package that added it; none if it is ours


BUILT_IN: dict[str, Entry] = {
    "critiprefill": Entry(
        "kvsift.methods.critiprefill:CritiPrefill", "blocks that a segment finds critical, fused over layers"
    ),
    "dense": Entry("kvsift.methods.dense:Dense", "every token; the baseline"),
    "h2o": Entry("kvsift.methods.h2o:H2O", "tokens that past queries attended to most; drops the others for good"),
    "infinigen": Entry("kvsift.methods.infinigen:InfiniGen", "tokens by logits foreseen from the layer below"),
    "infllm": Entry("kvsift.methods.infllm:InfLLM", "one set of blocks for all heads, seen from one distance"),
    "keydiff": Entry("kvsift.methods.keydiff:KeyDiff", "tokens least like the mean direction of the keys"),
    "less_is_more": Entry("kvsift.methods.less_is_more:LessIsMore", "one set of tokens for all heads and many layers"),
    "loki": Entry("kvsift.methods.loki:Loki", "tokens by logits along principal axes of the keys"),
    "magicpig": Entry("kvsift.methods.magicpig:MagicPIG", "a weighted sample of the tokens, drawn by hash tables"),
    "oracle_pages": Entry("kvsift.methods.oracle:OraclePages", "pages with the largest exact logits; a ceiling"),
    "oracle_tokens": Entry("kvsift.methods.oracle:OracleTokens", "tokens with the largest exact logits; a ceiling"),
    "pqcache": Entry("kvsift.methods.pqcache:PQCache", "tokens by logits from product-quantised keys"),
    "quest": Entry("kvsift.methods.quest:Quest", "pages by the upper bound of their min/max keys"),
    "quoka": Entry("kvsift.methods.quoka:QuoKA", "tokens by their cosine with the queries least like the mean"),
    "random": Entry("kvsift.methods.random:Random", "pages drawn at random; a floor"),
    "retrieval_attention": Entry(
        "kvsift.methods.retrieval_attention:RetrievalAttention", "tokens that an index of the keys finds for the query"
    ),
    "sample_attention": Entry(
        "kvsift.methods.sample_attention:SampleAttention", "tokens that evenly spaced queries of the chunk attend to"
    ),
    "sketch": Entry(
        "kvsift.methods.sketch:Sketch", "tokens by 1 or 2 bits per channel, and an estimate of attention to the others"
    ),
    "snapkv": Entry(
        "kvsift.methods.snapkv:SnapKV", "tokens that the end of the prompt attended to; drops the others for good"
    ),
    "sparq": Entry("kvsift.methods.sparq:SparQ", "tokens by logits over the largest channels of the queries"),
    "streaming_llm": Entry("kvsift.methods.streaming_llm:StreamingLLM", "sinks and the most recent tokens; a floor"),
    "tidal_decode": Entry("kvsift.methods.tidal_decode:TidalDecode", "each head's best tokens, for many layers"),
    "tova": Entry("kvsift.methods.tova:TOVA", "tokens that the last query attended to; drops the others for good"),
    "verify": Entry("kvsift.methods.verify:Verify", "pages that the last verification attended to; for exact decoding"),
}


@cache
def catalogue() -> dict[str, Entry]:
    """Return all methods by name: built in, and added by installed packages. A package's method whose name is taken is
    left out with a warning."""
    entries = dict(BUILT_IN)
    for point in entry_points(group="kvsift.methods"):
        package = point.dist.name if point.dist else "unknown"
        if point.name in entries:
            other = entries[point.name].package or "kvsift"
            log.warning(
                "the method %r of the installed package %s is left out: %s has a method of that name.",
                point.name, package, other,
            )  # fmt: skip
            continue
        entries[point.name] = Entry(point.value, f"added by {package}", package)
    return dict(sorted(entries.items()))


def method_class(name: str) -> type[Method]:
    """Return the class of a catalogued method.

    Raises:
        InputError: if no method has that name (with the nearest one that exists), or an installed package adds it and
            it cannot be loaded.
    """
    if name not in catalogue():
        raise unknown("method", name, catalogue())
    entry = catalogue()[name]
    try:
        return _load(entry.path)
    except Exception as error:
        if not entry.package:
            raise
        raise InvalidMethod(
            f"the method {name!r} of the installed package {entry.package} cannot be loaded: "
            f"{type(error).__name__}: {error}. Repair or uninstall {entry.package}."
        ) from error


def _load(path: str) -> type[Method]:
    from kvsift.methods.base import Method

    module, _, attribute = path.partition(":")
    loaded = getattr(import_module(module), attribute)
    if not (isinstance(loaded, type) and issubclass(loaded, Method)):
        raise TypeError(f"{path} is no subclass of kvsift.methods.base.Method")
    return loaded
