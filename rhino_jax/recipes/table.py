"""The experts' recipes, one entry each: what data and model axes cut.

An entry says nothing of meshes; `rhino_jax.recipes.recipes` lays it over one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """A recipe, whatever the mesh.

    Attributes:
      name: as users know it.
      source: who proposed it.
      has_model_axis: the last mesh axis of several devices cuts heads, hidden widths,
        experts and vocabulary; the others cut the batch. Otherwise all cut the batch.
      needs_data_axis: it is another recipe where no axis is left for the batch.
      cuts_params, cuts_state, cuts_sequence: as of `Recipe`.
    """

    name: str
    source: str
    has_model_axis: bool = False
    needs_data_axis: bool = False
    cuts_params: bool = False
    cuts_state: bool = False
    cuts_sequence: bool = False


_ZERO = "Rajbhandari et al., ZeRO, SC 2020, section 5"
_MEGATRON = "Shoeybi et al., Megatron-LM, 2019, section 3"
_SEQUENCE = "Korthikanti et al., Reducing activation recomputation, 2022, section 4"

EXPERTS = (
    Expert(name="dp", source=_ZERO),
    Expert(name="zero1", source=_ZERO, cuts_state=True),
    Expert(name="fsdp", source=_ZERO, cuts_params=True, cuts_state=True),
    Expert(name="megatron", source=_MEGATRON, has_model_axis=True),
    Expert(
        name="megatron+sp", source=_SEQUENCE, has_model_axis=True, cuts_sequence=True
    ),
    Expert(
        name="megatron+fsdp",
        source=f"{_MEGATRON}; {_ZERO}",
        has_model_axis=True,
        needs_data_axis=True,
        cuts_params=True,
        cuts_state=True,
    ),
    Expert(
        name="megatron+fsdp+sp",
        source=f"{_SEQUENCE}; {_ZERO}",
        has_model_axis=True,
        needs_data_axis=True,
        cuts_params=True,
        cuts_state=True,
        cuts_sequence=True,
    ),
)
"""In the order in which plans list them."""
