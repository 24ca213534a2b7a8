"""Prompts that were prefilled before: chunks of pages, found by the tokens that lead to them.

A chunk is ``grid`` tokens, of which the keys depend on the tokens before them alone, so sequences that share a prefix
share its pages. Its name is a hash of its tokens and of the name of the chunk before it; the tokens are compared,
too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kvsift.stores.page_pool import PagePool, Run


@dataclass(eq=False)
class Node:
    """A chunk that was prefilled.

    Attributes:
        name: name of the chain of chunks up to this one.
        ids: its tokens, as bytes.
        runs: its pages, in logical order.
        parent: the chunk before it; None for the first one.
        depth: chunks before it.
        kinds: kinds of page summary that its pages have.
        sealed: what methods remember of the tokens up to its end (``SparseCache.sealed``).
        used: time of its last use.
        users: those that hold it, each once: it may be held, or let go, again after an interrupt.
        children: chunks behind it.
    """

    name: bytes
    ids: bytes
    runs: list[Run]
    parent: Node | None
    depth: int
    kinds: frozenset[str]
    sealed: Sequence[Any]
    used: float
    users: set[object] = field(default_factory=set)
    children: set[bytes] = field(default_factory=set)

    @property
    def num_pages(self) -> int:
        return sum(run.num_pages for run in self.runs)


class PrefixTree:
    """Chunks by the tokens that lead to them. It holds a reference to the pages of each.

    Args:
        pages: the pool.
        grid: tokens of a chunk.
    """

    def __init__(self, pages: PagePool, grid: int) -> None:
        self._pages, self.grid = pages, grid
        self._nodes: dict[bytes, Node] = {}
        self.kinds: frozenset[str] = frozenset()  # that any chunk has

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_pages(self) -> int:
        return sum(node.num_pages for node in list(self._nodes.values()))  # a copy: another thread may seal

    @property
    def runs(self) -> list[Run]:
        """Pages of all chunks."""
        return [run for node in self._nodes.values() for run in node.runs]

    def find(self, root: bytes, ids: Sequence[int]) -> list[Node]:
        """The chunks that a prompt begins with, as far as they were prefilled; ``root`` names what else keys depend
        on."""
        found: list[Node] = []
        for name, chunk in chain(root, ids, self.grid):
            node = self._nodes.get(name)
            if node is None or node.ids != chunk:
                break
            found.append(node)
        return found

    def hold(self, nodes: Iterable[Node], user: object, now: float) -> None:
        """Keep these chunks for a user until ``let_go``."""
        for node in nodes:
            node.users.add(user)
            node.used = now

    def let_go(self, nodes: Iterable[Node], user: object) -> None:
        """Keep these chunks no longer for a user, if it holds them."""
        for node in nodes:
            node.users.discard(user)

    def seal(self, root: bytes, before: Node | None, ids: Sequence[int], runs: Sequence[Run], kinds: frozenset[str],
             now: float, sealed: Sequence[Any] = ()) -> Node:  # fmt: skip
        """Add the chunk behind ``before``, whose pages are full and are never written again; the caller holds it."""
        [(name, chunk)] = chain(before.name if before is not None else root, ids, self.grid)
        node = self._nodes.get(name)
        if node is None:
            self._pages.share(runs)
            depth = 0 if before is None else before.depth + 1
            node = self._nodes[name] = Node(name, chunk, list(runs), before, depth, kinds, sealed, now)
            self.kinds |= kinds
            if before is not None:
                before.children.add(name)
        return node

    def droppable(self) -> int:
        """Pages that ``drop`` could free: of chunks that neither a sequence nor a chunk behind them needs."""
        held: set[bytes] = set()
        for node in self._nodes.values():
            if node.users:
                step: Node | None = node
                while step is not None and step.name not in held:
                    held.add(step.name)
                    step = step.parent
        return sum(node.num_pages for node in self._nodes.values() if node.name not in held)

    def drop(self, num_pages: int, now: float) -> int:
        """Free so many pages, or as many as can be; the pages freed. The chunks that have waited longest go first, of
        those the ones that are cheap to read again: the work of a chunk grows with what lies before it."""
        freed = 0
        while freed < num_pages:
            leaves = [node for node in self._nodes.values() if not node.users and not node.children]
            if not leaves:
                break
            worst = max(leaves, key=lambda node: ((now - node.used) / (node.depth + 1), node.depth))
            freed += worst.num_pages
            self._remove(worst)
        return freed

    def _remove(self, node: Node) -> None:
        del self._nodes[node.name]
        if node.parent is not None:
            node.parent.children.discard(node.name)
        self._pages.release(node.runs)


def chain(root: bytes, ids: Sequence[int], grid: int) -> Iterable[tuple[bytes, bytes]]:
    """Names and tokens of the complete chunks of a prompt."""
    name = root
    for start in range(0, len(ids) - grid + 1, grid):
        chunk = array("q", ids[start : start + grid]).tobytes()
        name = blake2b(name + chunk, digest_size=32).digest()
        yield name, chunk
