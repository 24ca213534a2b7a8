"""Plans that requests may name."""

from __future__ import annotations

import pytest

from kvsift.server.api_errors import ApiError
from kvsift.server.plan_list import PlanList, spelling


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
