"""Every rule against the truth: shards, run and combined, against the whole op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from rhino_jax.frontend import importer  # noqa: F401  registers the rules
from rhino_jax.frontend.check.rule import check_rule
from rhino_jax.frontend.registry import OpContext, lookup, registered
from tests.cases import covering
from tests.frontend.rule_cases import CASES, Case, primitive
from tests.frontend.rule_cases_data import DATA_CASES
from tests.frontend.rule_cases_windows import WINDOW_CASES


ALL_CASES: dict[str, tuple[Case, ...]] = {**CASES, **DATA_CASES, **WINDOW_CASES}

IDENTITIES = {
    "copy_p", "layout_constraint", "pbroadcast", "pvary", "reduced_vary_cast",
    "reduced_vary_cast_p", "relayout", "reshard", "rhino_pin", "sharding_constraint",
    "stage", "with_memory_space_constraint", "pmax", "pmin", "ppermute", "psum",
    "psum_invariant",
}  # fmt: skip
"""Pass their operand on; running them alone takes a mesh or a device's memory."""

UNCUT = {
    "after_all", "axis_index", "create_token", "dce_sink", "debug_callback",
    "debug_print", "dim_as_value", "dimension_size", "empty2", "platform_index",
    "rng_bit_generator", "rng_uniform", "shape_assertion",
}  # fmt: skip
"""Their rules cut nothing, so there is nothing to be true."""

ELSEWHERE = {"custom_partitioning", "pallas_call", "rhino_rotate"}
"""The rules of the function or kernel at hand, tests/frontend/test_pallas.py; and an op
that traced functions do not have, tests/runtime/on_shards/test_stencils.py."""

UNDEFINED = {"empty"}
"""Any contents are right."""

OTHER_SPELLINGS = {
    "expand_dims", "ragged_dot", "random_gamma_grad", "scatter_add", "scatter_max",
    "scatter_min", "scatter_mul", "scatter_sub",
}  # fmt: skip
"""Names that other versions of JAX give to primitives of the table."""


@pytest.fixture(autouse=True, scope="module")
def quick_compiles() -> Iterator[None]:
    """Thousands of tiny ops are compiled once each: optimising them is wasted."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_every_rule_has_a_case() -> None:
    builtin = {n for n in registered() if not n.startswith("test_")}
    excluded = IDENTITIES | UNCUT | UNDEFINED | OTHER_SPELLINGS | ELSEWHERE
    assert builtin - set(ALL_CASES) - excluded == {
        n for n in ("log2", "one_minus_square") if primitive(n) is None
    }
    assert set(ALL_CASES) <= builtin
    assert not set(ALL_CASES) & excluded


# One rule stands for hundreds of elementwise ops: the first of its ops, by numbers of
# operands, stands for all in the short run. Of the other ops, it has every third case,
# with one factor cut in one way; the slow run has what is left.
FEW: dict[str, Any] = {"num_shards": (2,), "max_pairs": 0}
FOUR: dict[str, Any] = {"num_shards": (4,), "max_pairs": 0}
"""Of four shards of an image, two have neighbours on both sides."""


def options_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options of `check_rule` of the short run, and of what it leaves out."""
    if name in CASES:
        return FEW, {"num_shards": (), "max_pairs": 1}
    if name in WINDOW_CASES:
        return FOUR, {"num_shards": (), "max_pairs": 2}
    return FEW, {"num_shards": (4,), "max_pairs": 3}


def checked(name: str, *, is_short: bool) -> int:
    """Check the rule of an op on its cases; return how many strategies are true."""
    if primitive(name) is None:
        pytest.skip("this version of JAX has no such primitive")
    total, rng = 0, np.random.default_rng(len(name))
    few, more = options_of(name)
    both = {key: few[key] + more[key] for key in few}
    for i, case in enumerate(ALL_CASES[name]):
        fn, args = case(rng)
        is_in_short = name in CASES or i % (5 if name.startswith("conv") else 3) == 0
        if is_short and not is_in_short:
            continue
        options = few if is_short else more if is_in_short else both
        report = check_rule(fn, *args, only={name}, **options)
        assert name in {n for n, *_ in report.strategies}
        total += sum(count for n, _, count in report.strategies if n == name)
    return total


def first_of_each_rule() -> set[str]:
    """Return elementwise ops of different rules or numbers of operands."""
    found: dict[Any, str] = {}
    for name in sorted(CASES):
        if primitive(name) is not None:
            _, args = CASES[name][0](np.random.default_rng(len(name)))
            found.setdefault((lookup(name), len(jax.tree.leaves(args))), name)
    return {*found.values()}


LONG = {"random_gamma", "random_bits", "threefry4x32", "philox4x32"}
FIRST = (first_of_each_rule() - LONG) | {*DATA_CASES} | {*WINDOW_CASES}


@pytest.mark.parametrize("name", covering(sorted(ALL_CASES), lambda n: n in FIRST))
def test_rule_is_true(name: str) -> None:
    assert checked(name, is_short=True) or name in NEVER_CUT


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALL_CASES))
def test_rule_is_true_when_cut_otherwise(name: str) -> None:
    checked(name, is_short=False)


NEVER_CUT = {"cholesky_update"}
"""No batch dims, and the matrix is whole."""


@pytest.mark.parametrize("name", sorted(IDENTITIES | UNCUT))
def test_rule_of_an_op_that_cannot_run_alone(name: str) -> None:
    make_rule = lookup(name)
    assert make_rule is not None
    shapes = ((4, 6),)
    rule = make_rule(
        OpContext(
            primitive=name,
            in_shapes=shapes,
            in_dtypes=("float32",),
            out_shapes=shapes,
            out_dtypes=("float32",),
            params={},
        )
    ).rule
    assert str(rule) == ("a b -> a b" if name in IDENTITIES else "_ _ -> _ _")
