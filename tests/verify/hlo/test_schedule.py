"""Schedules that are simulated: the compute that hides an asynchronous collective."""

from __future__ import annotations

import pytest

from rhino_jax.verify.hlo.module import Computation, Instruction, parse_module
from rhino_jax.verify.hlo.schedule import simulated_s
from rhino_jax.verify.hlo.work import InstructionWork, WorkReader


HEAD = """HloModule m, is_scheduled=true
%gather (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  ROOT %g = f32[8]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
}
"""
ENTRY = HEAD + "ENTRY %main (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n"
PAIR = "(f32[4]{0}, f32[8]{0})"


def _seconds(body: str, seconds: dict[str, float], text: str = ENTRY) -> float:
    """Play a program in which these instructions take time."""

    def work_s(work: InstructionWork) -> float:
        return seconds.get(work.name, 0.0)

    def collective_s(computation: Computation, instruction: Instruction) -> float:
        return seconds[instruction.name]

    module = parse_module(f"{text}{body}\n}}\n")
    return simulated_s(module, WorkReader(module, work_s), collective_s)


def _compute(name: str) -> str:
    return f"  %{name} = f32[4]{{0}} negate(%x)"


def _start(name: str) -> str:
    return f"  %{name} = {PAIR} all-gather-start(%x), replica_groups={{{{0,1}}}}"


def _done(name: str) -> str:
    return f"  %{name}d = f32[8]{{0}} all-gather-done(%{name})"


def _lines(*lines: str) -> str:
    return "\n".join(lines)


@pytest.mark.parametrize(("gather", "step"), [(3.0, 7.0), (9.0, 11.0)])
def test_it_hides_behind_what_is_between_start_and_end(
    gather: float, step: float
) -> None:
    body = _lines(
        _compute("a"), _start("s"), _compute("b"),
        _done("s"), _compute("c"),
    )  # fmt: skip
    # 1 before; the larger of the gather and 5 between; 1 behind.
    assert _seconds(body, {"a": 1, "b": 5, "c": 1, "s": gather}) == step


def test_it_does_not_hide_behind_compute_elsewhere() -> None:
    body = _lines(
        _compute("a"), _start("s"), _done("s"),
        _compute("b"),
    )  # fmt: skip
    assert _seconds(body, {"a": 10, "b": 10, "s": 4}) == 24


def test_links_move_one_thing_after_another() -> None:
    body = _lines(
        _start("s"), _start("t"), _compute("a"),
        _done("s"), _done("t"),
    )  # fmt: skip
    assert _seconds(body, {"s": 4, "t": 4, "a": 5}) == 8
    assert _seconds(body, {"s": 4, "t": 4, "a": 9}) == 9


def test_a_synchronous_one_waits_for_the_links_and_for_itself() -> None:
    sync = "  %g = f32[8]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}"
    body = _lines(
        _start("s"), _compute("a"), sync, _compute("b"),
        _done("s"),
    )  # fmt: skip
    assert _seconds(body, {"s": 6, "a": 2, "g": 3, "b": 1}) == 6 + 3 + 1


def test_a_start_that_is_never_awaited_ends_with_its_computation() -> None:
    body = _lines(_compute("a"), _start("s"))
    assert _seconds(body, {"a": 2, "s": 5}) == 7


def test_a_computation_that_is_started_and_updated() -> None:
    start = f"  %s = ({PAIR}) async-start(%x), calls=%gather"
    update = f"  %u = ({PAIR}) async-update(%s)"
    done = "  %d = f32[8]{0} async-done(%u)"
    body = _lines(start, _compute("a"), update, _compute("b"), done)
    assert _seconds(body, {"s": 9, "a": 3, "b": 3}) == 9
    assert _seconds(body, {"s": 5, "a": 3, "b": 3}) == 6


def test_a_prepared_transfer_starts_with_its_data() -> None:
    start = "  %s = ((), ()) custom-call-start(), called_computations={%gather}"
    update = f"  %u = ({PAIR}) custom-call-update(%s, %a)"
    done = "  %d = f32[8]{0} custom-call-done(%u)"
    body = _lines(start, _compute("a"), update, _compute("b"), done)
    assert _seconds(body, {"s": 5, "a": 3, "b": 2}) == 3 + 5
    assert _seconds(body, {"s": 5, "a": 3, "b": 6}) == 3 + 6


def test_what_is_sent_to_another_slice_hides_until_it_is_received() -> None:
    body = _lines(
        "  %t = token[] after-all()",
        "  %s = (f32[4]{0}, u32[], token[]) send(%x, %t), channel_id=1",
        "  %r = (f32[4]{0}, u32[], token[]) recv(%t), channel_id=2",
        _compute("a"),
        "  %rd = (f32[4]{0}, token[]) recv-done(%r), channel_id=2",
        _compute("b"),
        "  %sd = token[] send-done(%s), channel_id=1",
    )
    assert _seconds(body, {"s": 5, "r": 0, "a": 3, "b": 2}) == 5 + 2
    assert _seconds(body, {"s": 5, "r": 0, "a": 6, "b": 2}) == 6 + 2


_PARTS = ("start", "step", "done")


def _chain(part: str, chain: str = "0") -> str:
    """Return a fusion's computation that is a part of an all-gather's chain."""
    gather = "f32[8]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}"
    ends = {
        "start": f'({PAIR}) custom-call(%g), custom_call_target="AsyncCollectiveStart"',
        "step": "(f32[4]{0}, f32[8]{0}) tuple(%n, %g)",
        "done": "f32[8]{0} custom-call(%p, %g),"
        ' custom_call_target="AsyncCollectiveDone"',
    }
    return f"""%{part}{chain} (p: f32[4]) -> f32[8] {{
  %p = f32[4]{{0}} parameter(0)
  %n = f32[4]{{0}} negate(%p)
  %g = {gather}, frontend_attributes={{chain_id="{chain}"}}
  ROOT %r = {ends[part]}
}}

"""


def _fused(name: str, part: str, chain: str = "0") -> str:
    cycles = ', backend_config={"estimated_cycles":"1"}' if part == "step" else ""
    return f"  %{name} = f32[8]{{0}} fusion(%x), calls=%{part}{chain}{cycles}"


def test_a_chain_of_fusions_hides_behind_what_runs_until_its_end() -> None:
    head, entry = ENTRY.split("ENTRY")
    text = head + "".join(map(_chain, _PARTS)) + "ENTRY" + entry
    body = _lines(
        _compute("a"), _fused("s", "start"), _fused("f", "step"),
        _compute("b"), _fused("d", "done"), _compute("c"),
    )  # fmt: skip
    seconds = {"a": 4, "f": 2, "b": 1, "c": 4}
    assert _seconds(body, seconds | {"s": 2}, text) == 4 + 3 + 4
    assert _seconds(body, seconds | {"s": 9}, text) == 4 + 9 + 4


def test_two_chains_share_the_links() -> None:
    head, entry = ENTRY.split("ENTRY")
    parts = [_chain(part, chain) for chain in "01" for part in ("start", "done")]
    text = head + "".join(parts) + "ENTRY" + entry
    body = _lines(
        _fused("s", "start"), _fused("t", "start", "1"), _compute("a"),
        _fused("d", "done"), _compute("b"), _fused("e", "done", "1"),
    )  # fmt: skip
    assert _seconds(body, {"s": 4, "t": 3, "a": 1, "b": 2}, text) == 4 + 3
    assert _seconds(body, {"s": 4, "t": 3, "a": 1, "b": 5}, text) == 4 + 5


LOOP = """HloModule m, is_scheduled=true
%body (s: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  BODY
  ROOT %r = f32[4]{0} bitcast(%x)
}

%cond (s: f32[4]) -> pred[] {
  %s = f32[4]{0} parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %w = f32[4]{0} while(%x), condition=%cond, body=%body,\
 backend_config={"known_trip_count":{"n":"5"}}"""


def test_a_loop_takes_its_trips_times_as_long() -> None:
    body = _lines(_start("s"), _compute("a"), _done("s"))
    text = LOOP.replace("BODY", body.strip())
    assert _seconds("", {"s": 3, "a": 1}, text) == 15
    assert _seconds("", {"s": 3, "a": 4}, text) == 20


def test_of_branches_the_longest() -> None:
    text = """HloModule m, is_scheduled=true
%one (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} negate(%p)
}

%two (p: f32[4]) -> f32[8] {
  %q = f32[4]{0} parameter(0)
  ROOT %g = f32[8]{0} all-gather(%q), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: f32[4], i: s32[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %c = f32[4]{0} conditional(%i, %x, %x), branch_computations={%one, %two}"""
    assert _seconds("", {"a": 2, "g": 7}, text) == 7
    assert _seconds("", {"a": 8, "g": 7}, text) == 8
    older = text.replace(
        "branch_computations={%one, %two}",
        "true_computation=%one, false_computation=%two",
    )
    assert _seconds("", {"a": 2, "g": 7}, older) == 7


def _host_copy(name: str, *, is_out: bool) -> str:
    there, here = "f32[4]{0:S(5)}", "f32[4]{0}"
    kinds = f"{there}, {here}" if is_out else f"{here}, {there}"
    return f"  %{name} = ({kinds}, u32[]{{:S(2)}}) copy-start(%x)"


def _copied(name: str) -> str:
    return f"  %{name}d = f32[4]{{0}} copy-done(%{name})"


def test_copies_to_and_from_the_host_have_a_link_each() -> None:
    """Copies of 16 bytes (and a start's 2) take 4 s one way; both ways run at once."""
    ins = [_host_copy(n, is_out=False) for n in ("i", "j")]
    out = [_host_copy("o", is_out=True), _copied("o"), _copied("i"), _copied("j")]
    body = _lines(*ins, _compute("a"), *out)
    module = parse_module(f"{ENTRY}{body}\n}}\n")
    for work_s, step_s in ((1.0, 8.0), (6.0, 10.0)):
        reader = WorkReader(module, lambda w, s=work_s: s if w.name == "a" else 0.0)
        assert simulated_s(module, reader, lambda *_: 0.0, 4.5) == step_s
