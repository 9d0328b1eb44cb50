"""dtrrun.sizes"""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrrun.sizes import UNITS, as_bytes, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GB", 6_000_000_000),
        ("6GiB", 6 * 2**30),
        ("512MB", 512_000_000),
        ("512 mb", 512_000_000),
        ("6G", 6_000_000_000),
        ("6g", 6_000_000_000),
        ("6 GB", 6_000_000_000),
        ("6 Gi", 6 * 2**30),
        ("512m", 512_000_000),
        ("2t", 2_000_000_000_000),
        ("1.5GiB", 3 * 2**29),
        (".5kB", 500),
        ("123456789B", 123_456_789),
        (" 2TiB ", 2**41),
        ("0.3GB", 300_000_000),  # floats would give 299999999
        ("1.9B", 1),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "size"), [("50%", 500), ("12.5%", 125), ("150 %", 1500)])
def test_percentage_is_of_the_whole(text, size):
    assert parse_size(text, lambda: 1000) == size


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("200", "has no unit; write 200MB, 200GB or 200B, as one word"),
        ("6 G B", "is not a size"),
        ("6PB", "unknown unit"),
        ("0GB", "less than one byte"),
        ("0", "less than one byte"),
        ("0.5B", "less than one byte"),
        ("-1GB", "is not a size"),
        ("1e9B", "is not a size"),
        ("1_000MB", "is not a size"),
        ("GB", "is not a size"),
        ("", "is not a size"),
        ("nanGB", "is not a size"),
        ("50%", "percentage is not possible here"),
    ],
)
def test_what_is_not_a_size_is_refused_with_a_hint(text, hint):
    with pytest.raises(ValueError, match=r".") as caught:
        parse_size(text)
    assert hint in str(caught.value)


@given(number=st.integers(1, 10**7), places=st.integers(0, 6), unit=st.sampled_from(sorted(UNITS)))
def test_decimal_fractions_are_exact(number, places, unit):
    exact = Decimal(number).scaleb(-places) * UNITS[unit]
    text = f"{Decimal(number).scaleb(-places):f}{unit}"
    if exact < 1:
        with pytest.raises(ValueError, match="less than one byte"):
            parse_size(text)
    else:
        assert parse_size(text) == int(exact)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (200_000_000, "200 MB"),
        (6 * 2**30, "6.44 GB"),
        (999_999_999, "999 MB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_format(size, text):
    assert format_size(size) == text


@pytest.mark.parametrize(("size", "expected"), [(None, None), (7, 7), ("2kB", 2000), ("2 k", 2000)])
def test_a_budget_is_bytes_or_text(size, expected):
    assert as_bytes(size) == expected


@pytest.mark.parametrize("size", [0, -1, True, 1.5, b"1GB"])
def test_what_is_no_budget(size):
    with pytest.raises(ValueError, match="is not a budget"):
        as_bytes(size)
