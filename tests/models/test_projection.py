"""Gated MLPs of many rows, which are computed a part at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvsift.kernels.scaled_weight import ScaledWeight
from kvsift.models import projection
from kvsift.models.projection import GatedMLP
from kvsift.models.scaled_linear import ScaledLinear


@pytest.mark.parametrize("scaled", [False, True])
def test_parts_of_many_rows_have_the_results_of_the_whole(monkeypatch: pytest.MonkeyPatch, scaled: bool) -> None:
    torch.manual_seed(0)
    shapes = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
    layers = {name: nn.Linear(*shape, bias=False).requires_grad_(False) for name, shape in shapes.items()}
    if scaled:
        layers = {name: ScaledLinear(ScaledWeight.of(layer.weight), None) for name, layer in layers.items()}  # type: ignore[misc]
    mlp, norm = GatedMLP.of(SimpleNamespace(**layers)), (torch.rand(64), 1e-5)
    x = torch.randn(150, 64)
    whole = mlp.add_to(x.clone(), x.clone(), norm)
    monkeypatch.setattr(projection, "MOST_ROWS", 64)
    parts = x.clone()  # overwritten, as a model gives it: the residual and the rows are one tensor
    torch.testing.assert_close(mlp.add_to(parts, parts, norm), whole)
