"""Inputs that would be answered wrongly are refused, with the reason and a way out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models.tiny import COVERING, SPARSE, greedy, left_alone, logits, prompt, ragged, tiny
from refusals import refused

import kvsift
from kvsift.errors import UnsupportedCall, UnsupportedModel
from kvsift.models.hf.calls import Calls
from kvsift.models.hf.inputs import check_uncached


def test_a_block_inside_another_is_refused_and_the_outer_one_goes_on() -> None:
    model = tiny()
    with kvsift.sparse(model, SPARSE) as run:
        with refused("unavailable"), kvsift.sparse(model, "dense"):
            pass
        greedy(model, prompt())
    assert run.report()["phases"]["decode"]["density"] < 0.6
    assert model.config._attn_implementation == "eager"


def test_showing_a_token_that_was_padding_is_refused() -> None:
    model = tiny()
    cache = kvsift.make_cache(model, SPARSE)
    logits(model, **ragged(20, 15), past_key_values=cache)
    tokens, mask = torch.ones(2, 4, dtype=torch.long), torch.ones(2, 24, dtype=torch.long)
    with refused("unsupported_call"):
        logits(model, tokens, attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("way", ["sparse", "make_cache"])
def test_a_forward_pass_that_records_gradients_is_refused(way: str) -> None:
    model = tiny()
    cache = kvsift.make_cache(model, SPARSE) if way == "make_cache" else None
    block = nullcontext() if way == "make_cache" else kvsift.sparse(model, SPARSE)
    with block, refused("unsupported_call"):
        model(prompt(20), past_key_values=cache)


@pytest.mark.parametrize("use_cache", [True, False, None])
def test_packed_sequences_are_refused(use_cache: bool | None) -> None:
    model = tiny()
    positions = torch.cat([torch.arange(12), torch.arange(8)]).unsqueeze(0)
    with kvsift.sparse(model, SPARSE), refused("unsupported_call: position_ids that start anew pack"):
        logits(model, prompt(20), position_ids=positions, use_cache=use_cache)


def test_packed_sequences_without_our_cache_are_refused_too() -> None:
    model = tiny()
    kvsift.make_cache(model, SPARSE)  # puts our attention on the model
    positions = torch.cat([torch.arange(12), torch.arange(8)]).unsqueeze(0)
    with refused("unsupported_call"):
        logits(model, prompt(20), position_ids=positions, use_cache=False)


def test_positions_that_do_not_start_at_zero_are_not_packed() -> None:
    model = tiny()
    expected = logits(model, prompt(20))
    with kvsift.sparse(model, SPARSE):
        shifted = logits(model, prompt(20), position_ids=torch.arange(30, 50).unsqueeze(0))
    torch.testing.assert_close(shifted, expected, atol=1e-4, rtol=1e-4)  # rotary positions are relative


@pytest.mark.parametrize("form", ["boolean", "additive", "blocks"])
def test_a_mask_with_a_row_per_query_is_refused(form: str) -> None:
    model = tiny()
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    if form == "blocks":
        mask[..., 10:, :10] = False
    if form == "additive":
        mask = torch.zeros(1, 1, 20, 20)
    with kvsift.sparse(model, SPARSE), refused("unsupported_call"):
        logits(model, prompt(20), attention_mask=mask)


def test_hiding_a_token_after_it_was_cached_is_refused() -> None:
    model = tiny()
    cache, mask = kvsift.make_cache(model, SPARSE), torch.ones(2, 24, dtype=torch.long)
    batch = ragged(20, 15)
    logits(model, **batch, past_key_values=cache)
    mask[:, 3] = 0
    with refused("unsupported_call"):
        logits(model, torch.ones(2, 4, dtype=torch.long), attention_mask=mask, past_key_values=cache)


def test_generating_without_a_cache_is_refused() -> None:
    model = tiny()
    with kvsift.sparse(model, SPARSE), refused("unsupported_call"):
        greedy(model, prompt(20), use_cache=False)


@pytest.mark.parametrize(("field", "value", "remedy"), [
    ("use_cache", False, "True"), ("cache_implementation", "static", "None"), ("output_attentions", True, "None"),
])  # fmt: skip
def test_a_refusal_of_what_the_checkpoint_asks_for_names_its_file_and_not_the_caller(
    field: str, value: Any, remedy: str
) -> None:
    model = tiny()
    expected = greedy(model, prompt(20))
    setattr(model.generation_config, field, value)
    says = f"unsupported_call: set model.generation_config.{field} = {remedy}"
    with kvsift.sparse(model, COVERING), refused(says):
        greedy(model, prompt(20))
    with refused(says):
        greedy(model, prompt(20), past_key_values=kvsift.make_cache(model, COVERING))
    with kvsift.sparse(model, COVERING), refused("unsupported_call: leave it out"):
        greedy(model, prompt(20), **{field: value})
    setattr(model.generation_config, field, {"True": True, "None": None}[remedy])  # as the refusal says
    with kvsift.sparse(model, COVERING):
        assert torch.equal(greedy(model, prompt(20)), expected)


def test_attention_weights_that_config_json_asks_for_are_refused_in_its_name() -> None:
    model = tiny()
    model.config.output_attentions = True
    with refused("unsupported_model: config.json of the model asks for it, so remove it there"):
        kvsift.make_cache(model, SPARSE)


@pytest.mark.parametrize("axes", [0, 3, 4])
def test_packed_rows_are_noticed_in_every_layout_of_positions(axes: int) -> None:
    """With axes of time, height and width positions are [3, rows, tokens], or [4, ...] with those of the text first."""
    model = tiny()
    packed = torch.cat([torch.arange(20), torch.arange(15)])[None]
    packed = packed if not axes else packed.expand(axes, 1, -1)
    with kvsift.sparse(model, "dense"), refused("unsupported_call: position_ids that start anew pack"):
        logits(model, prompt(35), position_ids=packed, use_cache=False)


def test_rows_packed_by_their_lengths_are_refused() -> None:
    model, ends = tiny(), torch.tensor([0, 20, 35], dtype=torch.int32)
    with kvsift.sparse(model, "dense"), refused("unsupported_call: cu_seq_lens_q packs"):
        logits(model, prompt(35), cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_positions_of_a_picture_are_no_packed_rows() -> None:
    """Patches share their time; it never goes back."""
    time = torch.tensor([0, 1, 2, 2, 2, 2, 4, 5])[None]
    check_uncached({"position_ids": time.expand(3, 1, -1)}, Calls())
    with refused("unsupported_call: position_ids that start anew pack"):
        check_uncached({"position_ids": time.flip(1).expand(3, 1, -1)}, Calls())


@pytest.mark.parametrize("way", ["forward", "generate", "config"])
def test_attention_weights_that_are_never_computed_are_refused(way: str) -> None:
    model = tiny()
    ways = {
        "forward": lambda: logits(model, prompt(20), output_attentions=True),
        "generate": lambda: greedy(model, prompt(20), return_dict_in_generate=True, output_attentions=True),
        "config": lambda: logits(model, prompt(20)),
    }
    model.config.output_attentions = way == "config"
    with (
        pytest.raises((UnsupportedCall, UnsupportedModel), match="output_attentions=True"),
        kvsift.sparse(model, SPARSE),
    ):
        ways[way]()


@pytest.mark.parametrize("plan", ["qest:budget=64", "quest:budgt=64", "quest:budget=8", 7, "prefill=quest"])
def test_a_plan_that_makes_no_sense_is_refused_before_the_model_is_touched(plan: Any) -> None:
    model = tiny()
    with left_alone(model), pytest.raises(kvsift.InputError):
        kvsift.make_cache(model, plan)
    with left_alone(model), pytest.raises(kvsift.InputError), kvsift.sparse(model, plan):
        pass
