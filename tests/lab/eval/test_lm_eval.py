"""The lm-eval model scores what the model itself says. Where lm-eval is not installed a package with its registry and
an empty base class stands in for it; one test wants the real one."""

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engine.tiny_directory import text_of

REAL = find_spec("lm_eval") is not None
CONTEXT, CONTINUATION = text_of(300), " and the wheel turns"


STAND_IN = {
    "__init__.py": "",
    "utils.py": "get_rolling_token_windows = make_disjoint_window = None",
    "api/__init__.py": "",
    "api/model.py": "class TemplateLM: pass",
    "api/registry.py": """
known = {}
def register_model(name):
    return lambda cls: known.setdefault(name, cls)
def get_model(name):
    if not known:
        import lm_eval.models
    return known[name]
""",
    "models/__init__.py": "from lm_eval.api.registry import known\nknown['hf'] = object",
}


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """``kvsift_lab.eval.lm_eval``."""
    with pytest.MonkeyPatch.context() as patch:
        if not REAL:
            folder = tmp_path_factory.mktemp("stand-in")
            for name, content in STAND_IN.items():
                (folder / "lm_eval" / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / "lm_eval" / name).write_text(content)
            patch.syspath_prepend(folder)
        yield importlib.import_module("kvsift_lab.eval.lm_eval")
        for name in [name for name in sys.modules if name.startswith("lm_eval") or name == "kvsift_lab.eval.lm_eval"]:
            if not REAL or name == "kvsift_lab.eval.lm_eval":
                del sys.modules[name]


@pytest.fixture(scope="module")
def dense(lm_eval: ModuleType, model: Path) -> Any:
    return lm_eval.KVSiftLM(str(model), plan="dense", device="cpu")


def by_one_pass(lm: Any, context: list[int], continuation: list[int]) -> tuple[float, list[int]]:
    """Log-likelihood from a single dense forward pass, and the likeliest tokens."""
    ids = [*context, *continuation]
    with torch.inference_mode():
        logits = lm.llm.directory.load(lm.llm.device, lm.llm.dtype)(torch.tensor([ids])).logits[0].float()
    places = range(len(context) - 1, len(ids) - 1)
    total = sum(float(logits[at].log_softmax(-1)[ids[at + 1]]) for at in places)
    return total, [int(logits[at].argmax()) for at in places]


def score(lm: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Log-likelihood of a continuation, and whether it is the likeliest, as lm-eval asks for them."""
    [found] = lm._loglikelihood_tokens([((CONTEXT, CONTINUATION), context, continuation)])
    return found  # type: ignore[no-any-return]


def test_a_continuation_is_as_likely_as_in_one_dense_pass(dense: Any) -> None:
    context, continuation = dense.tok_encode(CONTEXT), dense.tok_encode(CONTINUATION, add_special_tokens=False)
    expected, _ = by_one_pass(dense, context, continuation)
    total, greedy = score(dense, context, continuation)
    assert total == pytest.approx(expected, rel=1e-3)
    assert not greedy


def test_continuations_of_one_context_read_it_once(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    prefill = dense.llm.feed
    monkeypatch.setattr(
        dense.llm, "feed", lambda cache, ids, *a, **k: fed.append(len(ids)) or prefill(cache, ids, *a, **k)
    )
    context = dense.tok_encode(CONTEXT + "!")
    alone = score(dense, context, [70, 71])
    assert [score(dense, context, each) for each in ([70, 71], [80], [70, 71])][::2] == [alone, alone]
    assert fed.count(len(context) - 1) == 1


def test_a_plan_decides_what_is_read(lm_eval: ModuleType, model: Path, dense: Any) -> None:
    """Phases are told apart by a semicolon, because lm-eval splits its arguments at commas."""
    plan = "prefill=quoka:budget=96:chunk=32:window=16;decode=quest:budget=64:window=16:dense_layers=none"
    sifted = lm_eval.KVSiftLM(str(model), plan=plan, device="cpu")
    assert {"prefill", "decode"} == {phase for phase in ("prefill", "decode") if sifted.llm.plan.rule(phase)}
    context = dense.tok_encode(CONTEXT)
    assert score(sifted, context, [70, 71, 72])[0] != score(dense, context, [70, 71, 72])[0]


def test_generation_ends_at_a_stop_or_at_its_length(dense: Any) -> None:
    whole = dense.generate_until([SimpleNamespace(args=(CONTEXT, {"until": [], "max_gen_toks": 12}))])[0]
    assert whole
    stop = whole[len(whole) // 2]
    (cut,) = dense.generate_until([SimpleNamespace(args=(CONTEXT, {"until": [stop], "max_gen_toks": 12}))])
    assert cut == whole.split(stop)[0]


def test_a_whole_text_is_scored_with_its_bos_and_in_the_windows_of_hf(
    lm_eval: ModuleType, dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(lm_eval, "get_rolling_token_windows", lambda *args: asked.append(args) or [([0], [70])])
    monkeypatch.setattr(lm_eval, "make_disjoint_window", lambda window: window)
    dense.loglikelihood_rolling([SimpleNamespace(args=("a wheel",))])
    assert asked == [(dense.tok_encode("a wheel"), 0, dense.max_length, 1)]
    assert asked[0][0][0] == dense.prefix_token_id


def test_a_context_keeps_all_tokens_that_the_model_has_positions_for(
    lm_eval: ModuleType, dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of a continuation is predicted and never read, so it takes no position."""
    monkeypatch.setattr(lm_eval.KVSiftLM, "max_length", 40)
    context, continuation = dense.tok_encode(CONTEXT), [70, 71, 72]
    expected, _ = by_one_pass(dense, context[-38:], continuation)
    assert score(dense, context, continuation)[0] == pytest.approx(expected, rel=1e-3)


@pytest.mark.skipif(not REAL, reason="lm-eval is not installed")
def test_whole_texts_and_pairs_through_lm_eval(dense: Any) -> None:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    assert get_model("kvsift") is type(dense)
    assert lm_eval
    rolling = [Instance("loglikelihood_rolling", {}, (CONTEXT,), 0)]
    ids = dense.tok_encode(CONTEXT)
    assert dense.loglikelihood_rolling(rolling)[0] == pytest.approx(by_one_pass(dense, [0], ids)[0], rel=1e-3)
    pairs = [Instance("loglikelihood", {}, (CONTEXT, CONTINUATION), 0)]
    expected, _ = by_one_pass(dense, dense.tok_encode(CONTEXT), ids := dense.tok_encode(CONTINUATION, False))
    assert ids
    assert dense.loglikelihood(pairs, disable_tqdm=True)[0][0] == pytest.approx(expected, rel=1e-3)
