"""The demo does what the README says: every hidden fact is found, sifted and dense."""

import pytest

from kvsift.cli.demo import FACTS, PLAN, demo

ANSWERS = ("48213", "Elena Voss", "velvet canyon", "1874", "340 crowns", "905164")


def test_every_fact_is_answered_sifted_and_dense(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    demo(tokens=3000, plan=PLAN, document=None, device="cpu")
    shown = capsys.readouterr().out.splitlines()
    for (fact, _, question), answer in zip(FACTS, ANSWERS, strict=True):
        assert answer in fact
        row = next(line for line in shown if question in line)
        assert row.count(answer) == 2, row
    read = next(line for line in shown if "KV bytes read" in line)
    assert "(100.0 % of dense)" in read
