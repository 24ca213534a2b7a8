"""Where the output goes: a full disk, and an encoding that lacks characters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "kvsift", "methods"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_on_a_full_disk_ends_in_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run([*COMMAND, "--json"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (2, "kvsift: the output is cut: the disk that it goes to is full.\n")


def test_characters_that_an_encoding_lacks_are_escaped_as_in_json() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    run = subprocess.run([*COMMAND, "é😀"], capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 2
    assert r"unknown method '\u00e9\ud83d\ude00'" in run.stderr


@pytest.mark.skipif(os.name != "posix", reason="a shell that closes the output")
def test_a_closed_output_is_no_error() -> None:
    run = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.skipif(os.name != "posix", reason="a pipe that nobody reads")
@pytest.mark.parametrize("arguments", [["--version"], ["methods", "quest"]])
def test_a_reader_that_has_gone_is_no_error(arguments: list[str]) -> None:
    command = ["sh", "-c", '"$@" | true', "sh", *COMMAND[:3], *arguments]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
    assert run.stderr == ""
