"""Attention kernels against the textbook formula in float64."""

import pytest
import torch
from kernels.paged_cases import rounding
from refusals import refused
from torch import Tensor

from kvsift.kernels import attention as attention_module
from kvsift.kernels.attention import attention, attention_reference, nothing

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

SHAPES = [  # (group_size, head_dim)
    (1, 64),  # no grouping
    (4, 128),  # the usual
    (7, 80),  # group of 7, head_dim not a power of two
]


def draw(
    group: int, head_dim: int, num_queries: int, num_keys: int, dtype: torch.dtype, device: str = "cpu", batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(group + head_dim + num_queries + num_keys)
    heads = ((2 * group, num_queries), (2, num_keys), (2, num_keys))
    drawn = [torch.randn(batch, num_heads, tokens, head_dim) for num_heads, tokens in heads]
    queries, keys, values = (tensor.to(device, dtype) for tensor in drawn)
    return 2 * queries, keys, values


def textbook(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, lse) by softmax(scale * QK^T) V, every step in one dtype."""
    group = queries.shape[1] // keys.shape[1]
    q, k, v = queries.to(dtype), *(t.to(dtype).repeat_interleave(group, 1) for t in (keys, values))
    logits = q @ k.mT * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def distance(tensor: Tensor, reference: Tensor) -> float:
    return float((tensor.double() - reference).norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("group", "head_dim"), SHAPES)
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "causal"),
    [(1, 1, False), (1, 1000, False), (33, 65, False), (1, 1, True), (63, 63, True), (130, 130, True)],
)  # one token, a decode step, a chunk over its past; causal below and across the kernel's tile of 64
def test_fused_attention_is_at_most_twice_as_far_from_float64_as_the_formula_in_its_dtype(
    device: str, dtype: torch.dtype, group: int, head_dim: int, num_queries: int, num_keys: int, causal: bool
) -> None:
    queries, keys, values = draw(group, head_dim, num_queries, num_keys, dtype, device)
    scale = head_dim**-0.5
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril() if causal else None
    output, lse = textbook(queries, keys, values, scale, mask)
    own_output, own_lse = textbook(queries, keys, values, scale, mask, dtype)
    for run in (attention, attention_reference):
        how = {"causal": True} if causal and run is attention else {"mask": mask} if causal else {}
        part = run(queries, keys, values, scale, **how)  # type: ignore[operator]
        assert part.output.dtype == dtype
        assert part.lse.dtype == torch.float32
        # with one key the output is the value itself, and its distance may be 0
        assert distance(part.output, output) <= 2 * max(distance(own_output, output), rounding(output))
        assert distance(part.lse, lse) <= 2 * max(distance(own_lse, lse), rounding(lse))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_query_that_sees_nothing_answers_0_and_minus_infinity(softcap: float | None) -> None:
    queries, keys, values = draw(4, 16, 3, 5, torch.float32)
    mask = torch.zeros(2, 2, 3, 5, dtype=torch.bool)
    mask[:, :, 1:] = True  # the first query is blind
    part = attention_reference(queries, keys, values, 0.25, mask=mask, softcap=softcap)
    assert not part.output[:, :, 0].any()
    assert bool((part.lse[:, :, 0] == -torch.inf).all())
    assert bool(part.output.isfinite().all())
    for empty in (nothing(queries), attention(queries, keys[:, :, :0], values[:, :, :0], 0.25, softcap=softcap)):
        assert empty.output.shape == queries.shape
        assert not empty.output.any()
        assert bool((empty.lse == -torch.inf).all())
        assert empty.lse.dtype == torch.float32


def test_nan_in_hidden_keys_and_values_does_not_leak() -> None:
    queries, keys, values = draw(4, 16, 3, 6, torch.float32)
    seen = torch.tensor([True, True, False, True, False, True])
    clean = attention_reference(queries, keys[:, :, seen], values[:, :, seen], 0.25)
    keys[:, :, ~seen], values[:, :, ~seen] = torch.nan, torch.nan
    part = attention_reference(queries, keys, values, 0.25, mask=seen)
    torch.testing.assert_close(part.output, clean.output)
    torch.testing.assert_close(part.lse, clean.lse)


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 1, 6), (2, 3, 6), (8, 3, 6), (2, 2, 1, 6), (1, 1, 3, 6)], ids=str)
def test_a_mask_is_broadcast_over_the_leading_dimensions(shape: tuple[int, ...]) -> None:
    queries, keys, values = draw(4, 16, 3, 6, torch.float32)
    if shape[:1] == (8,):  # one mask per query head: keys are given per query head too
        keys, values = (tensor.repeat_interleave(4, 1) for tensor in (keys, values))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 0] = True
    part = attention_reference(queries, keys, values, 0.25, mask=mask)
    full = mask.reshape((1,) * (4 - mask.ndim) + mask.shape).expand(2, keys.shape[1], 3, 6)
    output, lse = textbook(queries, keys, values, 0.25, full.repeat_interleave(8 // keys.shape[1], 1))
    torch.testing.assert_close(part.output, output.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(part.lse, lse.float(), rtol=1e-5, atol=1e-6)


def test_softcap_bends_logits_after_the_scale() -> None:
    queries, keys, values = draw(4, 16, 3, 6, torch.float32)
    k, v = (tensor.double().repeat_interleave(4, 1) for tensor in (keys, values))
    logits = 2.0 * torch.tanh(queries.double() @ k.mT * 0.25 / 2.0)
    for part in (
        attention(queries, keys, values, 0.25, softcap=2.0),
        attention_reference(queries, keys, values, 0.25, softcap=2.0),
    ):
        torch.testing.assert_close(part.output, (logits.softmax(-1) @ v).float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(part.lse, logits.logsumexp(-1).float(), rtol=1e-5, atol=1e-6)


def test_a_weight_of_log_2_counts_a_token_twice() -> None:
    queries, keys, values = draw(4, 16, 3, 6, torch.float32)
    weight = torch.zeros(6)
    weight[2] = torch.log(torch.tensor(2.0))
    weighted = attention_reference(queries, keys, values, 0.25, log_weight=weight)
    twice = [torch.cat([tensor, tensor[:, :, 2:3]], 2) for tensor in (keys, values)]
    doubled = attention_reference(queries, *twice, 0.25)
    torch.testing.assert_close(weighted.output, doubled.output)
    torch.testing.assert_close(weighted.lse, doubled.lse)


def test_keys_may_be_views_into_a_pool() -> None:
    """Rows of a paged store are strided slices; a fused kernel that assumed contiguous heads would read neighbours."""
    queries, keys, values = draw(4, 16, 3, 12, torch.float32)
    pool = torch.full((2, 2, 40, 16), torch.nan)
    pool[:, :, 20:32] = keys
    part = attention(queries, pool[:, :, 20:32], values, 0.25)
    assert torch.equal(part.output, attention(queries, keys, values, 0.25).output)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("num_keys", [500, 8192, 50_000])
def test_keys_that_are_cut_into_blocks_are_attended_as_one(num_keys: int) -> None:
    queries, keys, values = draw(4, 128, 1024, num_keys, torch.bfloat16, "cuda", 1)
    output, lse = textbook(queries, keys, values, 0.1, None)
    part = attention(queries, keys, values, 0.1)
    whole = attention_module._fused(queries, keys, values, 0.1, False)
    assert part.output.dtype == torch.bfloat16
    assert distance(part.output, output) <= 2 * distance(whole.output, output)
    assert distance(part.lse, lse) <= 2 * max(distance(whole.lse, lse), rounding(lse))


@pytest.mark.parametrize("batch", [1, 2])
def test_each_key_has_a_value_and_causal_queries_a_key(batch: int) -> None:
    queries, keys, values = draw(1, 64, 1, 70, torch.float32, batch=batch)
    with refused("invalid_tensor: one value for each key"):
        attention(queries, keys, values[:, :, :30], 0.1)
    with refused("invalid_tensor: one key for each query"):
        attention(queries, keys, values, 0.1, causal=True)


def test_keys_of_one_sequence_serve_all() -> None:
    queries, keys, values = draw(2, 64, 3, 70, torch.float32, batch=4)
    for some in (queries, queries[:, :, :1]):
        found, expected = (run(some, keys[:1], values[:1], 0.1) for run in (attention, attention_reference))
        assert torch.allclose(found.output, expected.output, atol=1e-5)
