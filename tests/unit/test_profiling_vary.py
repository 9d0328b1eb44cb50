"""dtrrun.profiling.vary"""

import pytest

from dtrrun.profiling.vary import parse_range, parse_template, with_value


@pytest.mark.parametrize(
    ("target", "template", "expected"),
    [
        ("train.py --lr 1", "--batch-size {}", "train.py --lr 1 --batch-size 8"),
        ("train.py --batch-size 64 --lr 1", "--batch-size {}", "train.py --batch-size 8 --lr 1"),
        ("train.py --batch-size=64 --lr 1", "--batch-size {}", "train.py --batch-size=8 --lr 1"),
        ("train.py --batch-size=64", "--batch-size={}", "train.py --batch-size=8"),
        ("train.py data.batch=64 x=1", "data.batch={}", "train.py data.batch=8 x=1"),
        ("train.py x=1", "data.batch={}", "train.py x=1 data.batch=8"),
        ("train.py --batch-size", "--batch-size {}", "train.py --batch-size --batch-size 8"),
        ("train.py", "{}", "train.py 8"),
        ("train.py", "--shape {},3", "train.py --shape 8,3"),
    ],
)
def test_where_the_value_goes(target, template, expected):
    assert with_value(target.split(), parse_template(template), 8) == expected.split()


@pytest.mark.parametrize("text", ["--batch-size", "--a {} --b {}", "--a '{}", ""])
def test_a_template_has_one_place(text):
    with pytest.raises(ValueError, match=r"--batch-size|quotation"):
        parse_template(text)


def test_a_range():
    assert parse_range("8:512") == (8, 512)
    for text in ("8", "8:", "9:8", "0:4", "-1:4", "a:b", "1.5:2"):
        with pytest.raises(ValueError, match="not a range"):
            parse_range(text)
