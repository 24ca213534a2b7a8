"""What ``kvsift ask`` says about indexes."""

from __future__ import annotations

from kvsift.cli.report import _index


def test_kinds_are_counted_by_layer_or_by_head() -> None:
    assert _index({}) == "-"
    assert _index({0: [{"indexes": [{"kind": "flat"}]}], 1: [{"indexes": [{"kind": "flat"}]}]}) == "flat in 2 layers"
    auto = {"kind": "auto", "heads": ["graph", "flat_int8"]}
    assert (
        _index({0: [{"indexes": [auto]}], 1: [{"indexes": [auto]}]}) == "graph in 2 KV heads, flat_int8 in 2 KV heads"
    )
