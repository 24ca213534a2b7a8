"""Messages between the layers of one forward pass, such as a score map to be averaged with that of the layer above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

Content = TypeVar("Content")


class Message(NamedTuple):
    """A message, and the layer that sent it."""

    layer: int
    content: Any


class LayerMessages:
    """Messages of the current forward pass, sequence by sequence; the layers of one model share them.

    Nothing outlives its pass: layers come in ascending order, so one that is not above the layer before it begins
    another pass. A new message replaces the one under its key, so that those of a single layer are kept.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, dict[Any, Message]]] = {}  # row -> last layer that began, messages by key

    def begin(self, row: int, layer: int) -> None:
        """A layer begins to attend a sequence's new tokens."""
        last, messages = self._rows.get(row, (layer, {}))
        self._rows[row] = (layer, messages if layer > last else {})

    def get(self, row: int, layer: int, key: Any) -> Any:
        """The message under this key of the nearest layer below in this pass, or None."""
        message = self._rows[row][1].get(key)
        return message.content if message is not None and message.layer < layer else None

    def put(self, row: int, layer: int, key: Any, content: Any) -> None:
        """Send a message to the layers above."""
        self._rows[row][1][key] = Message(layer, content)

    def shared(self, row: int, key: Any, make: Callable[[], Content]) -> Content:
        """What the first layer to ask for it in this pass has made, for all others."""
        messages = self._rows[row][1]
        if key not in messages:
            self.put(row, -1, key, make())
        content: Content = messages[key].content
        return content

    def clear(self) -> None:
        """End the pass of all sequences: their order or lengths are about to change."""
        self._rows.clear()
