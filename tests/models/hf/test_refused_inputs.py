"""Inputs that would be answered wrongly are refused, with the reason and a way out."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models.tiny import COVERING, SPARSE, greedy, left_alone, logits, prompt, ragged, tiny
from refusals import refused

import kvsift
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


@pytest.mark.parametrize("way", ["sparse", "make_cache"])
def test_a_forward_pass_that_records_gradients_is_refused(way: str) -> None:
    model = tiny()
    cache = kvsift.make_cache(model, SPARSE) if way == "make_cache" else None
    block = nullcontext() if way == "make_cache" else kvsift.sparse(model, SPARSE)
    with block, refused("unsupported_call"):
        model(prompt(20), past_key_values=cache)


PACKED = torch.cat([torch.arange(12), torch.arange(8)]).unsqueeze(0)
ENDS = torch.tensor([0, 12, 20], dtype=torch.int32)
BLOCKS = torch.ones(1, 1, 20, 20, dtype=torch.bool).index_fill(2, torch.arange(10, 20), False)
ANEW = "position_ids that start anew pack"
# what is given to a forward pass or to generate(), and what is said
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{f"packed, use_cache={use}": ({"position_ids": PACKED, "use_cache": use}, ANEW) for use in (True, False, None)},
    # of time, height and width, or with those of the text first
    **{f"{n} axes": ({"position_ids": PACKED.expand(n, 1, -1), "use_cache": False}, ANEW) for n in (3, 4)},
    "packed by lengths": ({"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}, "cu_seq_lens_q packs"),
    "a row per query": ({"attention_mask": torch.ones(1, 1, 20, 20, dtype=torch.bool)}, ""),
    "an additive mask": ({"attention_mask": torch.zeros(1, 1, 20, 20)}, ""),
    "blocks": ({"attention_mask": BLOCKS}, ""),
    "attention weights": ({"output_attentions": True}, "output_attentions=True"),
    "generated without a cache": ({"max_new_tokens": 4, "use_cache": False}, ""),
    "generated with attention weights": (
        {"max_new_tokens": 4, "return_dict_in_generate": True, "output_attentions": True}, "output_attentions=True",
    ),
    **{
        f"a {kind} cache": ({"max_new_tokens": 4, "cache_implementation": kind}, f"cache_implementation='{kind}")
        for kind in ("static", "offloaded", "quantized")
    },
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_answered_wrongly_is_refused(what: str) -> None:
    model, (given, says) = tiny(), REFUSED[what]
    with kvsift.sparse(model, SPARSE), refused(f"unsupported_call: {says}"), torch.no_grad():
        (model.generate if "max_new_tokens" in given else model)(input_ids=prompt(20), **given)


def test_packed_rows_are_refused_under_attention_of_ours_without_a_block() -> None:
    model = tiny()
    kvsift.make_cache(model, SPARSE)
    with refused("unsupported_call"):
        logits(model, prompt(20), position_ids=PACKED, use_cache=False)


def test_positions_that_do_not_start_at_zero_are_not_packed() -> None:
    model = tiny()
    expected = logits(model, prompt(20))
    with kvsift.sparse(model, SPARSE):
        shifted = logits(model, prompt(20), position_ids=torch.arange(30, 50).unsqueeze(0))
    torch.testing.assert_close(shifted, expected, atol=1e-4, rtol=1e-4)  # rotary positions are relative


@pytest.mark.parametrize("hidden", [[], [3]], ids=["padding is shown", "a cached token is hidden"])
def test_a_mask_that_changes_its_mind_is_refused(hidden: list[int]) -> None:
    model = tiny()
    cache, mask = kvsift.make_cache(model, SPARSE), torch.ones(2, 24, dtype=torch.long)
    batch = ragged(20, 15)
    logits(model, **batch, past_key_values=cache)
    if hidden:
        mask[:, :20] = batch["attention_mask"]
    mask[:, hidden] = 0
    with refused("unsupported_call: the attention mask hides or shows"):
        logits(model, torch.ones(2, 4, dtype=torch.long), attention_mask=mask, past_key_values=cache)


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
    with refused("unsupported_model: output_attentions=True"), kvsift.sparse(model, SPARSE):
        logits(model, prompt(20))


def test_positions_of_a_picture_are_no_packed_rows() -> None:
    """Patches share their time; it never goes back."""
    time = torch.tensor([0, 1, 2, 2, 2, 2, 4, 5])[None]
    check_uncached({"position_ids": time.expand(3, 1, -1)}, Calls())
    with refused("unsupported_call: position_ids that start anew pack"):
        check_uncached({"position_ids": time.flip(1).expand(3, 1, -1)}, Calls())


@pytest.mark.parametrize("plan", ["qest:budget=64", "quest:budgt=64", "quest:budget=8", 7, "prefill=quest"])
def test_a_plan_that_makes_no_sense_is_refused_before_the_model_is_touched(plan: Any) -> None:
    model = tiny()
    with left_alone(model), pytest.raises(kvsift.InputError):
        kvsift.make_cache(model, plan)
    with left_alone(model), pytest.raises(kvsift.InputError), kvsift.sparse(model, plan):
        pass
