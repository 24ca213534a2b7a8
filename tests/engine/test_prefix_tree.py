"""Chunks of prompts: found by their tokens, held, dropped in order of what they are worth, and balanced."""

import random

import pytest

from kvsift.engine.pages import faults_of
from kvsift.engine.prefix_tree import Node, PrefixTree
from kvsift.models.hf.state_snapshot import NO_TOKENS
from kvsift.stores.page_pool import PagePool, Run

GRID, PAGES = 32, 2
ROOT = b"a model"


class Prompts:
    """A tree and the pages of prompts that were read into it."""

    def __init__(self) -> None:
        self.pool = PagePool()
        self.tree = PrefixTree(self.pool, GRID)
        self.now = 0.0  # and the sequence that reads then

    def read(self, ids: list[int], root: bytes = ROOT) -> list[Node]:
        """Read a prompt behind what is there; its sequence holds it all, and has let go of its own pages."""
        self.now += 1
        nodes = self.tree.find(root, ids)
        for start in range(GRID * len(nodes), len(ids) - GRID + 1, GRID):
            runs = self.pool.allocate(PAGES)
            before = nodes[-1] if nodes else None
            chunk = ids[start : start + GRID]
            nodes.append(self.tree.seal(root, before, chunk, runs, frozenset({"minmax"}), self.now))
            self.tree.keep_state(nodes[-1], NO_TOKENS, self.now)
            self.pool.release(runs)
        self.tree.hold(nodes, self.now, self.now)
        return nodes

    def check(self) -> None:
        assert faults_of(self.pool, self.tree.runs) == []


def test_a_prompt_finds_the_whole_chunks_that_it_begins_with() -> None:
    prompts, ids = Prompts(), list(range(100))
    nodes = prompts.read(ids)
    assert len(nodes) == 3
    assert prompts.tree.find(ROOT, ids[:95]) == nodes[:2]
    assert prompts.tree.find(ROOT, [*ids[:64], -1, *ids[65:]]) == nodes[:2]
    assert prompts.tree.find(ROOT, ids[1:]) == []
    assert prompts.tree.find(b"another model", ids) == []
    assert prompts.tree.find(ROOT, ids[32:]) == [], "a chunk is what it is behind those before it"
    assert prompts.read([*ids[:64], *range(500, 564)])[:2] == nodes[:2]
    assert (len(prompts.tree), prompts.tree.num_pages) == (5, 5 * PAGES)
    prompts.check()


def test_chunks_of_equal_names_are_told_apart_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = Prompts()
    prompts.read(list(range(32)))
    node = next(iter(prompts.tree._nodes.values()))
    node.ids = b"other tokens"
    assert prompts.tree.find(ROOT, list(range(32))) == []


def test_what_is_held_stays_and_leaves_go_before_what_they_need() -> None:
    prompts = Prompts()
    first, second = prompts.read(list(range(96))), prompts.read([*range(64), *range(900, 932)])
    assert prompts.tree.droppable() == 0
    assert prompts.tree.drop(100, prompts.now) == 0
    prompts.tree.let_go(first, 1.0)
    assert prompts.tree.droppable() == PAGES, "the second prompt needs all but one of the chunks"
    assert prompts.tree.drop(1, prompts.now) == PAGES
    assert prompts.tree.find(ROOT, list(range(96))) == first[:2]
    prompts.tree.let_go(second, 2.0)
    assert prompts.tree.drop(3, prompts.now) == 2 * PAGES
    assert prompts.tree.find(ROOT, list(range(96))) == first[:1]
    prompts.check()


def test_a_sequence_that_holds_or_lets_go_again_changes_nothing() -> None:
    prompts = Prompts()
    nodes = prompts.read(list(range(96)))
    prompts.tree.hold(nodes, 1.0, prompts.now)
    prompts.read(list(range(64)))
    for _ in range(2):
        prompts.tree.let_go(nodes, 1.0)
    assert prompts.tree.droppable() == PAGES, "the second sequence holds the others"


def test_of_prompts_that_wait_equally_long_the_deep_chunk_is_worth_most() -> None:
    prompts = Prompts()
    long, short = prompts.read(list(range(320))), prompts.read(list(range(1000, 1032)))
    for user, nodes in ((1.0, long), (2.0, short)):
        prompts.tree.let_go(nodes, user)
        for node in nodes:
            node.used = 0.0
    prompts.tree.drop(1, prompts.now)
    assert prompts.tree.find(ROOT, list(range(1000, 1032))) == [], "its tokens are cheap to read again"
    assert len(prompts.tree.find(ROOT, list(range(320)))) == 10


@pytest.mark.parametrize("seed", range(20))
def test_the_books_balance_whatever_happens(seed: int) -> None:
    rng, prompts = random.Random(seed), Prompts()
    held: list[tuple[list[Node], float]] = []
    for _ in range(200):
        move = rng.random()
        if move < 0.5:
            ids = [rng.randrange(2) for _ in range(rng.randrange(5))]
            prompt = [token for each in ids for token in [each] * GRID] + [9] * rng.randrange(GRID)
            held.append((prompts.read(prompt), prompts.now))
        elif move < 0.8 and held:
            prompts.tree.let_go(*held.pop(rng.randrange(len(held))))
        else:
            could, wanted = prompts.tree.droppable(), rng.randrange(12)
            freed = prompts.tree.drop(wanted, prompts.now)
            assert min(wanted, could) <= freed <= could
        prompts.check()
        assert all(node in prompts.tree._nodes.values() for nodes, _ in held for node in nodes)


def test_faults_of_references_are_found() -> None:
    pool = PagePool()
    runs = pool.allocate(3)
    assert faults_of(pool, runs) == []
    assert faults_of(pool, [Run(0, 2)]) == ["page 2 has 1 references and 0 owners", "page 2 is lost"]
    assert faults_of(pool, [*runs, Run(1, 2)]) == ["page 1 has 1 references and 2 owners"]
    pool.release([Run(0, 1)])
    assert "page 0 is free and has an owner" in faults_of(pool, runs)
