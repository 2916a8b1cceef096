"""Models as the authors of `transformers` wrote them, in sizes of their own.

4.49 is its last version with Flax modules: `pip install 'transformers<4.50'`. They took
no part in fitting any constant. Activations are bfloat16, parameters float32; dropout
is on, as when people train.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rhino_jax.bench.holdout.parts import cross_entropy
from rhino_jax.hardware.files import configs_dir
from rhino_jax.models.config import ModelConfig
from rhino_jax.models.train import train_step_for
from rhino_jax.models.workload import Workload


def workload(
    name: str,
    flax_class: str,
    data: str,
    usual: Mapping[str, Any],
    batch: int = 32,
    length: int = 512,
    sizes: Mapping[str, Any] | None = None,
) -> Workload:
    """Return one train step of a Flax class of `transformers`, with AdamW.

    Args:
      name: name of the workload.
      flax_class: its name in `transformers`.
      data: what it reads: "text", "images", "pairs" (of an image and a text), "audio"
        (samples), "features" (of audio, with text to decode), or "translation" (two
        texts).
      usual: keywords of its configuration.
      batch: number of examples.
      length: positions of a text, samples or frames of audio, height of an image.
      sizes: keywords of the configuration to replace.
    """
    optimizer = optax.adamw(1e-4)

    @cache
    def flax_model() -> Any:
        # Imported where it runs: suites are read without the package.
        import transformers

        made = getattr(transformers, flax_class)
        config = made.config_class(**{**usual, **(sizes or {})})
        return made(config, dtype=jnp.bfloat16, _do_init=False)

    def init(key: jax.Array) -> tuple[Any, ...]:
        model = flax_model()
        state = dict(model.init_weights(key, model.input_shape))
        statistics = {"batch_stats": state.pop("batch_stats", {})}
        params = state.get("params", state)
        return params, optimizer.init(params), statistics

    def make_batch(key: jax.Array) -> dict[str, Any]:
        config = flax_model().config
        vocab = getattr(getattr(config, "text_config", config), "vocab_size", 1)
        inputs = _inputs(data, batch, length, vocab, key)
        return {"inputs": inputs, "seed": jax.random.randint(key, (), 0, 2**30)}

    def loss_fn(params: Any, statistics: Any, examples: Any) -> tuple[jax.Array, Any]:
        return _loss_of(flax_model(), params, statistics, examples)

    return Workload(
        name=name,
        config=ModelConfig(batch=batch),
        init=init,
        make_batch=make_batch,
        step=train_step_for(loss_fn, optimizer, has_state=True),
        donate_argnums=(0, 1, 2),
    )


def _loss_of(
    model: Any, params: Any, statistics: Any, data: Mapping[str, Any]
) -> tuple[jax.Array, Any]:
    """Return the mean loss of a batch, and the statistics of BatchNorms after it."""
    inputs, key = data["inputs"], jax.random.PRNGKey(data["seed"])
    known = inspect.signature(model.__call__).parameters
    more = {name: key for name in ("dropout_rng", "indices_rng") if name in known}
    training = {"train": True} if "train" in known else {"deterministic": False}
    if not statistics["batch_stats"]:
        out = model(**inputs, params=params, **training, **more)
        return _loss(out, inputs), statistics
    state = {"params": params, **statistics}
    out, changed = model(**inputs, params=state, **training, **more)
    return _loss(out, inputs), changed


def _loss(out: Any, inputs: Mapping[str, Any]) -> jax.Array:
    if "logits_per_image" in out:
        scores = out["logits_per_image"]
        labels = jnp.arange(scores.shape[0])
        return (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2
    logits = out["logits"]
    text = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if text is None or logits.shape[:-1] != text.shape:
        text = jnp.zeros(logits.shape[:-1], jnp.int32)
    return cross_entropy(logits, text)


def _inputs(
    data: str, batch: int, length: int, vocab: int, key: jax.Array
) -> dict[str, Any]:
    """Return random inputs of a kind of model; see `workload`."""

    def text(length: int) -> jax.Array:
        return jax.random.randint(key, (batch, length), 0, vocab)

    def noise(*shape: int) -> jax.Array:
        return jax.random.normal(key, (batch, *shape))

    match data:
        case "images":
            return {"pixel_values": noise(3, length, length)}
        case "pairs":
            images = noise(3, length, length)
            return {"input_ids": text(64), "pixel_values": images}
        case "audio":
            return {"input_values": noise(length)}
        case "features":
            features = noise(80, length)
            decoded = text(length // 8)
            return {"input_features": features, "decoder_input_ids": decoded}
        case "translation":
            source = text(length)
            return {"input_ids": source, "decoder_input_ids": source[:, : length // 2]}
    return {"input_ids": text(length)}


def _models() -> dict[str, Callable[..., Workload]]:
    """Return the models of `configs/holdout/transformers.toml`."""
    file = configs_dir() / "holdout" / "transformers.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    found: dict[str, Callable[..., Workload]] = {}
    for name, own in table["models"].items():
        sizes = {**table["sizes"].get(own.get("like"), {}), **own.get("sizes", {})}
        given = f"public-{name}", own["flax_class"], own["data"], sizes
        found[given[0]] = partial(workload, *given)
    return found


MODELS: Mapping[str, Callable[..., Workload]] = _models()
"""Name of a model → function that makes its workload, with its sizes as keywords."""
