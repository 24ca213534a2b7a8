"""Programs that run in processes of their own, forked from one that has imported torch and kvsift.

Importing both takes five seconds of a processor. A forked process has no thread but its own, runs the program at its
top level, and ends as any Python does.
"""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

PARENT = """
import gc, json, os, signal, sys
import torch, transformers
import kvsift.api.llm, transformers.models.llama.modeling_llama
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # or each process would copy what it looks through
for line in sys.stdin:
    message = json.loads(line)
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
signal.alarm(240)  # what hangs fails
for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
    os.dup2(os.open(os.path.join(message["folder"], name), os.O_WRONLY | os.O_CREAT), stream.fileno())
sys.argv = ["-c", *message["arguments"]]
exec(compile(message["program"], "<string>", "exec"), {"__name__": "__main__"})
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program, which imports what it needs; its exit code and what it has written."""
    parent = _parent()
    with TemporaryDirectory() as folder:
        message = {"program": program, "arguments": arguments, "folder": folder}
        parent.stdin.write(json.dumps(message) + "\n")
        parent.stdin.flush()
        code = int(parent.stdout.readline())
        said = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(program, code, *said)


@cache
def _parent() -> subprocess.Popen[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # no GPU can be used in a forked process
    command, pipe = [sys.executable, "-c", PARENT], subprocess.PIPE
    parent = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    atexit.register(parent.kill)
    return parent
