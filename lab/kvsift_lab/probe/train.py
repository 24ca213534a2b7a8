"""Train the embedded model: `python -m kvsift_lab.probe.train PHASE TOKENIZER_DIR OUT_DIR [START_DIR]`, on one GPU, or
`python -m torch.distributed.run --nproc_per_node 4 -m kvsift_lab.probe.train ...`, on several: each takes a
step's tokens.

The schedule follows the clock, compilation not counted; a checkpoint in the Hugging Face layout is written at times.
With START_DIR, training goes on from that model.
"""

import json
import math
import multiprocessing as mp
import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, Qwen3ForCausalLM

from kvsift_lab.probe import phase
from kvsift_lab.probe.data import KINDS, PROSE, Batch, start_workers
from kvsift_lab.probe.model import Learned, loss, new_model, rope_tables

LOG_STEPS = 50
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # of torch.distributed.run


def main(phase_name: str, tokenizer_dir: Path, out: Path, start: Path | None = None) -> None:
    config = phase(phase_name)
    training = config["training"]
    device = torch.device("cuda", RANK) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(config["data"]["seed"])
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    progress = mp.Value("d", 0.0)
    queue, workers = start_workers(
        config, tokenizer_dir / "tokenizer.json", progress, RANK
    )  # before CUDA starts: they fork
    if WORLD > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32) if start else new_model(config["model"])
    model = model.to(device)
    optimizer = _optimizer(model, training)
    _warm_up(model, config, device)
    if WORLD > 1:
        dist.barrier()
    begin = saved = time.monotonic()
    report = _Report(device)
    for step in count():
        progress.value = _agreed((time.monotonic() - begin) / training["seconds"], device)
        if progress.value >= 1:
            break
        lr = _learning_rate(training, step, progress.value)
        for group in optimizer.param_groups:
            group["lr"] = lr
        report.waiting -= time.monotonic()
        batch = queue.get()
        report.waiting += time.monotonic()
        value, is_right = _step(model, optimizer, batch, config, device)
        report.add(batch, value, is_right)
        if RANK == 0 and step % LOG_STEPS == LOG_STEPS - 1:
            report.print(step + 1, progress.value, time.monotonic() - begin, lr)
        if RANK == 0 and time.monotonic() - saved > training["checkpoint_seconds"]:
            save(model, tokenizer, out)
            saved = time.monotonic()
    for worker in workers:
        worker.terminate()
    if WORLD > 1:
        dist.destroy_process_group()
    if RANK > 0:
        return
    save(model, tokenizer, out)
    seconds, tokens = time.monotonic() - begin, step * WORLD * training["tokens_per_step"]
    (out / "training.json").write_text(json.dumps({"steps": step, "tokens": tokens, "seconds": round(seconds, 1)}))
    print("done", step, tokens, round(seconds, 1), flush=True)


def save(model: Qwen3ForCausalLM, tokenizer: Any, out: Path) -> None:
    """The model in bf16 with its tokenizer; generation stops at eos or at the end of the line."""
    copy = Qwen3ForCausalLM(model.config).bfloat16()
    copy.load_state_dict({name: weight.bfloat16().cpu() for name, weight in model.state_dict().items()})
    newline = tokenizer.encode("\n", add_special_tokens=False)
    copy.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=[1, *newline], pad_token_id=2, do_sample=False
    )
    copy.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _agreed(value: float, device: torch.device) -> float:
    """What the first process says: all take the same steps at the same rate."""
    if WORLD == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(shared, 0)
    return float(shared)


def _average_gradients(model: torch.nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, (flat / WORLD).split([g.numel() for g in gradients])):
        gradient.copy_(mean.view_as(gradient))


def _optimizer(model: torch.nn.Module, training: dict[str, Any]) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": training["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=tuple(training["betas"]), fused=True)


def _learning_rate(training: dict[str, Any], step: int, progress: float) -> float:
    floor = training["final_lr_share"]
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return training["peak_lr"] * min(1.0, (step + 1) / training["warmup_steps"]) * cosine


def _warm_up(model: Qwen3ForCausalLM, config: dict[str, Any], device: torch.device) -> None:
    """Compile everything, for each length that will come, before the clock starts."""
    training, start = config["training"], time.monotonic()
    for length in sorted({int(length) for stage in training["stages"] for length in stage["lengths"]}):
        ids = torch.zeros(training["tokens_per_step"] // length, length, dtype=torch.long, device=device)
        places = torch.zeros(training["supervised_per_step"], dtype=torch.long, device=device)
        for _ in range(3):
            began = time.monotonic()
            value, _ = loss(
                model, ids, Learned(places, places, torch.ones_like(places).float()), _rope(config, length, device)
            )
            value.backward()
            value.item()
        print(f"warm-up {length}: step {time.monotonic() - began:.3f} s", flush=True)
    model.zero_grad()
    print(f"warm-up took {time.monotonic() - start:.1f} s", flush=True)


_tables: dict[int, tuple[Tensor, Tensor]] = {}


def _rope(config: dict[str, Any], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if length not in _tables:
        rows, model = config["training"]["tokens_per_step"] // length, config["model"]
        _tables[length] = rope_tables(length, rows, int(model["head_dim"]), float(model["rope_theta"]), device)
    return _tables[length]


def _step(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: dict[str, Any],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    ids = torch.from_numpy(batch.ids).to(device).long()
    arrays = (batch.places, batch.targets, batch.weights)
    places, targets, weights = (torch.from_numpy(array).to(device) for array in arrays)
    learned = Learned(places.long(), targets.long(), weights)
    value, is_right = loss(model, ids, learned, _rope(config, ids.shape[1], device))
    value.backward()
    if WORLD > 1:
        _average_gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), config["training"]["clip"])
    optimizer.step()
    optimizer.zero_grad()
    return value.detach(), is_right


class _Report:
    """What happened since the last line: mean loss and the share of right answer tokens per kind of row."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clear()

    def clear(self) -> None:
        self.loss = torch.zeros((), device=self.device)
        self.right = torch.zeros(PROSE + 1, device=self.device)
        self.total = torch.zeros(PROSE + 1, device=self.device)
        self.lengths: dict[int, int] = {}
        self.waiting = 0.0

    def add(self, batch: Batch, value: Tensor, is_right: Tensor) -> None:
        kinds = torch.from_numpy(batch.kinds).to(self.device).long()
        used = torch.from_numpy(batch.weights > 0).to(self.device).float()
        self.loss += value
        self.right.index_add_(0, kinds, used * is_right)
        self.total.index_add_(0, kinds, used)
        length = batch.ids.shape[1]
        self.lengths[length] = self.lengths.get(length, 0) + 1

    def print(self, step: int, progress: float, seconds: float, lr: float) -> None:
        shares = (self.right / self.total.clamp_min(1)).tolist()
        kinds = " ".join(f"{kind}={share:.3f}" for kind, share in zip((*KINDS, "prose"), shares))
        mean = self.loss.item() / LOG_STEPS
        head = f"{step} {progress:.3f} {seconds:.0f}s lr={lr:.1e} wait={self.waiting:.1f}s loss={mean:.4f}"
        print(head, self.lengths, kinds, flush=True)
        self.clear()


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]))
