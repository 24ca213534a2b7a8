"""A model split over two processes: each chooses for its own KV heads, and the tokens are those of one process."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from models.hf.tensor_parallel_worker import LENGTHS
from models.tiny import SPARSE, assert_sparse, ragged, tiny

import kvsift

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
SPLITTERS = ["torch", *(["transformers"] if find_spec("accelerate") else [])]  # tp_plan needs accelerate


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes_give_the_tokens_of_one(tmp_path: Path) -> None:
    model, directory, target = tiny(), tmp_path / "model", tmp_path / "report.json"
    model.save_pretrained(directory)
    with kvsift.sparse(model, SPARSE) as run:
        expected = model.generate(**ragged(*LENGTHS), max_new_tokens=10, do_sample=False)
    assert_sparse(run)

    path = os.pathsep.join(filter(None, [str(WORKER.parents[2]), os.environ.get("PYTHONPATH")]))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    ended = subprocess.run(  # one launch for both: most of its time goes into importing torch three times
        [*launch, str(directory), SPARSE, str(target), *SPLITTERS],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr.decode()[-3000:]

    decode, reports = run.report()["phases"]["decode"], json.loads(target.read_text())
    assert [*reports] == SPLITTERS
    for report in reports.values():
        assert report["tokens"] == expected.tolist()
        assert report["visible_tokens"] == decode["visible_tokens"]
        assert 2 * report["kv_bytes_dense"] == decode["kv_bytes_dense"]  # a process holds one of the two KV heads
