"""Which windows of steps can be profiled."""

from __future__ import annotations

import re

import pytest

from egmla_megatron.errors import UserError
from tests.unit.test_check import _check


@pytest.mark.parametrize(
    ("override", "got", "fix"),
    [
        ("profile.steps=[5]", "[5]", "profile.steps=[10,12]"),
        ("profile.steps=[5,6,7]", "[5,6,7]", "profile.steps=[10,12]"),
        ("profile.steps=[6,5]", "[6,5]", "profile.steps=[10,12]"),
        ("profile.steps=[0,5]", "[0,5]", "profile.steps=[10,12]"),
        ("profile.steps=[90,101]", "[90,101]", "profile.steps=[10,12]"),
        ("profile.steps=[20,90]", "[20,90], 71 steps", "profile.steps=[20,22]"),
        ("profile.ranks=[]", "[]", "profile.ranks=[0]"),
        ("profile.ranks=[1,1]", "[1,1]", "profile.ranks=[0]"),
        ("profile.ranks=[2]", "[2]", "profile.ranks=[0]"),
        ("profile.ranks=[-1]", "[-1]", "profile.ranks=[0]"),
    ],
)
def test_a_window_that_cannot_be_profiled(override: str, got: str, fix: str) -> None:
    run = ["train.steps=100", "optimizer.warmup_steps=0"]
    with pytest.raises(UserError, match=re.escape(f"got {got}; allowed: ")) as caught:
        _check([*run, override], 2)
    assert str(caught.value).endswith(f"fix: set {fix}")
    _check([*run, fix], 2)
    _check([*run, "profile.steps=[99,100]", "profile.ranks=[1,0]"], 2)
