"""API keys of a file, addresses that need one, and plans that requests may name."""

from pathlib import Path

import pytest
from refusals import refused

from kvsift.server.api_errors import ApiError
from kvsift.server.settings import PlanList, check_exposure, read_keys, spelling


@pytest.mark.parametrize(("host", "keys", "is_open", "is_refused"), [
    ("127.0.0.1", [], False, False), ("::1", [], False, False), ("localhost", [], False, False),
    ("0.0.0.0", [], False, True), ("", [], False, True), ("example.org", [], False, True),
    ("0.0.0.0", ["k"], False, False), ("0.0.0.0", [], True, False),
])  # fmt: skip
def test_other_machines_need_a_key(host: str, keys: list, is_open: bool, is_refused: bool) -> None:
    if is_refused:
        with refused("missing_input"):
            check_exposure(host, keys, is_open)
    else:
        check_exposure(host, keys, is_open)


def test_a_key_file_of_comments_alone_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n\n")
    with refused("missing_input"):
        read_keys(file, {})


def test_plans_are_compared_as_texts() -> None:
    plans = PlanList(["quest:budget=96:window=32", "dense"], ["decode=quest:budget=96:sinks=4:window=32", "dense"])
    assert [plans.index(plan) for plan in (None, "quest:window=32:budget=96", " quest: budget=96:window=32 ")] == [
        0
    ] * 3
    assert plans.index("decode=quest:budget=96:sinks=4:window=32") == 0
    assert plans.index("dense") == 1
    for other in ("quest", "quest:budget=97:window=32", "loki:calibration=/etc/passwd", "", "dense,dense"):
        with pytest.raises(ApiError, match="is not one of this server's: quest:budget=96:window=32; dense"):
            plans.index(other)
    auto = PlanList(["auto", "dense"], ["quest:budget=96", "dense"])
    assert auto.names == ["quest:budget=96", "dense"]
    assert [auto.index(plan) for plan in ("auto", "quest:budget=96", None)] == [0] * 3
    with pytest.raises(ApiError, match="is not one of this server's"):
        plans.index("auto")
    assert spelling("decode=quest:b=2:a=1, prefill=dense") == spelling("prefill=dense,decode=quest:a=1:b=2")
