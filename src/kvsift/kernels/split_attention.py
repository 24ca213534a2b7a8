"""Device code of split attention: one split of one row over its units, and the merge by the split that is last.

A record of the workspace holds the part of a split, in float32: [group, head_dim] sums of weighted values, [group]
largest logits in units of log 2, [group] sums of weights, and the number of visible tokens. Behind the records of its
splits a row may have some of estimates, which other kernels have written, of tokens that are not visible.
"""

from __future__ import annotations

from kvsift.kernels.coded_pages import load_scales, turned_rows
from kvsift.kernels.triton_shim import constant, jit, tl

ESTIMATED_WHOLE = float(1 << 32)  # all of a head's attention, as shares are added up
WHOLE = constant(ESTIMATED_WHOLE)


@jit
def capped(logits, softcap, CAPPED: tl.constexpr):
    """Return softcap * tanh(logits / softcap), both in units of log 2."""
    if CAPPED:
        twice = tl.exp2(2.8853900817779268 * logits / softcap)  # exp(2 x) of x = logits / softcap
        logits = softcap * (1.0 - 2.0 / (twice + 1.0))
    return logits


@jit
def load_tile(
    keys_ptr, values_ptr, table_ptr, list_ptr, slot, last, length, key_page, key_token, value_page, value_token,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Load keys and values [TILE * UNIT, DP] of the units from ``slot`` on; return their scales and which of the tokens
    exist, too. Values in 8 bits come in pairs, int16 [TILE * UNIT, DP / 2]: a product takes columns of 16 bits from
    shared memory at once, and of 8 bits one by one."""
    t, d = tl.arange(0, TILE * UNIT), tl.arange(0, DP)
    slots = slot + t // UNIT
    inside = slots < last
    units = slots
    if LISTED:
        units = tl.load(list_ptr + slots, mask=inside, other=0, cache_modifier=".cg")
    seen = inside & (units * UNIT + t % UNIT < length)
    mask = seen[:, None] & (d < D)[None, :]
    pages, within = units, t % UNIT
    if UNIT < PAGE:
        pages = units * UNIT // PAGE
        within += units * UNIT % PAGE
    physical = tl.load(table_ptr + pages, mask=inside, other=0).to(tl.int64)
    k = tl.load(
        keys_ptr + (physical * key_page + within * key_token)[:, None] + d[None, :], mask=mask, other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    v_at = values_ptr + physical * value_page + within * value_token
    k_scales, v_scales = 1.0, 1.0
    if keys_ptr.dtype.element_ty == tl.int8:
        pair = tl.arange(0, DP // 2)
        v = tl.load(
            v_at.to(tl.pointer_type(tl.int16))[:, None] + pair[None, :], mask=seen[:, None] & (pair < D // 2)[None, :],
            other=0, eviction_policy="evict_first",
        )  # fmt: skip
        k_scales = load_scales(keys_ptr + physical * key_page, within, seen, PAGE, D)
        v_scales = load_scales(values_ptr + physical * value_page, within, seen, PAGE, D)
    else:
        v = tl.load(v_at[:, None] + d[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    return k, v, k_scales, v_scales, seen


@jit
def attend_group(
    q_ptr, keys_ptr, values_ptr, table_ptr, list_ptr, begin, end, length, key_page, key_token, value_page, value_token,
    lengths_ptr, q_token, scale, softcap, part_ptr,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr, LISTED: tl.constexpr, CAPPED: tl.constexpr, STAGES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Attend the query heads of a group as rows of one matrix product: those of SIZE tokens of a sequence, ``q_token``
    numbers apart, each of which sees as many tokens as its length says; for one token that is ``length``."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    mask = (g < G)[:, None] & (d < D)[None, :]
    token = g // (G // SIZE)
    at = q_ptr + (token * q_token + g % (G // SIZE) * D)
    if keys_ptr.dtype.element_ty == tl.int8:
        q = turned_rows(at, g < G, D, DP, GP)
    else:
        q = tl.load(at[:, None] + d[None, :], mask=mask, other=0.0)
    own = tl.load(lengths_ptr + token, mask=g < G, other=1) if SIZE > 1 else g
    top, total = tl.full((GP,), float("-inf"), tl.float32), tl.zeros((GP,), tl.float32)
    CODED: tl.constexpr = keys_ptr.dtype.element_ty == tl.int8
    WIDTH: tl.constexpr = DP // 2 if CODED else DP
    visible, acc, odd = 0.0, tl.zeros((GP, WIDTH), tl.float32), tl.zeros((GP, WIDTH), tl.float32)
    for slot in tl.range(begin, end, TILE, num_stages=STAGES):
        k, v, k_scales, v_scales, seen = load_tile(
            keys_ptr, values_ptr, table_ptr, list_ptr, slot, end, length, key_page, key_token, value_page, value_token,
            D, DP, PAGE, UNIT, TILE, LISTED,
        )  # fmt: skip
        logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if CODED:
            logits *= k_scales[None, :]
        logits = capped(logits, softcap, CAPPED)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        if SIZE > 1:
            logits = tl.where((slot * UNIT + tl.arange(0, TILE * UNIT))[None, :] < own[:, None], logits, float("-inf"))
        new = tl.maximum(top, tl.max(logits, 1))
        shift = new
        if SIZE > 1:  # a tile may be behind all that a token sees
            shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(logits - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        if CODED:
            weights = (weights * v_scales[None, :]).to(q.dtype)
            high = (v >> 8).to(tl.int8).to(q.dtype)
            odd = tl.dot(weights, high, odd * shrink[:, None], input_precision="ieee")
            v = v.to(tl.int8)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        visible += tl.sum(seen.to(tl.float32), 0)
        top = new
    if CODED:
        acc = tl.reshape(tl.join(acc, odd), (GP, DP))
    tl.store(part_ptr + g[:, None] * D + d[None, :], acc, mask=mask)
    tl.store(part_ptr + G * D + g, top, mask=g < G)
    tl.store(part_ptr + G * D + G + g, total, mask=g < G)
    tl.store(part_ptr + G * D + 2 * G, visible)


@jit
def merge_splits(
    parts_ptr, sink_ptr, out_ptr, visible_ptr, estimated_ptr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SPLITS: tl.constexpr, ESTIMATES: tl.constexpr, RECORDSP: tl.constexpr, RECORD: tl.constexpr, COUNTED: tl.constexpr,
    SINK: tl.constexpr,
):  # fmt: skip
    """Merge the parts of all splits of one row, and the estimates, into its output; add up the visible tokens of the
    splits, and the shares of attention that are estimated."""
    RECORDS: tl.constexpr = SPLITS + ESTIMATES
    s, d = tl.arange(0, RECORDSP), tl.arange(0, DP)
    records = parts_ptr + s * RECORD
    estimated = 0.0
    if COUNTED:
        visible = tl.load(records + G * D + 2 * G, mask=s < RECORDS, other=0.0, cache_modifier=".cg")
        tl.atomic_add(visible_ptr, tl.sum(visible, 0).to(tl.int64), sem="relaxed")
    for each in tl.static_range(G):
        tops = tl.load(records + G * D + each, mask=s < RECORDS, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(records + G * D + G + each, mask=s < RECORDS, other=0.0, cache_modifier=".cg")
        top = tl.max(tops, 0)
        if SINK:
            sink = tl.load(sink_ptr + each).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(top, sink)
        weights = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weights * sums, 0)
        if ESTIMATES > 0:
            estimated += tl.sum(tl.where(s < SPLITS, 0.0, weights * sums), 0) / tl.where(total > 0, total, 1.0)
        if SINK:
            total += tl.exp2(sink - top)
        parts = tl.load(
            records[:, None] + each * D + d[None, :], mask=(s < RECORDS)[:, None] & (d < D)[None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        output = tl.sum(parts * weights[:, None], 0)
        tl.store(out_ptr + each * D + d, output / tl.where(total > 0, total, 1.0), mask=d < D)
    if ESTIMATES > 0:
        tl.atomic_add(estimated_ptr, (estimated * WHOLE).to(tl.int64), sem="relaxed")


@jit
def attend_split(
    row, split, q_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, list_ptr, count, out_ptr, parts_ptr, arrived_ptr,
    sink_ptr, visible_ptr, estimated_ptr, key_head, key_page, key_token, value_head, value_page, value_token, max_pages,
    num_rows, scale, softcap,
    G: tl.constexpr, GP: tl.constexpr, ROWS_PER_KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, ESTIMATES: tl.constexpr,
    RECORDSP: tl.constexpr, RECORD: tl.constexpr, LISTED: tl.constexpr, COUNTED: tl.constexpr, CAPPED: tl.constexpr,
    SINK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend one split of one row; the last one to finish merges them all. Return whether this was the last."""
    batch, head = row // num_rows, row % num_rows
    length = tl.load(lengths_ptr + batch)
    per_split = (count + SPLITS * TILE - 1) // (SPLITS * TILE) * TILE
    begin, end = split * per_split, tl.minimum((split + 1) * per_split, count)
    kv_head = (head // ROWS_PER_KV).to(tl.int64)
    keys_ptr += kv_head * key_head
    values_ptr += kv_head * value_head
    table_ptr += batch * max_pages
    parts_ptr += row * (SPLITS + ESTIMATES) * RECORD
    part_ptr = parts_ptr + split * RECORD
    attend_group(
        q_ptr + row * G * D, keys_ptr, values_ptr, table_ptr, list_ptr, begin, end, length, key_page, key_token,
        value_page, value_token, lengths_ptr, 0, scale, softcap, part_ptr, G, GP, D, DP, PAGE, UNIT, TILE, LISTED,
        CAPPED, STAGES, 1,
    )  # fmt: skip
    tl.debug_barrier()  # the whole record is written before its arrival is announced
    is_last = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        merge_splits(
            parts_ptr, sink_ptr + head * G, out_ptr + row * G * D, visible_ptr + batch, estimated_ptr + batch,
            G, D, DP, SPLITS, ESTIMATES, RECORDSP, RECORD, COUNTED, SINK,
        )  # fmt: skip
        tl.store(arrived_ptr + row, 0)
    return is_last
