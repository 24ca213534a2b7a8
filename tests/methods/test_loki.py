"""Loki with axes from a file, and which files are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.checks import ALL_CHECKS
from contracts.harness import SHAPE, Check, Runner, draw_tokens, spy
from refusals import refused
from safetensors.torch import save_file
from torch import Tensor

from kvsift.methods.base import Phase
from kvsift.methods.common.calibration import write
from kvsift.methods.loki import Loki
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan
from kvsift.types import LayerShape, Origin

BUDGET = Budget(tokens=30, sinks=4, window=6, dense_layers=())
ORIGIN = Origin("TinyForCausalLM, 1 layer", torch.randn(50, 8, generator=torch.Generator().manual_seed(3)))


def bases(seed: int, num_kv_heads: int = 2, head_dim: int = 8) -> Tensor:
    """Orthonormal columns, [num_kv_heads, head_dim, head_dim]."""
    drawn = torch.randn(num_kv_heads, head_dim, head_dim, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(drawn).Q


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Axes after and before RoPE of layer 2, for ``SHAPE``."""
    axes = {"keys_after_rope.2": bases(0), "keys_before_rope.2": bases(1)}
    write(tmp_path / "tiny.safetensors", axes, ORIGIN, {"tokens": 100})
    return str(tmp_path / "tiny.safetensors")


@pytest.mark.parametrize("axes", ["after_rope", "before_rope"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_tokens_are_those_of_the_largest_share_along_the_axes(file: str, axes: Any, phase: Phase) -> None:
    method = Loki(chunk=32, rank=3, calibration=file, axes=axes)
    asked, tokens = spy(method), draw_tokens(97, 4)
    rule = Rule(method, BUDGET)
    runner = Runner(Plan(prefill=rule) if phase == "prefill" else Plan(decode=rule))
    runner.feed_all(tokens, 96, [96])
    kept = bases(0 if axes == "after_rope" else 1)[..., :3].repeat_interleave(SHAPE.group_size, 0)
    assert len(asked) == (2 if phase == "prefill" else 1)
    for question in asked:
        queries = tokens.queries[:, question.start : question.start + question.num_queries]
        keys = tokens.keys[:, : question.start + (phase == "decode")].repeat_interleave(SHAPE.group_size, 0)
        weights = ((queries @ kept) @ (keys @ kept).mT * SHAPE.scale).softmax(-1).mean(1)
        best = weights.unflatten(0, (2, 2)).mean(1)[:, question.candidates.tokens].topk(question.limit.units).indices
        assert torch.equal(question.selection.units, best.sort(-1).values + question.candidates.first)


def test_keys_are_read_along_the_axes_alone(file: str) -> None:
    """3 of 8 numbers of a key, and the whole of the new key."""
    runner = Runner(Plan(decode=Rule(Loki(rank=3, calibration=file), BUDGET)))
    runner.feed(draw_tokens(70, 0))
    runner.feed(draw_tokens(1, 1), decode_tokens=1)  # the first step looks at all of them
    before = runner.stats.phase("decode").index_bytes_read
    runner.feed(draw_tokens(1, 2), decode_tokens=1)
    assert runner.stats.phase("decode").index_bytes_read - before == 4 * SHAPE.num_kv_heads * (72 * 3 + 8)
    assert Loki(rank=3, calibration=file).state_bytes_per_token(SHAPE) == 2 * 2 * 3
    assert Loki(rank=3).state_bytes_per_token(SHAPE) == 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.usefixtures("fewer_examples")
def test_contracts_hold_with_a_file(
    check: Check, phase: Phase, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For tokens of any width, as some checks draw them."""

    def of_any_width(path: str, kind: str, shape: LayerShape) -> Tensor:
        return bases(shape.layer, shape.num_kv_heads, shape.head_dim)

    path = tmp_path_factory.mktemp("files") / "file.safetensors"
    write(path, {"keys_after_rope.2": bases(2)}, ORIGIN, {})
    monkeypatch.setattr("kvsift.methods.common.calibration.directions", of_any_width)
    check(lambda: Loki(chunk=32, rank=3, calibration=str(path)), phase)


def new_state(file: str, **shape: Any) -> None:
    Loki(calibration=file).new_state(SHAPE._replace(**shape))


def test_the_same_model_in_another_dtype_is_the_same_model(file: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        new_state(file, origin=Origin(ORIGIN.name, ORIGIN.weights.to(dtype)))
    new_state(file, origin=None)  # nobody knows


def test_files_of_other_models_are_refused(file: str) -> None:
    with refused("other_model: TinyForCausalLM, 1 layer"):
        new_state(file, origin=Origin("HugeForCausalLM", ORIGIN.weights))
    with refused("other_model"):
        new_state(file, origin=Origin(ORIGIN.name, ORIGIN.weights.flip(0)))
    with refused("other_model"):
        new_state(file, num_kv_heads=4)
    with refused("other_model: keys after rope"):
        new_state(file, layer=7)


def test_what_is_no_calibration_file_is_refused_when_the_plan_is_read(tmp_path: Path) -> None:
    missing, text, other = (tmp_path / name for name in ("missing", "text.txt", "weights.safetensors"))
    text.write_text("axes")
    save_file({"weight": torch.zeros(2)}, other)
    for path, why in ((missing, "unreadable_file"), (text, "unreadable_file"), (other, "wrong_file")):
        with refused(why):
            parse_plan(f"loki:calibration={path}")
    with refused("missing_file"):
        Loki(calibration=3)  # type: ignore[arg-type]
    with refused("unused_option"):
        Loki(axes="before_rope")
