"""The traits in which a method differs from most others."""

from __future__ import annotations

from typing import NamedTuple


class Traits(NamedTuple):
    """Traits of a method; the defaults describe one that selects tokens within its budget.

    Attributes:
        selects: False: the always-visible tokens are all there is.
        unbounded: every token is visible; the method takes no budget.
        slides: in prefill too, a query sees no more of the recent tokens than the window.
        repositions: ``Method.reposition`` gives the positions from which tokens are attended.
        granularity: unit of a selection: "token", "page" or "block".
        fills: False: a selection may have fewer units than the limit, though the limit is no mass.
        keeps_all: False: a token that is left out once is never selected again.
        estimates_mass: scores are estimated logits, so ``Budget.mass`` applies.
        no_mass: why ``Budget.mass`` is refused otherwise; follows the method's name in the message.
        compares_heads: ``Method.select`` follows ``Limit.adaptive``.
        weighs_past: ``Limit.always_lse`` is always given.
        follows: ``Method.follow`` is called after tokens are answered.
        wants_queries: the method learns from the queries of the prompt, not only from its keys.
        seals: what a state has learned when a chunk of the prompt is prefilled depends on the tokens up to there alone,
            so sequences whose prompts share a prefix can start from it; ``Method.prepare`` is called after every chunk.
        to_share: settings with which the method seals, if it does not with the present ones.
        wants_hidden: in decode, ``KVReader.from_below`` returns the query foreseen from the layer below.
        on_host: decode reads keys in host memory, and only there.
        drafts_only: selects what a verification of exact decoding has found (``Method.verified``).
    """

    selects: bool = True
    unbounded: bool = False
    slides: bool = False
    repositions: bool = False
    granularity: str = "token"
    fills: bool = True
    keeps_all: bool = True
    estimates_mass: bool = False
    no_mass: str = "estimates no attention mass"
    compares_heads: bool = False
    weighs_past: bool = False
    follows: bool = False
    wants_queries: bool = False
    seals: bool = False
    to_share: str = ""
    wants_hidden: bool = False
    on_host: bool = False
    drafts_only: bool = False
