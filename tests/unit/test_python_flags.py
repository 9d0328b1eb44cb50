"""dtrrun.launch.python_flags"""

import pytest

from dtrrun.launch.errors import LaunchError
from dtrrun.launch.python_flags import refuse_flags


@pytest.mark.parametrize(
    "words",
    [
        "-I x.py",
        "-uI x.py",
        "-bES x.py",
        "-Ic code",
        "-X dev -S x.py",
        "-Xdev -S x.py",
        "-OO -W error -E x.py",
        "--check-hash-based-pycs always -I x.py",
    ],
)
def test_refused(words):
    with pytest.raises(LaunchError, match=r"leave -[IES] out") as caught:
        refuse_flags(["python", *words.split()])
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "words",
    [
        "",
        "x.py -I",
        "-c code -I",
        "-mpkg -I",
        "-cI",
        "-W I x.py",
        "-XI x.py",
        "-uP -s x.py",
        "- -I",
        "-- x.py -I",
        "--version",
    ],
)
def test_passed(words):
    refuse_flags(["python", *words.split()])
