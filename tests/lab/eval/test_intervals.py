"""95 % intervals: Wilson's where scores are 0 or 1, else from resampling."""

import random

import pytest
from kvsift_lab.eval.intervals import design_effect, interval, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17 (1998), table I
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
    ],
)
def test_shares_have_wilsons_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5.1e-5)
    assert interval([1.0] * successes + [0.0] * (trials - successes)) == wilson(successes, trials)


def test_questions_that_stand_or_fall_together_count_as_one() -> None:
    """By hand. Two contexts of four questions, all right or all wrong: sums of deviations are 2 and -2, so the mean
    varies by (4 + 4) / 64 * 2 / 1 = 1 / 4, and eight independent questions by (2 / 8 + 1 / 4) / 8 = 1 / 16."""
    together = [[1.0] * 4, [0.0] * 4]
    assert design_effect([together]) == pytest.approx(4)
    assert design_effect([together, [[1.0] * 4, [1.0] * 4]]) == pytest.approx(4)  # the second says nothing more
    assert design_effect([[[1.0] * 8, [0.0] * 8, [1.0] * 8, [1.0] * 8]]) == pytest.approx(8)


def test_what_contexts_share_is_found_on_average() -> None:
    """Context and question each decide a score half of the time: any two of a context agree by chance and a quarter
    more, so the effect is 1 + 7 / 4."""
    generator = random.Random(1)

    def context() -> list[float]:
        shared = float(generator.random() < 0.5)
        return [shared if generator.random() < 0.5 else float(generator.random() < 0.5) for _ in range(8)]

    assert design_effect([[context() for _ in range(3)] for _ in range(3000)]) == pytest.approx(1 + 7 / 4, rel=0.03)
