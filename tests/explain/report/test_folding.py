from __future__ import annotations

from rhino_jax.explain.report.tables import fold


def labels(*paths: str) -> list[tuple[str, int]]:
    folds = fold((path, "same") for path in paths)
    return [(f.label, len(f.members)) for f in folds]


def test_layers_become_one_row() -> None:
    paths = [f"params['h'][{i}]['w']" for i in range(12)]
    assert labels(*paths) == [("params['h'][0..11]['w']", 12)]


def test_numbers_that_do_not_change_stay() -> None:
    paths = [f"opt_state[0].mu['h_{i}']" for i in range(3)]
    assert labels(*paths) == [("opt_state[0].mu['h_0..2']", 3)]


def test_two_alike_are_shown_both() -> None:
    assert labels("w1", "w2") == [("w1", 1), ("w2", 1)]


def test_what_differs_in_spec_is_not_folded() -> None:
    items = [(f"h{i}", "P('x')" if i < 3 else "P()") for i in range(6)]
    assert [f.label for f in fold(items)] == ["h0..2", "h3..5"]


def test_gaps_and_strides_are_told() -> None:
    assert labels(*(f"h[{i}]" for i in (0, 2, 4, 6))) == [("h[0,2..6]", 4)]
    assert labels(*(f"h[{i}]" for i in (0, 1, 7))) == [("h[*]", 3)]


def test_order_is_that_of_first_members() -> None:
    assert [x for x, _ in labels("b0", "a0", "b1", "z", "b2")] == ["b0..2", "a0", "z"]


def test_several_numbers_at_once() -> None:
    paths = [f"s[{s}].l[{i}]" for s in range(2) for i in range(3)]
    assert labels(*paths) == [("s[0..1].l[0..2]", 6)]


def test_leading_zeros_do_not_hide_paths() -> None:
    assert labels("h01", "h1", "h001", "x") == [("h01", 3), ("x", 1)]
