"""Append of one token per sequence, and the summaries of its page, for a whole batch in one launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvsift.kernels.coded_pages import encode, load_keys, store_coded, turn, write_rows
from kvsift.kernels.page_summary import row_twin, summarise_pages
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.sketch import SKETCHES
from kvsift.kernels.sketch_append import pool_addresses, write_newest_triton
from kvsift.kernels.triton_shim import jit, power_of_two, runs_on_triton, tl
from kvsift.native.coded_rows import encode_rows


def append(kv: PagedKV, keys: Tensor, values: Tensor, summaries: Mapping[str, Tensor]) -> None:
    """Write the newest token of every row at position ``lengths - 1``, and the summaries of its page.

    Summaries come from the page's keys up to that position, sketches from its values too, whatever the slots behind it
    hold, so they equal those of ``stores.PagedStore.append``.

    Args:
        kv: pools to write to; ``lengths`` count the new token.
        keys, values: [batch, num_kv_heads, head_dim].
        summaries: kind -> [num_kv_heads, num_pages, width], contiguous.
    """
    run = append_triton if runs_on_triton(keys) else append_reference
    run(kv, keys, values, summaries)


def append_reference(kv: PagedKV, keys: Tensor, values: Tensor, summaries: Mapping[str, Tensor]) -> None:
    pages, slots = _newest(kv)
    for pool, new, turned in ((kv.keys, keys.transpose(0, 1), True), (kv.values, values.transpose(0, 1), False)):
        if pool.dtype == torch.int8:
            write_rows(pool, pages, slots, encode_rows(new, turned=turned))
        else:
            pool[:, pages, slots] = new.to(pool.dtype)
    _summarise_newest(kv, summaries)


def _newest(kv: PagedKV) -> tuple[Tensor, Tensor]:
    """Page and slot of each row's newest token, int64 [batch]."""
    positions = kv.lengths.long() - 1
    pages = kv.table.long().gather(1, positions.unsqueeze(1) // kv.page_size).squeeze(1)
    return pages, positions % kv.page_size


def _summarise_newest(kv: PagedKV, summaries: Mapping[str, Tensor]) -> None:
    """Write the summaries of the pages that hold the newest tokens. Never waits for the device."""
    pages, slots = _newest(kv)
    valid = torch.arange(kv.page_size, device=slots.device) <= slots.unsqueeze(1)  # [batch, page_size]
    for kind, pool in summaries.items():
        pool[:, pages] = summarise_pages(kind, kv.keys, kv.values, pages, pool, valid)


def append_triton(kv: PagedKV, keys: Tensor, values: Tensor, summaries: Mapping[str, Tensor]) -> None:
    _append_kernel[kv.batch, kv.num_kv_heads](
        keys, values, *keys.stride()[:2], *values.stride()[:2], **pool_arguments(kv, summaries), num_warps=4
    )
    summarise_without_twins(kv, summaries)


def summarise_without_twins(kv: PagedKV, summaries: Mapping[str, Tensor]) -> None:
    """Write the summaries that a kernel which calls ``store_token`` does not write, after it: sketches, which hold
    values, and kinds without a Triton twin."""
    rest = {kind: pool for kind, pool in summaries.items() if row_twin(kind) is None}
    for kind in SKETCHES.keys() & rest.keys():
        write_newest_triton(kv, SKETCHES[kind], rest.pop(kind))
    if rest:
        _summarise_newest(kv, rest)


def append_sketches(
    layers: Sequence[tuple[PagedKV, Mapping[str, Tensor]]], keep: Callable[..., Tensor], *, pdl: bool = False
) -> None:
    """Write the sketches of the pages that the newest tokens fill, which ``append`` was not given. Of several tokens
    in one page, each a row, the one that fills it counts.

    Args:
        layers: the layers of a model, each with the pools of its summaries.
        keep: keep(make, arguments, key=key) returns what ``make`` made of the arguments when it first saw this key.
        pdl: programmatic dependent launch: may start while the kernel before still runs, and lets the one behind it
            start at once (Hopper and later).
    """
    for kind, bits in SKETCHES.items():
        pools = [(kv, summaries[kind]) for kv, summaries in layers if kind in summaries]
        if not pools:
            continue
        if not runs_on_triton(pools[0][1]):
            for kv, rows in pools:
                last = kv.lengths % kv.page_size == 0
                of_last = kv._replace(table=kv.table[last], lengths=kv.lengths[last])
                _summarise_newest(of_last, {kind: rows})
            continue
        by_layout = defaultdict[object, list[tuple[PagedKV, Tensor]]](list)  # plans that came first laid out the pools
        for kv, rows in pools:
            by_layout[kv.keys.stride(), kv.values.stride(), rows.stride()].append((kv, rows))
        for alike in by_layout.values():
            key = tuple(tensor.data_ptr() for kv, rows in alike for tensor in (kv.keys, kv.values, rows))
            addresses = keep(pool_addresses, alike, key=key)
            write_newest_triton(alike[0][0], bits, alike[0][1], addresses, filled=True, pdl=pdl)


def pool_arguments(kv: PagedKV, summaries: Mapping[str, Tensor]) -> dict[str, object]:
    """Arguments of a kernel that calls ``store_token``: the pools, and the kinds of summary that it writes."""
    assert all(pool.is_contiguous() for pool in summaries.values())
    twins = [(row_twin(kind), pool) for kind, pool in summaries.items()]
    written = [(twin, pool) for twin, pool in twins if twin is not None]
    return {
        "keys_ptr": kv.keys, "values_ptr": kv.values, "table_ptr": kv.table, "lengths_ptr": kv.lengths,
        "k_head": kv.keys.stride(0), "k_page": kv.keys.stride(1), "k_slot": kv.keys.stride(2),
        "v_head": kv.values.stride(0), "v_page": kv.values.stride(1), "v_slot": kv.values.stride(2),
        "table_row": kv.table.stride(0), "num_pages": kv.keys.shape[1],
        "summaries": tuple(pool.view(torch.uint8) if pool.element_size() == 1 else pool for _, pool in written),
        "WIDTHS": tuple(pool.shape[2] for _, pool in written), "writers": tuple(twin for twin, _ in written),
        "SIZE": kv.page_size, "PAGE": max(16 if kv.coded else 1, power_of_two(kv.page_size)),
        "D": kv.head_dim, "DP": power_of_two(kv.head_dim),
    }  # fmt: skip


@jit
def load_page(
    row, head, keys_ptr, table_ptr, lengths_ptr, k_head, k_page, k_slot, table_row, SIZE: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The page of a row's newest token, the token's slot, and the keys in the slots before it, float32 [PAGE, DP]."""
    slots = tl.arange(0, PAGE)
    position = tl.load(lengths_ptr + row) - 1
    page = tl.load(table_ptr + row * table_row + position // SIZE).to(tl.int64)
    slot = position % SIZE
    page_keys = keys_ptr + head.to(tl.int64) * k_head + page * k_page
    return page, slot, load_keys(page_keys, slots, slots < slot, k_slot, SIZE, D, DP, PAGE)


@jit
def store_token(
    key, value, page, slot, keys, head, keys_ptr, values_ptr, k_head, k_page, k_slot, v_head, v_page, v_slot, num_pages,
    summaries, writers, WIDTHS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store a token at the slot that ``load_page`` returned, and write the summaries of its page."""
    d, slots, head = tl.arange(0, DP), tl.arange(0, PAGE), head.to(tl.int64)
    page_keys = keys_ptr + head * k_head + page * k_page
    page_values = values_ptr + head * v_head + page * v_page
    # the new key comes from its register: reading back what other threads store would need a barrier
    if keys_ptr.dtype.element_ty == tl.int8:
        factor: tl.constexpr = (D & -D) ** -0.5
        codes, scale = encode(turn(key.to(tl.float32), False, D, DP) * factor)
        store_coded(page_keys, slot, k_slot, codes, scale, SIZE, D, DP)
        key = turn(codes, True, D, DP) * (scale * factor)
        codes, scale = encode(value.to(tl.float32))
        store_coded(page_values, slot, v_slot, codes, scale, SIZE, D, DP)
    else:
        key = key.to(keys_ptr.dtype.element_ty)
        tl.store(page_keys + slot * k_slot + d, key, mask=d < D)
        tl.store(page_values + slot * v_slot + d, value.to(values_ptr.dtype.element_ty), mask=d < D)
        key = key.to(tl.float32)
    keys = tl.where((slots == slot)[:, None], key[None, :], keys)
    for i in tl.static_range(len(summaries)):
        writers[i](summaries[i] + (head * num_pages + page) * WIDTHS[i], keys, slots <= slot, D, DP)


@jit
def _append_kernel(
    new_keys_ptr, new_values_ptr, new_k_row, new_k_head, new_v_row, new_v_head, keys_ptr, values_ptr, table_ptr,
    lengths_ptr, k_head, k_page, k_slot, v_head, v_page, v_slot, table_row, num_pages, summaries, writers,
    WIDTHS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    row, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, DP)
    key = tl.load(new_keys_ptr + row * new_k_row + head * new_k_head + d, mask=d < D, other=0.0)
    value = tl.load(new_values_ptr + row * new_v_row + head * new_v_head + d, mask=d < D, other=0.0)
    page, slot, keys = load_page(
        row, head, keys_ptr, table_ptr, lengths_ptr, k_head, k_page, k_slot, table_row, SIZE, PAGE, D, DP
    )
    store_token(
        key, value, page, slot, keys, head, keys_ptr, values_ptr, k_head, k_page, k_slot, v_head, v_page, v_slot,
        num_pages, summaries, writers, WIDTHS, SIZE, PAGE, D, DP,
    )  # fmt: skip
