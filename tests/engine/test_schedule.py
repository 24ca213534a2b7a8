"""The scheduler of the engine loop: examples to read first, then its promises, over random histories.

Histories have 100,000 steps, or KVSIFT_EXAMPLES times as many.
"""

import os
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from engine.loop_model import LoopModel, run_random
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsift.engine.schedule import Decision, Schedule

EXAMPLES = float(os.environ.get("KVSIFT_EXAMPLES", "1"))
DECODE, IDLE = Decision(decode=True), Decision()
GRID, LONG = 8, 80


def chunks(schedule: Schedule, lengths: dict[int, int], count: int, room: int = 1000) -> list[int]:
    """The sequences of the next chunks, if each sequence ends with its prompt; ``lengths`` are what is left of
    prompts."""
    keys = []
    for _ in range(count):
        key = schedule.decide(room).prefill
        assert key is not None
        keys.append(key)
        tokens = min(GRID, lengths[key])
        lengths[key] -= tokens
        schedule.has_prefilled(key, tokens, 1.0, done=not lengths[key])
        if not lengths[key]:
            schedule.remove(key)
    return keys


def added(schedule: Schedule, requests: dict[int, tuple[str, int]]) -> dict[int, int]:
    """Add requests, each a client and a length, that need a page; returns their lengths."""
    for key, (client, tokens) in requests.items():
        assert schedule.add(key, client, tokens, 1)
    return {key: tokens for key, (_, tokens) in requests.items()}


def test_the_life_of_a_request():
    schedule = Schedule(max_seqs=4, grid=GRID)
    assert schedule.decide(room=9) == IDLE
    assert schedule.add(7, "ann", tokens=12, pages=3)
    assert schedule.waiting == (7,)
    assert schedule.decide(room=9) == Decision(admit=7, prefill=7)
    schedule.has_prefilled(7, tokens=8, seconds=0.1, done=False)
    assert schedule.prefilling == (7,)
    assert schedule.decide(room=6) == Decision(prefill=7)
    schedule.has_prefilled(7, tokens=4, seconds=0.1, done=True)
    assert schedule.decoding == (7,)
    assert schedule.decide(room=6) == DECODE
    schedule.has_decoded(0.02)
    schedule.remove(7)
    assert schedule.decide(room=9) == IDLE


@pytest.mark.parametrize(("share", "steps"), [(0.0, 1), (0.5, 4), (0.75, 12)])
def test_a_chunk_of_half_a_second_is_followed_by_the_share_of_steps_of_an_eighth(share: float, steps: int):
    schedule = Schedule(max_seqs=2, grid=GRID, decode_share=share)
    schedule.add(0, "ann", 1, 1)
    schedule.add(1, "ann", LONG, 1)
    schedule.decide(9)
    schedule.has_prefilled(0, 1, 0.5, done=True)
    for _ in range(3):
        for _ in range(steps):
            assert schedule.decide(9) == DECODE
            schedule.has_decoded(0.125)
        assert schedule.decide(9).prefill == 1
        schedule.has_prefilled(1, 8, 0.5, done=False)
    schedule.remove(0)
    assert schedule.decide(9).prefill == 1  # no sequence decodes: chunks run back to back


@pytest.mark.parametrize(
    ("requests", "order"),
    [
        ({0: ("ann", 40), 1: ("ann", 40)} | dict.fromkeys(range(10, 16), ("bob", 4)),
         [10, 0, 11, 12, 0, 13, 14, 0, 15, 0]),
        ({0: ("ann", LONG)} | dict.fromkeys(range(10, 18), ("bob", 1)), [10, 11, 12, 0, 13, 14, 15, 16, 0, 17, 0]),
        ({key: (client, 3 * GRID) for key, client in enumerate(["ann", "ann", "bob", "cleo"])},
         [0, 2, 3] * 3 + [1] * 3),
    ],
    ids=["clients share tokens, not requests", "a tiny request costs a quarter of a chunk",
         "long prompts: of clients side by side, of one client one after the other"],
)  # fmt: skip
def test_the_order_of_chunks(requests: dict[int, tuple[str, int]], order: list[int]):
    schedule = Schedule(max_seqs=9, grid=GRID, decode_share=0.0)
    assert chunks(schedule, added(schedule, requests), len(order)) == order


def test_a_client_that_was_idle_has_saved_nothing():
    schedule = Schedule(max_seqs=9, grid=GRID, decode_share=0.0)
    lengths = added(schedule, {0: ("ann", 100 * GRID)})
    assert chunks(schedule, lengths, 20) == [0] * 20
    lengths |= added(schedule, {1: ("bob", 100 * GRID)})
    assert chunks(schedule, lengths, 6) == [1, 0] * 3


def test_a_client_gains_nothing_by_splitting_its_prompt_and_by_leaving_in_between():
    schedule = Schedule(max_seqs=9, grid=GRID, decode_share=0.0)
    lengths = added(schedule, {0: ("ann", 100 * GRID)})
    chunks(schedule, lengths, 1)
    seen: list[int] = []
    for key in range(1, 31):
        lengths |= added(schedule, {key: ("bob", GRID)})  # as soon as the one before has ended
        while key not in seen:
            seen += chunks(schedule, lengths, 1)
    assert seen.count(0) == 29


@pytest.mark.parametrize("client", ["ann", "bob"])
@pytest.mark.parametrize("tokens", [1, GRID])
@pytest.mark.parametrize("others", [[], ["ann"], ["cleo", "dan"]], ids=["alone", "own", "of others"])
def test_a_short_request_beside_long_prompts_waits_for_the_chunk_that_runs_and_one_of_each_other_client(
    client: str, tokens: int, others: list[str]
):
    """Thirty times one after the other, of the client of the first long prompt and of another one."""
    schedule = Schedule(max_seqs=9, grid=GRID, decode_share=0.0)
    lengths = added(schedule, {key: (other, 1000 * GRID) for key, other in enumerate(["ann", *others])})
    chunks(schedule, lengths, 1)
    for key in range(10, 40):
        running = schedule.decide(99).prefill
        assert running is not None
        lengths |= added(schedule, {key: (client, tokens)})
        lengths[running] -= GRID
        schedule.has_prefilled(running, GRID, 1.0, done=False)
        competing = {"ann", client, *others} - {client}
        assert key in chunks(schedule, lengths, 1 + len(competing) - (running == 0 and client == "bob"))


@pytest.mark.parametrize("overtakes", [1, 2, 4])
def test_short_requests_pass_a_long_one_of_their_client_so_many_times_between_two_chunks(overtakes: int):
    schedule = Schedule(max_seqs=9, grid=GRID, overtakes=overtakes, decode_share=0.0)
    lengths = added(schedule, {0: ("ann", 3 * GRID)} | dict.fromkeys(range(1, 20), ("ann", 1)))
    passed = [*range(1, 20)]
    expected = [key for _ in range(3) for key in [*(passed.pop(0) for _ in range(overtakes)), 0]]
    assert chunks(schedule, lengths, 3 + 3 * overtakes) == expected


@pytest.mark.parametrize("own", [False, True], ids=["of others", "own"])
@pytest.mark.parametrize("overtakes", [1, 4])
def test_a_request_is_passed_so_many_times_while_it_waits_for_its_pages(own: bool, overtakes: int):
    schedule = Schedule(max_seqs=9, grid=GRID, overtakes=overtakes)
    schedule.add(0, "ann", LONG, pages=10)
    assert schedule.decide(room=9) == IDLE  # its turn has come, but not its pages
    passed = []
    for key in range(1, 8):
        schedule.add(key, "ann" if own else f"client {key}", 1, pages=1)
        if (decision := schedule.decide(room=9)).prefill is not None:
            passed.append(decision.prefill)
            schedule.has_prefilled(decision.prefill, 1, 0.1, done=True)
            schedule.remove(decision.prefill)
    assert passed == list(range(1, overtakes + 1))
    assert schedule.decide(room=10).admit == 0


def test_a_client_with_a_sequence_leaves_an_eighth_of_the_pages_and_keeps_nobody_back():
    schedule = Schedule(max_seqs=9, grid=GRID, decode_share=0.0)
    schedule.add(0, "ann", GRID, pages=40)
    schedule.add(1, "ann", GRID, pages=31)
    schedule.add(2, "bob", GRID, pages=60)
    assert schedule.decide(room=80).admit == 0
    schedule.has_prefilled(0, GRID, 0.0, done=True)
    assert schedule.decide(room=40) == DECODE
    schedule.has_decoded(0.0)
    assert schedule.decide(room=40) == DECODE, "41 pages are lacking"
    for key in range(10, 14):
        schedule.add(key, f"client {key}", 1, pages=1)
    schedule.has_decoded(0.0)
    assert schedule.decide(room=40).admit == 10, "bob's may be passed, and ann's"
    schedule.remove(0)
    schedule.remove(2)
    assert schedule.decide(room=79).admit == 11


def test_a_client_opens_sequences_while_more_places_are_free_than_it_has():
    schedule = Schedule(max_seqs=8, grid=GRID, decode_share=0.0)
    key, seqs = 0, []
    for client in ("ann", "bob", "cleo", "dan", "eve", "fay"):
        requests = {key + number: (client, 1) for number in range(10)}
        added(schedule, requests)
        opened = 0
        for _ in range(50):
            decision = schedule.decide(1000)
            if decision.prefill is None:
                schedule.has_decoded(1.0)
            else:
                schedule.has_prefilled(decision.prefill, 1, 0.0, done=True)
                opened += 1
        seqs.append(opened)
        key += 10
    assert seqs == [8, 4, 2, 1, 1, 0]


def test_the_rows_of_a_call_decode_once_all_are_prefilled_beside_those_of_others():
    schedule, steps = Schedule(max_seqs=4, grid=GRID), []
    for key in (1, 2, 3):
        assert schedule.add(key, "ann", GRID, 1, call="a list")
    assert schedule.add(4, "bob", GRID, 1)
    while schedule.waiting:
        decision = schedule.decide(room=9)
        if decision.decode:
            steps.append(schedule.step_sequences())
            schedule.has_decoded(1.0)
        else:
            schedule.has_prefilled(decision.prefill, GRID, 1.0, done=True)
    assert set(steps) == {(4,)}
    assert schedule.decide(room=9) == DECODE
    assert sorted(schedule.step_sequences()) == [1, 2, 3, 4]


def test_the_rows_of_a_call_decode_while_the_others_find_no_room():
    schedule = Schedule(max_seqs=4, grid=GRID)
    for key in (1, 2, 3):
        assert schedule.add(key, "ann", GRID, 1, call="a list")
    for _ in range(2):
        schedule.has_prefilled(schedule.decide(room=9).prefill, GRID, 1.0, done=True)
    assert schedule.decide(room=0) == DECODE
    assert schedule.step_sequences() == (1, 2)
    schedule.remove(1)
    assert schedule.decide(room=9) == Decision(admit=3, prefill=3)
    schedule.has_prefilled(3, GRID, 1.0, done=True)
    assert schedule.decide(room=9) == DECODE
    assert schedule.step_sequences() == (2, 3)


def test_clients_take_turns_at_the_places_of_a_step_for_sixteen_steps():
    model = LoopModel(max_seqs=4)
    for _ in range(4):
        model.arrive("ann", 1, answer=1000)
    while len(model.decoding) < 4 or model.step().prefill is not None:
        model.step()
    assert model.schedule.step_sequences() == (0, 1, 2, 3)
    for _ in range(2):
        model.arrive("bob", 1, answer=1000)
    while len(model.decoding) < 6 or model.schedule._steps_left:
        model.step()
    steps = [model.schedule.step_sequences() for _ in range(16 * 12)]
    assert {sum(key >= 4 for key in placed) for placed in steps} == {2}, "two of four places for each client"
    changes = [number for number in range(1, len(steps)) if steps[number] != steps[number - 1]]
    assert {after - before for before, after in pairwise(changes)} == {16}
    taken = Counter(key for placed in steps for key in placed)
    assert max(taken[key] for key in range(4)) - min(taken[key] for key in range(4)) <= 16


def test_a_sequence_whose_answer_ends_gives_its_place_to_a_paused_one_at_once():
    schedule = Schedule(max_seqs=1, grid=GRID, decode_share=0.0)
    lengths = added(schedule, {0: ("ann", 1), 1: ("bob", 1)})
    for key in lengths:
        assert schedule.decide(9).prefill == key
        schedule.has_prefilled(key, 1, 0.0, done=True)
        schedule.has_decoded(0.0)
        schedule._must_decode = False
    assert schedule.step_sequences() == (0,)
    schedule.remove(0)
    assert schedule.step_sequences() == (1,)


def test_what_can_be_reused_changes_a_request_and_not_its_place():
    schedule = Schedule(max_seqs=1, grid=GRID)
    for key in range(3):
        schedule.add(key, "ann", LONG, 10)
    schedule.revise(1, 2 * GRID, 1)
    assert schedule.waiting == (0, 1, 2)
    schedule.revise(2, 1, 1)  # short now
    assert chunks(schedule, {0: LONG, 1: 2 * GRID, 2: 1}, 13) == [2, *[0] * 10, 1, 1]


def test_a_full_queue_refuses_and_a_removed_request_makes_room():
    schedule = Schedule(max_seqs=1, grid=GRID, max_waiting=2)
    assert [schedule.add(key, "ann", 1, 1) for key in range(3)] == [True, True, False]
    schedule.remove(0)
    assert schedule.add(2, "ann", 1, 1)
    assert schedule.waiting == (1, 2)
    with pytest.raises(KeyError):
        schedule.remove(0)


def test_a_chunk_whose_sequence_was_cancelled_costs_its_time():
    schedule = Schedule(max_seqs=3, grid=GRID)
    for key, tokens in enumerate((1, LONG, LONG)):
        schedule.add(key, "ann", tokens, 1)
    schedule.decide(9)
    schedule.has_prefilled(0, 1, 0.0, done=True)
    assert schedule.decide(9) == DECODE  # a sequence decodes in the next step, however fast the chunk
    schedule.has_decoded(0.0)
    assert schedule.decide(9).admit == 1
    schedule.remove(1)
    schedule.has_prefilled(1, GRID, 0.5, done=False)
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
    schedule = model.schedule
    assert not schedule._accounts
    assert not schedule._prefill_turns._counts


def test_parameters_without_a_meaning_are_refused():
    for wrong in ({"max_seqs": 0}, {"grid": 0}, {"decode_share": 1.0}, {"max_waiting": 0}, {"overtakes": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Schedule(**{"max_seqs": 1, "grid": 1, **wrong})


MODELS = st.builds(
    LoopModel,
    max_seqs=st.integers(1, 4),
    grid=st.sampled_from([1, 4]),
    decode_share=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    max_waiting=st.sampled_from([3, 64]),
    overtakes=st.sampled_from([1, 4]),
    pages=st.sampled_from([3, 20]),
)
SECONDS = st.sampled_from([0.0, 0.001, 0.1, 3.0])
EVENTS = st.one_of(
    st.tuples(st.just("arrive"), st.sampled_from("abc"), st.integers(1, 20), st.integers(1, 20), st.integers(1, 5)),
    st.tuples(st.just("cancel"), st.sampled_from(["waiting", "prefilling", "decoding"]), st.integers(0, 9)),
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
        max_seqs=random.choice((1, 2, 4, 8)),
        grid=random.choice((1, 4, 8)),
        decode_share=random.choice((0.0, 0.3, 0.5, 0.8)),
        max_waiting=random.choice((8, 64)),
        overtakes=random.choice((1, 4, 4)),
        pages=random.choice((10, 1000)),
    )
    run_random(model, seed, round(5000 * EXAMPLES), clients=random.choice((1, 2, 4, 8)))
    model.finish()


@settings(max_examples=round(40 * EXAMPLES))
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 4]), st.sampled_from([0.0, 0.3, 0.5, 0.8]))
def test_a_first_token_waits_for_at_most_two_chunks_of_each_other_client(seed: int, overtakes: int, share: float):
    """With a place and pages for all: ``LoopModel.check_waited``, also of requests that arrive while a step runs."""
    random = Random(seed)
    model = LoopModel(10**6, GRID, share, max_waiting=10**6, overtakes=overtakes, pages=10**9)

    def arrive() -> None:
        while random.random() < load:
            tokens = random.choice((1, 2, GRID - 1, GRID, GRID + 1, random.randint(1, 100)))
            model.arrive(random.choice("abcdefgh"[: random.choice((2, 8))]), tokens, answer=random.randint(1, 5))

    for step in range(400):
        load = 0.0 if step > 350 else random.choice((0.02, 0.2, 0.5))
        arrive()
        model.step(0.01, random.choice((0.001, 0.3)), arrive)
    model.finish()
    assert not model.has_waited


@settings(max_examples=round(60 * EXAMPLES))
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.5, 0.8]), st.sampled_from([0.001, 0.05, 0.5]))
def test_seconds_of_waiting_are_those_of_the_chunks_and_of_the_decode_share(seed: int, share: float, step_s: float):
    random, token_s = Random(seed), 0.01
    model = LoopModel(max_seqs=10**6, grid=GRID, decode_share=share, pages=10**9)
    arrivals: dict[int, tuple[float, float, int, int]] = {}
    model.arrive("z", 1, answer=10**6)  # decodes all the time
    for _ in range(400):
        while random.random() < 0.05:
            key = model.arrive(random.choice("abcd"), random.choice((3, GRID, random.randint(1, 100))), answer=5)
            arrivals[key] = model.read_s + model.decode_s, max(0.0, model.owed), model.computed, model.turns.total()
        before, computed, turns = model.read_s + model.decode_s, model.computed, model.turns.total()
        admitted = model.step(token_s, step_s).admit
        if admitted in arrivals:
            arrived_s, owed_s, computed_then, turns_then = arrivals[admitted]
            most_s = (computed - computed_then) * token_s / (1 - share) + owed_s + (turns - turns_then + 1) * step_s
            assert before - arrived_s <= most_s + 1e-6
