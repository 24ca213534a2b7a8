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


@pytest.mark.parametrize(("group", "processors", "window"), [(4, 40, 64), (4, 6, 300), (9, 2, 150), (1, 1, 1)])
def test_answers_over_the_bus_are_the_same(group: int, processors: int, window: int) -> None:
    case = draw(1, group, 128, 16, torch.bfloat16, lengths=[700, 20], window=window)
    found = []
    for over_bus in (False, True):
        with emulated(processors, over_bus):
            found.append(sketched.check(case))
    assert all(torch.equal(one, other) for one, other in zip(*found))


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
