"""Decode steps in small: ragged batches on scattered pages, NaN wherever no token is, and what is exact about them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from kernels.conftest import DEVICE
from kernels.paged_cases import coded, plain
from torch import Tensor

from kvsift.kernels.page_summary import SUMMARIES, summarise
from kvsift.kernels.paged import PagedKV

Lists = tuple[Tensor, Tensor]  # pages int32 [batch, num_rows, capacity], counts int32 [batch, num_rows]


class DecodeCase(NamedTuple):
    """What one decode step of one layer is given."""

    queries: Tensor  # [batch, num_query_heads, head_dim]
    kv: PagedKV
    summary: Tensor  # [num_kv_heads, num_pages, width]
    spans: Tensor  # int32 [batch, 4]
    kind: str

    @property
    def scale(self) -> float:
        return self.kv.head_dim**-0.5

    @property
    def capacity(self) -> int:
        """What the lists need, and a little more."""
        first, stop, chosen, held = self.spans.unbind(1)
        return int((first + chosen + held - stop).max()) + 1

    def new_lists(self, shared: bool, capacity: int | None = None) -> Lists:
        """Lists for a kernel to write; -7 is in no kernel's answer."""
        num_rows = self.kv.num_kv_heads if shared else self.queries.shape[1]
        pages = torch.full((self.kv.batch, num_rows, capacity or self.capacity), -7, device=self.queries.device)
        return pages.int(), torch.full_like(pages[:, :, 0], -7).int()


def draw_case(
    lengths: Sequence[int], num_kv_heads: int, group: int, head_dim: int, page_size: int, dtype: torch.dtype, *,
    kind: str = "minmax", spans: Sequence[tuple[int, int, int]] | None = None, foreign: bool = False,
    table_pages: int | None = None, seed: int = 0, device: str = DEVICE, in_8_bits: bool = False,
) -> DecodeCase:  # fmt: skip
    """A step over rows of these lengths.

    spans: pages of sinks, pages of window and pages to choose of each row, cut to what the row holds.
    foreign: blocks [num_blocks, page_size, num_kv_heads, head_dim] of someone else's, keys and values in one tensor.
    in_8_bits: with scales (``kernels.coded_pages``), and summaries of what they are then.
    """
    generator = torch.Generator(device).manual_seed(seed)
    held = torch.tensor([-(-length // page_size) for length in lengths])
    num_pages = int(held.sum()) + 2  # two belong to nobody; the table is padded with one of them
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.full((len(lengths), table_pages or int(held.max()) + 1), int(order[-1]), dtype=torch.int32)
    filled = torch.arange(table.shape[1]) < held[:, None]
    table[filled] = order[:-2]
    tokens = (torch.tensor(lengths)[:, None] - torch.arange(table.shape[1]) * page_size).clamp(0, page_size)
    on_page = torch.zeros(num_pages, dtype=torch.int64)
    on_page[table[filled].long()] = tokens[filled]
    written = (torch.arange(page_size) < on_page[:, None]).to(device)  # [num_pages, page_size]
    pools = torch.randn(2, num_kv_heads, num_pages, page_size, head_dim, generator=generator, device=device)
    pools[0, ..., 0] = 20 * pools[0, ..., 0] + 7  # keys have an outlier channel and an offset, as real ones do
    keys, values = pools.masked_fill_(~written[:, :, None], torch.nan).to(dtype)
    if foreign:
        blocks = torch.stack([keys, values]).permute(2, 0, 3, 1, 4).contiguous()  # [num_pages, 2, page_size, ..]
        keys, values = (blocks[:, half].permute(2, 0, 1, 3) for half in (0, 1))
    kv = PagedKV(keys, values, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device))
    kv = coded(kv) if in_8_bits else kv
    summary = summarise(kind, plain(kv, dtype).keys, written)
    nowhere = (~written[:, 0]).nonzero().flatten()
    if summary.element_size() == 1:
        summary.view(torch.uint8)[:, nowhere] = 0x7F  # NaN
    else:
        summary[:, nowhere] = torch.nan
    queries = torch.randn(len(lengths), num_kv_heads * group, head_dim, generator=generator, device=device).to(dtype)
    wanted = spans or [(1, 2, 3)] * len(lengths)
    return DecodeCase(queries, kv, summary, _spans(held.tolist(), wanted).to(device), kind)


def _spans(held: Sequence[int], wanted: Sequence[tuple[int, int, int]]) -> Tensor:
    rows = []
    for pages, (sinks, window, chosen) in zip(held, wanted, strict=True):
        stop = max(pages - window, 0)
        first = min(sinks, stop)
        rows.append((first, stop, min(chosen, stop - first), pages))
    return torch.tensor(rows, dtype=torch.int32)


def everything(kv: PagedKV, num_rows: int) -> Lists:
    """Lists of all pages."""
    held = (-(-kv.lengths // kv.page_size))[:, None].expand(-1, num_rows)
    pages = torch.arange(int(held.max()), dtype=torch.int32, device=held.device)
    return pages.expand(*held.shape, -1).contiguous(), held.contiguous()


def exact_scores(case: DecodeCase, shared: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """The formula of the kind in one dtype, as ``kernels.score_pages`` lays it out, with 0 behind the candidates."""
    features = SUMMARIES[case.kind].features(case.queries.double() * case.scale).to(dtype)
    rows = case.summary[:, case.kv.table.long()].float().to(dtype)  # [num_kv_heads, batch, max_pages, width]
    scores = (features.unflatten(1, (len(rows), -1)) @ rows.transpose(0, 1).mT).double()
    scores = scores.amax(2) if shared else scores.flatten(1, 2)  # by logical page
    pages = case.spans[:, 0, None, None] + torch.arange(scores.shape[2], device=scores.device)
    return of_candidates(case, scores.gather(2, pages.clamp_max(scores.shape[2] - 1).expand_as(scores)))


def of_candidates(case: DecodeCase, scores: Tensor) -> Tensor:
    """Scores [batch, heads, max_pages] with 0 behind those of candidates."""
    counts = case.spans[:, 1] - case.spans[:, 0]
    return scores.masked_fill(torch.arange(scores.shape[2], device=scores.device) >= counts[:, None, None], 0.0)


def tokens_of(kv: PagedKV, lists: Lists) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of lists, and which of them are there: [batch, num_rows, capacity * page_size]."""
    pages, counts = lists
    listed = torch.arange(pages.shape[2], device=pages.device) < counts[..., None]
    slots = torch.arange(kv.page_size, device=pages.device)
    positions = (pages.masked_fill(~listed, 0).long()[..., None] * kv.page_size + slots).flatten(2)
    return positions, listed.repeat_interleave(kv.page_size, 2) & (positions < kv.lengths[:, None, None])


def exact_attention(
    queries: Tensor, kv: PagedKV, lists: Lists, *, scale: float, softcap: float | None = None,
    sink_logit: Tensor | None = None, dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """The textbook formula in one dtype over listed tokens, fetched one by one."""
    (positions, seen), kv = tokens_of(kv, lists), plain(kv, dtype)
    num_rows = seen.shape[1]
    batch = torch.arange(kv.batch, device=seen.device)[:, None, None]
    physical = kv.table[batch, positions // kv.page_size].long()
    heads = torch.arange(num_rows, device=seen.device)[:, None] // (num_rows // kv.num_kv_heads)
    keys, values = (
        pool[heads, physical, positions % kv.page_size].to(dtype).masked_fill(~seen[..., None], 0.0)
        for pool in (kv.keys, kv.values)
    )  # [batch, num_rows, num_tokens, head_dim]
    logits = queries.to(dtype).unflatten(1, (num_rows, -1)) @ keys.mT * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
    if sink_logit is not None:
        extra = sink_logit.to(dtype).view(1, num_rows, -1, 1).expand(kv.batch, -1, -1, -1)
        logits = torch.cat([logits, extra], -1)
    return (logits.softmax(-1)[..., : seen.shape[2]] @ values).flatten(1, 2)
