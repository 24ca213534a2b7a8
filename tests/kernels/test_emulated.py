"""The single launches, emulated where there is no GPU: what they choose and answer, and that they stay in bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels import test_sifted_attention as sifted
from kernels import test_sketch_launch as sketched
from kernels.decode_cases import draw_case
from kernels.emulated import emulated, reason_against
from kernels.test_sketch_attention import draw

from kvsift.kernels import sketch_launch

pytestmark = [
    pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "never"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU"),
]


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketched, "single_launch_runs", lambda *_: True)
    monkeypatch.setattr(sifted, "runs", lambda *_: True)


@pytest.mark.parametrize(
    ("shape", "bits", "processors", "how"),
    [  # KV heads, group, head_dim, page_size; blocks per row are processors / rows
        ((1, 4, 128, 16), 1, 12, {"lengths": [250, 1, 61]}),
        ((2, 7, 128, 64), 2, 2, {"lengths": [61, 250], "in_8_bits": True}),
        ((1, 1, 64, 16), 1, 1, {"lengths": [64]}),
        ((1, 12, 256, 32), 1, 3, {"lengths": [1500]}),
    ],
    ids=str,
)
def test_sketches(shape: tuple[int, int, int, int], bits: int, processors: int, how: dict[str, Any]) -> None:
    with emulated(processors):
        sketched.check(draw(*shape, torch.bfloat16, bits=bits, **how))


@pytest.mark.parametrize(
    ("group", "over_bus", "how"),
    [(4, True, {}), (3, True, {"sinks": 0, "window": 1}), (4, False, {"window": 300}), (9, False, {"window": 150})],
    ids=str,
)
def test_members_that_weigh_a_share_of_sinks_and_window(group: int, over_bus: bool, how: dict[str, Any]) -> None:
    with emulated(6, over_bus):
        sketched.check(draw(1, group, 128, 16, torch.bfloat16, lengths=[700, 20], **how))


@pytest.mark.parametrize("spilled", range(1, 5))
def test_sketches_whose_numbers_find_no_shared_memory(spilled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_launch, "_spilled", lambda *_: spilled)
    with emulated(2):
        sketched.check(draw(1, 4, 128, 16, torch.bfloat16, lengths=[2100], chosen=100))


@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "in_8_bits"),
    [((1, 4, 128, 16), torch.bfloat16, "minmax", False), ((1, 3, 64, 8), torch.float16, "minmax_fp8", True)],
    ids=str,
)
def test_pages(shape: tuple[int, int, int, int], dtype: torch.dtype, kind: str, in_8_bits: bool) -> None:
    with emulated(4):
        sifted.launch(
            draw_case([300, 1], *shape, dtype, kind=kind, spans=[(1, 2, 9), (1, 2, 5)], in_8_bits=in_8_bits),
            capacity=64,
        )
