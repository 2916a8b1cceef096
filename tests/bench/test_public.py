from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.bench.holdout import public
from rhino_jax.bench.suite import load_suite, model_of


def test_the_suite_has_every_public_model() -> None:
    rows = {row.model for row in load_suite("fidelity").rows}
    assert rows == set(public.MODELS)


def test_unknown_sizes_are_refused_without_the_package() -> None:
    assert model_of("public-gpt2", batch=4).config.batch == 4
    with pytest.raises(ValueError, match="lenght"):
        model_of("public-gpt2", lenght=4)


def test_losses_take_the_text_that_is_read_or_decoded() -> None:
    text, decoded = jnp.zeros((2, 3), int), jnp.ones((2, 3), int)
    logits = jnp.zeros((2, 3, 4)).at[..., 1].set(9.0)
    both = {"input_ids": text, "decoder_input_ids": decoded}
    assert public._loss({"logits": logits}, {"input_ids": text}) > 8
    assert public._loss({"logits": logits}, both) < 1e-2
    pairs = {"logits_per_image": 9 * jnp.eye(3)}
    assert public._loss(pairs, {}) < 1e-2
    np.testing.assert_allclose(
        public._loss({"logits": jnp.zeros((5, 8))}, {}), np.log(8), rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["public-resnet", "public-clip", "public-opt"])
def test_steps_return_the_state_that_they_take(name: str) -> None:
    pytest.importorskip("transformers", reason="pip install rhino_jax[bench]")
    workload = model_of(name, batch=2, length=224 if name != "public-opt" else 16)
    args = workload.abstract_args()
    *state, loss = jax.eval_shape(workload.step, *args)
    assert jax.tree.map(jnp.shape, tuple(state)) == jax.tree.map(jnp.shape, args[:3])
    assert loss.shape == ()
