"""Layers with attention beside a recurrent state, and values that are narrower than keys."""

import pytest
import torch
from models.families import SETTINGS
from models.tiny import SPARSE, covered, greedy, left_alone, logits, prompt, take_over, tiny
from refusals import refused

import kvsift

RECURRENT = ["FalconH1", "Zaya"]


@pytest.mark.parametrize("family", RECURRENT)
def test_beams_take_their_states_along(family: str) -> None:
    model = tiny(family, **SETTINGS[family])
    expected = greedy(model, prompt(60), num_beams=3)
    with covered(model):
        assert torch.equal(greedy(model, prompt(60), num_beams=3), expected)


@pytest.mark.parametrize("family", RECURRENT)
def test_a_rewound_cache_has_the_state_of_its_checkpoint(family: str) -> None:
    cache = kvsift.make_cache(model := tiny(family, **SETTINGS[family]), SPARSE)
    logits(model, prompt(100), past_key_values=cache)
    cache.mark()
    first = logits(model, prompt(9, seed=1), past_key_values=cache)
    for _ in range(2):
        cache.rewind()
        assert cache.get_seq_length() == 100
        assert torch.equal(logits(model, prompt(9, seed=1), past_key_values=cache), first)
    with refused("unsupported_call: layer 0 has a recurrent state"):
        cache.crop(-1)
    cache.reset()
    whole = logits(model, torch.cat([prompt(100), prompt(9, seed=1)], 1), past_key_values=cache)
    torch.testing.assert_close(whole[:, -9:], first, rtol=0, atol=1e-4)


def test_values_that_are_read_from_a_cache_are_as_wide_as_the_model_s() -> None:
    cache = kvsift.make_cache(model := tiny("MiMoV2Flash", **SETTINGS["MiMoV2Flash"]), SPARSE)
    logits(model, prompt(40), past_key_values=cache)
    assert (cache.layers[1].keys.shape, cache.layers[1].values.shape) == ((1, 2, 40, 24), (1, 2, 40, 16))


@pytest.mark.parametrize("way", ["sparse", "make_cache"])
def test_values_wider_than_keys_are_refused(way: str) -> None:
    model = tiny("MiMoV2Flash", **{**SETTINGS["MiMoV2Flash"], "v_head_dim": 32})
    with left_alone(model), refused("unsupported_model: values have 32 channels and its keys 24"):
        take_over(model, way)
