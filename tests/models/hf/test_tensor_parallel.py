"""A model split over two processes: each chooses for its own KV heads, and the tokens are those of one process."""

import json
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from models.hf.tensor_parallel_worker import LENGTHS
from models.tiny import SPARSE, assert_sparse, ragged, tiny
from stories import run as run_story

import kvsift

RANKS = f"""
import os, runpy, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv.pop(1))
rank = str(int(os.fork() == 0))
os.environ.update(RANK=rank, LOCAL_RANK=rank)
runpy.run_path({str(Path(__file__).with_name("tensor_parallel_worker.py"))!r}, run_name="__main__")
"""
SPLITTERS = ["torch", *(["transformers"] if find_spec("accelerate") else [])]  # tp_plan needs accelerate


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes_give_the_tokens_of_one(tmp_path: Path) -> None:
    model, directory, target = tiny(), tmp_path / "model", tmp_path / "report.json"
    model.save_pretrained(directory)
    with kvsift.sparse(model, SPARSE) as run:
        expected = model.generate(**ragged(*LENGTHS), max_new_tokens=10, do_sample=False)
    assert_sparse(run)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ended = run_story(RANKS, port, str(directory), SPARSE, str(target), *SPLITTERS)
    assert ended.returncode == 0, ended.stderr[-3000:]

    decode, reports = run.report()["phases"]["decode"], json.loads(target.read_text())
    assert [*reports] == SPLITTERS
    for report in reports.values():
        assert report["tokens"] == expected.tolist()
        assert report["visible_tokens"] == decode["visible_tokens"]
        assert 2 * report["kv_bytes_dense"] == decode["kv_bytes_dense"]  # a process holds one of the two KV heads
