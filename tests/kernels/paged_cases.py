"""Small paged caches for tests of kernels: rows of unlike length on scattered pages, NaN where no token is."""

import torch
from torch import Tensor

from kvsift.kernels.coded_pages import codes_of, read_pages, write_rows
from kvsift.kernels.page_summary import row_format
from kvsift.kernels.paged import PagedKV
from kvsift.native.coded_rows import coded_width, encode_rows_reference


def paged_kv(
    lengths: list[int], num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype, device: str,
    foreign: bool = False,
) -> PagedKV:  # fmt: skip
    """Caches in which each row's last token is still to be written.

    foreign: blocks [num_blocks, page_size, num_kv_heads, head_dim] of someone else's, keys and values in one tensor.
    """
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    held = [-(-length // page_size) for length in lengths]
    num_pages = sum(held) + 2  # two belong to nobody
    order = torch.randperm(num_pages, generator=generator).int()
    table = torch.zeros(len(lengths), max(held) + 1, dtype=torch.int32)
    pools = torch.full((2, num_kv_heads, num_pages, page_size, head_dim), torch.nan)
    for row, length in enumerate(lengths):
        table[row, : held[row]] = order[sum(held[:row]) :][: held[row]]
        for position in range(length - 1):
            page = int(table[row, position // page_size])
            pools[:, :, page, position % page_size] = _tokens(2, num_kv_heads, head_dim, generator)
    keys, values = pools.to(device, dtype)
    if foreign:
        blocks = torch.stack([keys, values]).permute(2, 0, 3, 1, 4).contiguous()  # [num_pages, 2, page_size, ..]
        keys, values = (blocks[:, half].permute(2, 0, 1, 3) for half in (0, 1))
    return PagedKV(keys, values, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device))


def _tokens(*shape: int | torch.Generator) -> Tensor:
    *sizes, generator = shape
    tokens = torch.randn(*sizes, generator=generator)  # type: ignore[call-overload]
    tokens[..., 0] = 20 * tokens[..., 0] + 7  # an outlier channel, as real keys have
    return tokens


def pools_of(kinds: list[str], kv: PagedKV) -> dict[str, Tensor]:
    """A pool for every kind, with a number in it that no kernel writes."""
    pools = {}
    for kind in kinds:
        width, dtype = row_format(kind, kv.head_dim, kv.page_size)
        numbers = torch.full((kv.num_kv_heads, kv.keys.shape[1], width), 77.0, device=kv.keys.device)
        pools[kind] = numbers.to(dtype or kv.keys.dtype)
    return pools


def coded(kv: PagedKV) -> PagedKV:
    """The same tokens in 8 bits; where no token is, the scale is NaN."""
    pools = []
    for pool, turned in ((kv.keys, True), (kv.values, False)):
        heads, pages, page_size, head_dim = pool.shape
        codes = codes_of(
            torch.zeros(heads, pages, page_size, coded_width(head_dim), dtype=torch.int8, device=pool.device)
        )
        slots = torch.arange(pages * page_size, device=pool.device)
        rows = encode_rows_reference(pool.flatten(1, 2), turned=turned)
        write_rows(codes, slots // page_size, slots % page_size, rows)
        pools.append(codes)
    return kv._replace(keys=pools[0], values=pools[1])


def plain(kv: PagedKV, dtype: torch.dtype) -> PagedKV:
    """What a cache in 8 bits holds, in a dtype; another cache as it is."""
    if not kv.coded:
        return kv
    keys, values = read_pages(kv.keys, slice(None), dtype, turned=True), read_pages(kv.values, slice(None), dtype)
    return kv._replace(keys=keys, values=values)


def copy_of(kv: PagedKV) -> PagedKV:
    keys, values = (torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device).copy_(p) for p in kv[:2])
    return kv._replace(keys=keys, values=values)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal numbers, NaN in the same places."""
    return torch.equal(a.float().nan_to_num(nan=12345.0), b.float().nan_to_num(nan=12345.0))


def rounding(exact: Tensor) -> float:
    """What float32 itself may cost: an ulp, or on a GPU, where every kernel adds in an order of its own, a few."""
    return (16 if exact.is_cuda else 1) * torch.finfo(torch.float32).eps * float(exact.norm())


def distance(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor.double() - exact.double()).norm())
