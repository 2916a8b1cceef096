"""Models as the authors of `transformers` wrote them, in sizes of their own.

4.49 is its last version with Flax modules: `pip install 'transformers<4.50'`. They took
no part in fitting any constant. Activations are bfloat16, parameters float32; dropout
is on, as when people train.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rhino_jax.bench.holdout.parts import cross_entropy
from rhino_jax.models.config import ModelConfig
from rhino_jax.models.workload import Workload


@dataclass(frozen=True, slots=True)
class PublicModel:
    """A Flax class of `transformers`, with what it reads.

    Attributes:
      flax_class: its name in `transformers`.
      data: "text", "images", "pairs" (of an image and a text), "audio" (samples),
        "features" (of audio, with text to decode), or "translation" (two texts).
      sizes: keywords of its configuration.
    """

    flax_class: str
    data: str
    sizes: Mapping[str, Any]

    def workload(
        self,
        name: str,
        batch: int = 32,
        length: int = 512,
        sizes: Mapping[str, Any] | None = None,
    ) -> Workload:
        """Return one train step with AdamW.

        Args:
          name: name of the workload.
          batch: number of examples.
          length: positions of a text, samples or frames of audio, height of an image.
          sizes: keywords of the configuration to replace.
        """
        optimizer = optax.adamw(1e-4)

        @cache
        def flax_model() -> Any:
            # Imported where it runs: suites are read without the package.
            import transformers

            flax_class = getattr(transformers, self.flax_class)
            config = flax_class.config_class(**{**self.sizes, **(sizes or {})})
            return flax_class(config, dtype=jnp.bfloat16, _do_init=False)

        def init(key: jax.Array) -> tuple[Any, ...]:
            model = flax_model()
            state = dict(model.init_weights(key, model.input_shape))
            statistics = {"batch_stats": state.pop("batch_stats", {})}
            params = state.get("params", state)
            return params, optimizer.init(params), statistics

        def make_batch(key: jax.Array) -> dict[str, Any]:
            config = flax_model().config
            vocab = getattr(getattr(config, "text_config", config), "vocab_size", 1)
            inputs = _INPUTS[self.data](batch, length, vocab, key)
            return {"inputs": inputs, "seed": jax.random.randint(key, (), 0, 2**30)}

        def step(
            params: Any, opt_state: Any, statistics: Any, data: Any
        ) -> tuple[Any, ...]:
            def loss_fn(params: Any) -> tuple[jax.Array, Any]:
                return _loss_of(flax_model(), params, statistics, data)

            found = jax.value_and_grad(loss_fn, has_aux=True)(params)
            (loss, statistics), grads = found
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, statistics, loss

        return Workload(
            name=name,
            config=ModelConfig(batch=batch),
            init=init,
            make_batch=make_batch,
            step=step,
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


def _text(batch: int, length: int, vocab: int, key: jax.Array) -> dict[str, Any]:
    return {"input_ids": jax.random.randint(key, (batch, length), 0, vocab)}


def _images(batch: int, length: int, vocab: int, key: jax.Array) -> dict[str, Any]:
    shape = (batch, 3, length, length)
    return {"pixel_values": jax.random.normal(key, shape)}


def _pairs(batch: int, length: int, vocab: int, key: jax.Array) -> dict[str, Any]:
    return _text(batch, 64, vocab, key) | _images(batch, length, vocab, key)


def _audio(batch: int, length: int, vocab: int, key: jax.Array) -> dict[str, Any]:
    return {"input_values": jax.random.normal(key, (batch, length))}


def _features(batch: int, length: int, vocab: int, key: jax.Array) -> dict[str, Any]:
    text = _text(batch, length // 8, vocab, key)["input_ids"]
    features = jax.random.normal(key, (batch, 80, length))
    return {"input_features": features, "decoder_input_ids": text}


def _translation(batch: int, length: int, vocab: int, key: jax.Array) -> dict[str, Any]:
    text = _text(batch, length, vocab, key)
    return text | {"decoder_input_ids": text["input_ids"][:, : length // 2]}


_INPUTS = {
    "text": _text,
    "images": _images,
    "pairs": _pairs,
    "audio": _audio,
    "features": _features,
    "translation": _translation,
}
_BERT = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_BART = {
    "vocab_size": 16384,
    "d_model": 768,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
}
_GPT = {"vocab_size": 16384, "n_embd": 1024, "n_layer": 3, "n_head": 16}
_VIT = {**_BERT, "hidden_size": 1024, "num_attention_heads": 16, "image_size": 224}
_MODELS = {
    "albert": PublicModel("FlaxAlbertForMaskedLM", "text", _BERT),
    "bart": PublicModel("FlaxBartForConditionalGeneration", "translation", _BART),
    "beit": PublicModel("FlaxBeitForImageClassification", "images", _VIT),
    "bert": PublicModel("FlaxBertForMaskedLM", "text", _BERT),
    "bigbird": PublicModel("FlaxBigBirdForMaskedLM", "text", _BERT),
    "blenderbot": PublicModel(
        "FlaxBlenderbotForConditionalGeneration",
        "translation",
        {**_BART, "max_position_embeddings": 512},
    ),
    "bloom": PublicModel(
        "FlaxBloomForCausalLM",
        "text",
        {"vocab_size": 16384, "hidden_size": 1024, "n_layer": 3, "n_head": 16},
    ),
    "clip": PublicModel(
        "FlaxCLIPModel",
        "pairs",
        {
            "text_config": {**_BERT, "hidden_size": 512, "num_attention_heads": 8},
            "vision_config": {**_BERT, "image_size": 224, "patch_size": 32},
        },
    ),
    "dinov2": PublicModel("FlaxDinov2ForImageClassification", "images", _VIT),
    "distilbert": PublicModel(
        "FlaxDistilBertForMaskedLM",
        "text",
        {"vocab_size": 16384, "dim": 768, "n_layers": 3, "hidden_dim": 3072},
    ),
    "electra": PublicModel("FlaxElectraForMaskedLM", "text", _BERT),
    "gemma": PublicModel(
        "FlaxGemmaForCausalLM",
        "text",
        {
            **_BERT,
            "hidden_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 128,
        },
    ),
    "gpt2": PublicModel("FlaxGPT2LMHeadModel", "text", _GPT),
    "gpt-neo": PublicModel(
        "FlaxGPTNeoForCausalLM",
        "text",
        {
            "vocab_size": 16384,
            "hidden_size": 1024,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 16,
        },
    ),
    "gptj": PublicModel("FlaxGPTJForCausalLM", "text", {**_GPT, "rotary_dim": 32}),
    "llama": PublicModel(
        "FlaxLlamaForCausalLM",
        "text",
        {**_BERT, "hidden_size": 1024, "num_attention_heads": 8},
    ),
    "marian": PublicModel("FlaxMarianMTModel", "translation", _BART),
    "mistral": PublicModel(
        "FlaxMistralForCausalLM",
        "text",
        {
            **_BERT,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
    ),
    "opt": PublicModel(
        "FlaxOPTForCausalLM",
        "text",
        {
            "vocab_size": 16384,
            "hidden_size": 1024,
            "num_hidden_layers": 3,
            "ffn_dim": 4096,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 1024,
        },
    ),
    "pegasus": PublicModel("FlaxPegasusForConditionalGeneration", "translation", _BART),
    "regnet": PublicModel(
        "FlaxRegNetForImageClassification", "images", {"num_labels": 1000}
    ),
    "resnet": PublicModel(
        "FlaxResNetForImageClassification", "images", {"num_labels": 1000}
    ),
    "roberta": PublicModel(
        "FlaxRobertaForMaskedLM", "text", {**_BERT, "max_position_embeddings": 1026}
    ),
    "vit": PublicModel(
        "FlaxViTForImageClassification", "images", {**_VIT, "patch_size": 16}
    ),
    "wav2vec2": PublicModel(
        "FlaxWav2Vec2ForCTC",
        "audio",
        {
            **_BERT,
            "vocab_size": 32,
            "do_stable_layer_norm": True,
            "feat_extract_norm": "layer",
        },
    ),
    "whisper": PublicModel(
        "FlaxWhisperForConditionalGeneration",
        "features",
        {**_BART, "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2},
    ),
    "xglm": PublicModel(
        "FlaxXGLMForCausalLM",
        "text",
        {
            "vocab_size": 16384,
            "d_model": 1024,
            "num_layers": 3,
            "ffn_dim": 4096,
            "attention_heads": 16,
        },
    ),
}
MODELS: Mapping[str, Callable[..., Workload]] = {
    f"public-{name}": partial(model.workload, f"public-{name}")
    for name, model in _MODELS.items()
}
"""Name of a model → function that makes its workload, with its sizes as keywords."""
