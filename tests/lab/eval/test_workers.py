"""Worker processes give results as they come, and whatever ends one ends the run with a reason."""

from collections.abc import Iterator
from multiprocessing import active_children
from time import monotonic
from typing import Any

import pytest
from kvsift_lab.eval.workers import run_jobs
from lab.eval.work import dying, failing, multiplying, refusing, seeing, sleeping
from refusals import refused


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    before = active_children()
    yield
    assert active_children() == before


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_job_is_done_once_and_by_one_worker_in_order(workers: int) -> None:
    results = list(run_jobs(multiplying, (10,), [(3, 2), (1, 1), (2, 3)], workers))
    assert sorted(results) == [10, 20, 21, 22, 30, 31]
    assert workers > 1 or results == [30, 31, 10, 20, 21, 22]


def test_processes_see_one_gpu_each_in_turns() -> None:
    assert sorted(run_jobs(seeing, (), [()] * 3, 3, gpus=("4", "6"))) == ["4", "4", "6"]


def test_what_is_not_wanted_any_more_is_ended() -> None:
    results = run_jobs(sleeping, (), [(0.0,), (60.0,)], 2)
    assert next(results) == 0.0
    results.close()


def test_time_that_is_up_ends_what_is_under_way() -> None:
    started = monotonic()
    assert list(run_jobs(sleeping, (), [(0.0,), (60.0,)], 2, stop_at=started + 4)) == [0.0]
    assert monotonic() - started < 50
    assert list(run_jobs(sleeping, (), [(0.0,)], 1, stop_at=monotonic())) == []


@pytest.mark.parametrize(("act", "says"), [(dying, "failed_process"), (refusing, "input_error: not this")])
def test_what_a_worker_refuses_or_dies_of_is_refused(act: Any, says: str) -> None:
    with refused(says):
        list(run_jobs(act, (), [(), ()], 2))


def test_a_worker_that_fails_shows_where() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)a worker failed:.*in fail.*ZeroDivisionError"):
        list(run_jobs(failing, (), [()], 1))
