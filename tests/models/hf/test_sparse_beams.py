"""Beam search under a sparse budget is a beam search whose every hypothesis was generated alone."""

from collections.abc import Callable

import torch
from models.tiny import SPARSE, assert_sparse, logits, prompt, ragged, tiny
from torch import Tensor

import kvsift


def beam_search(step: Callable[[list[int]], Tensor], num_beams: int, num_new: int) -> list[int]:
    """The likeliest continuation; ``step`` gives the log-probabilities of the token after some generated ones."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(num_new):
        grown = []
        for score, tokens in beams:
            best = step(tokens).topk(num_beams)
            grown += [(score + float(gain), [*tokens, int(token)]) for gain, token in zip(*best)]
        beams = sorted(grown, reverse=True)[:num_beams]
    return beams[0][1]


def test_beams_are_those_of_a_search_that_generates_every_hypothesis_from_the_start() -> None:
    model = tiny()

    def step(tokens: list[int]) -> Tensor:
        cache = kvsift.make_cache(model, SPARSE)
        answer = logits(model, prompt(), past_key_values=cache)
        for token in tokens:
            answer = logits(model, torch.tensor([[token]]), past_key_values=cache)
        return answer[0, -1].log_softmax(-1)

    expected = beam_search(step, num_beams=3, num_new=6)
    with kvsift.sparse(model, SPARSE) as run:
        found = model.generate(prompt(), num_beams=3, max_new_tokens=6, do_sample=False)
    assert found[0, 150:].tolist() == expected
    assert_sparse(run)


def test_beams_of_a_padded_batch_are_those_of_each_row_alone() -> None:
    model = tiny()
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8, "do_sample": False}
    with kvsift.sparse(model, SPARSE) as run:
        together = model.generate(**ragged(150, 127), **options)[:, 150:]
        alone = [
            model.generate(prompt(length, seed=row), **options)[:, length:] for row, length in ((0, 150), (1, 127))
        ]
    assert torch.equal(together, torch.cat(alone))
    assert_sparse(run)


def test_one_row_of_beam_samples_repeats_with_its_seed() -> None:
    model = tiny()
    found = []
    with kvsift.sparse(model, SPARSE):
        for _ in range(2):
            torch.manual_seed(5)
            found.append(model.generate(prompt(), num_beams=3, max_new_tokens=8, do_sample=True))
    assert torch.equal(*found)
