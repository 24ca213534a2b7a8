"""What every family of models can do here, found out by running a tiny model of it: the page docs/models.md says so.

``families.json`` has what was found. ``python tests/models/families.py`` writes it anew, and ``make docs`` the page of
it; ``python tests/models/families.py --gpu`` adds, on an NVIDIA GPU, whose captured steps were right there.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import torch
import transformers
from engine.tiny_directory import text_of, write_tokenizer
from models.tiny import FAMILIES, covered, greedy, tiny
from torch import Tensor
from transformers import DynamicCache

import kvsift
from kvsift import LLM
from kvsift.api.answer import Answer
from kvsift.errors import NotEnoughMemory

FILE = Path(__file__).with_suffix(".json")
TEXTS = text_of(200), text_of(331)[130:]  # nothing in common at their beginnings
CONTINUED = TEXTS[0][:170] + " What is it that grinds the corn?"
CHUNK, NUM_NEW = 64, 8
END, PAD = 1, 2
SIZES = {"vocab_size": 259, "num_hidden_layers": 2, "max_position_embeddings": 4096, "pad_token_id": PAD}
COVERING = ("quest:budget=4096:dense_layers=none", "sketch:budget=4096:dense_layers=none")
SPARSE = "quest:budget=64:window=16:dense_layers=none"
LEAST_SKIPPED = 0.5  # of the context, under SPARSE

SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Bamba": {**MAMBA, "attn_layer_indices": [1]},
    "BioGpt": {},
    "Cohere2": SLIDING,
    "Exaone4": SLIDING,
    "FalconH1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    "GPTNeoX": {"rotary_pct": 0.5},
    "Gemma3n": {
        **SLIDING,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 400,
        "num_kv_shared_layers": 0,
        "intermediate_size": [32, 32],
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "Gemma4": {
        **SLIDING,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 400,
    },
    "Glm4": {},
    "Glm4Moe": {**ROUTED, "first_k_dense_replace": 1},
    "Granite": {},
    "GraniteMoeHybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "HYV3": {**EXPERTS, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Lfm3": {"layer_types": ["conv", "full_attention"]},
    "MiMoV2Flash": {**SLIDING, **ROUTED, "head_dim": 24, "v_head_dim": 16},
    "MiniMaxM2": LOCAL,
    "Ministral3": {},
    "Mixtral": LOCAL,
    "NemotronH": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "Olmo2": {},
    "Olmo3": SLIDING,
    "OlmoHybrid": DELTA,
    "Phi": {"partial_rotary_factor": 0.5},
    "Qwen3Next": {**DELTA, **EXPERTS},
    "Qwen3_5": DELTA,
    "Qwen3_5Moe": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "SeedOss": {},
    "SmolLM3": {},
    "SolarOpen": ROUTED,
    "StableLm": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "Starcoder2": {},
    "Zaya": {**EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 16},
}
SETTINGS = {**FAMILIES, **OTHERS}


def names() -> list[str]:
    """The families that the installed transformers has."""
    return sorted((name for name in SETTINGS if hasattr(transformers, f"{name}ForCausalLM")), key=str.lower)


KINDS = {
    "DynamicLayer": "full",
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionLayer": "recurrent",
    "LinearAttentionAndFullAttentionLayer": "full beside recurrent",
}
HEAD_DIMS = (64, 80, 128, 256, 512)


class Runs:
    """A tiny model of a family in a folder, and what stock transformers answers with it.

    Attributes:
        model: the stock model.
        llm: the engine with the model, as it is by default.
        ids: tokens of the texts.
        expected: what stock greedy generation says after them.
    """

    def __init__(self, name: str, folder: Path, **changes: Any) -> None:
        self.folder = folder
        self.model = tiny(name, **{**SIZES, **SETTINGS[name], **changes})
        self.model.get_output_embeddings().weight.data[END] = 0.0  # or it might end
        self.model.save_pretrained(folder)
        tokenizer = write_tokenizer(folder)
        self.ids = [tokenizer(text)["input_ids"] for text in (*TEXTS, CONTINUED)]
        self.expected = [greedy(self.model, torch.tensor([ids]), NUM_NEW)[0].tolist() for ids in self.ids]
        self.llm = self.opened(keep_tokens=10_000)

    def opened(self, **options: Any) -> LLM:
        """The engine with the model."""
        return LLM(self.folder, "dense", **{"device": "cpu", "dtype": "float32", "chunk_size": CHUNK, **options})

    def equal(self, answers: Sequence[Answer], which: Sequence[int] = (0, 1)) -> None:
        """Assert that answers are those of stock transformers to the texts of these numbers."""
        for answer, number in zip(answers, which, strict=True):
            assert answer.token_ids == self.expected[number], (answer.plan, answer.path, number)

    def layers(self) -> str:
        """Kinds of layers, by what they cache, and whether some have experts."""
        kinds = dict.fromkeys(KINDS[type(layer).__name__] for layer in DynamicCache(config=self.model.config).layers)
        experts = any(name.endswith(".experts") for name, _ in self.model.named_modules())
        return ", ".join(sorted(kinds)) + ("; experts" if experts else "")

    def block(self) -> str:
        """In ``kvsift.sparse``, a covering budget gives the stock logits of a padded batch, and a row of a small one
        has the tokens that it has alone."""
        width = max(len(ids) for ids in self.ids[:2])
        padded = torch.tensor([[PAD] * (width - len(ids)) + ids for ids in self.ids[:2]])
        options = {"attention_mask": (padded != PAD).long()}
        stock = self._logits(padded, **options)
        with covered(self.model):
            torch.testing.assert_close(self._logits(padded, **options), stock, rtol=0, atol=1e-4)
        with kvsift.sparse(self.model, SPARSE) as run:
            together = greedy(self.model, padded, NUM_NEW, **options)
            alone = [greedy(self.model, torch.tensor([ids]), NUM_NEW) for ids in self.ids[:2]]
        assert torch.equal(together, torch.cat(alone))
        assert run.report()["phases"]["decode"]["density"] < 1 - LEAST_SKIPPED
        return "yes"

    def _logits(self, ids: Tensor, **options: Any) -> Tensor:
        """Logits of every generated token, [tokens, rows, vocabulary]."""
        keep = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        return torch.stack(self.model.generate(ids, max_new_tokens=NUM_NEW, **keep, **options).logits)

    def composed(self) -> str:
        """Dense answers and those of budgets that cover the context are the stock ones, alone and in a batch; a small
        budget skips more than half, and answers in a batch as alone. Bytes are those that memory is reckoned with."""
        llm = self.opened(path="composed")
        for plan in ("dense", *COVERING):
            self.equal(llm.generate(list(TEXTS), plan=plan, max_new_tokens=NUM_NEW))
        together = llm.generate(list(TEXTS), plan=SPARSE, max_new_tokens=NUM_NEW)
        alone = [llm.generate(text, plan=SPARSE, max_new_tokens=NUM_NEW) for text in TEXTS]
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        for answer, ids in zip(alone, self.ids):
            assert answer.path.startswith("composed")
            assert answer.decode("density") < 1 - LEAST_SKIPPED
            contexts = range(len(ids) + 1, len(ids) + len(answer.token_ids))
            foretold = llm.directory.kv_bytes_per_token(torch.float32) * sum(contexts)
            assert answer.decode("kv_bytes_dense") == foretold
            assert answer.decode("kv_bytes_read") < (1 - LEAST_SKIPPED) * answer.decode("kv_bytes_dense")
        return "yes"

    def captured(self, **options: Any) -> str:
        """Steps of captured graphs, run without capturing them unless ``options`` have a GPU capture them."""
        llm = self.opened(**{"path": "eager", **options})
        for plan in ("dense", *COVERING):
            answers = llm.generate(list(TEXTS), plan=plan, max_new_tokens=NUM_NEW)
            if why := _why_composed(answers[0]):
                return why
            self.equal(answers)
        assert llm.generate(TEXTS[0], plan=SPARSE, max_new_tokens=NUM_NEW).decode("density") < 1 - LEAST_SKIPPED
        return "yes"

    def native(self) -> str:
        """Decode steps of the compiled core."""
        for plan in ("dense", *COVERING):
            answers = self.llm.generate(list(TEXTS), plan=plan, max_new_tokens=NUM_NEW)
            self.equal(answers)
            if why := _why_composed(answers[0]):
                return why
        return "yes"

    def exact(self) -> str:
        """Exact answers are the stock ones, whatever is left out while drafting."""
        try:
            self.equal(self.llm.generate(list(TEXTS), plan=SPARSE, exact=True, max_new_tokens=NUM_NEW))
        except kvsift.InputError as error:
            return str(error)
        return "yes"

    def reuse(self) -> str:
        """A prompt that begins as another one did shares what is cached of it."""
        self.equal([self.llm.generate(TEXTS[0], max_new_tokens=NUM_NEW)], [0])
        answer = self.llm.generate(CONTINUED, max_new_tokens=NUM_NEW)
        self.equal([answer], [2])
        if answer.no_reuse:
            return answer.no_reuse
        assert answer.prompt_tokens - answer.new_prompt_tokens >= CHUNK
        return "yes"

    def saved(self) -> str:
        """A document that is saved and opened answers as before."""
        document, question, file = self.llm.read(TEXTS[0]), "What grinds?", self.folder / "document.kvsift"
        expected = document.ask(question, max_new_tokens=NUM_NEW).token_ids
        try:
            document.save(file)
        except kvsift.InputError as error:
            return str(error)
        assert self.llm.open(file).ask(question, max_new_tokens=NUM_NEW).token_ids == expected
        return "yes"


def _why_composed(answer: Answer) -> str:
    return answer.path.partition("composed: ")[2].removeprefix("no NVIDIA GPU; ")


PARTS = ("layers", "block", "composed", "captured", "native", "exact", "reuse", "saved")


def found(name: str, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """What a family can do, each by a run: "yes", or the sentence with which it was declined.

    Raises:
        AssertionError: if it did something else than stock transformers.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(name, Path(folder))
        return {part: getattr(runs, part)().replace(type(runs.model).__name__, "the model") for part in parts}


def found_by_head_dim(head_dim: int) -> dict[str, str]:
    """What Llama can do with a head_dim, as ``found``."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs("Llama", Path(folder), head_dim=head_dim)
        return {part: getattr(runs, part)() for part in ("composed", "captured", "native")}


def on_gpu(name: str) -> str:
    """Whether captured steps of a family are right on the GPU of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return Runs(name, Path(folder)).captured(path="auto", device="cuda")
        except (AssertionError, RuntimeError, NotEnoughMemory) as error:
            return f"{type(error).__name__}: {str(error)[:200]}"


def main() -> None:
    """Write ``families.json``."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    stored = json.loads(FILE.read_text())["families"] if FILE.exists() else {}
    for name in names():
        new = {"gpu": {torch.cuda.get_device_name(): on_gpu(name)}} if "--gpu" in sys.argv else found(name)
        stored[name] = {**stored.get(name, {}), **new}
        print(name, new, flush=True)
    facts = {
        "transformers": transformers.__version__,
        "families": {name: stored[name] for name in names()},
        "head_dims": {str(head_dim): found_by_head_dim(head_dim) for head_dim in HEAD_DIMS},
    }
    FILE.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
