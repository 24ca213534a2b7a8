"""Prompts that were prefilled before: chunks of pages, found by the tokens that lead to them.

A chunk is ``grid`` tokens, of which the keys depend on the tokens before them alone, so sequences that share a prefix
share its pages. Its name is a hash of its tokens and of the name of the chunk before it; the tokens are compared,
too.

Layers without pages (``StateSnapshot``) have one state for each length, so a prompt begins with chunks up to one whose
state is kept. Of a prompt of n chunks, the state d chunks before the end stays if its number is a multiple of the
largest power of two up to d, or if prompts part behind it. So a prompt that leaves this one d chunks before the end
reads fewer than 2 d chunks again, the states of a prompt are some log2(n), and one that is not needed now will not be.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kvsift.models.hf.state_snapshot import StateSnapshot
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
        state: state of the layers without pages at its end; None: it is not kept.
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
    state: StateSnapshot | None = None
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
        most_state_bytes: bytes of host memory for states.

    Attributes:
        num_state_bytes: bytes of the states that are kept.
    """

    def __init__(self, pages: PagePool, grid: int, most_state_bytes: int = 0) -> None:
        self._pages, self.grid, self.most_state_bytes = pages, grid, most_state_bytes
        self.num_state_bytes = 0
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
        """The chunks that a prompt begins with, as far as they were prefilled and end with a state; ``root`` names what
        else keys depend on."""
        found, num_usable = list[Node](), 0
        for name, chunk in chain(root, ids, self.grid):
            node = self._nodes.get(name)
            if node is None or node.ids != chunk:
                break
            found.append(node)
            if node.state is not None:
                num_usable = len(found)
        return found[:num_usable]

    def hold(self, nodes: Iterable[Node], user: object, now: float) -> None:
        """Keep these chunks for a user until ``let_go``."""
        for node in nodes:
            node.users.add(user)
            node.used = now

    def let_go(self, nodes: Iterable[Node], user: object) -> None:
        """Keep these chunks no longer for a user, if it holds them."""
        for node in (nodes := list(nodes)):
            node.users.discard(user)
        for node in reversed(nodes):
            self._prune(node)

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

    def keep_state(self, node: Node, state: StateSnapshot | None, now: float) -> None:
        """Keep the state at the end of a chunk that has none. If all take too many bytes, others go: first those that
        no sequence holds, which have waited longest and save the fewest chunks."""
        if state is None or node.state is not None or state.num_bytes > self.most_state_bytes:
            return
        node.state = state
        self.num_state_bytes += state.num_bytes
        while self.num_state_bytes > self.most_state_bytes:
            others = ((each, _saved_by(each)) for each in self._nodes.values() if each is not node and _num_bytes(each))
            worst, _ = max(others, key=lambda other: (not other[0].users, (now - other[0].used) / other[1], -other[1]))
            self._drop_state(worst)

    def thin(self, nodes: Sequence[Node]) -> None:
        """Drop the states that the first chunks of a prompt need not keep."""
        for number, node in enumerate(nodes[:-1], 1):
            step = 1 << (len(nodes) - number).bit_length() - 1
            if number % step and len(node.children) < 2 and _num_bytes(node):
                self._drop_state(node)

    def _drop_state(self, node: Node) -> None:
        self.num_state_bytes -= _num_bytes(node)
        node.state = None
        self._prune(node)

    def _prune(self, node: Node | None) -> None:
        """Remove chunks at the end of a chain that no sequence holds, and none can begin with."""
        while node is not None and node.state is None and not node.users and not node.children:
            if self._nodes.get(node.name) is not node:
                return
            self._remove(node)
            node = node.parent

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
        self.num_state_bytes -= _num_bytes(node)
        if node.parent is not None:
            node.parent.children.discard(node.name)
        self._pages.release(node.runs)


def _num_bytes(node: Node) -> int:
    return 0 if node.state is None else node.state.num_bytes


def _saved_by(node: Node) -> int:
    """Chunks that need not be read again where the state of this one is kept."""
    count, before = 1, node.parent
    while before is not None and before.state is None:
        count, before = count + 1, before.parent
    return count


def chain(root: bytes, ids: Sequence[int], grid: int) -> Iterable[tuple[bytes, bytes]]:
    """Names and tokens of the complete chunks of a prompt."""
    name = root
    for start in range(0, len(ids) - grid + 1, grid):
        chunk = array("q", ids[start : start + grid]).tobytes()
        name = blake2b(name + chunk, digest_size=32).digest()
        yield name, chunk
