"""Who must agree: the processes whose devices are in a mesh, and nobody else."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from rhino_jax.errors import ProcessError
from rhino_jax.runtime.processes import agree, meeting, service, signs


def devices(*processes: int, runtime: str = "") -> list[Any]:
    client = SimpleNamespace(runtime_type=runtime)
    return [SimpleNamespace(process_index=p, client=client) for p in processes]


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is process 1 of 4."""
    monkeypatch.setattr(agree, "coordination_client", object)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 1)


def test_a_process_alone_agrees_with_nobody() -> None:
    assert agree.is_alone()
    assert agree.processes_of(devices(0, 1)) == ()


@pytest.mark.usefixtures("several")
def test_those_of_the_mesh_do() -> None:
    assert agree.processes_of(devices(3, 1, 1, 0)) == (0, 1, 3)
    assert agree.processes_of(devices(1, 1)) == ()
    assert agree.processes_of(devices(0, 2)) == ()
    assert agree.processes_of(devices(0, 1, runtime="compile_only_runtime")) == ()
    abstract = jax.sharding.AbstractMesh((4,), ("a",))
    assert agree.processes_of_mesh(abstract) == ()


class Client:
    """A coordination service of which every call fails in one way."""

    def __init__(self, error: str) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            raise jax.errors.JaxRuntimeError(self.error)

        return call


def test_what_is_not_there_is_none() -> None:
    assert service.Service(Client("NOT_FOUND: a"), 1.0, "f").find("a") is None
    found = service.Service(Client("DEADLINE_EXCEEDED: a"), 1.0, "f").get("a", 0.1)
    assert found is None


def test_what_is_there_already_stays() -> None:
    service.Service(Client("ALREADY_EXISTS: a"), 1.0, "f").put("a", b"")


def test_a_service_that_fails_or_hangs_is_told() -> None:
    with pytest.raises(ProcessError, match="process 0 is lost") as error:
        service.Service(Client("INTERNAL: no"), 1.0, "`f`").find("a")
    assert "INTERNAL: no" in error.value.numbers and "`f`" in error.value.what
    hanging = SimpleNamespace(key_value_try_get=lambda key: signal())

    def signal() -> None:
        import threading

        threading.Event().wait(5)

    with pytest.raises(ProcessError, match=r"no answer for 0\.2 s"):
        service.Service(hanging, 0.2, "f").find("a")


class Store:
    """A coordination service in which process 0 shows one sign of life, and no more."""

    def key_value_try_get(self, key: str) -> str:
        if key != "rhino_jax/alive/0":
            raise jax.errors.JaxRuntimeError("NOT_FOUND: no")
        return "1 at work 3"

    def blocking_key_value_get_bytes(self, key: str, wait_ms: int) -> bytes:
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: no")


@pytest.mark.usefixtures("several")
def test_a_process_that_is_lost_while_it_plans_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RHINO_LOST_AFTER_S", "0.1")
    met = meeting.Meeting(Store(), (0, 1), "`f`", "step")
    with pytest.raises(ProcessError, match="process 0 is lost") as error:
        met.wait("made", met.first, "to plan")
    assert "to plan" in error.value.what and "RHINO_LOST" in error.value.fix


def test_time_counts_from_the_last_heartbeat_and_the_last_visit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RHINO_LOST_AFTER_S", "0.2")
    monkeypatch.setenv("RHINO_ARRIVE_WITHIN_S", "0.4")
    watch = signs.HeartbeatWatch(service.Service(Store(), 1.0, "`f`"), "`f`")
    for count in range(4):  # It sends heartbeats, and is elsewhere in between.
        watch.look(0, f"{count}", True, count % 2 == 0, "to compare")
        time.sleep(0.1)
    watch.look(0, "done", False, False, "to compare")
    time.sleep(0.4)
    with pytest.raises(ProcessError, match="has not come to the planning") as error:
        watch.look(0, "done", False, False, "to compare", "; it is at step 3")
    assert "it is at step 3" in error.value.numbers
    watch.start("step 4")
    watch.look(0, "done", True, True, "to compare")
    time.sleep(0.25)
    with pytest.raises(ProcessError, match="process 0 is lost") as error:
        watch.look(0, "done", True, True, "to compare")
    assert "step 4" in error.value.where


def test_times_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signs.lost_after_s() == 30.0
    monkeypatch.setenv("RHINO_LOST_AFTER_S", "2.5")
    assert signs.lost_after_s() == 2.5
    monkeypatch.setenv("RHINO_LOST_AFTER_S", "soon")
    with pytest.raises(ProcessError, match="number of seconds") as error:
        signs.lost_after_s()
    assert "soon" in error.value.numbers
