"""The scheduler of the engine loop: examples to read first, then its promises, over random histories.

Histories have 100,000 steps, or KVSIFT_EXAMPLES times as many.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from batching.loop_model import LoopModel, run_random
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsift.batching.schedule import Decision, Schedule

EXAMPLES = float(os.environ.get("KVSIFT_EXAMPLES", "1"))
DECODE, IDLE = Decision(decode=True), Decision()
GRID, LONG = 8, 80


def admissions(schedule: Schedule, count: int, room: int = 1000) -> list[int]:
    """The next requests that are admitted, if each row ends with its prompt."""
    keys = []
    for _ in range(count):
        decision = schedule.decide(room)
        assert decision.admit is not None
        keys.append(decision.admit)
        schedule.has_read(decision.admit, LONG, 1.0, done=True)
        schedule.remove(decision.admit)
    return keys


def test_the_life_of_a_request():
    schedule = Schedule(max_rows=4, grid=GRID)
    assert schedule.decide(room=9) == IDLE
    assert schedule.add(7, "ann", tokens=12, pages=3)
    assert (schedule.waiting, schedule.backlog) == ((7,), 12)
    assert schedule.decide(room=9) == Decision(admit=7, read=7)
    schedule.has_read(7, tokens=8, seconds=0.1, done=False)
    assert (schedule.reading, schedule.backlog) == ((7,), 4)
    assert schedule.decide(room=6) == Decision(read=7)
    schedule.has_read(7, tokens=4, seconds=0.1, done=True)
    assert schedule.decoding == (7,)
    assert schedule.decide(room=6) == DECODE
    schedule.has_decoded(0.02)
    schedule.remove(7)
    assert schedule.decide(room=9) == IDLE


@pytest.mark.parametrize(("share", "steps"), [(0.0, 1), (0.5, 4), (0.75, 12)])
def test_a_chunk_of_half_a_second_is_followed_by_the_share_of_steps_of_an_eighth(share: float, steps: int):
    schedule = Schedule(max_rows=2, grid=GRID, decode_share=share)
    schedule.add(0, "ann", 1, 1)
    schedule.add(1, "ann", LONG, 1)
    schedule.decide(9)
    schedule.has_read(0, 1, 0.5, done=True)
    for _ in range(3):
        for _ in range(steps):
            assert schedule.decide(9) == DECODE
            schedule.has_decoded(0.125)
        assert schedule.decide(9).read == 1
        schedule.has_read(1, 8, 0.5, done=False)
    schedule.remove(0)
    assert schedule.decide(9).read == 1  # no row decodes: chunks run back to back


def test_clients_share_prompt_tokens_not_requests():
    schedule = Schedule(max_rows=1, grid=GRID)
    for key in range(3):
        schedule.add(key, "ann", 40, 1)
    for key in range(10, 16):
        schedule.add(key, "bob", 20, 1)
    assert admissions(schedule, 9) == [10, 0, 11, 12, 1, 13, 14, 2, 15]


def test_a_client_that_was_idle_has_saved_nothing():
    schedule = Schedule(max_rows=1, grid=GRID)
    for key in range(6):
        schedule.add(key, "ann", 40, 1)
    assert admissions(schedule, 3) == [0, 1, 2]
    for key in range(10, 13):
        schedule.add(key, "bob", 40, 1)
    assert admissions(schedule, 6) == [3, 10, 4, 11, 5, 12]


def test_a_client_cannot_wait_with_a_large_request_for_many_small_ones():
    schedule = Schedule(max_rows=1, grid=GRID)
    schedule.add(0, "ann", 400, 1)
    for key in range(1, 10):
        schedule.add(key, "ann", 20, 1)
    for key in range(10, 40):
        schedule.add(key, "bob", 20, 1)
    assert admissions(schedule, 15) == list(range(10, 25))
    schedule.remove(0)
    assert admissions(schedule, 6) == [1, 2, 25, 3, 26, 4]  # equal turns: by arrival


def test_a_short_request_is_read_between_two_chunks_of_a_long_prompt():
    schedule = Schedule(max_rows=4, grid=GRID)
    schedule.add(0, "ann", LONG, 1)
    assert schedule.decide(9) == Decision(admit=0, read=0)
    schedule.has_read(0, GRID, 0.1, done=False)
    schedule.add(1, "bob", GRID + 1, 1)
    assert schedule.decide(9) == Decision(read=0)
    schedule.has_read(0, GRID, 0.1, done=False)
    schedule.add(2, "cleo", GRID, 1)
    assert schedule.decide(9) == Decision(admit=2, read=2)
    schedule.has_read(2, GRID, 0.1, done=True)
    assert schedule.decide(9) == DECODE
    schedule.has_decoded(0.1)
    assert schedule.decide(9) == Decision(read=0)


@pytest.mark.parametrize("clients", [["ann"] * 7, ["bob", "cleo", "dan", "eve", "fay", "gus", "hal"]])
@pytest.mark.parametrize("overtakes", [0, 1, 4])
def test_a_long_request_is_overtaken_so_many_times_while_it_waits_for_its_pages(clients: list[str], overtakes: int):
    schedule = Schedule(max_rows=9, grid=GRID, overtakes=overtakes)
    schedule.add(0, "ann", LONG, pages=10)
    assert schedule.decide(room=1) == IDLE  # its turn has come, but not its pages
    passed = []
    for key, client in enumerate(clients, start=1):
        schedule.add(key, client, 1, pages=1)
        if (decision := schedule.decide(room=1)).read is not None:
            passed.append(decision.read)
            schedule.has_read(decision.read, 1, 0.1, done=True)
            schedule.remove(decision.read)
    assert passed == list(range(1, overtakes + 1))
    assert schedule.decide(room=10).admit == 0


def test_short_requests_of_other_clients_pass_one_that_waits_for_pages_but_large_ones_do_not():
    schedule = Schedule(max_rows=9, grid=GRID)
    schedule.add(0, "ann", LONG, pages=10)
    assert schedule.decide(room=5) == IDLE
    schedule.add(1, "bob", GRID + 1, pages=1)
    schedule.add(2, "cleo", GRID, pages=1)
    schedule.add(3, "dan", GRID - 1, pages=6)
    assert schedule.decide(room=5) == IDLE  # dan's is first among the short ones, which keep their order
    assert admissions(schedule, 2, room=6) == [3, 2]
    assert schedule.decide(room=6) == IDLE
    assert admissions(schedule, 2, room=10) == [0, 1]


@pytest.mark.parametrize("client", ["ann", "bob"])
def test_a_short_request_that_does_not_fit_keeps_no_long_one_from_its_turn(client: str):
    schedule = Schedule(max_rows=9, grid=GRID)
    schedule.add(0, "ann", LONG, pages=5)
    assert schedule.decide(room=4) == IDLE
    schedule.add(1, client, GRID, pages=6)
    assert schedule.decide(room=5).admit == 0


def test_a_client_that_comes_while_a_long_prompt_is_read_does_not_pass_those_who_had_no_more():
    schedule = Schedule(max_rows=9, grid=GRID)
    schedule.add(0, "ann", LONG, 1)
    schedule.decide(9)
    schedule.has_read(0, GRID, 0.1, done=False)
    for key in (1, 2):
        schedule.add(key, "bob", GRID, 1)
    assert admissions(schedule, 1) == [1]
    schedule.add(3, "cleo", GRID, 1)
    assert admissions(schedule, 2) == [2, 3]


@pytest.mark.parametrize("client", ["ann", "bob"])
@pytest.mark.parametrize("tokens", [1, GRID])
@pytest.mark.parametrize("others", [[], ["ann"], ["cleo", "dan"]], ids=["alone", "own", "of others"])
def test_the_fifth_short_question_beside_long_prompts_waits_for_a_chunk_as_the_first_does(
    client: str, tokens: int, others: list[str]
):
    """One after the other, of the same client and another one, also when further long prompts wait."""
    schedule = Schedule(max_rows=9, grid=GRID, decode_share=0.0)
    for key, other in enumerate(["ann", *others]):
        schedule.add(key, other, 100 * GRID, 1)
    assert schedule.decide(99).admit == 0
    for key in range(10, 40):
        schedule.has_read(0, GRID, 0.1, done=False)
        schedule.add(key, client, tokens, 1)
        assert schedule.decide(99) == Decision(admit=key, read=key)
        schedule.has_read(key, tokens, 0.1, done=True)
        schedule.remove(key)
        assert schedule.decide(99) == Decision(read=0)


def test_a_long_prompt_lets_short_requests_pass_between_its_chunks_and_still_advances():
    schedule = Schedule(max_rows=9, grid=GRID, overtakes=2, decode_share=0.0)
    schedule.add(0, "ann", LONG, 1)
    assert schedule.decide(9).admit == 0
    schedule.has_read(0, GRID, 0.1, done=False)
    passed, chunks = list[int](), list[int]()
    for key in range(1, 200):
        schedule.add(key, "bob", 1, 1)
        decision = schedule.decide(9)
        assert decision.read is not None
        if decision.read == 0:
            chunks.append(key)
            schedule.has_read(0, GRID, 0.1, done=len(chunks) == LONG // GRID - 1)
            if len(chunks) == LONG // GRID - 1:
                break
        else:
            passed.append(decision.read)
            schedule.has_read(decision.read, 1, 0.1, done=True)
            schedule.remove(decision.read)
    assert len(chunks) == LONG // GRID - 1
    assert len(passed) == 2 * (len(chunks) - 1), "two before each chunk but the last, which nobody passes"


def test_a_client_beyond_its_share_does_not_overtake_others():
    schedule = Schedule(max_rows=9, grid=GRID)
    schedule.add(0, "ann", LONG, pages=10)
    assert schedule.decide(room=5) == IDLE
    schedule.add(1, "bob", GRID, pages=1)
    assert admissions(schedule, 1, room=5) == [1]
    schedule.add(2, "bob", GRID, pages=1)
    assert schedule.decide(room=5) == IDLE


def test_what_can_be_reused_changes_a_request_and_not_its_place():
    schedule = Schedule(max_rows=1, grid=GRID, overtakes=0)
    for key in range(3):
        schedule.add(key, "ann", LONG, 10)
    schedule.revise(1, 1, 1)
    assert schedule.backlog == 2 * LONG + 1
    assert admissions(schedule, 3) == [0, 1, 2]
    schedule = Schedule(max_rows=1, grid=GRID)
    for key in range(3):
        schedule.add(key, "ann", LONG, 10)
    schedule.revise(1, 1, 1)  # short now
    assert admissions(schedule, 3) == [1, 0, 2]


def test_a_full_queue_refuses_and_a_removed_request_makes_room():
    schedule = Schedule(max_rows=1, grid=GRID, max_waiting=2)
    assert [schedule.add(key, "ann", 1, 1) for key in range(3)] == [True, True, False]
    schedule.remove(0)
    assert schedule.add(2, "ann", 1, 1)
    assert schedule.waiting == (1, 2)
    with pytest.raises(KeyError):
        schedule.remove(0)


def test_a_chunk_whose_row_was_cancelled_costs_its_time():
    schedule = Schedule(max_rows=3, grid=GRID)
    for key, tokens in enumerate((1, LONG, LONG)):
        schedule.add(key, "ann", tokens, 1)
    schedule.decide(9)
    schedule.has_read(0, 1, 0.0, done=True)
    assert schedule.decide(9) == DECODE  # a row decodes in the next step, however fast the chunk
    schedule.has_decoded(0.0)
    assert schedule.decide(9).admit == 1
    schedule.remove(1)
    schedule.has_read(1, GRID, 0.5, done=False)
    for _ in range(2):
        assert schedule.decide(9) == DECODE
        schedule.has_decoded(0.25)
    assert schedule.decide(9).admit == 2


def test_clients_that_left_are_forgotten():
    model = LoopModel()
    for key in range(500):
        model.arrive(f"client {key}", 1 + key % 20)
        model.step()
    model.finish()
    assert len(model.schedule._queue._accounts) <= 1


def test_parameters_without_a_meaning_are_refused():
    for wrong in ({"max_rows": 0}, {"grid": 0}, {"decode_share": 1.0}, {"max_waiting": 0}, {"overtakes": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Schedule(**{"max_rows": 1, "grid": 1, **wrong})


MODELS = st.builds(
    LoopModel,
    max_rows=st.integers(1, 4),
    grid=st.sampled_from([1, 4]),
    decode_share=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    max_waiting=st.sampled_from([3, 64]),
    overtakes=st.sampled_from([0, 1, 4]),
    pages=st.sampled_from([3, 20]),
)
SECONDS = st.sampled_from([0.0, 0.001, 0.1, 3.0])
EVENTS = st.one_of(
    st.tuples(st.just("arrive"), st.sampled_from("abc"), st.integers(1, 20), st.integers(1, 20), st.integers(1, 5)),
    st.tuples(st.just("cancel"), st.sampled_from(["waiting", "reading", "decoding"]), st.integers(0, 9)),
    st.tuples(st.just("revise"), st.integers(0, 9), st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.just("lend"), st.integers(0, 20)),
    st.tuples(st.just("step"), SECONDS, SECONDS),
    st.tuples(st.just("step"), SECONDS, SECONDS),
)


def carry_out(model: LoopModel, event: tuple) -> None:
    match event:
        case "arrive", client, tokens, pages, answer:
            model.arrive(client, tokens, min(pages, model.pages), answer)
        case "cancel", state, place:
            requests = model.queue if state == "waiting" else list(getattr(model, state).values())
            if requests:
                model.remove(requests[place % len(requests)].key)
        case "revise", place, tokens, pages:
            if model.queue:
                model.revise(model.queue[place % len(model.queue)], tokens, min(pages, model.pages))
        case "lend", pages:
            model.pages_lent = pages
        case "step", read_s, decode_s:
            model.step(read_s, decode_s)


@settings(max_examples=round(150 * EXAMPLES))
@given(MODELS, st.lists(EVENTS, max_size=80))
def test_every_promise_holds_after_any_events(model: LoopModel, events: list[tuple]):
    for event in events:
        carry_out(model, event)
        model.check_states()
    model.finish()


@pytest.mark.parametrize("seed", range(20))
def test_every_promise_holds_over_long_histories(seed: int):
    random = Random(seed)
    model = LoopModel(
        max_rows=random.choice((1, 2, 4, 8)),
        grid=random.choice((1, 4, 8)),
        decode_share=random.choice((0.0, 0.3, 0.5, 0.8)),
        max_waiting=random.choice((8, 64)),
        overtakes=random.choice((0, 1, 4, 4)),
        pages=random.choice((10, 1000)),
    )
    run_random(model, seed, round(5000 * EXAMPLES), clients=random.choice((1, 2, 4, 8)))
    model.finish()


def test_the_same_history_gives_the_same_decisions():
    runs = [run_random(LoopModel(), seed=1, steps=3000, clients=4) for _ in range(2)]
    assert runs[0] == runs[1]


@settings(max_examples=round(60 * EXAMPLES))
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.5, 0.8]), st.sampled_from([0.001, 0.05, 0.5]))
def test_seconds_of_waiting_are_bounded(seed: int, share: float, step_s: float):
    """With rows and pages for all, at a constant rate: by the bound of the scheduler's docstring."""
    random, token_s, grid = Random(seed), 0.01, 8
    model = LoopModel(max_rows=10**6, grid=grid, decode_share=share, pages=10**9)
    arrivals: dict[int, tuple] = {}
    model.arrive("z", 1, answer=10**6)  # decodes all the time
    for _ in range(400):
        while random.random() < 0.05:
            key = model.arrive(random.choice("abcd"), random.choice((3, grid, random.randint(1, 100))), answer=5)
            request = next((request for request in model.queue if request.key == key), None)
            arrivals[key] = (request, model.read_s + model.decode_s, max(0.0, model.owed))
        before = model.read_s + model.decode_s
        admitted = model.step(token_s, step_s).admit
        if admitted in arrivals:
            request, arrived_s, owed_s = arrivals[admitted]
            tokens = request.bound(grid, model.overtakes)
            chunks = (model.computed - request.computed) + 1  # no more than tokens
            most_s = tokens * token_s / (1 - share) + owed_s + chunks * step_s
            assert before - arrived_s <= most_s + 1e-6


@settings(max_examples=round(60 * EXAMPLES))
@given(st.integers(1, 100), st.integers(0, 60), st.integers(1, GRID))
@pytest.mark.parametrize("busy", ["long", "short", "mixed"])
def test_a_hundred_requests_of_one_client_delay_a_short_one_of_another_by_a_chunk_and_its_own_work(
    busy: str, seed: int, steps: int, tokens: int
):
    """And by what the deficit rule gives to the first meanwhile: as many tokens, or a chunk."""
    random = Random(seed)
    model = LoopModel(max_rows=10**6, grid=GRID, max_waiting=200, pages=10**9)
    for _ in range(100):
        long = busy == "long" or (busy == "mixed" and random.random() < 0.5)
        model.arrive("ann", random.randint(GRID + 1, LONG) if long else random.randint(1, GRID))
    for _ in range(steps):
        model.step()
    passed = max((row.passed for row in model.reading.values()), default=0)
    key, computed = model.arrive("bob", tokens), model.computed
    while model.step().admit != key:
        pass
    others = model.computed - computed - tokens
    chunks = 1 + (passed == model.overtakes)  # the next one, and the last one if it is the next but one
    assert others <= chunks * GRID + tokens
