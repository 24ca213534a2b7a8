"""How much exact decoding proposes, by what it has measured."""

import pytest

from kvsift.engine.speculative.decoder import ExactDecoder, Proposal
from kvsift.engine.speculative.pace import DENSE_EVERY, FIRST_DRAFTS, FIRST_PAUSE, Amount, Pace, Paces, decide_together


def begun() -> Pace:
    return Paces().begin("quest", 1000)


def paced(*, verify: dict[int, float], draft: float, accepted: int, offered: int) -> Pace:
    pace = begun()
    for tokens, seconds in verify.items():
        pace.note_verified(tokens, seconds)
    for _ in range(20):
        pace.note_drafts(offered, accepted, draft)
    return pace


def choice(pace: Pace, repeat: int = 0, repeated: int = 0, most: int = 7) -> Amount:
    decide_together([pace], [most])
    return pace.choose(repeat, repeated, most)


def test_the_first_pass_is_dense_and_the_next_one_measures_drafts() -> None:
    pace = begun()
    assert choice(pace).tokens == 0
    pace.note_verified(1, 0.01)
    assert choice(pace).tokens == FIRST_DRAFTS
    assert choice(pace, most=2).tokens == 2


def test_cheap_drafts_that_are_accepted_are_long() -> None:
    short = paced(verify={1: 0.010, 4: 0.011}, draft=0.001, accepted=1, offered=2)
    long = paced(verify={1: 0.010, 4: 0.011}, draft=0.001, accepted=7, offered=7)
    assert 0 < choice(short).tokens < choice(long).tokens == 7


def test_drafts_that_do_not_pay_pause_and_are_tried_again_ever_more_rarely() -> None:
    pace = paced(verify={1: 0.010, 4: 0.014}, draft=0.009, accepted=1, offered=3)
    tries, since = [], 0
    for _ in range(600):
        chosen = choice(pace)
        since += 1
        if chosen.tokens:
            tries.append(since)
            since = 0
            pace.note_drafts(chosen.tokens, 0, 0.009)
        pace.note_verified(chosen.tokens + 1, 0.010)
    assert pace.measured.is_paused
    assert FIRST_PAUSE <= tries[0] < tries[1] < tries[2]
    assert len(tries) <= 4


def test_a_draft_that_was_slow_once_pauses_none() -> None:
    pace = paced(verify={1: 0.010, 4: 0.011}, draft=0.003, accepted=7, offered=7)
    pace.note_drafts(3, 3, 0.100)
    assert choice(pace).tokens


def test_the_end_of_an_answer_is_no_wrong_draft() -> None:
    pace = paced(verify={1: 0.010, 4: 0.011}, draft=0.001, accepted=7, offered=7)
    decoder, share = ExactDecoder([3, 4, 5], pace), pace.drafted_share
    decoder.learn(Proposal([6, 7, 8], drafts=3), 2, 0.003, 0.011, False, 4)
    assert pace.drafted_share >= share
    decoder.learn(Proposal([6, 7, 8], drafts=3), 2, 0.003, 0.011, True, 4)
    assert pace.drafted_share < share
    assert pace.measured.draft.seconds == pytest.approx(0.001)


def test_drafting_begins_again_when_it_pays() -> None:
    pace = paced(verify={1: 0.010, 4: 0.011}, draft=0.009, accepted=0, offered=3)
    assert choice(pace).tokens == 0
    assert pace.measured.is_paused
    for _ in range(40):
        pace.note_drafts(3, 3, 0.001)
    for _ in range(FIRST_PAUSE):
        assert choice(pace).tokens == 0
    assert choice(pace).tokens > 2
    assert not pace.measured.is_paused


def test_drafts_go_on_behind_the_pause_that_a_busy_machine_has_caused() -> None:
    pace = paced(verify={1: 0.010, 4: 0.011}, draft=0.100, accepted=7, offered=7)
    for _ in range(FIRST_PAUSE + 1):
        assert choice(pace).tokens == 0
    assert choice(pace).tokens == FIRST_DRAFTS
    pace.note_drafts(3, 3, 0.001)
    assert choice(pace).tokens == 7
    assert not pace.measured.is_paused


def test_a_dense_step_that_was_slow_once_is_measured_again() -> None:
    pace, drafted = paced(verify={1: 0.060, 3: 0.018}, draft=0.010, accepted=1, offered=2), 0
    for _ in range(20 * DENSE_EVERY):
        chosen = choice(pace)
        drafted += chosen.tokens > 0
        if chosen.tokens:
            pace.note_drafts(chosen.tokens, 1, 0.010)
        pace.note_verified(chosen.tokens + 1, 0.018 if chosen.tokens else 0.013)
    assert pace.measured.is_paused
    assert drafted < 10 * DENSE_EVERY


@pytest.mark.parametrize("learns", [False, True])
def test_the_time_of_a_dense_step_is_of_steps_that_are_dense_and_teach_nothing(learns: bool) -> None:
    decoder = ExactDecoder([1, 2], begun(), learns=learns)
    verify = decoder.pace.measured.verify
    decoder.learn(decoder.propose(3, 0, False), 0, 0.0, 0.010, False, 1)
    assert verify[1].seconds == 0.010, "it rests until this is known"
    decoder.learn(Proposal(), 0, 0.0, 0.020, False, 8)
    assert verify[1].seconds == 0.010, "another sequence has proposed tokens"
    decoder.propose(4, 0, False)
    assert not decoder.is_paused
    decoder.learn(Proposal(), 0, 0.0, 0.020, False, 1)
    assert (verify[1].seconds == 0.010) == learns
    decoder.learn(Proposal([5, 6]), 2, 0.002, 0.030, False, 5)
    assert verify.keys() == {1, 5}, "a step takes as long as its longest sequence"


def test_repeats_and_drafts_are_compared() -> None:
    pace = paced(verify={1: 0.010, 8: 0.011}, draft=0.004, accepted=2, offered=3)
    assert not choice(pace, 4, 7).is_repeat or choice(pace, 4, 7).tokens > 0
    for _ in range(30):
        pace.note_repeats(4, 7, 7)
    chosen = choice(pace, 4, 7)
    assert chosen.is_repeat
    assert chosen.tokens == 7
    for _ in range(60):
        pace.note_repeats(4, 7, 0)
    assert not choice(pace, 4, 7).is_repeat
    assert choice(pace, 40, 7, 0).is_repeat, "long repeats have a share of their own"


def test_nothing_is_proposed_when_nothing_can_be() -> None:
    pace = paced(verify={1: 0.010}, draft=0.001, accepted=3, offered=3)
    assert choice(pace, most=0) == Amount(1 / 0.010)


def test_an_answer_begins_with_what_earlier_ones_have_measured() -> None:
    paces = Paces()
    first = paces.begin("quest", 30_000)
    first.note_verified(1, 0.010)
    first.note_drafts(3, 3, 0.001)
    first.note_verified(4, 0.012)
    assert choice(paces.begin("quest", 30_100)).tokens > 1
    for other in (paces.begin("quest", 60_000), paces.begin("sketch", 30_000)):
        assert choice(other) == Amount(0.0)
    for _ in range(200):
        first.note_drafts(3, 0, 0.001)
    answers = [paces.begin("quest", 30_000) for _ in range(FIRST_PAUSE + 2)]
    for answer in answers:
        tokens = choice(answer).tokens
        assert (tokens > 0) == (answer is answers[-1]), "short answers wait together"
        answer.note_verified(tokens + 1, 0.010)


def test_sequences_of_one_kind_draft_together() -> None:
    """One sequence that drafts would let the others wait for its drafts."""
    paces = Paces()
    seqs = [paces.begin("quest", 30_000) for _ in range(4)]
    for seq in seqs:
        seq.note_verified(1, 0.0196)
        seq.note_verified(8, 0.0203)
    drafted = []
    for number in range(2000):
        decide_together(seqs, [7] * 4)
        drafted.append([seq.choose(0, 0, 7).tokens for seq in seqs])
        for place, seq in enumerate(seqs):
            if count := drafted[-1][place]:
                accepted = next((k for k in range(count) if (number * 7 + place * 3 + k) % 2), count)  # about a half
                seq.note_drafts(count, accepted, 0.0051)
    assert all(len(set(each)) == 1 for each in drafted)
    assert sum(each[0] > 0 for each in drafted) > 1900, "a half accepted pays for four sequences"
    alone = paced(verify={1: 0.0196, 8: 0.0203}, draft=0.0051, accepted=0, offered=2)
    decide_together([*seqs, alone], [7] * 5)
    assert alone.choose(0, 0, 7).tokens == 0, "sequences of other kinds decide for themselves"


def test_a_pause_lasts_as_many_steps_for_several_sequences_as_for_one() -> None:
    tries = []
    for num_seqs in (1, 4):
        paces, tried = Paces(), []
        seqs = [paces.begin("quest", 30_000) for _ in range(num_seqs)]
        seqs[0].note_verified(1, 0.010)
        for step in range(1000):
            decide_together(seqs, [7] * num_seqs)
            if count := seqs[0].choose(0, 0, 7).tokens:
                tried.append(step)
                for seq in seqs:
                    seq.note_drafts(count, 0, 0.009)
        tries.append(tried)
    assert tries[0] == tries[1]
    assert 3 <= len(tries[0]) <= 5
