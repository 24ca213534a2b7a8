"""A budget that covers the context changes nothing: logits of plain forward passes equal eager attention's."""

import pytest
import torch
from models.tiny import FAMILIES, covered, empty_cache, logits, prompt, ragged, tiny
from turns import in_turns

TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.mark.parametrize(("family", "padding"), in_turns(FAMILIES, ["left", "right", "holes"]))
def test_padding_anywhere_gives_the_logits_of_eager_attention(family: str, padding: str) -> None:
    model = tiny(family)
    batch = ragged(90, 53, 88, side="right" if padding == "right" else "left")
    if padding == "holes":
        batch["attention_mask"][1, 60:75] = 0
        batch["attention_mask"][2, [0, 1, 40, 89]] = 0
    real = batch["attention_mask"].bool()
    expected = logits(model, **batch)
    with covered(model):
        torch.testing.assert_close(logits(model, **batch)[real], expected[real], **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_fed_in_pieces_give_the_logits_of_eager_attention(family: str) -> None:
    model = tiny(family)
    expected = logits(model, prompt(80))
    with covered(model):
        cache, answers = empty_cache(model), []
        for piece in prompt(80).split([50, 1, 1, 7, 21], dim=1):
            answers.append(logits(model, piece, past_key_values=cache))
        torch.testing.assert_close(torch.cat(answers, 1), expected, **TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_fed_in_pieces_answer_as_they_do_alone(side: str) -> None:
    model = tiny()
    batch = ragged(64, 20, 41, side=side)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    with covered(model):
        alone = [logits(model, prompt(length, seed=row))[0] for row, length in enumerate((64, 20, 41))]
        cache, answers = empty_cache(model), []
        for start, stop in ((0, 30), (30, 31), (31, 64)):  # one row is padding alone in the first piece, or the last
            answers.append(
                logits(
                    model,
                    batch["input_ids"][:, start:stop],
                    attention_mask=batch["attention_mask"][:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=cache,
                )
            )
    together = torch.cat(answers, 1)
    for row, mask in enumerate(batch["attention_mask"].bool()):
        torch.testing.assert_close(together[row, mask], alone[row], **TOLERANCE)


def test_arguments_by_position_reach_the_same_cache() -> None:
    model = tiny()
    expected = logits(model, prompt(80))
    with covered(model) as run, torch.no_grad():
        cache = empty_cache(model)
        model(prompt(80)[:, :79], None, None, cache)
        last = model(prompt(80)[:, 79:], None, None, cache).logits
    torch.testing.assert_close(last, expected[:, 79:], **TOLERANCE)
    assert run.report()["phases"]["decode"]["queries"] == 2  # one token in two layers
