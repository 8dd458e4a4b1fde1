"""`streamrl bench plan`: numbers out of their range are told before anything is drawn."""

from __future__ import annotations

import pytest

from streamrl_jax.bench import plan_speed
from streamrl_jax.cli import main


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seed", "-1"], "--seed -1: give 0 or more"),
        (["--sigma", "nan"], "--sigma nan: give a number from 0 to 10"),
        (["--limit", "0"], "--limit 0.0: give a number from 1 to 1e+09"),
        (["--error", "0.3", "inf"], "--error inf: give a number from 0 to 10"),
        (["--instances", "4", "0"], "--instances 0: give a number from 1 to 100000"),
        (["--prompts", "9999999", "--answers", "100"], "--prompts times --answers is 999999900: give fewer"),
        (
            ["--slots", "99999999999999999999999"],
            "--slots 99999999999999999999999: give a number from 1 to 1e+06",
        ),
    ],
)
def test_a_number_out_of_its_range_is_named(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_speed, "drawn", None)
    assert main(["bench", "plan", *options]) == 2
    assert said in capsys.readouterr().err
