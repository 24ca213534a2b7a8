"""Softmax mass on lists, against float64."""

import torch
from kernels.conftest import DEVICE, DTYPES, crossed, needs_triton
from kernels.decode_cases import draw_case
from kernels.test_page_attention import LENGTHS, SHAPES, lists_of

from kvsift.kernels.page_attention import listed_tokens
from kvsift.kernels.recovery import RecoverySpace, recovery_reference, recovery_triton


@needs_triton
@crossed(shape=SHAPES, dtype=DTYPES, shared=[True, False], softcap=[None, 3.0])
def test_it_is_the_softmax_mass_on_the_lists(
    shape: tuple[int, int, int, int], dtype: torch.dtype, shared: bool, softcap: float | None
) -> None:
    case = draw_case(LENGTHS, *shape, dtype)
    units, counts = lists_of(case, shared)
    heads, page_size, expected = case.queries.shape[1], case.kv.page_size, []
    for row, length in enumerate(case.kv.lengths.tolist()):
        keys = case.kv.row(row)[0].double().repeat_interleave(heads // case.kv.num_kv_heads, 0)
        logits = torch.einsum("hd,hnd->hn", case.queries[row].double(), keys) * case.scale
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        listed = listed_tokens(units[row], counts[row], length, page_size)
        mask = listed.repeat_interleave(heads // len(listed), 0)
        expected.append((logits.softmax(-1) * mask).sum(-1))
    space = RecoverySpace.make(case.kv, case.queries, units, page_size)
    how = {"scale": case.scale, "softcap": softcap, "unit_size": page_size}
    for run, more in (
        (recovery_reference, {}),
        (recovery_triton, {"space": space}),
        (recovery_triton, {"space": space}),
    ):
        found = run(case.queries, case.kv, units, counts, **how, **more)
        assert found.shape == case.queries.shape[:2]
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        assert (found.double() - torch.stack(expected).to(DEVICE)).abs().max() < tolerance
    assert not torch.stack(expected).allclose(torch.ones((), dtype=torch.float64, device=DEVICE))
