"""Construction of the attention-aware graph from the keys that sampled queries want."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvsift import native
from kvsift.errors import InvalidTensor, InvalidValue, unknown

Per = Literal["kv_head", "query_head"]

LISTS_PER_KEY = 128  # of the lists that contain a key, so many are counted at most; 1024 build no better graph
NUM_ENTRIES = 16
PAPER_BEAM = 500  # of the searches that link keys in the paper's build


def build_graphs(
    keys: Tensor, lists: Tensor, degree: int, per: Per, compat: Literal["paper"] | None
) -> tuple[Tensor, Tensor, list[int]]:
    """Build one graph per KV head, or per query head; arguments as in ``GraphIndex.from_lists``.

    Returns:
        neighbours int32 [num_graphs, n, degree] and entries int32 [num_graphs, num_entries], -1 at the end of a row;
        and how many keys of each graph no list contains.

    Raises:
        InputError: for keys or lists of another form, ids that are not rows of ``keys``, or a degree below 4.
    """
    check_form(keys)
    num_kv_heads, n, _ = keys.shape
    _check_lists(lists, num_kv_heads, n)
    if degree < 4 or compat not in (None, "paper"):
        raise InvalidValue(f"degree={degree}, compat={compat!r}: degree must be at least 4, compat None or 'paper'.")
    num_graphs = num_kv_heads if check_per(per) == "kv_head" else lists.shape[0]
    grouped = lists.to("cpu", torch.int32).reshape(num_graphs, -1, lists.shape[2]).contiguous()
    neighbours = torch.empty(num_graphs, n, degree * (2 if compat else 1), dtype=torch.int32)
    native.advise_huge(neighbours)  # a walk reads scattered rows: with small pages it also waits for addresses
    entries = torch.full((num_graphs, 1 if compat else NUM_ENTRIES), -1, dtype=torch.int32)
    unseen = []
    for graph in range(num_graphs):
        source = (grouped[graph].data_ptr(), grouped.shape[1], grouped.shape[2])
        target = neighbours[graph].data_ptr(), entries[graph].data_ptr()
        if compat:
            head = keys[graph * num_kv_heads // num_graphs]
            unseen.append(native.core.graph_build_paper(
                head.data_ptr(), *head.shape, head.dtype == torch.bfloat16, *source, degree, PAPER_BEAM, *target,
                native.num_threads(None), native.level(),
            ))  # fmt: skip
        else:
            unseen.append(native.core.graph_build(
                *source, n, degree, LISTS_PER_KEY, *target, NUM_ENTRIES, native.num_threads(None)
            ))  # fmt: skip
    return neighbours, entries, unseen


def check_per(per: str) -> str:
    """Return what a graph is built for, if it is known."""
    if per not in ("kv_head", "query_head"):
        raise unknown("kind of graph", per, ("kv_head", "query_head"))
    return per


def _check_lists(lists: Tensor, num_kv_heads: int, num_keys: int) -> None:
    if lists.ndim != 3 or lists.shape[0] == 0 or lists.shape[0] % num_kv_heads:
        raise InvalidTensor(f"lists {tuple(lists.shape)}: give [num_query_heads, t, k] for {num_kv_heads} KV heads.")
    if lists.numel() and (int(lists.max()) >= num_keys or int(lists.min()) < -1):
        raise InvalidTensor(
            f"lists hold ids from {int(lists.min())} to {int(lists.max())}; keys have rows 0 to {num_keys - 1}."
        )


def check_form(keys: Tensor) -> None:
    """Refuse keys that the compiled core cannot walk over.

    Raises:
        InputError: unless they are [num_kv_heads, n, d] on the CPU, bf16 or float32, the rows of a head contiguous.
    """
    if keys.ndim != 3 or keys.device.type != "cpu" or keys.dtype not in (torch.bfloat16, torch.float32):
        raise InvalidTensor(
            f"keys {tuple(keys.shape)}, {keys.dtype} on {keys.device}: an index needs [num_kv_heads, n, d] on the CPU, "
            "bf16 or float32."
        )
    if keys.numel() and (keys.stride(2) != 1 or (keys.shape[1] > 1 and keys.stride(1) != keys.shape[2])):
        raise InvalidTensor(f"keys with strides {keys.stride()}: rows of a head must lie next to each other in memory.")
