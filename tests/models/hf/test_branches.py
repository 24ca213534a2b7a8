"""One context, several continuations: caches that are copied, repeated over a batch, reset and rewound."""

from copy import deepcopy

import pytest
import torch
from models.tiny import CACHED, SPARSE, VERSION, WITH_SLIDING_LAYERS, fed, greedy, prompt, tiny

import kvsift
from kvsift.models.hf.sparse import SparseCache

families = pytest.mark.parametrize("family", CACHED)
QUESTION = prompt(25, seed=4)


@families
def test_a_copied_cache_goes_its_own_way(family: str) -> None:
    model = tiny(family)
    shared = fed(model, prompt())
    branches = [torch.cat([prompt(), prompt(25, seed=seed)], 1) for seed in (5, 6)]
    expected = [greedy(model, text, past_key_values=fed(model, prompt())) for text in branches]
    for text, tokens in zip(branches, expected):
        assert torch.equal(greedy(model, text, past_key_values=deepcopy(shared)), tokens)
    assert shared.get_seq_length() == 150


@families
def test_a_shared_prefix_repeated_over_a_batch_answers_every_row_as_alone(family: str) -> None:
    model = tiny(family)
    texts = [torch.cat([prompt(), prompt(25, seed=seed)], 1) for seed in (5, 6, 7)]
    expected = [greedy(model, text, past_key_values=fed(model, prompt())) for text in texts]
    cache = fed(model, prompt())
    cache.batch_repeat_interleave(3)
    assert torch.equal(greedy(model, torch.cat(texts), past_key_values=cache), torch.cat(expected))


@families
def test_a_reset_cache_starts_over(family: str) -> None:
    if VERSION < (5, 23) and family in WITH_SLIDING_LAYERS:
        pytest.skip("before 5.23 transformers' own sliding layers forget their length and keep their tokens")
    model = tiny(family)
    cache = kvsift.make_cache(model, SPARSE)
    expected = greedy(model, prompt(), past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(greedy(model, prompt(), past_key_values=cache), expected)


@families
def test_rewinding_to_a_mark_forgets_what_came_after(family: str) -> None:
    model = tiny(family)
    cache = fed(model, prompt())
    cache.mark()
    first = greedy(model, torch.cat([prompt(), QUESTION], 1), past_key_values=cache)
    greedy(model, torch.cat([prompt(), prompt(40, seed=9)], 1), past_key_values=_rewound(cache))
    again = greedy(model, torch.cat([prompt(), QUESTION], 1), past_key_values=_rewound(cache))
    assert torch.equal(again, first)
    _rewound(cache)
    assert cache.get_seq_length() == 150


def _rewound(cache: SparseCache) -> SparseCache:
    cache.rewind()
    return cache
