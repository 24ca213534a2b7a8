"""What layers pass up: to the layers above, in the same pass, of the same row, and no further."""

from __future__ import annotations

from kvsift.runtime.relay import Relay


def test_a_message_is_found_by_the_layers_above_alone() -> None:
    relay = Relay()
    for layer in (1, 2, 4):
        relay.enter(0, layer)
        if layer == 2:
            assert relay.find(0, layer, "key") is None
            relay.leave(0, layer, "key", "two")
            assert relay.find(0, layer, "key") is None, "a layer hears itself"
    assert relay.find(0, 4, "key") == "two"
    assert relay.find(0, 4, "other") is None


def test_the_newest_message_replaces_the_one_below() -> None:
    relay = Relay()
    for layer in (1, 2, 3):
        relay.enter(0, layer)
        assert relay.find(0, layer, "key") == (layer - 1 or None)
        relay.leave(0, layer, "key", layer)


def test_a_pass_ends_where_the_next_begins() -> None:
    """A pass that broke off half-way included: the next one begins at a layer that is not above."""
    relay = Relay()
    for layer in (1, 2):
        relay.enter(0, layer)
        relay.leave(0, layer, "key", layer)
    relay.enter(0, 1)
    relay.enter(0, 3)
    assert relay.find(0, 3, "key") is None
    relay.leave(0, 3, "key", 3)
    relay.enter(0, 3)
    relay.enter(0, 4)
    assert relay.find(0, 4, "key") is None


def test_rows_and_keys_keep_to_themselves_and_forgetting_ends_the_pass_of_all() -> None:
    relay = Relay()
    for row in (0, 1):
        relay.enter(row, 1)
        relay.leave(row, 1, "key", row)
        relay.leave(row, 1, "other", "else")
    for row in (0, 1):
        relay.enter(row, 2)
        assert relay.find(row, 2, "key") == row
    relay.forget()
    relay.enter(0, 3)
    assert relay.find(0, 3, "key") is None
