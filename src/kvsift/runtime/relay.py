"""What layers leave for the layers above them within one forward pass, such as a score map to be fused with theirs."""

from __future__ import annotations

from typing import Any, NamedTuple


class Message(NamedTuple):
    """What a layer left, and which one it was."""

    layer: int
    content: Any


class Relay:
    """Messages of the forward pass under way, row by row; the layers of one model share a relay.

    Nothing outlives its pass: layers come in ascending order, so one that is not above the layer before it begins
    another pass. The newest message under a key replaces the one before, so that a single layer's are held.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, dict[Any, Message]]] = {}  # row -> last layer that came, messages by key

    def enter(self, row: int, layer: int) -> None:
        """A layer begins to attend a row's new tokens."""
        last, messages = self._rows.get(row, (layer, {}))
        self._rows[row] = (layer, messages if layer > last else {})

    def find(self, row: int, layer: int, key: Any) -> Any:
        """What the nearest layer below left under this key in this pass, or None."""
        message = self._rows[row][1].get(key)
        return message.content if message is not None and message.layer < layer else None

    def leave(self, row: int, layer: int, key: Any, content: Any) -> None:
        """Leave something for the layers above."""
        self._rows[row][1][key] = Message(layer, content)

    def forget(self) -> None:
        """End the pass for all rows: they are about to change places, or lengths."""
        self._rows.clear()
