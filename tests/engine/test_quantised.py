"""Checkpoints whose weights are quantised: loaded as they are, decoded on either path."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from engine.tiny_directory import text_of, write_model, write_tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from kvsift import LLM
from kvsift.models.hf.model_directory import ModelDirectory

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="it quantises the checkpoints of these tests")

QUEST = "quest:budget=128:window=16:dense_layers=0"
SETTINGS = {
    "Linear4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "Linear8bitLt": {"load_in_8bit": True},
}


@pytest.fixture(scope="module", params=SETTINGS)
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of its linear layers, and the directory."""
    plain = write_model(tmp_path_factory.mktemp("plain"), hidden_size=64, intermediate_size=128)
    config = BitsAndBytesConfig(**SETTINGS[request.param])
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    )
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return request.param, directory


def test_weights_stay_quantised_and_give_transformers_tokens(quantised: tuple[str, Path]) -> None:
    kind, directory = quantised
    llm = LLM(directory, "dense")
    assert {type(part).__name__ for part in llm.model.model.layers[0].mlp.children()} >= {kind}
    assert llm.directory.is_quantised
    expected = AutoModelForCausalLM.from_pretrained(directory, device_map={"": "cpu"}, dtype=torch.float32)
    ids = torch.tensor([llm.tokenizer(text_of(100))["input_ids"]])
    tokens = expected.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()
    assert llm.generate(text_of(100), max_new_tokens=5).token_ids == tokens


def test_the_fast_path_calls_quantised_layers_as_they_are(quantised: tuple[str, Path]) -> None:
    kind, directory = quantised
    fast, slow = (
        LLM(directory, QUEST, path=path).generate(text_of(600), max_new_tokens=12) for path in ("eager", "auto")
    )
    assert fast.token_ids == slow.token_ids
    assert fast.decode("density") == slow.decode("density") < 0.6
    if kind == "Linear4bit":
        assert fast.path == "eager"
    else:  # which columns are outliers is looked up by the host
        assert fast.path.startswith("composed: its int8 layers look for outliers")


def test_quantised_weights_need_what_their_files_hold(quantised: tuple[str, Path]) -> None:
    from kvsift.engine.memory import predict_bytes

    directory = ModelDirectory.check(quantised[1])
    cpu = torch.device("cpu")
    wide, narrow = (predict_bytes(directory, cpu, dtype, 0, 1) for dtype in (torch.float32, torch.bfloat16))
    assert wide == narrow
