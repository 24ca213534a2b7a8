"""PageMean: rank pages by the logit of their mean key.

score(page) = scale * q . mean(keys of the page)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import pad

from kvsift.methods.base import Phase
from kvsift.methods.pages import PagedMethod


@dataclass(frozen=True)
class PageMean(PagedMethod):
    """Pages by the logit of their mean key, in prefill and decode."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    summaries: ClassVar[tuple[str, ...]] = ("mean_std",)  # kept by the store; a row is [mean | std]

    def features(self, queries: Tensor) -> Tensor:
        return pad(queries, (0, queries.shape[-1]))  # [scale * q | 0]: the score is their product with the row
