"""Pack what is large in results/ and not packed yet, before it is committed; every reader takes both.

    python lab/pack_results.py

kvsift eval packs a result of which nothing is left out; this is for benchmarks and for results that stay unfinished.
"""

from __future__ import annotations

from pathlib import Path

from kvsift_lab.eval.packed import pack_large, packed_path

RESULTS = Path(__file__).parent.parent / "results"
LEAST = 8_000  # bytes: the tree is near its limit

if __name__ == "__main__":
    for path in sorted([*RESULTS.rglob("*.json"), *RESULTS.rglob("*.jsonl")]):
        if pack_large(path, LEAST):
            print(packed_path(path).relative_to(RESULTS.parent))
