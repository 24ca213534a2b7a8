"""RoPE that depends on the length of the sequence: a cache never holds keys of two rotations."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from models.ropes import KNOBS, ORIGINAL, PHI3, in_one_pass, in_one_rotation, rope
from models.tiny import COVERING, SPARSE, covered, greedy, left_alone, logits, prompt, ragged, take_over, tiny
from refusals import refused
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from turns import in_turns

import kvsift
from kvsift.models.hf.rope import RopeLimits

LENGTH = 300
CHUNKS = [40, 120, 129, 1000]  # ends below the original maximum, or not
WITH_LENGTHS = ["dynamic", "longrope"]
OTHERS = [kind for kind in KNOBS if kind not in WITH_LENGTHS]
BY_LAYER = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


def chunked(model: PreTrainedModel, ids: Tensor, chunk_size: int, plan: str, **options: Any) -> Tensor:
    """Logits of a prompt that is fed in chunks."""
    cache = kvsift.make_cache(model, plan, **options)
    return torch.cat([logits(model, piece, past_key_values=cache) for piece in ids.split(chunk_size, 1)], 1)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_every_type_of_transformers_is_tested() -> None:
    assert set(KNOBS) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize(("kind", "chunk_size"), [*product(WITH_LENGTHS, CHUNKS), *zip(OTHERS, CHUNKS * 2)])
def test_a_prompt_in_chunks_is_answered_as_in_one_pass(kind: str, chunk_size: int) -> None:
    model, ids = tiny("Llama", **rope(kind)), prompt(LENGTH)
    stock = in_one_pass(model, ids, LENGTH)
    for plan in ("dense", COVERING):
        assert_close(chunked(model, ids, chunk_size, plan, reserve=LENGTH), stock)


@pytest.mark.parametrize(("kind", "length"), in_turns(KNOBS, [60, LENGTH]))
def test_a_forward_pass_is_that_of_stock(kind: str, length: int) -> None:
    model, ids = tiny("Llama", **rope(kind)), prompt(length)
    stock = in_one_pass(model, ids, length)
    with covered(model):
        assert_close(logits(model, ids), stock)


@pytest.mark.parametrize(
    ("kind", "num_tokens"), in_turns([kind for kind in KNOBS if kind != "dynamic"], [60, ORIGINAL - 9, LENGTH])
)
def test_generate_on_one_side_of_the_original_maximum_is_stock(kind: str, num_tokens: int) -> None:
    model, ids = tiny("Llama", **rope(kind)), prompt(num_tokens)
    stock = greedy(model, ids)
    with kvsift.sparse(model, "dense"):
        assert torch.equal(greedy(model, ids), stock)
        assert torch.equal(greedy(model, ids, prefill_chunk_size=50), stock)


@pytest.mark.parametrize("num_tokens", [60, ORIGINAL - 9, LENGTH])
def test_phi3_keeps_the_cache_that_it_would_drop(num_tokens: int) -> None:
    model, ids = tiny("Phi3", **PHI3), prompt(num_tokens)
    stock = greedy(model, ids)
    with kvsift.sparse(model, "dense") as run:
        assert torch.equal(greedy(model, ids), stock)
    assert run.report()["phases"]["decode"]["queries"] > 0
    cache = kvsift.make_cache(model, "dense")
    assert torch.equal(greedy(model, ids, past_key_values=cache), stock)
    assert cache.get_seq_length() == num_tokens + 9


@pytest.mark.parametrize(
    ("family", "changes"), [("Llama", rope("longrope")), ("Llama", rope("dynamic")), ("Phi3", PHI3)]
)
def test_an_answer_across_the_original_maximum_has_one_rotation(family: str, changes: dict[str, Any]) -> None:
    model, ids = tiny(family, **changes), prompt(ORIGINAL - 6)
    wanted = in_one_rotation(model, ids, 20)
    with kvsift.sparse(model, "dense"):
        assert torch.equal(greedy(model, ids, 20), wanted)
        assert torch.equal(greedy(model, ids, 20, prefill_chunk_size=50), wanted)
        assert torch.equal(greedy(model, ids, 20, prompt_lookup_num_tokens=3), wanted)


def test_phimoe_scales_by_the_length_of_the_whole_sequence() -> None:
    parameters = {**rope("longrope")["rope_parameters"], "short_mscale": 1.0, "long_mscale": 1.5}
    changes = {**rope("longrope"), "rope_parameters": parameters, "hidden_size": 64, "num_local_experts": 2}
    model, ids = tiny("Phimoe", **changes), prompt(LENGTH)
    assert_close(chunked(model, ids, 40, "dense", reserve=LENGTH), in_one_pass(model, ids, LENGTH))


@pytest.mark.parametrize("kind", WITH_LENGTHS)
def test_layers_with_ropes_of_their_own_are_pinned_each(kind: str) -> None:
    changes = rope(kind)
    changes["rope_parameters"] = {**BY_LAYER, "full_attention": changes["rope_parameters"]}
    model, ids = tiny("Gemma3", **changes), prompt(LENGTH)
    stock = in_one_pass(model, ids, LENGTH)
    assert_close(chunked(model, ids, 40, "dense", reserve=LENGTH), stock)


def test_padded_rows_rotate_as_the_longest_does_as_in_stock() -> None:
    model, rows = tiny("Llama", **rope("longrope")), ragged(60, LENGTH)
    stock = greedy(model, **rows)
    with kvsift.sparse(model, "dense"):
        assert torch.equal(greedy(model, **rows), stock)


def test_padding_is_no_part_of_the_length() -> None:
    model, rows = tiny("Llama", **rope("longrope")), ragged(60, LENGTH)
    alone = {name: rows[name][:1] for name in rows}  # 240 columns of padding
    stock = greedy(model, **alone)
    cache = kvsift.make_cache(model, "dense")
    assert torch.equal(greedy(model, **alone, past_key_values=cache), stock)
    again = {"input_ids": torch.cat([alone["input_ids"], stock], 1)}
    again["attention_mask"] = torch.cat([alone["attention_mask"], torch.ones_like(stock)], 1)
    greedy(model, **again, past_key_values=cache)
    assert cache.rotation == 0


@pytest.mark.parametrize("kind", WITH_LENGTHS)
@pytest.mark.parametrize("reserve", [0, 200])
def test_a_conversation_that_crosses_the_original_maximum_is_refused_unless_announced(kind: str, reserve: int) -> None:
    model, turns = tiny("Llama", **rope(kind)), prompt(150)
    cache = kvsift.make_cache(model, "dense", reserve=reserve)
    greedy(model, turns[:, :100], 10, past_key_values=cache)
    if reserve:
        greedy(model, turns, 10, past_key_values=cache)
        return
    reason = "unsupported_call: reserve=159"
    with refused(reason):
        greedy(model, turns, 10, past_key_values=cache)
    assert cache.get_seq_length() == 109
    greedy(model, turns[:, :115], 10, past_key_values=cache)


def test_crossing_is_not_called_a_missing_cache() -> None:
    model, ids = tiny("Phi3", **PHI3), prompt(ORIGINAL + 10)
    cache = kvsift.make_cache(model, "dense")
    logits(model, ids[:, :100], past_key_values=cache)
    with refused("unsupported_call: longrope, original maximum 128") as refusal, kvsift.sparse(model, "dense"):
        greedy(model, ids, past_key_values=cache)
    assert "use_cache" not in str(refusal.value)


def test_a_loop_of_ones_own_that_crosses_is_refused_before_anything_is_stored() -> None:
    model, ids = tiny("Llama", **rope("longrope")), prompt(LENGTH)
    cache = kvsift.make_cache(model, SPARSE)
    logits(model, ids[:, :ORIGINAL], past_key_values=cache)
    with refused("unsupported_call"):
        logits(model, ids[:, ORIGINAL : ORIGINAL + 1], past_key_values=cache)
    assert cache.get_seq_length() == ORIGINAL


@pytest.mark.parametrize("empty", [lambda cache: cache.reset(), lambda cache: cache.crop(-60)])
def test_a_cache_that_was_emptied_starts_anew(empty: Any) -> None:
    model, ids = tiny("Llama", **rope("longrope")), prompt(LENGTH)
    cache = kvsift.make_cache(model, "dense")
    logits(model, ids[:, :60], past_key_values=cache)
    empty(cache)
    assert_close(logits(model, ids, past_key_values=cache), in_one_pass(model, ids, LENGTH))


@pytest.mark.parametrize("kind", WITH_LENGTHS)
def test_what_came_before_changes_nothing(kind: str) -> None:
    model, long, short = tiny("Llama", **rope(kind)), prompt(LENGTH), prompt(60)
    stock = in_one_pass(model, short, 60), in_one_pass(model, long, LENGTH)
    logits(model, prompt(500))  # dynamic NTK remembers
    for _ in range(2):
        assert_close(chunked(model, short, 40, "dense"), stock[0])
        assert_close(chunked(model, long, 40, "dense", reserve=LENGTH), stock[1])


@pytest.mark.parametrize("kind", WITH_LENGTHS)
def test_threads_with_sequences_of_different_lengths_do_not_share_a_rotation(kind: str) -> None:
    model, lengths = tiny("Llama", **rope(kind)), (60, LENGTH, 100, 200)
    prompts = [prompt(length) for length in lengths]

    def answer(ids: Tensor, times: int = 3) -> list[Tensor]:
        return [chunked(model, ids, 10, "dense", reserve=ids.shape[1]) for _ in range(times)]

    alone = [answer(ids, 1)[0] for ids in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together: Sequence[list[Tensor]] = list(pool.map(answer, prompts))
    for answers, wanted in zip(together, alone):
        assert all(torch.equal(each, wanted) for each in answers)


@pytest.mark.parametrize("kind", WITH_LENGTHS)
def test_the_model_is_left_as_it_was(kind: str) -> None:
    model = tiny("Llama", **rope(kind))
    with left_alone(model):
        take_over(model, "sparse")


def test_outside_a_cache_of_ours_the_model_rotates_as_ever() -> None:
    model, ids = tiny("Llama", **rope("longrope")), prompt(LENGTH)
    stock = logits(model, ids)
    chunked(model, ids[:, :60], 40, "dense")
    assert_close(logits(model, ids), stock)


@pytest.mark.parametrize(
    ("limits", "length", "least"),
    [
        (RopeLimits(longrope=(128,)), 128, 0),
        (RopeLimits(longrope=(128,)), 300, 129),
        (RopeLimits(dynamic=(128,)), 128, 0),
        (RopeLimits(dynamic=(128,)), 300, 300),
        (RopeLimits(longrope=(128, 200)), 150, 129),
        (RopeLimits(longrope=(128,), dynamic=(200,)), 150, 129),
        (RopeLimits(longrope=(128,), dynamic=(200,)), 300, 300),
    ],
)
def test_rotations_are_told_apart_by_the_least_length_that_has_them(
    limits: RopeLimits, length: int, least: int
) -> None:
    assert limits.least(length) == least == limits.least(least)


def test_a_copy_of_the_model_rotates_for_itself() -> None:
    model, ids = tiny("Llama", **rope("longrope")), prompt(LENGTH)
    chunked(model, ids, 40, "dense", reserve=LENGTH)
    copied = deepcopy(model)
    copied.model.rotary_emb.attention_scaling *= 2
    assert not torch.allclose(logits(copied, ids), logits(model, ids))
