"""The compiled core: attention, page scores and exact search on the host, at the speed of its memory.

``available`` says whether it is here. Where it is not, everything else here raises InputError with ``why_missing()``;
``kvsift.native.twins`` has the same functions in plain torch.
"""

from kvsift.native.attention import attend_dense, attend_units
from kvsift.native.codes import Codes
from kvsift.native.loader import available, core, level, levels, num_threads, use_level, why_missing
from kvsift.native.memory import advise_huge, bandwidth
from kvsift.native.pages import choose_pages, page_scores
from kvsift.native.scan import scan, scan_codes

__all__ = [
    "Codes",
    "advise_huge",
    "attend_dense",
    "attend_units",
    "available",
    "bandwidth",
    "choose_pages",
    "core",
    "level",
    "levels",
    "num_threads",
    "page_scores",
    "scan",
    "scan_codes",
    "use_level",
    "why_missing",
]
