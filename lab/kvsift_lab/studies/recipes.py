"""Recipes of the studies: measurements of one question each, behind a table or a sentence of the docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsift.errors import InvalidValue
from kvsift_lab.bench import recipe as r

K = 1 << 10
QUEST, ALL_LAYERS = "quest:budget=2048", ":dense_layers=none"
QUOKA = "prefill=quoka:budget=1024:chunk=512,decode=quest:budget=2048"
VLLM_CHATS = "kvsift_lab.studies.vllm_chats:VllmChatsBench"
CHATS: dict[str, dict[str, Any]] = {
    "cpu": {
        "tokens": 32 * K, "documents": 4, "chats": 4, "steps": 32, "rounds": 5, "new_tokens": 8192,
        "plans": ("dense", f"sketch:budget=1024{ALL_LAYERS}", f"quest:budget=1024{ALL_LAYERS}"),
    },
    "gpu": {
        "tokens": 64 * K, "documents": 8, "chats": 8, "steps": 64, "rounds": 5, "chunk_reads": 3,
        "plans": ("dense", "sketch:budget=1024", QUEST, f"sketch:budget=1024{ALL_LAYERS}", QUEST + ALL_LAYERS),
    },
    "gpu-shared": {
        "tokens": 128 * K, "documents": 2, "chats": 8, "steps": 64, "rounds": 3, "chunk_reads": 3,
        "plans": ("dense", "sketch:budget=1024", QUEST), "read_beside": (("dense", QUEST), (QUOKA, QUEST)),
    },
}  # fmt: skip


def _number(help: str) -> Any:
    return r.option(None, f"{help}, instead of the load's.", kind=int | None, minimum=1, value=0)


@dataclass(frozen=True)
class ChatsRecipe(r.BenchRecipe):
    """Chats about long documents on one machine: tokens per second of all, and waits beside each other."""

    measured_by = "kvsift_lab.studies.chats:ChatsBench"

    load: str = r.option("cpu", "cpu: the embedded model. gpu, gpu-shared: an 8B model's shape, random weights.")
    engine: str = r.option("kvsift", "kvsift, or vllm: the same load in stock vLLM.")
    tokens: int = _number("Tokens of a document")
    documents: int = _number("Documents")
    chats: int = _number("Chats")
    rounds: int = _number("Rounds of each plan")
    chunk_reads: int = r.option(None, "Reads in chunks of 8,192, instead of the load's.", kind=int | None, value=0)
    plans: tuple[str, ...] = r.option(
        None, "Plans with ; between, dense among them, instead of the load's.", kind=str | None, parse=r.split, value=()
    )
    steps: int = 0
    new_tokens: int = 0  # of another document that is read beside the chats of a round
    read_beside: tuple[tuple[str, str], ...] = ()  # plan of a document that is read, plan of the chats beside it

    def bench(self) -> Any:
        return r.load(VLLM_CHATS).of(self) if self.engine == "vllm" else super().bench()

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> r.BenchRecipe:
        """Return the load of a name, with what is given instead."""
        r.require_known("load", [given["load"]], CHATS)
        if given["engine"] not in ("kvsift", "vllm"):
            raise InvalidValue(f"--engine {given['engine']} must be kvsift or vllm.")
        own = {key: value for key, value in given.items() if value is not None}
        return cls(**CHATS[given["load"]] | own | ({"plans": r.split(own["plans"])} if "plans" in own else {}))


@dataclass(frozen=True)
class ExactRecipe(r.BenchRecipe):
    """Exact decoding beside dense decoding on a CPU: equal tokens, accepted drafts, times in turns."""

    measured_by = "kvsift_lab.studies.exact:ExactBench"

    tokens: int = r.option(32_000, "Tokens of the document.", minimum=1000)
    new: int = r.option(200, "Tokens that continue it.", minimum=2)
    rounds: int = r.option(5, "Rounds of dense decoding and every plan in turns.", minimum=1)
    plans: tuple[str, ...] = r.plans(f"sketch:budget=1024;sketch:budget=256{ALL_LAYERS};quest:budget=1024{ALL_LAYERS}")


@dataclass(frozen=True)
class AcceptanceRecipe(r.BenchRecipe):
    """Which drafts of exact decoding are accepted, by task and length; every answer must be that of dense decoding."""

    measured_by = "kvsift_lab.studies.exact:AcceptanceBench"

    lengths: tuple[int, ...] = r.option("4096,8192,16384,32768", "Tokens of contexts.", parse=r.token_counts)
    tasks: tuple[str, ...] = r.option("needle,facts,ruler,prose", "Tasks, and prose.", parse=r.names)
    plans: tuple[str, ...] = r.plans("sketch;quest;verify", "Plans without a budget, with ; between them.")
    dtype: str = r.option("bfloat16", "Of the model.")
    device: str = r.option("cpu", "cpu, or cuda: in captured steps.", stored=False)
    share: float = 0.05  # of the context, visible to drafts
    drafts: int = 4  # a cycle

    def __post_init__(self) -> None:
        from kvsift_lab.eval.tasks import task_names

        task_names([name for name in self.tasks if name != "prose"])


@dataclass(frozen=True)
class CapturedRecipe(r.BenchRecipe):
    """Exact decoding in captured steps beside the fastest dense decoding, with acceptance imposed."""

    measured_by = "kvsift_lab.studies.exact_captured:CapturedBench"

    contexts: tuple[tuple[int, ...], ...] = r.option(
        "32768x1,131072x1,131072x4,524288x1", "Tokens x rows, and x rounds instead of --rounds.", parse=r.batches
    )
    plans: tuple[str, ...] = r.plans(f"{QUEST}{ALL_LAYERS};sketch:budget=1024{ALL_LAYERS}")
    accepted: tuple[float, ...] = r.option("0.90,0.94,0.97", "Probabilities of a draft.", parse=r.shares)
    rounds: int = r.option(3, "Rounds that are measured.", minimum=1)
    new: int = r.option(512, "Tokens of an answer; some are decoded while other rows are still read.", minimum=4)
    embedded: bool = r.option(False, "The embedded model, uncaptured, to try it.")


@dataclass(frozen=True)
class BusyRecipe(r.BenchRecipe):
    """Time per token on a quiet machine and beside busy loops, by the wait of OpenMP's threads."""

    measured_by = "kvsift_lab.studies.busy:BusyBench"

    settings: tuple[str, ...] = r.option(
        "spin,passive,kvsift,torch-first,one", "Names, and numbers as spin counts.", parse=r.names, stored=False
    )
    cores: int | None = r.option(
        None, "Processors to use, for the busy loops too.", kind=int | None, minimum=1, stored=False
    )
    context: int = r.option(4096, "Tokens of the document.", minimum=64)
    rounds: int = r.option(20, "Rounds on the quiet machine.")
    busy_rounds: int = r.option(6, "Rounds beside busy loops.")
    loops: int = r.option(2, "Busy loops.")
    tokens: int = r.option(24, "Tokens per plan and round; a third of them beside loops.", minimum=3)
    questions: int = r.option(2, "Questions of the job, per plan; 0: no job.", stored=False)


@dataclass(frozen=True)
class LlamaCppRecipe(r.BenchRecipe):
    """Decoding and prefill of a GGUF file on this processor, beside llama.cpp."""

    measured_by = "kvsift_lab.studies.llama_cpp:LlamaCppBench"

    model: str = r.option("model.gguf", "The file.")
    binary: str = r.option("llama-bench", "llama.cpp's llama-bench, built for this processor.", stored=False)
    contexts: tuple[int, ...] = r.option("512,4K,7500", "Tokens.", parse=r.token_counts)
    plans: tuple[str, ...] = r.option("dense,sketch:budget=1024,quest:budget=1024", "Of kvsift.", parse=r.names)
    rounds: int = r.option(3, "The first tries all settings of llama.cpp.", minimum=1)
    tokens: int = r.option(24, "Tokens per sample.", minimum=2)
    repeats: int = r.option(2, "Samples of llama.cpp per round.", minimum=1)
    kv_dtype: str = r.option("auto", "Of kvsift's keys and values: auto or int8.")
    threads: int | None = r.threads()


@dataclass(frozen=True)
class GenerationRecallRecipe(r.BenchRecipe):
    """Recall of an index built from a prompt, against exact search, while the model generates."""

    measured_by = "kvsift_lab.studies.recall:GenerationRecall"

    tokens: int = r.option(2000, "Tokens to generate.", minimum=1)
    length: int = r.option(32768, "Tokens of the document.", minimum=1000)
    seed: int = 700000
    every: int = 4  # steps; neighbouring ones are nearly the same
    threads: int | None = r.threads()


@dataclass(frozen=True)
class SummaryRecallRecipe(r.BenchRecipe):
    """Recall of each plan of a recipe on the queries and keys of dense attention over real contexts."""

    measured_by = "kvsift_lab.studies.recall:SummaryRecall"

    recipe: str = r.option("lab/recipes/summary-recall-32k.toml", "Recipe of an evaluation.")


@dataclass(frozen=True)
class VllmDecodeRecipe(r.BenchRecipe):
    """Decoding in vLLM, its own attention and plans' in turns: milliseconds per token and seconds to the first."""

    measured_by = "kvsift_lab.studies.vllm_decode:VllmDecode"

    plans: tuple[str, ...] = r.plans("stock", "Plans with ; between, each an engine of its own; stock: vLLM's own.")
    anchors: int | None = r.anchors()
    tp: int = r.option(1, "GPUs that share the heads.", minimum=1)
    points: tuple[tuple[int, ...], ...] = r.option(
        "4096x1,32768x1,131072x1,32768x4,131072x4", "Contexts x batches.", parse=r.batches
    )
    only_decode: bool = r.option(False, "Leave attention out of all prompts, not only out of batches'.")
    fp8: bool = r.option(False, "Weights in 8-bit floats: vLLM's quantization='fp8'.")

    def __post_init__(self) -> None:
        from kvsift.plan.syntax import parse_plan
        from kvsift_lab.bench.spaced_anchors import require_anchored

        for plan in self.plans:
            if plan != "stock":
                require_anchored(self.anchors, parse_plan(plan), plan)


@dataclass(frozen=True)
class LongAnswersRecipe(r.BenchRecipe):
    """Long answers of a chat model about real texts: where plans part from dense decoding, how they repeat and end."""

    measured_by = "kvsift_lab.studies.long_answers:LongAnswers"

    model: str = r.option("build/smollm2", "Directory of a model with a chat format.")
    texts: str = r.option("build/real-texts/evaluated", "Directory of .txt files.")
    plans: tuple[str, ...] = r.plans(
        ";".join(f"{method}:budget={budget}{ALL_LAYERS}" for method in ("sketch", "quest") for budget in (256, 1024))
    )
    exact: str = r.option(f"sketch:budget=256{ALL_LAYERS}", "The plan that drafts for exact decoding.")
    prompts: int = r.option(8, "Texts, in the order of their names.", minimum=1)
    tokens: int = r.option(4096, "Tokens of each text.", minimum=1)
    new: int = r.option(2000, "Tokens of an answer, at most.", minimum=1)
    device: str = r.option("auto", "cpu, or cuda: in captured steps.", stored=False)
