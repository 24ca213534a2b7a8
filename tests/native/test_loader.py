"""Which instruction set is used, and what is said without the core."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from refusals import refused

from kvsift import native
from kvsift.native.memory import HugeRoom, huge_empty


def in_a_process(code: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    return (done.stdout + done.stderr).strip().splitlines()


def test_the_best_level_is_in_use_and_any_can_be_chosen(core: None) -> None:
    assert native.levels()[0] == "generic"
    before = native.level()
    for name in native.levels():
        native.use_level(name)
        assert native.level() == name
    native.use_level(before)
    with refused("unknown_name: set 'generc'; did you mean 'generic'?"):
        native.use_level("generc")


def test_the_environment_names_the_first_level(core: None) -> None:
    code = (
        "import importlib, os\n"
        "import kvsift.native as n\n"
        "print(n.level())\n"
        "for os.environ['KVSIFT_ISA'] in ('generic', 'sse9'):\n"
        "    importlib.reload(n.loader)\n"
        "    print(n.level())"
    )
    said = in_a_process(code, KVSIFT_ISA="")
    assert said[:2] == [native.levels()[-1], "generic"]
    assert "Known: " in said[-1]


def test_without_the_core_it_says_what_to_do() -> None:
    code = (
        "import sys; sys.modules['kvsift.native._core'] = None\n"
        "import torch, kvsift.native as n\n"
        "assert not n.available()\n"
        "try:\n    n.scan(torch.ones(1, 8), torch.ones(1, 2, 8), 1)\n"
        "except n.loader.MissingPackage as error:\n    print(error)"
    )
    said = in_a_process(code)[-1]
    assert "C++ compiler" in said
    assert "pip install" in said


def test_huge_pages_are_asked_for(core: None) -> None:
    assert native.advise_huge(torch.empty(1 << 22)) in range(1 << 24 | 1)


def test_tensors_in_a_room_are_apart() -> None:
    room = HugeRoom()
    counts = 1, 700_000, 50, 20_000_000  # the last has memory of its own
    taken = [room.take([count, 3]).fill_(i) for i, count in enumerate(counts)]
    assert [tuple(each.shape) for each in taken] == [(count, 3) for count in counts]
    assert all(each.data_ptr() % 64 == 0 and bool((each == i).all()) for i, each in enumerate(taken))


def test_a_large_empty_tensor_has_its_dtype() -> None:
    for sizes in ((3, 5), (3, 1 << 20), (0, 4)):  # below a huge page, above, nothing
        made = huge_empty(sizes, torch.bfloat16)
        assert (tuple(made.shape), made.dtype) == (sizes, torch.bfloat16)
        assert bool((made.fill_(2) == 2).all())


def test_threads_must_be_some(core: None) -> None:
    with refused("invalid_value: threads=0"):
        native.all_scores(torch.ones(1, 8), torch.ones(1, 2, 8), threads=0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_the_core_is_there_where_it_can_be_built() -> None:
    # every other test of the core skips where it is missing: a build that broke would go unseen
    assert native.available(), native.why_missing()
