"""What ``kvsift ask`` says about indexes."""

from __future__ import annotations

from kvsift.cli.numbers_table import _index


def test_kinds_are_counted_by_layer_or_by_head() -> None:
    assert _index({}) == ""
    assert _index({0: [{"indexes": [{"kind": "flat"}]}], 1: [{"indexes": [{"kind": "flat"}]}]}) == "flat in 2 layers"
    auto = {"kind": "auto", "heads": ["graph", "flat_int8"]}
    assert (
        _index({0: [{"indexes": [auto]}], 1: [{"indexes": [auto]}]}) == "graph in 2 KV heads, flat_int8 in 2 KV heads"
    )


def test_what_audits_found_is_said() -> None:
    rows = {0: [{"indexes": [{"kind": "graph"}], "audits": {"found": [0.9, 1.0]}}], 1: [{"audits": {"found": []}}]}
    assert _index(rows) == "graph in 1 layers, 95.0 % of a scan's keys found in 2 audits"
