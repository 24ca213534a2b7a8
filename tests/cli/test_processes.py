"""kvsift as a process: how fast it starts, what it imports, what it leaves on its streams and in its exit code."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

HEAVY = {"numpy", "safetensors", "torch", "transformers"}
IMPORTED = """
import runpy, sys
sys.argv = ["kvsift", *sys.argv[1:]]
try:
    runpy.run_module("kvsift", run_name="__main__")
except SystemExit:
    pass
print(sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def kvsift(*arguments: object, code: str | None = None) -> subprocess.CompletedProcess[str]:
    program = ["-m", "kvsift"] if code is None else ["-c", code]
    return subprocess.run([sys.executable, *program, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["--version"], ["ask", "--help"], ["eval", "--help"], ["nonsense"]]
)
def test_nothing_heavy_is_imported_before_there_is_something_to_do(arguments: list[str]) -> None:
    imported = set(eval(kvsift(*arguments, code=IMPORTED).stderr.splitlines()[-1]))
    assert "kvsift" in imported
    assert not imported & HEAVY


def test_help_is_there_at_once() -> None:
    kvsift("--help")
    times = []
    for _ in range(5):
        started = time.perf_counter()
        assert kvsift("--help").returncode == 0
        times.append(time.perf_counter() - started)
    assert min(times) < 1.0, times  # 0.2 s where nothing else runs; torch alone would take more


def test_a_refusal_is_one_line_and_exit_code_2(model: Path) -> None:
    ended = kvsift("ask", "--question", "Why?", "--model", model, "--context", "no.txt")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("kvsift: the context file no.txt does not exist.")
    assert ended.stderr.count("\n") == 1


def test_stdout_is_one_json_document_and_stderr_is_empty(model: Path, text: Path) -> None:
    plan = "quest:budget=128:window=16:dense_layers=none"
    given = ("--context", text, "--question", "Why?", "--plan", plan, "--max-new-tokens", 3, "--dense-below", 0)
    ended = kvsift("ask", "--model", model, *given, "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["plan"] == plan


def test_ctrl_c_says_what_is_safe_and_ends_with_130(model: Path, text: Path) -> None:
    command = ("ask", "--model", model, "--context", text, "--question", "Why?", "--raw", "--max-new-tokens", 3000)
    program = [sys.executable, "-m", "kvsift", *map(str, command)]
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where jobs in the background ignore it
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heeds) as process:
        process.stdout.read(1)  # it has begun
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.decode().strip().startswith("kvsift: interrupted. No file was left half written;")
    assert "Traceback" not in said.decode()


def test_a_second_ctrl_c_while_the_first_ends_the_step_is_as_safe(tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("The mill by the river grinds corn. " * 2500)
    program = [sys.executable, "-m", "kvsift", "ask", "--context", text, "--question", "Why?"]
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(program, stderr=subprocess.PIPE, preexec_fn=heeds) as process:
        said = b""
        while b"reading" not in said and (more := process.stderr.read1()):
            said += more
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        said += process.communicate(timeout=60)[1]
    assert process.returncode in (130, -signal.SIGINT)
    assert b"Traceback" not in said


INTERRUPTED = """
import runpy, sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == NAME:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv = ["kvsift", *sys.argv[1:]]
runpy.run_module("kvsift", run_name="__main__")
"""


@pytest.mark.parametrize("name", ["kvsift.cli.main", "typer", "torch", "transformers"])
def test_ctrl_c_while_something_is_imported_prints_one_line_at_most(name: str, text: Path) -> None:
    code = INTERRUPTED.replace("NAME", repr(name))
    ended = kvsift("ask", "--context", text, "--question", "Why?", "--plan", "dense", code=code)
    assert ended.returncode == 130
    assert ended.stdout == ""
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == (name in ("torch", "transformers"))
    assert all(line.startswith("kvsift: interrupted.") for line in lines)


def test_a_misspelt_key_is_refused_before_transformers_is_imported() -> None:
    ended = kvsift("generate", "--prompt", "a", "--plan", "quest:budgett=256", code=IMPORTED)
    assert "unknown key of quest 'budgett'; did you mean 'budget'?" in ended.stderr
    assert "transformers" not in eval(ended.stderr.splitlines()[-1])


def test_a_misspelt_method_is_refused_before_torch_is_imported(text: Path) -> None:
    for plan in ("qest:budget=256", "decode=qest", "prefill=quoka,decode=qest:budget=1"):
        ended = kvsift("ask", "--context", text, "--question", "Why?", "--compare", plan, code=IMPORTED)
        imported = set(eval(ended.stderr.splitlines()[-1]))
        assert "unknown method 'qest'; did you mean 'quest'?" in ended.stderr
        assert not imported & HEAVY
