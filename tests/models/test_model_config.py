"""Config files: what is refused, and what the refusal says."""

from __future__ import annotations

import pytest

from rhino_jax import models
from rhino_jax.models import registry


GOOD = (registry.models_dir() / "gpt-tiny.toml").read_text()


def _refused(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(models.ModelConfigError) as info:
        models.load(path)
    return str(path), str(info.value)


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace("batch = 8", "batch = 24"))
    workload = models.load(path)
    assert (workload.name, workload.config.batch) == ("mine", 24)


def test_every_file_names_its_source():
    for name in models.names():
        first = (
            (registry.models_dir() / f"{name}.toml").read_text().split("\nfamily")[0]
        )
        assert first.startswith("# "), name
        assert "Source:" in first or "of our own" in first, name


@pytest.mark.parametrize(
    ("old", "new", "key", "expected"),
    [
        ("batch = 8\n", "", "batch", "a whole number >= 1"),
        ("batch = 8", "batch = 0", "batch", "a whole number >= 1"),
        ("batch = 8", "batch = true", "batch", "a whole number >= 1"),
        ("batch = 8", "batch = 8.5", "batch", "a whole number >= 1"),
        ("batch = 8", "batch = '8'", "batch", "a whole number >= 1"),
        ("batch = 8", "batch = [8]", "batch", "a whole number >= 1"),
        ("remat = true", "remat = 1", "remat", "true or false"),
        ('layers = "scan"', 'layers = "loop"', "layers", "'scan' or 'unroll'"),
        ('layers = "scan"', 'layers = ["scan"]', "layers", "'scan' or 'unroll'"),
        ('"float32"', '"float64"', "dtype", "'float32' or 'bfloat16' or 'float16'"),
        ('"adamw"', '"adam"', "optimizer", "'adamw' or 'adafactor' or 'sgd'"),
        ("d_ff = 256", "d_ff = 256\nlearning_rate = 0", "learning_rate", "number > 0"),
        (
            "d_ff = 256",
            "d_ff = 256\nlearning_rate = nan",
            "learning_rate",
            "finite number",
        ),
        (
            "d_ff = 256",
            "d_ff = 256\nlearning_rate = inf",
            "learning_rate",
            "finite number",
        ),
        ("d_ff = 256", "d_ff = 256\nclip_norm = -1", "clip_norm", "number >= 0"),
        ("num_heads = 8", "num_heads = 7", "num_heads", "a divisor of d_model = 64"),
        ("d_ff = 256", "d_fff = 256", "d_fff", "Did you mean 'd_ff'?"),
        ('family = "gpt"', 'family = "gtp"', "family", "Did you mean 'gpt'?"),
        ('family = "gpt"', "family = ['gpt']", "family", "expected one of"),
        ('family = "gpt"\n', "", "family", "expected one of"),
    ],
)
def test_a_bad_value_is_named(tmp_path, old, new, key, expected):
    assert old in GOOD
    path, message = _refused(tmp_path, GOOD.replace(old, new))
    assert path in message
    assert f"`{key}`" in message
    assert expected in message
    assert "fix:" in message


@pytest.mark.parametrize(
    ("name", "overrides", "key"),
    [
        ("llama-tiny", {"rope_theta": 0}, "rope_theta"),
        ("llama-tiny", {"num_kv_heads": 3}, "num_kv_heads"),
        ("llama-tiny", {"num_heads": 64, "num_kv_heads": 64}, "num_heads"),
        ("moe-tiny", {"capacity_factor": 0}, "capacity_factor"),
        ("moe-tiny", {"moe_every": 3}, "moe_every"),
        ("moe-tiny", {"top_k": 9}, "top_k"),
        ("t5-tiny", {"position_buckets": 2}, "position_buckets"),
        ("t5-tiny", {"position_max_distance": 2}, "position_max_distance"),
        ("unet-tiny", {"image_size": 15}, "image_size"),
        ("unet-tiny", {"groups": 3}, "groups"),
        ("unet-tiny", {"multipliers": []}, "multipliers"),
        ("unet-tiny", {"multipliers": [1, 0]}, "multipliers"),
        ("wide-resnet-tiny", {"blocks": 3}, "blocks"),
        ("two-tower-tiny", {"patch": 5}, "patch"),
        ("two-tower-tiny", {"text_heads": 5}, "text_heads"),
        ("decode-tiny", {"prompt_len": 32}, "prompt_len"),
        ("decode-tiny", {"end_token": 128}, "end_token"),
        ("rnn-tiny", {"cell": "rnn"}, "cell"),
    ],
)
def test_values_that_do_not_go_together(name, overrides, key):
    with pytest.raises(models.ModelConfigError, match=f"key `{key}`"):
        models.get(name, **overrides)


def test_not_toml(tmp_path):
    path, message = _refused(tmp_path, GOOD + "\nbatch =")
    assert path in message
    assert "cannot be read: Invalid value" in message


def test_no_such_file(tmp_path):
    with pytest.raises(models.ModelConfigError, match="cannot be read"):
        models.load(tmp_path / "absent.toml")


def test_no_such_model():
    with pytest.raises(models.ModelConfigError, match="Did you mean 'gpt-tiny'"):
        models.get("gpt-tinny")


def test_overrides_change_only_what_they_name():
    config = models.get("gpt-tiny", batch=16, learning_rate=1).config
    assert (config.batch, config.learning_rate, config.d_model) == (16, 1.0, 64)
    assert isinstance(config.learning_rate, float)
