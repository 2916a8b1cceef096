"""Lines of a notebook's cells."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.frontend.provenance import cell_of
from rhino_jax.verify.hlo.module import parse_frames


FILE = "/tmp/ipykernel_4242/1825377899.py"


class Compiler:
    """As IPython's."""

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        return ("Cell", "In[7]") if name == FILE else None


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(compile=Compiler())
    module = ModuleType("IPython")
    monkeypatch.setattr(module, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", module)


@pytest.mark.usefixtures("notebook")
def test_a_cell_goes_by_the_number_of_its_run() -> None:
    assert cell_of(FILE) == "In[7]"
    assert cell_of("/home/me/train.py") == "/home/me/train.py"


@pytest.mark.parametrize("shell", [None, SimpleNamespace(), SimpleNamespace(compile=1)])
def test_without_a_notebook_files_keep_their_names(
    monkeypatch: pytest.MonkeyPatch, shell: object
) -> None:
    module = ModuleType("IPython")
    monkeypatch.setattr(module, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", module)
    assert cell_of(FILE) == FILE
    monkeypatch.delitem(sys.modules, "IPython")
    assert cell_of(FILE) == FILE
    assert "IPython" not in sys.modules


@pytest.mark.usefixtures("notebook")
def test_plans_and_compiled_programs_name_the_cell_alike() -> None:
    code = "def step(x, w):\n    y = x @ w\n    return y.sum()\n"
    names: dict[str, object] = {}
    exec(compile(code, FILE, "exec"), names)
    args = (jnp.zeros((64, 256)), jnp.zeros((256, 64)))
    pins = {"x": jax.P(None, "a"), "w": jax.P("a", None)}
    plan = rhino.plan(names["step"], *args, mesh={"a": 8}, pins=pins, progress=False)
    sources = {c.source for c in plan.collectives}
    assert sources and all(s.startswith("In[7]:") for s in sources)
    compiled = plan.verify(names["step"], *args).collectives
    assert {c.source for c in compiled} & sources


@pytest.mark.usefixtures("notebook")
def test_frames_of_compiled_programs_name_the_cell() -> None:
    tables = f"""\
FileNames
1 "{FILE}"

FunctionNames
1 "step"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=39 end_line=39}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
"""
    assert parse_frames(tables.splitlines()) == {1: "In[7]:39 (step)"}


def test_ipython_names_cells_as_is_asked_for() -> None:
    shell = pytest.importorskip("IPython.core.interactiveshell")
    compiler = shell.InteractiveShell().compile
    name = compiler.cache("x = 1", 7, raw_code="x = 1")
    assert compiler.format_code_name(name) == ("Cell", "In[7]")
