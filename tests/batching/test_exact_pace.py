"""How much exact decoding proposes, by what it has measured."""

from kvsift.batching.exact.pace import FIRST_DRAFTS, FIRST_PAUSE, Amount, Pace, Paces


def begun() -> Pace:
    return Paces().begin("quest", 1000)


def paced(*, verify: dict[int, float], draft: float, accepted: int, offered: int) -> Pace:
    pace = begun()
    for tokens, seconds in verify.items():
        pace.note_verified(tokens, 1, seconds)
    for _ in range(20):
        pace.note_drafts(offered, accepted, draft * offered)
    return pace


def test_the_first_pass_is_dense_and_the_next_one_measures_drafts() -> None:
    pace = begun()
    assert pace.choose(0, 0, 7).tokens == 0
    pace.note_verified(1, 1, 0.01)
    assert pace.choose(0, 0, 7).tokens == FIRST_DRAFTS
    assert pace.choose(0, 0, 2).tokens == 2


def test_cheap_drafts_that_are_accepted_are_long() -> None:
    short = paced(verify={1: 0.010, 4: 0.011}, draft=0.001, accepted=1, offered=2)
    long = paced(verify={1: 0.010, 4: 0.011}, draft=0.001, accepted=7, offered=7)
    assert 0 < short.choose(0, 0, 7).tokens < long.choose(0, 0, 7).tokens == 7


def test_drafts_that_do_not_pay_pause_and_are_tried_again_ever_more_rarely() -> None:
    pace = paced(verify={1: 0.010, 4: 0.014}, draft=0.009, accepted=1, offered=3)
    tries, since = [], 0
    for _ in range(600):
        choice = pace.choose(0, 0, 7)
        since += 1
        if choice.tokens:
            tries.append(since)
            since = 0
            pace.note_drafts(choice.tokens, 0, 0.009 * choice.tokens)
        pace.note_verified(choice.tokens + 1, 1, 0.010)
    assert pace.measured.is_paused
    assert FIRST_PAUSE <= tries[0] < tries[1] < tries[2]
    assert len(tries) <= 4


def test_drafting_begins_again_when_it_pays() -> None:
    pace = paced(verify={1: 0.010, 4: 0.011}, draft=0.009, accepted=0, offered=3)
    assert pace.choose(0, 0, 7).tokens == 0
    assert pace.measured.is_paused
    pace.note_verified(1, FIRST_PAUSE, 0.010)
    for _ in range(40):
        pace.note_drafts(3, 3, 0.003)
    assert pace.choose(0, 0, 7).tokens > 2
    assert not pace.measured.is_paused


def test_repeats_and_drafts_are_compared() -> None:
    pace = paced(verify={1: 0.010, 8: 0.011}, draft=0.004, accepted=2, offered=3)
    assert not pace.choose(4, 7, 7).is_repeat or pace.choose(4, 7, 7).tokens > 0
    for _ in range(30):
        pace.note_repeats(4, 7, 7)
    choice = pace.choose(4, 7, 7)
    assert choice.is_repeat
    assert choice.tokens == 7
    for _ in range(60):
        pace.note_repeats(4, 7, 0)
    assert not pace.choose(4, 7, 7).is_repeat
    assert pace.choose(40, 7, 0).is_repeat, "long repeats have a share of their own"


def test_nothing_is_proposed_when_nothing_can_be() -> None:
    pace = paced(verify={1: 0.010}, draft=0.001, accepted=3, offered=3)
    assert pace.choose(0, 0, 0) == Amount(1 / 0.010)


def test_an_answer_begins_with_what_earlier_ones_have_measured() -> None:
    paces = Paces()
    first = paces.begin("quest", 30_000)
    first.note_verified(1, 1, 0.010)
    first.note_drafts(3, 3, 0.003)
    first.note_verified(4, 4, 0.012)
    assert paces.begin("quest", 30_100).choose(0, 0, 7).tokens > 1
    for other in (paces.begin("quest", 60_000), paces.begin("sketch", 30_000)):
        assert other.choose(0, 0, 7) == Amount(0.0)
    for _ in range(200):
        first.note_drafts(3, 0, 0.003)
    answers = [paces.begin("quest", 30_000) for _ in range(FIRST_PAUSE + 1)]
    for answer in answers:
        tokens = answer.choose(0, 0, 7).tokens
        assert (tokens > 0) == (answer is answers[-1]), "short answers wait together"
        answer.note_verified(tokens + 1, 1, 0.010)
