"""Tables, text and charts of results."""

from typing import Any

import pytest
from kvsift_lab.bench import attention as attention_report
from kvsift_lab.bench import chart
from kvsift_lab.bench import decode as decode_report
from lab.bench.fake_results import attention_result, decode_result


@pytest.fixture
def result() -> dict[str, Any]:
    return attention_result()


def test_the_best_dense_kernel_is_what_speed_is_compared_with(result: dict[str, Any]) -> None:
    point = result["points"][1]  # 32/32 at 32K
    assert attention_report.best_dense(point)[0] == "sdpa-cudnn"
    dense, sparse = attention_report.best_dense(point)[1], attention_report.medians(point)["quest-minmax"]
    row = attention_report.attention_tables(result).splitlines()[5]
    assert row.startswith(f"| 32K | {dense * 1e6:.1f} | 1.02 | sdpa-cudnn | ")
    assert f"| {sparse * 1e6:.1f} | 1.54 | {dense / sparse:.1f}x |" in row


def test_without_a_dense_kernel_there_is_time_and_floor_but_no_speed_up(result: dict[str, Any]) -> None:
    for point in result["points"]:
        point["variants"] = [variant for variant in point["variants"] if variant["role"] == "sparse"]
    assert "| 32K | - | - | - | - | 22.9 | 1.54 | - |" in attention_report.attention_tables(result)
    assert attention_report.break_evens(result) == []
    assert "best dense none ran" in attention_report.point_text(result["points"][0], 4.5e12)
    text = attention_report.attention_tables(result) + attention_report.point_text(result["points"][0], 4.5e12)
    assert "inf" not in text.lower()
    assert attention_report.dense_tables(result)
    assert chart.attention_chart(result)


def test_what_was_not_measured_is_listed_once(result: dict[str, Any]) -> None:
    result["points"].append(
        {"num_query_heads": 32, "num_kv_heads": 8, "context": 1 << 19, "batch": 1, "reason": "late"}
    )
    left = ["flashinfer: flashinfer cannot be imported", "32/8 heads at 512K: late"]
    assert attention_report.left_out(result) == left
    assert "not measured, late" in attention_report.point_text(result["points"][-1], 4.5e12)
    for render in (attention_report.attention_tables, attention_report.dense_tables, attention_report.breakdown_table):
        assert "512K" not in render(result)


def test_losses_are_shown_and_their_absence_is_said(result: dict[str, Any]) -> None:
    slow = attention_result(fixed_us=12.0)
    table = attention_report.losses_table(slow)
    assert "| 32/8 | 4K | quest-minmax | 14.1 | 5.7 (sdpa-cudnn) | 2.5x |" in table
    assert "32K" not in table
    quick = attention_report.losses_table(attention_result(fixed_us=0.0))
    assert quick.startswith("At no measured context")


def test_a_chart_is_an_svg_that_names_its_result(result: dict[str, Any]) -> None:
    picture = chart.attention_chart(result)
    assert picture == chart.attention_chart(result)
    assert picture.startswith(b"<?xml")
    assert chart.digest(result).encode() in picture
    for words in ("FlashInfer", "32 query heads, 8 KV heads", "SDPA cuDNN", "times faster", "floor, dense"):
        assert (words.encode() in picture) == (words != "FlashInfer")  # which did not run
    assert chart.digest(result) != chart.digest(attention_result(fixed_us=1.0))
    assert chart.attention_chart(result, "png").startswith(b"\x89PNG")


def test_decode_tables_show_floor_speed_up_and_what_the_engine_does() -> None:
    result = decode_result()
    first, second = decode_report.decode_table(result).splitlines()[2:]
    assert first.startswith("| 4K | 1 | 3.80 | 3.45 | 1.10 | ")
    assert second.endswith(" | 1.74x | 0.020 |")
    assert decode_report.engine_table(result).splitlines()[2:] == [
        "| 4K | 1 | 9,000 | dense | +0.9 % |",
        "| 128K | 1 | 9,000 | sparse | -42.7 % |",
    ]
    kernels = decode_report.kernel_tables(result)
    assert "128K, batch 1, sparse:" in kernels
    assert "| `gemv` | 64 | 3000 | 75% |" in kernels
    assert "below" not in kernels
    for variant in result["points"][0]["variants"]:
        variant["kernels"] += [{"name": f"k{number}", "launches": 1.5, "seconds": 1e-5} for number in range(2)]
    assert "k1" not in decode_report.kernel_tables(result)
    assert "| 2 below 1% each | 3 | 20 | 0% |" in decode_report.kernel_tables(result)
    assert "auto" in decode_report.point_text(result["points"][0], 4.5e12)
