"""One rank of test_tensor_parallel: split a model, generate under a plan; rank 0 writes what came out.

Arguments: directory of the model; plan; file to write; and who splits, one after the other: "transformers", "torch".
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
from models.tiny import ragged
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvsift

LENGTHS = (150, 121)


def split_by_torch(directory: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory)
    apart = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    together = ["self_attn.o_proj", "mlp.down_proj"]
    plan = {name: ColwiseParallel() for name in apart} | {name: RowwiseParallel() for name in together}
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def main(directory: str, plan: str, target: str, *splitters: str) -> None:
    torch.set_num_threads(1)
    found = {}
    for splitter in splitters:
        if splitter == "torch":
            model = split_by_torch(directory)
        else:
            model = AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto")
        with kvsift.sparse(model.eval(), plan) as run:
            tokens = model.generate(**ragged(*LENGTHS), max_new_tokens=10, do_sample=False)
        found[splitter] = {"tokens": tokens.tolist(), **run.report()["phases"]["decode"]}
    if distributed.get_rank() == 0:
        Path(target).write_text(json.dumps(found))
    with suppress(RuntimeError):  # the other one may be gone already, with its answer
        distributed.barrier()
    os._exit(0)  # gloo's threads abort now and then when the interpreter ends


if __name__ == "__main__":
    main(*sys.argv[1:])
