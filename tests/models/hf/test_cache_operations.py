"""The operations that generate() and its users call on a cache: cropping, and choosing and repeating rows."""

import pytest
import torch
from models.tiny import SPARSE, greedy, logits, prompt, ragged, tiny
from refusals import refused
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvsift
from kvsift.models.hf.sparse import SparseCache

LENGTHS = (150, 121, 143)


def filled(model: PreTrainedModel, *lengths: int) -> tuple[SparseCache, Tensor]:
    """A cache that holds a left-padded batch, and its mask."""
    cache, batch = kvsift.make_cache(model, SPARSE), ragged(*lengths)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    logits(model, **batch, position_ids=positions, past_key_values=cache)
    return cache, batch["attention_mask"]


def steps(model: PreTrainedModel, cache: SparseCache, mask: Tensor, num_steps: int = 5) -> Tensor:
    """[rows, steps, vocabulary]: logits of decode steps over fixed tokens."""
    answers = []
    for step in range(num_steps):
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.long)], 1)
        tokens = torch.full((len(mask), 1), step + 1)
        positions = mask.sum(1, keepdim=True) - 1
        answers.append(logits(model, tokens, attention_mask=mask, position_ids=positions, past_key_values=cache))
    return torch.cat(answers, 1)


@pytest.mark.parametrize("amount", [-1, -7, -8, -30, torch.tensor(-9), 140, torch.tensor(120)])
def test_a_cropped_cache_is_the_cache_of_the_shorter_text(amount: int | Tensor) -> None:
    model = tiny()
    cache, _ = filled(model, 150)
    cache.crop(amount)  # a positive amount is what to keep: transformers 5.17 still says it so
    kept = int(amount) if amount > 0 else 150 + int(amount)
    assert cache.get_seq_length() == kept
    short = kvsift.make_cache(model, SPARSE)
    logits(model, prompt()[:, :kept], past_key_values=short)
    mask = torch.ones(1, kept, dtype=torch.long)
    torch.testing.assert_close(steps(model, cache, mask), steps(model, short, mask))


@pytest.mark.parametrize("amount", [0, 150, 200])
def test_cropping_nothing_keeps_everything(amount: int) -> None:
    model = tiny()
    cache, mask = filled(model, 150)
    cache.crop(amount)
    assert cache.get_seq_length() == 150
    untouched, _ = filled(model, 150)
    assert torch.equal(steps(model, cache, mask), steps(model, untouched, mask))


def test_decode_steps_that_are_taken_back_leave_no_trace() -> None:
    model = tiny()
    cache, mask = filled(model, *LENGTHS)
    first = steps(model, cache, mask, 20)
    cache.crop(-20)
    assert torch.equal(steps(model, cache, mask, 20), first)


def test_a_padded_batch_cropped_into_its_padding_goes_on_as_each_row_alone() -> None:
    model = tiny()
    cache, mask = filled(model, 150, 10)
    cache.crop(-15)  # the short row, padded on the left, has nothing left but padding
    texts = [prompt(150)[:, :135], prompt(150, seed=1)[:, :0]]
    answers = steps(model, cache, torch.cat([mask[:1, :135], torch.zeros(1, 135, dtype=torch.long)]))
    alone = kvsift.make_cache(model, SPARSE)
    logits(model, texts[0], past_key_values=alone)
    torch.testing.assert_close(answers[:1], steps(model, alone, mask[:1, :135]))
    torch.testing.assert_close(
        answers[1:], steps(model, kvsift.make_cache(model, SPARSE), torch.zeros(1, 0, dtype=torch.long))
    )


def test_cropping_more_than_there_is_is_refused() -> None:
    model = tiny()
    cache, _ = filled(model, 150)
    with refused("invalid_value: 150"):
        cache.crop(-151)
    assert cache.get_seq_length() == 150


ROWS = {
    "one": [1], "some": [2, 0], "doubled": [0, 0, 1, 1, 2, 2], "reversed": [2, 1, 0], "by a mask": [True, False, True]
}  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "rows"),
    [*(("batch_select_indices", rows) for rows in ROWS), *(("reorder_cache", rows) for rows in list(ROWS)[:4])],
)
def test_chosen_rows_go_on_as_if_they_had_been_the_batch(operation: str, rows: str) -> None:
    model, chosen = tiny(), torch.tensor(ROWS[rows])
    cache, mask = filled(model, *LENGTHS)
    getattr(cache, operation)(chosen)
    untouched, _ = filled(model, *LENGTHS)
    torch.testing.assert_close(steps(model, cache, mask[chosen]), steps(model, untouched, mask)[chosen])


def test_repeated_rows_are_copies_that_part_ways() -> None:
    model = tiny()
    cache, mask = filled(model, *LENGTHS)
    cache.batch_repeat_interleave(2)
    doubled = mask.repeat_interleave(2, 0)
    untouched, _ = filled(model, *LENGTHS)
    expected = steps(model, untouched, mask)
    torch.testing.assert_close(steps(model, cache, doubled), expected.repeat_interleave(2, 0))


def test_operations_on_a_cache_that_holds_nothing_do_nothing() -> None:
    model = tiny()
    cache = kvsift.make_cache(model, SPARSE)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reorder_cache(torch.tensor([0]))
    cache.crop(0)
    cache.reset()
    expected = greedy(model, prompt(), past_key_values=kvsift.make_cache(model, SPARSE))
    assert torch.equal(greedy(model, prompt(), past_key_values=cache), expected)


def test_keys_and_values_can_be_read_from_a_cache_as_from_a_stock_one() -> None:
    model, batch = tiny(), ragged(30, 21)
    stock = DynamicCache(config=model.config)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    cache = kvsift.make_cache(model, "dense")
    for each in (stock, cache):
        logits(model, **batch, position_ids=positions, past_key_values=each)
    real = batch["attention_mask"].bool()
    for ours, theirs in zip(cache, stock, strict=True):
        for mine, expected in zip(ours[:2], theirs[:2]):
            assert mine.shape == expected.shape
            torch.testing.assert_close(mine.transpose(1, 2)[real], expected.transpose(1, 2)[real])
            assert not mine.transpose(1, 2)[~real].any()
    assert kvsift.make_cache(model, "dense").layers[0].keys is None


def test_keys_of_a_cache_that_dropped_some_are_refused_by_name() -> None:
    model = tiny()
    cache = kvsift.make_cache(model, "streaming_llm:budget=40:evict=true:dense_layers=none")
    greedy(model, prompt(), past_key_values=cache)
    with refused("evicted_tokens"):
        _ = cache.layers[0].keys
