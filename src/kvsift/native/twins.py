"""The compiled functions in plain torch and float32, for tests and for paths where speed does not matter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvsift.native.coded_rows import decode_rows_reference
from kvsift.native.codes import Codes
from kvsift.native.shapes import HeadRows, PooledRows
from kvsift.native.sketch_format import MOST_VOTE


def attend_dense(
    queries: Tensor, keys: HeadRows, values: HeadRows, scale: float, softcap: float | None = None,
    *, shares: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Twin of native.attend_dense."""
    if queries.dim() == 2:
        output, lse = attend_dense(queries.unsqueeze(1), keys, values, scale, softcap, shares=shares)
        return output.squeeze(1), lse.squeeze(1)
    (num_heads, num_tokens, _), n = queries.shape, keys.shape[1]
    visible = torch.ones(num_tokens, n, dtype=torch.int64).tril(n - num_tokens)
    output, lse = _attend(queries.flatten(0, 1), keys, values, visible.repeat(num_heads, 1), scale, softcap)
    if shares is not None:
        ones = torch.eye(n).unflatten(1, (1, n)).expand(n, len(shares), n).transpose(0, 1)
        weights, _ = _attend(queries.flatten(0, 1), keys, ones, visible.repeat(num_heads, 1), scale, softcap)
        by_token = weights.float().unflatten(0, (len(shares), -1)).sum(1)
        shares.copy_(torch.nn.functional.pad(by_token, (0, -n % 16)).unflatten(1, (-1, 16)).sum(-1))
    return output.unflatten(0, (num_heads, num_tokens)), lse.unflatten(0, (num_heads, num_tokens))


def attend_units(
    queries: Tensor, keys: HeadRows, values: HeadRows, units: Tensor, unit_size: int, spans: Sequence[tuple[int, int]],
    scale: float, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Twin of native.attend_units."""
    n = keys.shape[1]
    visible = torch.zeros(units.shape[0], n, dtype=torch.int64)  # times that a list holds a token
    for row, ids in zip(visible, units):
        for unit in ids[ids >= 0].tolist():
            row[unit * unit_size : (unit + 1) * unit_size] += 1
    for start, stop in spans:
        visible[:, max(start, 0) : max(stop, 0)] += 1
    return _attend(
        queries, keys, values, visible.repeat_interleave(queries.shape[0] // units.shape[0], 0), scale, softcap
    )


def _attend(
    queries: Tensor, keys: HeadRows, values: HeadRows, visible: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """visible int64 [num_query_heads, n]: times that a token counts."""
    logits = _products(queries, keys) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + visible.float().log()  # -inf where it does not count
    lse = logits.logsumexp(-1) if keys.shape[1] else logits.new_full((queries.shape[0],), -torch.inf)
    weights = (logits - lse.unsqueeze(-1)).exp().masked_fill(visible == 0, 0.0)
    output = weights.unflatten(0, (keys.shape[0], -1)) @ _numbers(values)  # [num_kv_heads, group_size, head_dim]
    return output.flatten(0, 1).to(queries.dtype), lse


def page_scores(queries: Tensor, rows: HeadRows, scale: float) -> Tensor:
    """Twin of native.page_scores."""
    q = queries.float() * scale
    return _products(torch.cat([q.clamp_min(0), q.clamp_max(0)], -1), rows)


def choose_pages(queries: Tensor, rows: HeadRows, scale: float, k: int, num_selections: int) -> Tensor:
    """Twin of native.choose_pages."""
    best = page_scores(queries, rows, scale).unflatten(0, (num_selections, -1)).amax(1)
    return best.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values


def choose_sketched(
    log_weights: Tensor, value_means: Tensor, page_size: int, first: int, k: int, num_selections: int, past_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of native.choose_sketched, given the estimates of a sketch: logarithms of the weights of the candidates,
    float32 [num_query_heads, count], and mean values, float32 [num_kv_heads, num_pages, head_dim]."""
    count, (num_kv_heads, num_pages, _) = log_weights.shape[1], value_means.shape
    past = past_lse.masked_fill(past_lse == -torch.inf, 0.0).maximum(log_weights.amax(-1) - MOST_VOTE)
    votes = (log_weights - past.unsqueeze(-1)).exp().unflatten(0, (num_selections, -1)).sum(1)
    ids = votes.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
    lists = ids.repeat_interleave(len(log_weights) // num_selections, 0)
    left = log_weights.scatter(1, lists, -torch.inf)
    lse = left.logsumexp(-1)
    shares = (left - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
    by_page = torch.nn.functional.pad(shares, (first, num_pages * page_size - first - count))
    by_page = by_page.unflatten(-1, (num_pages, page_size)).sum(-1).unflatten(0, (num_kv_heads, -1))
    return ids, (by_page @ value_means).flatten(0, 1), lse


def scan(queries: Tensor, keys: HeadRows, k: int) -> tuple[Tensor, Tensor]:
    """Twin of native.scan."""
    return _best(_products(queries, keys), k)


def all_scores(queries: Tensor, keys: HeadRows) -> Tensor:
    """Twin of native.all_scores."""
    return _products(queries, keys)


def scan_codes(queries: Tensor, codes: Codes, keys: HeadRows, k: int, overfetch: float = 1.5) -> tuple[Tensor, Tensor]:
    """Twin of native.scan_codes; it does not round queries to codes, so that candidates may differ."""
    rows = (
        codes.blocks.permute(0, 1, 3, 2, 4).flatten(1, 2).flatten(2)[:, : keys.shape[1]]
    )  # [num_kv_heads, n, head_dim]
    decoded = codes.centre.unsqueeze(1) + codes.scale.unsqueeze(1) * (rows.float() - 128)
    candidates, _ = _best(_products(queries, decoded), math.ceil(overfetch * k))
    exact = _products(queries, keys)
    chosen = torch.zeros_like(exact, dtype=torch.bool)
    for row, ids in zip(chosen, candidates):
        row[ids[ids >= 0]] = True
    return _best(exact.masked_fill(~chosen, -torch.inf), k)


def _products(queries: Tensor, keys: HeadRows) -> Tensor:
    """q.k, float32 [num_query_heads, n]."""
    return (queries.float().unflatten(0, (keys.shape[0], -1)) @ _numbers(keys, turned=True).mT).flatten(0, 1)


def _numbers(rows: HeadRows, turned: bool = False) -> Tensor:
    """float32 [num_kv_heads, n, width]; ``turned``: coded ones are keys."""
    tensor = rows.gather() if isinstance(rows, PooledRows) else rows
    return decode_rows_reference(tensor, torch.float32, turned=turned) if tensor.dtype == torch.int8 else tensor.float()


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids, scores) of the k largest, ties to the lower id, -1 and -inf where there are fewer."""
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    ids = order.new_full((scores.shape[0], k), -1)
    best = values.new_full((scores.shape[0], k), -torch.inf)
    ids[:, : order.shape[1]] = order[:, :k]
    best[:, : order.shape[1]] = values[:, :k]
    return ids, best
