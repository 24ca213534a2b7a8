"""Plans that share a prefilled context: one rule for documents, evaluations and reports."""

import pytest

from kvsift.engine.prefill_sharing import can_share_prefill, prefill_key
from kvsift.plan.syntax import parse_plan

SNAPKV, BLOCKS = "snapkv:budget=256", "retrieval_attention:block=16384"


@pytest.mark.parametrize(
    ("plan", "other", "shares"),
    [
        ("dense", "quest:budget=256", True),
        ("quest:budget=256", "quest:budget=512", True),
        ("prefill=quoka:budget=256", "dense", False),
        ("prefill=quoka:budget=256", "prefill=quoka:budget=256,decode=quest:budget=256", True),
        ("dense", SNAPKV, False),  # its state comes from the queries of the prompt
        (SNAPKV, SNAPKV, True),
        (SNAPKV, "snapkv:budget=512", False),
        ("dense", "retrieval_attention", False),
        ("dense", BLOCKS, False),
        (BLOCKS, BLOCKS, True),
        (BLOCKS, "retrieval_attention:block=8192", False),
        ("dense", "retrieval_attention:index=flat", True),  # the keys are all that it reads
        (SNAPKV, "dense", True),  # the keys and values are those of a dense prefill
    ],
)
def test_a_context_is_prefilled_again_only_if_it_must_be(plan: str, other: str, shares: bool) -> None:
    one, two = parse_plan(plan), parse_plan(other)
    assert can_share_prefill(one, two) == shares
    if one.decode == two.decode or not shares:
        assert (prefill_key(one) == prefill_key(two)) == shares
