"""The compiled core: attention, page scores and exact search in host memory, at the speed of that memory.

``available`` returns whether it is installed. Without it the other functions raise InputError with ``why_missing()``;
``kvsift.native.twins`` has those of attention, scores and search in plain torch.
"""

from kvsift.native.attention import attend_dense, attend_units, merge_estimate, takes_estimate
from kvsift.native.codes import Codes
from kvsift.native.loader import available, core, level, levels, num_threads, use_level, why_missing
from kvsift.native.memory import advise_huge
from kvsift.native.pages import choose_pages, page_scores
from kvsift.native.scan import all_scores, scan, scan_codes
from kvsift.native.shapes import PooledRows
from kvsift.native.sketch import choose_sketched, sketch_rows, sketches_fit, takes_tokens
