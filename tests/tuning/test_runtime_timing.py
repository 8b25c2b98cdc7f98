"""Times of single layers, and the processor they were measured on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft_tune.runtime_target.bench import middle
from weft_tune.runtime_target.fastest import describe_processor


def test_disturbed_runs_do_not_count() -> None:
    assert middle([3, 3, 4, 4, 3, 4, 900, 1]) == pytest.approx((3 + 3 + 4 + 4) / 4)
    assert middle([5]) == 5


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("model name : Xeon\nflags : avx2 avx512bw avx512_vnni\n", r"Xeon, which has instructions .* \(AVX-512 VNNI\)"),
        ("model name : i7\nflags : sse avx2\n", r"i7, which has none made for 8-bit products \(AVX2\)"),
        ("Features : asimd asimddp i8mm\n", r".*, which has instructions .* \(i8mm, dot products\)"),
        ("model name : old\nflags : sse\n", "old$"),
    ],
)
def test_a_processor_is_describe_processor_by_what_the_system_says(told: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(told)
    assert re.match(words, describe_processor(tmp_path / "cpuinfo"))


def test_a_system_that_says_nothing_has_a_processor_too(tmp_path: Path) -> None:
    assert describe_processor(tmp_path / "none")
