"""Device code of ``sketch_attention``: what sinks and window weigh, weights estimated from sketches and votes, and the
estimate of what is not chosen.

Weights are logarithms in units of log 2, float32 [batch, num_query_heads, max_tokens]; column i is candidate first + i.
"""

from __future__ import annotations

from kvsift.kernels.coded_pages import load_scales
from kvsift.kernels.sketch import MOST_VOTE
from kvsift.kernels.split_attention import capped
from kvsift.kernels.triton_shim import constant, jit, tl

LOG2E = constant(1.4426950408889634)
MOST = constant(MOST_VOTE * 1.4426950408889634)


@jit
def row_starts(table_ptr, head, token, inside, head_bytes, page_bytes, PAGE: tl.constexpr):
    """Bytes before the row of each token's page."""
    page = tl.load(table_ptr + token // PAGE, mask=inside, other=0).to(tl.int64)
    return page * page_bytes + head.to(tl.int64) * head_bytes


@jit
def load_mean(octets_ptr, halves_ptr, start, inside, MEAN: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr,
              DP: tl.constexpr):  # fmt: skip
    """A mean vector of the row of each token, [tokens, DP], whose rows begin at bytes ``start``."""
    d = tl.arange(0, DP)
    at, there = octets_ptr + start[:, None] + MEAN + (d // 2)[None, :], inside[:, None] & (d < D)[None, :]
    pairs = tl.load(at, mask=there, other=0).to(tl.int32)
    whole = tl.where(there, (pairs >> (d % 2 * 4)[None, :] & 15) - 8, 0)
    scale = tl.load(halves_ptr + start // 2 + SCALE // 2, mask=inside, other=0.0)
    return whole.to(tl.float32) * scale.to(tl.float32)[:, None]


@jit
def estimated_keys(
    words_ptr, halves_ptr, octets_ptr, start, slot, inside, BITS: tl.constexpr, PAGE: tl.constexpr, WORDS: tl.constexpr,
    FACTORS: tl.constexpr, MEAN: tl.constexpr, SCALES: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Rotated keys as the row that begins at byte ``start`` codes them, [TILE, DP], and factors of their codes."""
    word = tl.arange(0, DP // 32)
    mask = inside[:, None] & (word < WORDS)[None, :]
    index = tl.zeros((TILE, DP), tl.int32)
    for bit in tl.static_range(BITS):
        at = (start // 4)[:, None] + ((bit * WORDS + word) * PAGE)[None, :] + slot[:, None]
        words = tl.load(words_ptr + at, mask=mask, other=0)
        channels = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        index += tl.reshape(channels, (TILE, DP)) << bit
    codes = (2 * index - ((1 << BITS) - 1)).to(tl.float32)
    factors = tl.load(halves_ptr + start // 2 + FACTORS // 2 + slot, mask=inside, other=0.0).to(tl.float32)
    return codes * factors[:, None] + load_mean(octets_ptr, halves_ptr, start, inside, MEAN, SCALES, D, DP), factors


@jit
def past_kernel(
    q_ptr, keys_ptr, table_ptr, spans_ptr, past_ptr, key_head, key_page, key_token, max_pages, scale, softcap,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of the exact logits of sinks and window, of a sequence that has candidates; 0 where it has neither.
    Keys in 8 bits are turned, and so are the queries that meet them."""
    head, batch = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(spans_ptr + batch * 4), tl.load(spans_ptr + batch * 4 + 1)
    if first >= stop:
        return
    count = first + tl.load(spans_ptr + batch * 4 + 3) - stop
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    row = (batch * tl.num_programs(0) + head) * G + g
    q = tl.load(q_ptr + row[:, None] * D + d[None, :], mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)
    keys_ptr += head.to(tl.int64) * key_head
    top, total = tl.full((GP,), float("-inf"), tl.float32), tl.zeros((GP,), tl.float32)
    for offset in range(0, count, TILE):
        index = offset + tl.arange(0, TILE)
        inside = index < count
        token = index + tl.where(index < first, 0, stop - first)
        page = tl.load(table_ptr + batch * max_pages + token // PAGE, mask=inside, other=0).to(tl.int64)
        page_ptr, slot = keys_ptr + page * key_page, token % PAGE
        at, there = (page_ptr + slot * key_token)[:, None] + d[None, :], inside[:, None] & (d < D)[None, :]
        keys = tl.load(at, mask=there, other=0.0).to(q.dtype)
        logits = tl.dot(q, tl.trans(keys), input_precision="tf32x3") * scale
        if keys_ptr.dtype.element_ty == tl.int8:
            logits *= load_scales(page_ptr, slot, inside, PAGE, D)[None, :]
        logits = tl.where(inside[None, :], capped(logits, softcap, CAPPED), float("-inf"))
        new = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(logits - new[:, None]), 1)
        top = new
    past = tl.where(count > 0, top + tl.log2(tl.where(count > 0, total, 1.0)), 0.0)
    tl.store(past_ptr + row, past, mask=g < G)


@jit
def weights_kernel(
    q_ptr, words_ptr, halves_ptr, octets_ptr, table_ptr, spans_ptr, past_ptr, weights_ptr, votes_ptr, head_bytes,
    page_bytes, max_pages, softcap, error,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr, PAGE: tl.constexpr,
    WORDS: tl.constexpr, FACTORS: tl.constexpr, MEAN: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Weights of some candidates, and the votes of the query heads that share a list; ``q_ptr`` holds rotated
    queries."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, stop = tl.load(spans_ptr + batch * 4), tl.load(spans_ptr + batch * 4 + 1)
    begin, end = block * BLOCK, tl.minimum((block + 1) * BLOCK, stop - first)
    if begin >= end:
        return
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    kv_row = batch * tl.num_programs(1) + head
    row, own = kv_row * G + g, (g < G)[:, None]
    q = tl.load(q_ptr + row[:, None] * D + d[None, :], mask=own & (d < D)[None, :], other=0.0)
    past = tl.load(past_ptr + row, mask=g < G, other=0.0)
    noise = tl.sum(q * q, 1) * error * 0.5
    weights_ptr += row[:, None].to(tl.int64) * (max_pages * PAGE)
    votes_ptr += kv_row.to(tl.int64) * (max_pages * PAGE)
    for offset in range(begin, end, TILE):
        index = offset + tl.arange(0, TILE)
        inside = index < end
        token = first + index
        start = row_starts(table_ptr + batch * max_pages, head, token, inside, head_bytes, page_bytes, PAGE)
        keys, factors = estimated_keys(
            words_ptr, halves_ptr, octets_ptr, start, token % PAGE, inside, BITS, PAGE, WORDS, FACTORS, MEAN, SCALES,
            D, DP, TILE,
        )  # fmt: skip
        weights = tl.dot(q, tl.trans(keys), input_precision="tf32x3")
        if CAPPED:
            weights = capped(weights * LOG2E, softcap, CAPPED)
        else:
            weights = (weights - noise[:, None] * (factors * factors)[None, :]) * LOG2E
        tl.store(weights_ptr + index[None, :], weights, mask=own & inside[None, :])
        votes = weights - past[:, None]
        votes = tl.exp2(tl.where(votes > MOST, MOST, votes))  # NaN remains
        tl.store(votes_ptr + index, tl.sum(tl.where(own, votes, 0.0), 0), mask=inside)


@jit
def hide_kernel(
    tokens_ptr, counts_ptr, spans_ptr, weights_ptr, num_kv_heads, capacity, max_tokens, G: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Give the candidates that are listed no weight, for the estimate of the others."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spans_ptr += row // num_kv_heads * 4
    first, stop = tl.load(spans_ptr), tl.load(spans_ptr + 1)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + row * capacity + slot, mask=slot < tl.load(counts_ptr + row), other=-1)
    for each in tl.static_range(G):
        weights = weights_ptr + (row * G + each) * max_tokens
        nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
        tl.store(weights + token - first, nothing, mask=(token >= first) & (token < stop))


@jit
def rest_kernel(
    weights_ptr, halves_ptr, octets_ptr, table_ptr, spans_ptr, parts_ptr, head_bytes, page_bytes, max_pages, num_parts,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, MEAN: tl.constexpr,
    SCALES: tl.constexpr, TILE: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """An estimate of attention over a part of the candidates that are not listed, as a record of split attention."""
    part, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, stop = tl.load(spans_ptr + batch * 4), tl.load(spans_ptr + batch * 4 + 1)
    per_part = (stop - first + tl.num_programs(0) * TILE - 1) // (tl.num_programs(0) * TILE) * TILE
    begin, end = part * per_part, tl.minimum((part + 1) * per_part, stop - first)
    kv_row, g, d = batch * tl.num_programs(1) + head, tl.arange(0, GP), tl.arange(0, DP)
    weights_ptr += (kv_row * G + g)[:, None].to(tl.int64) * (max_pages * PAGE)
    top, total = tl.full((GP,), float("-inf"), tl.float32), tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DP), tl.float32)
    for offset in range(begin, end, TILE):
        index = offset + tl.arange(0, TILE)
        inside = index < end
        weights = tl.load(weights_ptr + index[None, :], mask=(g < G)[:, None] & inside[None, :], other=float("-inf"))
        new = tl.maximum(top, tl.max(weights, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # all of them are listed
        shares, shrink = tl.exp2(weights - base[:, None]), tl.exp2(top - base)
        counts = inside & (tl.max(shares, 0) > 0)  # a page may have no means yet that count for nothing
        start = row_starts(table_ptr + batch * max_pages, head, first + index, counts, head_bytes, page_bytes, PAGE)
        values = load_mean(octets_ptr, halves_ptr, start, counts, MEAN, SCALES, D, DP)
        acc = tl.dot(shares, values, acc * shrink[:, None], input_precision="tf32x3")
        total = total * shrink + tl.sum(shares, 1)
        top = new
    # behind the records of the splits
    parts_ptr += (kv_row * num_parts + num_parts - tl.num_programs(0) + part) * RECORD
    tl.store(parts_ptr + g[:, None] * D + d[None, :], acc, mask=(g < G)[:, None] & (d < D)[None, :])
    tl.store(parts_ptr + G * D + g, top, mask=g < G)
    tl.store(parts_ptr + G * D + G + g, total, mask=g < G)
    tl.store(parts_ptr + G * D + 2 * G, 0.0)  # visible tokens
