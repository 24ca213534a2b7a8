"""The chats of ``chats.py`` in stock vLLM, at the same load, through its engine's step loop.

    kvsift bench chats --load gpu --engine vllm --out results/chats-vllm-h200

Prefixes are cached; a step has 8,192 tokens, as in ``vllm serve``, or where chats wait for a document, 1,024 of one
prompt, too (``--long-prefill-token-threshold``, the grid of ``kvsift.LLM``). Needs vLLM 0.26.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from transformers import AutoTokenizer

from kvsift.errors import InvalidValue
from kvsift.models.embedded import embedded_model
from kvsift_lab.bench import machine
from kvsift_lab.bench.bench import Study
from kvsift_lab.numbers import digits
from kvsift_lab.studies.chats import MOST, MeasuredChats, chats_table, load_of
from kvsift_lab.studies.recipes import ChatsRecipe
from kvsift_lab.studies.vllm_engine import SIZES, engine, require_vllm

STEP, GRID = 8192, 1024  # tokens of a step; those of one prompt in it
GRAPHS = [1, 2, 4, 8, 16, 24, 32]  # tokens: a question beside seven chats has about 24


@dataclass
class VllmRow:
    """A request to vLLM, and when its tokens came."""

    key: str
    times: list[float] = field(default_factory=list)
    num_reused: int = 0
    is_ended: bool = False
    error: Exception | None = None

    @property
    def output(self) -> VllmRow:
        return self


class VllmChats(MeasuredChats):
    """Requests to vLLM's engine; plans are ignored."""

    def __init__(self, core: Any, *load: Any) -> None:
        super().__init__(*load)
        self.core = core
        self.rows: dict[str, VllmRow] = {}  # that have not ended
        self.count = 0

    def start(self, ids: list[int], plan: str, num_tokens: int = MOST) -> VllmRow:
        from vllm import SamplingParams

        self.count += 1
        row = self.rows[f"{self.count}"] = VllmRow(f"{self.count}")
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self.core.add_request(row.key, {"prompt_token_ids": ids}, sampling)
        return row

    def step(self) -> None:
        outputs, now = self.core.step(), perf_counter()
        for output in outputs:
            if (row := self.rows.get(output.request_id)) is None:
                continue
            times = row.times
            times.extend([now] * (len(output.outputs[0].token_ids) - len(times)))
            row.num_reused = output.num_cached_tokens or 0
            if output.finished:
                row.is_ended = True
                del self.rows[row.key]

    def close(self, *rows: VllmRow) -> None:
        self.core.abort_request([row.key for row in rows if self.rows.pop(row.key, None) is not None])

    def state(self, row: VllmRow) -> dict[str, Any]:
        return {"reused": row.num_reused}


class VllmChatsBench(Study):
    """Chats of vLLM."""

    kind = "chats"
    recipe: ChatsRecipe

    def __init__(self, recipe: ChatsRecipe) -> None:
        super().__init__(recipe)
        require_vllm()
        if recipe.chats > max(SIZES):
            raise InvalidValue(f"--chats {recipe.chats}: vLLM's engine has CUDA graphs of {max(SIZES)} rows at most.")
        self._load = load_of(recipe, AutoTokenizer.from_pretrained(embedded_model()))
        self._core = engine(
            "stock", dtype="bfloat16", max_model_len=len(self._load[1][0]) + 64 + MOST,
            max_num_batched_tokens=STEP, enable_prefix_caching=True,
            compilation_config={"cudagraph_capture_sizes": GRAPHS},
        ).llm_engine  # fmt: skip
        import vllm

        self._name = f"vLLM {vllm.__version__}"

    def environment(self) -> dict[str, Any]:
        config = self._core.vllm_config
        about = {
            "version": self._name, "tokens_of_a_step": STEP,
            "kv_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        }  # fmt: skip
        return machine.environment(torch.device("cuda", 0)) | {"vllm": about}

    def run(self) -> Iterator[dict[str, Any]]:
        recipe, (ids, documents, question) = self.recipe, self._load
        chats = VllmChats(self._core, recipe, documents, question)
        chats.read([7, *ids[:2048]])
        for chat in range(recipe.documents):
            yield digits({"part": "vLLM's document", "seconds": chats.read(chats.prompt(chat))}, 4)
        for number in range(recipe.rounds):
            new = [400 + number, *ids[: recipe.new_tokens]] if recipe.new_tokens else []
            yield digits({"part": "round", "plan": self._name, **chats.measure("", new)}, 4)
        scheduler = self._core.vllm_config.scheduler_config
        for number, most in enumerate((0, GRID) if recipe.read_beside else ()):
            scheduler.long_prefill_token_threshold = most
            how = f"{self._name}, {most or STEP} tokens at a time"
            yield digits({"part": "beside", **chats.read_beside(number, ids, how, self._name)}, 4)

    def closing(self, result: dict[str, Any]) -> str:
        return chats_table([result])
