"""The zoo: workloads by name, from `configs/models/*.toml`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from rhino_jax.errors import nearest
from rhino_jax.hardware.files import configs_dir
from rhino_jax.models import (
    decode,
    gpt,
    llama,
    mixture,
    mlp,
    moe,
    rnn,
    t5,
    two_tower,
    unet,
    wide_resnet,
)
from rhino_jax.models.config import ModelConfigError, TrainConfig, build, read
from rhino_jax.models.train import optimizer, train_step_for
from rhino_jax.models.weights import draw
from rhino_jax.models.workload import Workload


FAMILIES: Mapping[str, tuple[ModuleType, type[Any]]] = {
    "decode": (decode, decode.DecodeConfig),
    "gpt": (gpt, gpt.GPTConfig),
    "llama": (llama, llama.LlamaConfig),
    "mixture": (mixture, mixture.MixtureConfig),
    "mlp": (mlp, mlp.MLPConfig),
    "moe": (moe, moe.MoEConfig),
    "rnn": (rnn, rnn.RNNConfig),
    "t5": (t5, t5.T5Config),
    "two_tower": (two_tower, two_tower.TwoTowerConfig),
    "unet": (unet, unet.UNetConfig),
    "wide_resnet": (wide_resnet, wide_resnet.WideResNetConfig),
}


def models_dir() -> Path:
    """Return the folder of the models' config files."""
    return configs_dir() / "models"


def names() -> tuple[str, ...]:
    """Return the names of all workloads, sorted."""
    return tuple(sorted(path.stem for path in models_dir().glob("*.toml")))


def get(name: str, **overrides: Any) -> Workload:
    """Return a workload of the zoo.

    Args:
      name: one of `names()`.
      overrides: values by key that replace the file's, as `batch=16`.
    Raises:
      ModelConfigError: no model has that name, or a value is invalid.
    Example:
      >>> get("gpt-tiny", optimizer="adafactor").config.optimizer
      'adafactor'
    """
    if name not in names():
        raise ModelConfigError(
            f"`models.get({name!r})`: no model has that name.{nearest(name, names())}",
            where=str(models_dir()),
            numbers=f"known: {', '.join(names())}",
            fix="use one of these, or `models.load(path)` for a file of your own.",
        )
    return load(models_dir() / f"{name}.toml", **overrides)


def load(path: str | Path, **overrides: Any) -> Workload:
    """Return a workload from the user's config file; its name is the file's stem.

    Raises:
      ModelConfigError: the file is malformed; the message names file, key and
        expectation.
    """
    path = Path(path)
    table = read(path)
    where = f"{path}, overridden by {overrides}" if overrides else str(path)
    family = table.pop("family", None)
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelConfigError(
            "the model config's `family` is not one of the known families."
            + nearest(str(family), FAMILIES),
            where=f"{path}, key `family`",
            numbers=f"got {family!r}, expected one of {', '.join(FAMILIES)}",
            fix="change `family`.",
        )
    module, config_type = FAMILIES[family]
    config = build(config_type, {**table, **overrides}, where)
    make = _training if isinstance(config, TrainConfig) else _decoding
    return make(path.stem, module, config)


def _decoding(name: str, module: ModuleType, config: Any) -> Workload:
    def decode_step(params: Any, prompt: Any) -> Any:
        return module.decode(config, params, prompt)

    return Workload(
        name=name,
        config=config,
        init=lambda key: (draw(module.describe(config), key),),
        make_batch=partial(module.make_batch, config),
        step=decode_step,
        donate_argnums=(),
    )


def _training(name: str, module: ModuleType, config: TrainConfig) -> Workload:
    tx = optimizer(
        config.optimizer,
        config.learning_rate,
        clip_norm=config.clip_norm,
        accumulate_steps=config.accumulate_steps,
    )
    has_state = module is wide_resnet
    loss: Callable[..., Any] = partial(module.loss, config)

    def init(key: jax.Array) -> tuple[Any, ...]:
        drawn = draw(module.describe(config), key)
        if not has_state:
            return drawn, tx.init(drawn)
        params, model_state = drawn
        return params, tx.init(params), model_state

    return Workload(
        name=name,
        config=config,
        init=init,
        make_batch=partial(module.make_batch, config),
        step=train_step_for(loss, tx, has_state=has_state),
        donate_argnums=(0, 1, 2) if has_state else (0, 1),
    )
