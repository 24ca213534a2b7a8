"""KV on the host, of a model that runs there too."""

from __future__ import annotations

from typing import Any

from kvsift.errors import InputError
from kvsift.stores.paged import PagedStore


class HostStore(PagedStore):
    """As ``PagedStore``; refuses a model on another device."""

    def __init__(self, shape: Any, num_rows: int, page_size: int, like: Any, *args: Any, **kwargs: Any) -> None:
        if like.device.type != "cpu":
            raise InputError(
                f"placement=host keeps the model on the CPU, and this one is on {like.device}. Move it, or use "
                "placement=split or placement=offload."
            )
        super().__init__(shape, num_rows, page_size, like, *args, **kwargs)
