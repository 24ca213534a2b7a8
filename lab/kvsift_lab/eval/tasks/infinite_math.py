"""InfiniteBench's math_find: the largest, smallest, second, third or median number of a long list.

Facts from OpenBMB/InfiniteBench (``data/construct_synthetic_dataset.py``): seven questions, numbers from 0 to 99, one
end of which is drawn per list so that the answer cannot be guessed; second and third are of distinct values; the median
of an even count is the mean of the middle two. The answer, which takes the whole list (depth 1), is worked out from the
list as it stands after it was cut to length.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from statistics import median

from kvsift.texts.sample import Sample, SampleRequest, Style, Task
from kvsift_lab.eval.tasks.assembly import BLOCK, Assembly

TOP = 99
_STYLE = Style("math_find", 12, is_framed=False, stop=None)


def _ranked(index: int) -> Callable[[Sequence[int]], int]:
    """Return a function that finds the distinct number of a rank: 0 is the smallest, -1 the largest."""
    return lambda numbers: sorted(set(numbers))[index]


FINDERS: dict[str, Callable[[Sequence[int]], float]] = {
    "largest": _ranked(-1),
    "second largest": _ranked(-2),
    "third largest": _ranked(-3),
    "smallest": _ranked(0),
    "second smallest": _ranked(1),
    "third smallest": _ranked(2),
    "median": median,
}


def write(request: SampleRequest) -> Sample:
    rng = request.rng
    rank = rng.choice(list(FINDERS))
    assembly = Assembly(request, f"What is the {rank} number of this list?\n\n")
    low, high = _range(rng, rank)
    separator = ""
    while assembly.room > 0:
        assembly.add(separator + ", ".join(str(rng.randint(low, high)) for _ in range(BLOCK)))
        separator = ", "
    context, ids = assembly.cut()
    answer = FINDERS[rank](numbers_of(context))
    text = str(int(answer) if answer == int(answer) else answer)
    tail = "\n\nAnswer with one number and no other words."
    question = _STYLE.question(tail, text, 1.0, (text,), f" The {rank} number of the list is:")
    return Sample("infinite_math_find", context, ids, (question,))


def numbers_of(context: str) -> list[int]:
    """Return the numbers of the list; the last one may be cut."""
    return [int(number) for number in re.findall(r"\d+", context.partition("?\n\n")[2])]


def _range(rng: random.Random, rank: str) -> tuple[int, int]:
    low, high = rng.randint(0, TOP // 5), rng.randint(TOP * 4 // 5, TOP)
    if rank == "median":
        return (low, TOP) if rng.random() < 0.5 else (0, high)
    return (0, high) if "largest" in rank else (low, TOP)


_ABOUT = "the largest, a small or the median number of a long list"
TASKS = (Task("infinite_math_find", _ABOUT, write=write, max_questions=1, family="infinite", style=_STYLE),)
