"""Anchor files: what is refused, whose selection a layer takes, and which head's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.checks import (
    chunking_does_not_change_the_answer,
    forks_answer_as_if_each_had_always_been_alone,
    interleaved_sequences_answer_as_alone,
    messages_between_layers_stay_in_their_sequence_and_pass,
    neighbours_and_padding_do_not_change_the_answer,
)
from contracts.harness import SHAPE, Asked, Check, Stack, Tokens, draw_tokens, spy
from refusals import refused
from torch import Tensor

from kvsift.errors import MissingFile, UnreadableFile, WrongFile
from kvsift.layer.layer_messages import LayerMessages
from kvsift.methods.base import Method, Phase
from kvsift.methods.common import anchors as anchors_file
from kvsift.methods.common.anchors import AnchorMap, Reuse, read, reuse_in
from kvsift.methods.less_is_more import LessIsMore
from kvsift.methods.sketch import Sketch
from kvsift.methods.tidal_decode import TidalDecode
from kvsift.plan.budget import Budget
from kvsift.plan.plan import Plan, Rule
from kvsift.plan.syntax import parse_plan
from kvsift.types import Origin

BUDGET = Budget(tokens=30, sinks=4, window=6, dense_layers=())
LAYERS = (2, 3, 5, 7)
# layer 5 reuses the lower of two anchors, with its heads exchanged; both heads of layer 7 take one
REUSE = {5: Reuse(2, (1, 0), 0.9), 7: Reuse(3, (1, 1), 0.8)}
ORIGIN = Origin("Toy, 8 layers", torch.linspace(-1, 1, 100).reshape(10, 10))
PROMPT = 90


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path)


def write(
    folder: Path, reuse: Mapping[int, Reuse] = REUSE, dense: tuple[int, ...] = (), origin: Origin = ORIGIN
) -> str:
    path = folder / "anchors.json"
    anchors = [layer for layer in LAYERS if layer not in reuse and layer not in dense]
    anchors_file.write(path, AnchorMap.of(origin, anchors, reuse, dense, {"tokens": 5}))
    return str(path)


def decoded(method: Method, tokens: Tokens, budget: Budget = BUDGET) -> tuple[Stack, list[Asked]]:
    """One token through a stack of layers, and what each was asked in turn."""
    asked = spy(method)
    stack = Stack(Plan(decode=Rule(method, budget)), layers=LAYERS, peers=LAYERS)
    stack.feed(tokens.part(0, PROMPT))
    stack.feed(tokens.part(PROMPT, PROMPT + 1), decode_tokens=1)
    return stack, asked


def best_of_layer(tokens: Tokens, number: int, k: int = 20) -> Tensor:
    """The tokens that each KV head of the layer of this number ranks highest, [num_kv_heads, k], by the formula."""
    queries = tokens.queries[:, PROMPT].roll(number, -1).double()
    keys = tokens.keys[:, : PROMPT + 1].double().repeat_interleave(SHAPE.group_size, 0)
    shares = torch.einsum("hd,htd->ht", queries, keys).mul(SHAPE.scale).softmax(-1)[:, 4 : PROMPT + 1 - 6]
    return shares.unflatten(0, (2, 2)).mean(1).topk(k).indices.sort(-1).values + 4


def test_heads_take_the_tokens_of_the_heads_that_the_file_names(file: str) -> None:
    tokens = draw_tokens(PROMPT + 1, 0)
    two, three = best_of_layer(tokens, 0), best_of_layer(tokens, 1)
    assert not torch.equal(two[0], two[1]), "the wrong head would not show"
    _, asked = decoded(TidalDecode(anchors=file), tokens)
    selected = [question.selection.units for question in asked]
    for units, expected in zip(selected, [two, three, two[[1, 0]], three[[1, 1]]], strict=True):
        assert torch.equal(units, expected)


def test_sketches_are_read_in_anchors_alone_and_estimate_the_rest_there(file: str) -> None:
    stack, asked = decoded(Sketch(anchors=file, page_size=4), draw_tokens(PROMPT + 1, 0))
    two, three, five, seven = (question.selection for question in asked)
    assert torch.equal(five.units, two.units[[1, 0]])
    assert torch.equal(seven.units, three.units[[1, 1]])
    assert not torch.equal(two.units, three.units)
    assert [chosen.extra is None for chosen in (two, three, five, seven)] == [False, False, True, True]
    read = [layer.stats.phase("decode").index_bytes_read for layer in stack.layers]
    assert read[2] == five.units.numel() * 8 < read[0], "the list of the anchor alone"


def test_layers_that_select_see_everything_unless_told_not_to(file: str) -> None:
    tokens = draw_tokens(PROMPT + 1, 0)
    for full_choice, expected in ((True, [91, 91, 30, 30]), (False, [30] * 4)):
        stack, _ = decoded(TidalDecode(anchors=file, full_choice=full_choice), tokens)
        assert [float(layer.stats.phase("decode").visible_tokens) for layer in stack.layers] == expected


def test_a_layer_that_was_left_out_selects_for_itself_and_for_no_other(tmp_path: Path) -> None:
    """Layer 3 was dense in the calibration: in a plan that makes it sparse it selects, and 5 still takes from 2."""
    file = write(tmp_path, {5: Reuse(2, (0, 1), 1.0), 7: Reuse(2, (0, 1), 1.0)}, dense=(3,))
    _, asked = decoded(TidalDecode(anchors=file), draw_tokens(PROMPT + 1, 0))
    two, three, five, seven = (question.selection.units for question in asked)
    assert torch.equal(two, five)
    assert torch.equal(two, seven)
    assert not torch.equal(two, three)


def test_a_layer_selects_for_itself_where_its_anchor_had_room_for_everything(file: str) -> None:
    """Of a pyramid the lowest layer holds the whole of a short context, and ranks nothing."""
    method, tokens = TidalDecode(anchors=file, full_choice=False), draw_tokens(PROMPT + 1, 0)
    budget = Budget(tokens=55, sinks=4, window=6, dense_layers=(), layer_budgets="pyramid")
    stack, asked = decoded(method, tokens, budget)
    sparse = [layer.stats.phase("decode").sparse_queries for layer in stack.layers]
    assert sparse[0] == 0
    assert sparse[2] == 1
    five = asked[-2].selection.units
    assert torch.equal(five, best_of_layer(tokens, 2, five.shape[1]))


CHECKS: list[Check] = [
    messages_between_layers_stay_in_their_sequence_and_pass,
    interleaved_sequences_answer_as_alone,
    neighbours_and_padding_do_not_change_the_answer,
    chunking_does_not_change_the_answer,
    forks_answer_as_if_each_had_always_been_alone,
]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_rows_chunks_and_passes_stay_apart(check: Check, phase: Phase, file: str) -> None:
    """In the stack of the first contract, of layers 2, 3 and 5, the uppermost takes from the lowest."""
    check(lambda: TidalDecode(chunk=32, anchors=file, full_choice=False), phase)


def test_kept_messages_are_found_by_their_layer_and_end_with_the_pass() -> None:
    from kvsift.layer.selection import CountingReader

    messages = LayerMessages()

    def reader(layer: int) -> CountingReader:
        messages.begin(0, layer)
        return CountingReader(None, messages, (0, layer, ("decode", 8, 9)))  # type: ignore[arg-type]

    for layer in (1, 2):
        reader(layer).pass_up(torch.full((2, 3), layer), keep=True)
    above = reader(3)
    assert [above.from_layer(layer) is None for layer in (0, 1, 2, 3)] == [True, False, False, True]
    lowest = above.from_layer(1)
    assert lowest.tolist() == [[1] * 3] * 2
    assert above.bytes_read == 3 * 2 * 3 * 8
    assert above.from_below() is None
    assert reader(1).from_layer(1) is None, "the pass is over"


def test_a_file_comes_back_as_it_was_written(file: str) -> None:
    found = read("anchors", file)
    assert (found.anchors, found.dense, dict(found.reuse)) == ((2, 3), (), REUSE)
    assert found.recipe == {"tokens": 5}
    assert found.layers == list(LAYERS)
    shape = SHAPE._replace(peers=LAYERS, origin=ORIGIN)
    assert [reuse_in(file, shape._replace(layer=layer)) for layer in LAYERS] == [None, None, REUSE[5], REUSE[7]]
    rounded = Origin(ORIGIN.name, ORIGIN.weights.bfloat16())
    assert reuse_in(file, shape._replace(layer=5, origin=rounded)) == REUSE[5]


def test_a_file_of_another_model_is_refused(file: str) -> None:
    shape = SHAPE._replace(layer=5, peers=LAYERS, origin=ORIGIN)
    weights = shape._replace(origin=Origin(ORIGIN.name, ORIGIN.weights.flip(0)))
    named = shape._replace(origin=Origin("Other", ORIGIN.weights))
    for other in (weights, named):
        with refused("other_model"):
            TidalDecode(anchors=file).new_state(other)
    with refused("other_model: 2, 3, 5, 6, 7"):
        TidalDecode(anchors=file).new_state(shape._replace(peers=(2, 3, 5, 6, 7)))
    with refused("other_model"):
        TidalDecode(anchors=file).new_state(shape._replace(num_kv_heads=4))
    with refused("other_model"):
        parse_plan({"method": "tidal_decode", "anchors": file, "dense_layers": ()}).check_layers(range(7))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "kvsift anchors 0"}, "wrong_file"),
        ({"anchors": [2]}, "damaged_file"),
        (
            {"reuse": {"5": {"anchor": 7, "heads": [0, 1], "recovery": 1}}, "anchors": [2, 3, 7]},
            "damaged_file: no anchor",
        ),
        ({"reuse": {"5": {"anchor": 2, "heads": [0, 2], "recovery": 1}}}, "damaged_file: the heads of layer 5"),
        ({"reuse": {"5": {"anchor": 2, "recovery": 1}}}, "damaged_file: KeyError"),
        ({"reuse": [1]}, "damaged_file: AttributeError"),
        ({"dense": [2]}, "damaged_file: a layer is named twice"),
        ({"model": None}, "damaged_file: TypeError"),
    ],
    ids=str,
)
def test_a_damaged_file_is_refused(change: dict[str, Any], says: str, file: str) -> None:
    document = json.loads(Path(file).read_text()) | change
    Path(file).write_text(json.dumps(document))
    with refused(says):
        TidalDecode(anchors=file)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"3"], ids=range(6))
def test_what_is_no_anchor_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "anchors.json"
    path.write_bytes(content)
    for wrong in (str(path), str(tmp_path), str(tmp_path / "nowhere.json"), 3, ""):
        with pytest.raises((MissingFile, UnreadableFile, WrongFile), match="anchors="):
            parse_plan({"method": "less_is_more", "anchors": wrong})


def test_anchors_and_a_correction_layer_are_refused(file: str) -> None:
    for correction in (3, "none"):
        with refused("conflict"):
            LessIsMore(anchors=file, correction=correction)  # type: ignore[arg-type]


def test_an_anchor_that_the_budget_leaves_dense_is_refused_at_once(file: str) -> None:
    with refused("unsupported_plan"):
        parse_plan(f"tidal_decode:anchors={file}:dense_layers=0+3")  # of layers 2, 3, 5 and 7
    plan = parse_plan(f"tidal_decode:anchors={file}:dense_layers=0+2")  # then nobody reuses it
    assert f"anchors={file}" in str(plan)
    assert parse_plan(str(plan)) == plan
