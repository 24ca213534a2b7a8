"""Scores of keys by probe queries: the reference by hand, the twin against it."""

import pytest
import torch
from kernels.conftest import DEVICE, DTYPES, needs_triton

from kvsift.kernels.probe_scores import probe_scores_reference, probe_scores_triton


def test_two_probes_and_three_keys_by_hand() -> None:
    keys = torch.tensor([[[[0.0, 2.0], [9.0, 9.0]], [[0.0, 0.0], [3.0, 4.0]]]])
    table = torch.tensor([0, 1, 0], dtype=torch.int32)
    probes = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).view(1, 1, 2, 2)
    expected = {
        (False, False): [0.0, 4.0, 2.0], (True, False): [0.0, 0.8, 1.0],
        (False, True): [0.0, 3.5, 1.0], (True, True): [0.0, 0.7, 0.5],
    }  # fmt: skip
    for (cosine, mean), scores in expected.items():
        found = probe_scores_reference(probes, keys, table, slice(2, 5), cosine=cosine, mean=mean)
        torch.testing.assert_close(found, torch.tensor([[scores]]))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "segments", "probes"),  # KV heads, lists, head_dim
    [((2, 2, 64), 3, 16), ((1, 4, 128), 1, 16), ((2, 2, 80), 17, 5), ((1, 1, 32), 2, 40)],
    ids=str,
)
@pytest.mark.parametrize("how", [{"cosine": True}, {"cosine": False, "mean": True}, {"cosine": True, "mean": True}])
def test_the_twin(
    shape: tuple[int, int, int], segments: int, probes: int, dtype: torch.dtype, how: dict[str, bool]
) -> None:
    kv_heads, num_lists, head_dim = shape
    generator = torch.Generator().manual_seed(segments)
    keys = torch.randn(45, 16, kv_heads, head_dim, generator=generator).to(DEVICE, dtype).permute(2, 0, 1, 3)
    table = torch.randperm(45, generator=generator).to(DEVICE, torch.int32)
    drawn = torch.randn(segments, num_lists, probes, head_dim, generator=generator).to(DEVICE, dtype)
    exact, found = (
        run(drawn, keys, table, slice(5, 667), **how) for run in (probe_scores_reference, probe_scores_triton)
    )
    torch.testing.assert_close(found, exact, rtol=2e-5, atol=2e-4 if dtype == torch.float32 else 1e-3)
