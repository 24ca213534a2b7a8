"""What layers pass up: to the layers above, in the same pass, of the same row, and no further."""

from kvsift.layer.layer_messages import LayerMessages


def test_a_message_is_found_by_the_layers_above_alone() -> None:
    messages = LayerMessages()
    for layer in (1, 2, 4):
        messages.begin(0, layer)
        if layer == 2:
            assert messages.get(0, layer, "key") is None
            messages.put(0, layer, "key", "two")
            assert messages.get(0, layer, "key") is None, "a layer gets its own message"
    assert messages.get(0, 4, "key") == "two"
    assert messages.get(0, 4, "other") is None


def test_the_newest_message_replaces_the_one_below() -> None:
    messages = LayerMessages()
    for layer in (1, 2, 3):
        messages.begin(0, layer)
        assert messages.get(0, layer, "key") == (layer - 1 or None)
        messages.put(0, layer, "key", layer)


def test_a_pass_ends_where_the_next_begins() -> None:
    """A pass that broke off half-way included: the next one begins at a layer that is not above."""
    messages = LayerMessages()
    for layer in (1, 2):
        messages.begin(0, layer)
        messages.put(0, layer, "key", layer)
    messages.begin(0, 1)
    messages.begin(0, 3)
    assert messages.get(0, 3, "key") is None
    messages.put(0, 3, "key", 3)
    messages.begin(0, 3)
    messages.begin(0, 4)
    assert messages.get(0, 4, "key") is None


def test_rows_and_keys_keep_to_themselves_and_forgetting_ends_the_pass_of_all() -> None:
    messages = LayerMessages()
    for row in (0, 1):
        messages.begin(row, 1)
        messages.put(row, 1, "key", row)
        messages.put(row, 1, "other", "else")
    for row in (0, 1):
        messages.begin(row, 2)
        assert messages.get(row, 2, "key") == row
    messages.clear()
    messages.begin(0, 3)
    assert messages.get(0, 3, "key") is None
