"""Attention over keys and values in host memory: dense, of one token or several; of one over listed units and spans."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvsift.errors import InvalidTensor, InvalidValue
from kvsift.native.loader import AVAILABLE, core, num_threads
from kvsift.native.shapes import ROW_DTYPES, ROW_TYPES, HeadRows, address_of, check_attended, no_tensor, shape_of
from kvsift.types import Part

SHARE_TOKENS = 16  # of a page of shares


def attend_dense(
    queries: Tensor, keys: HeadRows, values: HeadRows, scale: float, softcap: float | None = None, *,
    threads: int | None = None, shares: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of consecutive tokens, the last of which sees all keys -> (output as queries, lse float32).

    queries [num_query_heads, num_tokens, head_dim], or of one token without that dimension; keys, values
    [num_kv_heads, n, head_dim], both tensors or both ``PooledRows`` with the same runs (the result is the same, bit for
    bit); lse [num_query_heads, num_tokens]. The keys are read once, and each token gets the bits that it gets alone.
    logit = scale * q.k, then softcap * tanh(logit / softcap) if there is a softcap. n = 0 gives output 0 and lse -inf.
    With bf16 queries the softmax weights may be rounded to bf16, as the output is; lse is not.

    shares, float32 [num_kv_heads, ceil(n / 16)], is filled with the attention that each page of 16 tokens gets, summed
    over tokens and the query heads of the KV head.
    """
    check_attended(queries, keys, values, several=True)
    num_tokens = queries.shape[1] if queries.dim() == 3 else 1
    if num_tokens > max(keys.shape[1], 1):
        raise InvalidTensor(f"there are {num_tokens} tokens and {keys.shape[1]} keys; each token has a key of its own.")
    if shares is not None:
        _check_shares(shares, (keys.shape[0], -(-keys.shape[1] // SHARE_TOKENS)))
    q = queries.float().contiguous()
    output, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    core.attend_dense(
        shape_of(queries, keys), num_tokens, q.data_ptr(), *address_of(keys), *address_of(values),
        ROW_TYPES[keys.dtype], scale, 0.0 if softcap is None else _cap(softcap),
        queries.dtype == torch.bfloat16, num_threads(threads),
        output.data_ptr(), lse.data_ptr(), 0 if shares is None else shares.data_ptr(),
    )  # fmt: skip
    return output.to(queries.dtype), lse


def attend_units(
    queries: Tensor, keys: HeadRows, values: HeadRows, units: Tensor, unit_size: int, spans: Sequence[tuple[int, int]],
    scale: float, softcap: float | None = None, *, threads: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over the tokens of units and of spans; arguments and result as of ``attend_dense``.

    units int64 [num_lists, capacity], num_lists 1, num_kv_heads or num_query_heads, padded with -1; unit u is the
    tokens [u * unit_size, (u + 1) * unit_size) as far as there are keys. spans (start, stop) of tokens that all heads
    attend. A token that is listed twice counts twice.
    """
    check_attended(queries, keys, values)
    if not isinstance(units, Tensor):
        raise no_tensor("units", units)
    readable = units.dim() == 2 and units.dtype == torch.int64 and units.is_cpu
    if not readable or units.shape[0] not in (1, keys.shape[0], queries.shape[0]):
        raise InvalidTensor(
            f"units are {list(units.shape)} {units.dtype} on {units.device}; they must be int64 [num_lists, capacity] "
            f"on the CPU with 1, {keys.shape[0]} or {queries.shape[0]} lists."
        )
    if unit_size < 1:
        raise InvalidValue(f"unit_size={unit_size} must be at least 1.")
    ids, q = units.contiguous(), queries.float().contiguous()
    output, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    core.attend_units(
        shape_of(q, keys), q.data_ptr(), *address_of(keys), *address_of(values),
        ROW_TYPES[keys.dtype], ids.data_ptr(), ids.shape[0], ids.shape[1], unit_size,
        list(spans), scale, 0.0 if softcap is None else _cap(softcap), queries.dtype == torch.bfloat16,
        num_threads(threads), output.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    return output.to(queries.dtype), lse


def takes_estimate(part: Part, estimate: Part) -> bool:
    """Whether the compiled core is available and merges these, of one query per head each."""
    host = part.output.is_cpu and estimate.output.is_cpu
    one = part.output.shape[0] == part.output.shape[2] == 1 and part.output.shape == estimate.output.shape
    return AVAILABLE and host and one and part.output.dtype in ROW_DTYPES


def merge_estimate(part: Part, estimate: Part) -> tuple[Part, float]:
    """Attention over visible tokens, merged with an estimate of attention over the others as ``kernels.merge`` merges
    it; with the share of the estimate, a mean over heads.

    part, estimate: output [1, num_query_heads, 1, head_dim], lse [1, num_query_heads, 1]; ``takes_estimate`` holds.
    """
    output, lse = (each.clone(memory_format=torch.contiguous_format) for each in part)
    values, values_lse = (each.float().contiguous() for each in estimate)
    num_heads, head_dim = output.shape[1], output.shape[3]
    total = core.merge_estimate(
        output.dtype == torch.bfloat16, output.data_ptr(), lse.data_ptr(), values.data_ptr(), values_lse.data_ptr(),
        num_heads, head_dim,
    )  # fmt: skip
    return Part(output, lse), total / num_heads


def _check_shares(shares: Tensor, expected: tuple[int, int]) -> None:
    if shares.shape != expected or shares.dtype != torch.float32 or not shares.is_contiguous() or not shares.is_cpu:
        raise InvalidTensor(
            f"shares are {list(shares.shape)} {shares.dtype} on {shares.device}; they must be float32 "
            f"{list(expected)}, contiguous, on the CPU."
        )


def _cap(softcap: float) -> float:
    if not 0 < softcap < math.inf:
        raise InvalidValue(f"softcap={softcap} must be positive and finite, or None for no cap.")
    return softcap
