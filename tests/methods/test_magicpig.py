"""MagicPIG: hand-computed probabilities, samples by the formula written out, an estimate that is right on average."""

from math import pi
from typing import Any

import pytest
import torch
from contracts.harness import SHAPE, Runner, draw_tokens, phase_plan, spy
from methods.weighted import Keys

from kvsift.methods.magicpig import EPSILON, MagicPIG, angles, inclusion, within_budget
from kvsift.plan.budget import Budget
from kvsift.types import Candidates, Limit, Selection

NUM_KEYS = 160
TOKENS = draw_tokens(NUM_KEYS + 1, 5)
KEYS, VALUES = (tensor[:, :NUM_KEYS].repeat_interleave(2, 0) for tensor in TOKENS[1:])  # of each query head
QUERY = TOKENS.queries[:, NUM_KEYS:] / 2
SHARES = ((QUERY @ KEYS.mT)[:, 0] * SHAPE.scale).softmax(-1)  # [num_query_heads, NUM_KEYS]
EXACT = (SHARES.unsqueeze(-1) * VALUES).sum(1)
ALL = Candidates(0, NUM_KEYS, 1)


def asked(method: MagicPIG, units: int, candidates: Candidates = ALL) -> tuple[Any, Selection]:
    state, reader = method.new_state(SHAPE), Keys(TOKENS.keys[:, :NUM_KEYS])
    return state, method.select(state, SHAPE, QUERY, NUM_KEYS, candidates, Limit(units), reader)  # type: ignore[arg-type]


def test_as_many_tables_as_the_budget_has_room_for() -> None:
    same = torch.tensor(
        [[1, 1, 0, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 1, 1], [0, 1, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    ).bool()  # sampled by table 2, never, 4, 3, 4, never
    for most, sampled, tables in ((9, [0, 2, 3, 4], 5), (4, [0, 2, 3, 4], 5), (3, [0, 3], 3), (1, [0], 2)):
        found, used = within_budget(same, most)
        assert (found.nonzero().flatten().tolist(), used) == (sampled, tables)
    found, used = within_budget(same[:1].expand(4, -1), 3)  # all four come with the second table
    assert (int(found.sum()), used) == (0, 1)


def test_keys_collide_as_often_as_the_formula_says() -> None:
    """Over independent projections; four standard errors of a binomial share, plus one draw."""
    bits, tables, runs = 2, 5, 400
    vectors = torch.tensor([[1.0, 0, 0], [0.8, 0.6, 0], [0, 1, 0], [-1, 0.5, 0.2]])
    shape = SHAPE._replace(head_dim=3)
    hits = torch.zeros(4)
    for seed in range(runs):
        codes = MagicPIG(bits=bits, tables=tables, seed=seed).new_state(shape).hash(vectors)
        hits += (codes == codes[0]).sum(-1) >= 2
    expected = inclusion(angles(vectors[0], vectors), bits, tables)
    slack = 4 * (expected * (1 - expected) / runs).sqrt() + 1 / runs
    assert bool(((hits / runs - expected).abs() <= slack).all()), (hits / runs, expected)


@pytest.mark.parametrize(("bits", "tables", "units"), [(10, 150, 30), (3, 8, 60), (2, 30, 25)])
def test_the_selection_is_that_of_the_formula_written_out(bits: int, tables: int, units: int) -> None:
    method = MagicPIG(bits=bits, tables=tables, seed=3)
    candidates = Candidates(4, 130, 1)
    state, selection = asked(method, units, candidates)
    planes = state._planes.double().unflatten(1, (tables, bits))
    for head in range(SHAPE.num_query_heads):
        keys = TOKENS.keys[head // 2].double()
        keys = keys - keys[4 : 4 + 128].mean(0)  # 130 candidates: the first 128 have settled
        signs = [torch.einsum("d,dtb->tb", vector, planes) > 0 for vector in (QUERY[head, 0].double(), *keys)]
        equal = [(signs[0] == of).all(-1).tolist() for of in signs[1:]]
        collisions = {key: [t for t in range(tables) if equal[key][t]] for key in range(4, 134)}

        def sampled_by(used: int, collisions: dict[int, list[int]] = collisions) -> set[int]:
            return {key for key, of in collisions.items() if len([t for t in of if t < used]) >= 2}

        used = max(used for used in range(tables + 1) if len(sampled_by(used)) <= units)
        sampled = sampled_by(used)
        assert sampled <= set(selection.units[head].tolist())
        room = (units - len(sampled)) / (130 - len(sampled))
        for key, weight in zip(selection.units[head].tolist(), selection.log_weight[head].tolist()):
            cosine = float(torch.nn.functional.cosine_similarity(QUERY[head, 0].double(), keys[key], dim=0))
            p = 1 - torch.tensor(cosine).acos().item() / pi
            u = 1 - (1 - p**bits) ** used - used * p**bits * (1 - p**bits) ** (used - 1)
            assert weight == pytest.approx(-torch.tensor(u + (1 - u) * room + EPSILON).log().item(), abs=1e-4)


def test_the_denominator_is_right_on_average() -> None:
    """Sums of weighted exponentials over independent draws, within four standard errors of the exact sum; 2e-3 for the
    epsilon, which takes at most 1e-4 of a probability that is never below 30 / 160."""
    runs = 300
    sums = []
    for seed in range(runs):
        _, selection = asked(MagicPIG(bits=6, tables=20, seed=seed), 30)
        sums.append((selection.log_weight.exp() * SHARES.gather(1, selection.units)).sum(-1))  # 1 if exact
    mean, deviation = torch.stack(sums).mean(0), torch.stack(sums).std(0)
    assert bool(((mean - 1).abs() <= 4 * deviation / runs**0.5 + 2e-3).all()), mean
    assert bool((deviation > 0.01).all()), "nothing was drawn"


def test_the_output_converges_to_the_exact_one_as_tables_are_added() -> None:
    """The paper's estimate, every sample and nothing else. With shares s, values v, exact output o and samples I, its
    numerator error is sum of s (I / u - 1) (v - o): whatever the correlation between keys, its root mean square is at
    most sum of s sqrt((1 - u) / u) |v - o|, which goes to 0 as tables are added."""
    bounds = []
    for tables in (20, 80, 320, 1280):
        errors = []
        keys = KEYS.double() - KEYS.double().mean(1, keepdim=True)
        u = torch.stack([inclusion(angles(QUERY[head, 0], keys[head]), 3, tables) for head in range(4)])
        distance = (VALUES - EXACT.unsqueeze(1)).norm(dim=-1)
        bound = (SHARES * ((1 - u) / u).sqrt() * distance).sum(-1)  # [num_query_heads]
        for seed in range(20):
            state = MagicPIG(bits=3, tables=tables, seed=seed).new_state(SHAPE)
            same = state.hash(keys) == state.hash(QUERY)  # [num_query_heads, NUM_KEYS, tables]
            weight = SHARES * torch.stack([within_budget(of, NUM_KEYS)[0] for of in same]) / (u + EPSILON)
            errors.append((weight.unsqueeze(-1) * (VALUES - EXACT.unsqueeze(1))).sum(1).norm(dim=-1))
        rms = torch.stack(errors).square().mean(0).sqrt()
        assert bool((rms <= 1.1 * bound + EPSILON * distance.amax(-1)).all()), (tables, rms, bound)
        bounds.append(float(bound.amax()))
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < 0.01 < 0.5 < bounds[0]


def test_keys_are_hashed_once_until_the_centre_moves() -> None:
    tokens = draw_tokens(80, 1)
    method = MagicPIG(bits=3, tables=10)
    runner = Runner(phase_plan(method, Budget(tokens=20, sinks=2, window=4, dense_layers=()), "decode"))
    state = runner.state()
    hashed: list[int] = []
    original = state.hash
    state.hash = lambda vectors: (hashed.append(vectors.shape[-2]), original(vectors))[1]
    runner.feed_all(tokens, 66, range(66, 80))
    keys_hashed = hashed[::2]  # the others are the queries
    # 61 candidates at the first step, and 64 at the fourth: 56 have settled, then 64 until there are 80
    assert keys_hashed[:5] == [63, 1, 1, 66, 1]
    assert set(keys_hashed[4:]) == {1}
    centre = state.centre
    runner.crop(0, 76)
    runner.feed_all(tokens, 66, range(76, 80), start=76)
    assert state.centre is centre
    runner.crop(0, 60)
    runner.feed_all(tokens.part(0, 60).then(draw_tokens(12, 2)), 71, [71], start=60)  # as many candidates again
    assert not torch.equal(state.centre, centre), "keys that the centre was taken from are gone"


def test_every_query_head_draws_for_itself_and_seeds_differ() -> None:
    tokens = draw_tokens(120, 2)
    drawn = []
    for seed in (0, 0, 1):
        method = MagicPIG(bits=4, tables=10, seed=seed)
        questions = spy(method)
        Runner(phase_plan(method, Budget(tokens=30, dense_layers=(), window=8), "decode")).feed_all(tokens, 118, [118])
        drawn.append([question.selection.units for question in questions])
    assert drawn[0][0].shape[0] == SHAPE.num_query_heads
    assert len(set(map(tuple, drawn[0][0].tolist()))) == SHAPE.num_query_heads
    assert all(torch.equal(*pair) for pair in zip(drawn[0], drawn[1]))
    assert not torch.equal(drawn[0][0], drawn[2][0])


def test_the_papers_dense_layers_are_the_default_and_memory_is_declared() -> None:
    method = MagicPIG()
    assert method.budget_defaults == {"dense_layers": (0, 16, 32, 48, 64)}
    state, _ = asked(method, 20)
    held = state._rows._buffer[:, 0]
    assert method.state_bytes_per_token(SHAPE) == held.numel() * held.element_size() == 2 * 150 * 2
