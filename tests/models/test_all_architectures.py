"""Every causal language model of the installed transformers answers as stock, or is refused with a sentence."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from models.architectures import class_names

AT_ONCE = 12  # architectures of a process: some keep memory for good
MOST_MIB = 4096
FEWEST_EQUAL = 70  # of the oldest transformers too, or small configurations are not built any more


def outcomes(names: list[str]) -> list[dict[str, Any]]:
    """What became of some architectures, in a process of their own."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "models.architectures", *names]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1])
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_every_architecture_answers_as_stock_or_is_refused_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    names = class_names()
    parts = [names[first : first + AT_ONCE] for first in range(0, len(names), AT_ONCE)]
    found = [outcome for part in parts for outcome in outcomes(part)]
    counts = Counter((outcome["block"], outcome["engine"]) for outcome in found)
    with capsys.disabled():
        for each in found:
            print(f"{each['name']:40} {each['block']:10} {each['engine']:10} {each['note'][:100]}")
        print(*(f"block {block}, engine {engine}: {count}" for (block, engine), count in counts.items()), sep="\n")
    assert [outcome["name"] for outcome in found] == names
    others = [each for each in found if not {each["block"], each["engine"]} <= {"equal", "refused", "skipped"}]
    assert not others
    assert counts["equal", "equal"] >= FEWEST_EQUAL
    assert max(outcome["peak_mib"] for outcome in found) < MOST_MIB
