"""The sentences of `why`: the reason first, and of the sums what does not cancel."""

from __future__ import annotations

from typing import Any

from rhino_jax.explain.words import CostTerms, Line, _cause, _reasons
from rhino_jax.plan.records import Predicted


UP = "params['up']"
REDUCED: Line = ("all-reduce", ("x", "y"), "m.py:7 (f)", f"gradient of {UP}: sum of x")
SCATTERED: Line = ("reduce-scatter", ("x",), "m.py:7 (f)", f"gradient of {UP}: sum")
GATHERED: Line = ("all-gather", ("x", "y"), "m.py:9 (g)", f"gathers {UP}: P('x') → P()")
SWAPPED: Line = ("all-gather", ("y", "x"), "m.py:9 (g)", f"gathers {UP}: P('y') → P()")
LATER: Line = ("all-gather", ("x",), "m.py:20 (h)", "gathers y: P('x') → P()")


def cost(lines: dict[Line, float], compute_s: float = 1.0, peak: int = 100) -> Any:
    sent_s = sum(lines.values())
    predicted = Predicted(compute_s + sent_s, compute_s, sent_s, peak, 0.0)
    return CostTerms(predicted, compute_s + sent_s, 0.0, peak, {}, lines)


def test_what_one_line_does_to_one_value_is_one_term() -> None:
    planned, other = cost({SCATTERED: 0.4}), cost({REDUCED: 0.6})
    assert _cause(other, planned) == (
        "200 ms more go to all-reduces over `x+y` in place of reduce-scatters over"
        " `x` at m.py:7 (gradient of params['up']: sum of x)"
    )
    assert _reasons(other, planned).count("reduce") == 2


def test_gathers_that_only_change_their_axes_are_left_out() -> None:
    planned = cost({GATHERED: 0.3, SCATTERED: 0.4})
    other = cost({SWAPPED: 0.3, SCATTERED: 0.5})
    assert _reasons(other, planned) == (
        "100 ms more of reduce-scatters over `x` at m.py:7 (gradient of params['up']:"
        " sum)"
    )


def test_a_gather_that_only_moves_to_another_line_is_left_out() -> None:
    planned, other = cost({GATHERED: 0.3}), cost({LATER: 0.301}, compute_s=1.1)
    assert _reasons(other, planned) == "100 ms more of compute"
    assert _cause(other, planned) == "each device computes 100 ms longer"


def test_what_does_not_cancel_stays() -> None:
    planned, other = cost({GATHERED: 0.3}), cost({LATER: 0.5})
    assert "500 ms more of all-gathers over `x` at m.py:20" in _reasons(other, planned)
    assert "300 ms less of all-gathers over `x+y`" in _reasons(other, planned)


def test_memory_is_the_reason_where_time_is_not() -> None:
    planned, other = cost({}), cost({}, peak=3 * 2**30)
    assert _cause(other, planned) == "the peak is 3.00 GiB higher"
    assert _cause(cost({}), planned) == "nothing is gained"
