"""Several caches in one pool: each answers as it does alone, pages go back, and nothing moves while it is held."""

import gc
import threading
import time

import pytest
import torch
from contracts.harness import Runner, Tokens, answers, assert_same_answer, draw_tokens
from refusals import refused
from stores.pools import free_pool

from kvsift.kernels.page_summary import SUMMARIES
from kvsift.plan.syntax import parse_plan
from kvsift.stores.kv_pool import KVPool
from kvsift.stores.page_table import PageTable

KNOBS = "budget=24:sinks=4:window=8:dense_layers=none"
PLANS = [
    f"quest:{KNOBS}:page_size=4",
    f"quest:{KNOBS}:page_size=4:score_by=mean_std",
    f"oracle_tokens:{KNOBS}",
    "dense",
]


def runner(plan: str, kv: KVPool) -> Runner:
    """A runner whose unused slots are not poisoned: they may be another's."""
    made = Runner(parse_plan(plan), table=PageTable(1, kv))
    del made.store.append
    return made


@pytest.mark.parametrize("plan", PLANS)
def test_documents_in_one_pool_answer_as_each_does_alone(plan: str) -> None:
    kv, texts = KVPool(free_pool(80)), [draw_tokens(length, seed) for seed, length in enumerate((90, 60, 75))]
    page_size = parse_plan(plan).page_size or 16
    readers = [runner(plan, kv) for _ in texts]
    outputs: list[list[torch.Tensor]] = [[] for _ in texts]
    for start in range(0, 90, 7):  # in turns, so that rows are fragmented
        for tokens, reader, output in zip(texts, readers, outputs):
            chunk = tokens.part(start, min(start + 7, tokens.length))
            generated = max(start + chunk.length - 50, 0) if start < tokens.length else 0
            if chunk.length:
                output += reader.feed(chunk, decode_tokens=min(generated, chunk.length))
    assert kv.layers[2].page_size == page_size
    for tokens, output in zip(texts, outputs):
        cuts = range(7, tokens.length, 7)
        expected = answers(parse_plan(plan), tokens, 50, cuts)
        assert_same_answer(torch.cat(output, 1), expected, "a neighbour in the pool changed the answer")


def test_a_closed_document_returns_its_pages_to_the_pool() -> None:
    kv = KVPool(free_pool(24))
    one, other = (runner(PLANS[0], kv) for _ in range(2))
    for each in (one, other):
        each.feed(draw_tokens(44, 0))
    assert kv.pages.num_free <= 2
    pools = kv.layers[2].tensors
    del one
    gc.collect()
    third = runner(PLANS[0], kv)
    tokens = draw_tokens(44, 1)
    third.feed(tokens)
    assert_same_answer(
        other.feed(tokens.part(0, 1))[0], alone(draw_tokens(44, 0), tokens.part(0, 1)), "pages were taken"
    )
    assert all(now is before for now, before in zip(kv.layers[2].tensors, pools)), "the pool moved"


def alone(*chunks: Tokens) -> torch.Tensor:
    made = Runner(parse_plan(PLANS[0]))
    return [made.feed(chunk) for chunk in chunks][-1][0]


def test_a_pool_has_one_page_size() -> None:
    kv = KVPool(free_pool(40))
    runner(PLANS[0], kv)
    with refused("unsupported_plan"):
        runner("quest:budget=40:sinks=4:window=8:dense_layers=none:page_size=8", kv)


@pytest.mark.parametrize("kind_of_machine", ["idle", "busy"])
def test_threads_that_share_a_growing_pool_lose_nothing(kind_of_machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, failures = KVPool(), list[BaseException]()
    expected = {seed: answers(parse_plan(PLANS[0]), draw_tokens(120, seed), 60) for seed in range(4)}

    def read(seed: int) -> None:
        tokens = draw_tokens(120, seed)
        for _ in range(6):
            try:
                output = runner(PLANS[0], kv).feed_all(tokens, 60, range(60, 120))
                assert_same_answer(output, expected[seed], f"sequence {seed}")
            except BaseException as error:  # a thread's exception would fail nothing
                failures.append(error)

    if kind_of_machine == "busy":  # another thread runs between looking and making
        summary = SUMMARIES["minmax"]

        def slow_width(head_dim: int) -> int:
            time.sleep(0.02)
            return summary.width(head_dim)

        monkeypatch.setitem(SUMMARIES, "minmax", summary._replace(width=slow_width))
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
