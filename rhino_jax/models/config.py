"""Schema of a model's config file, and its loader.

A config is one flat TOML table: `family` names the model, every other key is a
field of that family's dataclass. Types, positive sizes and allowed words follow
from the dataclass; `conflicts` checks constraints across several keys.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rhino_jax.errors import RhinoError
from rhino_jax.utils.checked_table import CheckedTable


class ModelConfigError(RhinoError, ValueError):
    """A model is unknown, or its config malformed."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Fields that every model has.

    Attributes:
      batch: examples in a step, over all devices.
      dtype: type of activations and matmuls; parameters are float32.
    """

    batch: int
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield (key, expectation) for values that contradict each other."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelConfig):
    """Fields of a model that is trained.

    Attributes:
      optimizer: see `rhino_jax.models.train`.
      learning_rate: constant learning rate.
      clip_norm: maximum global norm of the gradients; 0: no clipping.
      accumulate_steps: number of steps whose gradients are averaged for one update.
    """

    optimizer: Literal["adamw", "adafactor", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    clip_norm: float = 0.0
    accumulate_steps: int = 1

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from positive(self, "learning_rate")


@dataclass(frozen=True, kw_only=True)
class StackConfig(TrainConfig):
    """Fields of a model made of equal blocks.

    Attributes:
      layers: "scan" stacks the blocks' parameters and loops; "unroll" repeats.
      remat: whether to recompute each block's activations in the backward pass.
      remat_policy: residuals that `remat` saves in addition to a block's inputs: none
        ("full"), or results of matmuls with weights ("dots",
        `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`).
    """

    layers: Literal["scan", "unroll"] = "scan"
    remat: bool = False
    remat_policy: Literal["full", "dots"] = "full"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(StackConfig):
    """Sizes of a decoder: V vocab, S seq_len, D d_model, H num_heads, F d_ff.

    Attributes:
      attention: form of causal attention, as of `rhino.attention`; "choose": the form
        that the planner takes, "xla" without it.
    """

    vocab: int
    seq_len: int
    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    attention: Literal["xla", "cudnn", "splash", "choose"] = "xla"

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        yield from divides(self.d_model, self.num_heads, "num_heads", "d_model")


def positive(config: ModelConfig, *keys: str) -> Iterator[tuple[str, str]]:
    """Yield a conflict for each key whose number is 0."""
    for key in keys:
        if not getattr(config, key):
            yield key, "a number > 0"


def divides(num: int, den: int, key: str, what: str) -> Iterator[tuple[str, str]]:
    """Yield a conflict at `key` unless `den` divides `num`."""
    if num % den:
        yield key, f"a divisor of {what} = {num}"


ConfigT = typing.TypeVar("ConfigT", bound=ModelConfig)


def build(config_type: type[ConfigT], table: Mapping[str, Any], where: str) -> ConfigT:
    """Return a checked config from plain values.

    Args:
      config_type: the family's dataclass.
      table: values by key, without `family`; lists stand for tuples.
      where: the file or call that the values come from, for errors.

    Raises:
      ModelConfigError: a key is unknown, missing, or has an invalid value.
    """
    checked = CheckedTable(table, "the model config", where, ModelConfigError)
    config = checked.record(config_type)
    for key, expected in config.conflicts():
        raise checked.fail(key, expected, getattr(config, key))
    return config


def read(path: Path) -> dict[str, Any]:
    """Return the table of a config file.

    Raises:
      ModelConfigError: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ModelConfigError(
            f"the model config cannot be read: {error}.",
            where=str(path),
            fix="give the path of a TOML file, or correct its syntax there.",
        ) from None
