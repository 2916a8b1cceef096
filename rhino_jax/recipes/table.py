"""The experts' recipes, one entry each: the values that data and model axes shard.

Entries are independent of meshes; `rhino_jax.recipes.recipes` applies them to one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """A recipe, whatever the mesh.

    Attributes:
      name: name that users know.
      source: publication that proposed it.
      has_model_axis: whether the last mesh axis of several devices shards heads, hidden
        widths, experts and vocabulary, and the others the batch. Otherwise all shard
        the batch.
      has_expert_axis: whether axes that shard the batch also shard the experts of a
        mixture: all of them, or all but the first where `needs_data_axis`.
      needs_data_axis: whether it requires an axis for the batch alone; without one it
        would be another recipe.
      shards_params, shards_state, shards_sequence: as in `Recipe`.
    """

    name: str
    source: str
    has_model_axis: bool = False
    has_expert_axis: bool = False
    needs_data_axis: bool = False
    shards_params: bool = False
    shards_state: bool = False
    shards_sequence: bool = False


_ZERO = "Rajbhandari et al., ZeRO, SC 2020, section 5"
_MEGATRON = "Shoeybi et al., Megatron-LM, 2019, section 3"
_EXPERTS = "MaxText, configs/base.yml, rules of `exp`, `embed` and `embed_no_exp`"
_SEQUENCE = "Korthikanti et al., Reducing activation recomputation, 2022, section 4"

EXPERTS = (
    Expert(name="dp", source=_ZERO),
    Expert(name="zero1", source=_ZERO, shards_state=True),
    Expert(name="fsdp", source=_ZERO, shards_params=True, shards_state=True),
    Expert(name="megatron", source=_MEGATRON, has_model_axis=True),
    Expert(
        name="megatron+sp", source=_SEQUENCE, has_model_axis=True, shards_sequence=True
    ),
    Expert(
        name="megatron+fsdp",
        source=f"{_MEGATRON}; {_ZERO}",
        has_model_axis=True,
        needs_data_axis=True,
        shards_params=True,
        shards_state=True,
    ),
    Expert(
        name="megatron+fsdp+sp",
        source=f"{_SEQUENCE}; {_ZERO}",
        has_model_axis=True,
        needs_data_axis=True,
        shards_params=True,
        shards_state=True,
        shards_sequence=True,
    ),
    Expert(
        name="experts",
        source=_EXPERTS,
        has_expert_axis=True,
        shards_params=True,
        shards_state=True,
    ),
    Expert(
        name="fsdp+experts",
        source=_EXPERTS,
        has_expert_axis=True,
        needs_data_axis=True,
        shards_params=True,
        shards_state=True,
    ),
    Expert(
        name="megatron+experts",
        source=f"{_MEGATRON}; {_EXPERTS}",
        has_model_axis=True,
        has_expert_axis=True,
        shards_params=True,
        shards_state=True,
    ),
)
"""All recipes, in the order in which plans list them."""
