"""What is read from a config.json, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.config import ModelConfig
from tests.models.checkpoints import FAMILIES, ROPES, SHAPE

QWEN2 = ["Qwen2ForCausalLM"]
BASE: dict[str, Any] = dict(SHAPE, architectures=["LlamaForCausalLM"], model_type="llama", rope_theta=5e5)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
WINDOWS = {
    "mistral-window": (9,) * 4,
    "qwen2-window": (None, None, 9, 9),
    "qwen3-window": (7, None, 7, None),
}


def config(**changes: Any) -> ModelConfig:
    given = BASE | changes
    return ModelConfig.from_dict({key: value for key, value in given.items() if value is not ...})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read_back(checkpoint, family):
    source = checkpoint(family)
    theirs, ours = source.model.config, ModelConfig.from_folder(source.folder)
    assert (ours.hidden_size, ours.intermediate_size, ours.vocab_size) == (64, 88, 97)
    assert (ours.num_layers, ours.heads, ours.kv_heads) == (4, 4, theirs.num_key_value_heads)
    assert ours.head_dim == source.model.model.layers[0].self_attn.head_dim == ours.v_head_dim
    assert (ours.rms_norm_eps, ours.max_positions, ours.rope.theta) == (1e-5, 256, 5000.0)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert [ours.window(layer) for layer in range(4)] == list(WINDOWS.get(family, (None,) * 4))
    assert ours.dtype == "float32" and ours.scale == ours.head_dim**-0.5


def test_older_rope_keys_mean_the_same():
    for rope, extra in (("llama3", LLAMA3), ("linear", dict(factor=3.0)), ("yarn", dict(factor=4.0))):
        new = config(rope_theta=..., rope_parameters=dict(extra, rope_type=rope, rope_theta=5e5))
        assert config(rope_scaling=dict(extra, rope_type=rope)) == new
        assert config(rope_scaling=dict(extra, type=rope)) == new
        assert config(rope_scaling=dict(extra, type="default", rope_type=rope)) == new
    assert config(rope_scaling=None).rope.theta == 5e5
    assert config(rope_theta=...).rope.theta == 10000.0


@pytest.mark.parametrize("rope", [*ROPES, "yarn-long", "yarn-implicit", "yarn-outer-original"])
@pytest.mark.parametrize("head_dim,theta", [(16, 1e4), (128, 5e5), (80, 1e6)])
def test_frequencies_equal_transformers_bit_for_bit(rope, head_dim, theta):
    extra = {}
    if rope == "yarn-long":  # both ends of the ramp within the head
        parameters = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
    elif rope == "yarn-implicit":  # the factor from the two lengths
        parameters = dict(rope_type="yarn", factor=None, original_max_position_embeddings=32)
    elif rope == "yarn-outer-original":  # beside, not in, the rope parameters
        parameters, extra = dict(rope_type="yarn", factor=4.0), dict(original_max_position_embeddings=128)
    else:
        parameters = dict(ROPES[rope])
    parameters["rope_theta"] = theta
    shape = dict(SHAPE, head_dim=head_dim, **extra)
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**shape, rope_parameters=dict(parameters)))
    ours = config(head_dim=head_dim, rope_theta=..., rope_parameters=parameters, **extra).rope
    assert torch.equal(ours.inverse_frequencies(head_dim), theirs.inv_freq)
    assert ours.attention_factor == theirs.attention_scaling
    cos, sin = ours.tables(head_dim, 300, torch.float32, "cpu")
    expected_cos, expected_sin = theirs(torch.zeros(1), torch.arange(300)[None])
    assert torch.equal(cos, expected_cos[0, :, : head_dim // 2]) and cos.shape == (300, head_dim // 2)
    assert torch.equal(sin, expected_sin[0, :, : head_dim // 2])


@pytest.mark.parametrize(
    "preset,layers,heads,kv_heads,head_dim,kibibytes",
    [
        ("llama-3.1-8b", 32, 32, 8, 128, 128),
        ("llama-3.1-70b", 80, 64, 8, 128, 320),
        ("qwen3-8b", 36, 32, 8, 128, 144),
        ("smollm2-135m", 30, 9, 3, 64, 22.5),
    ],
)
def test_presets(preset, layers, heads, kv_heads, head_dim, kibibytes):
    shape = ModelConfig.preset(preset)
    assert (shape.num_layers, shape.heads, shape.kv_heads, shape.head_dim) == (layers, heads, kv_heads, head_dim)
    assert shape.kv_bytes_per_token(torch.bfloat16) == kibibytes * 1024
    assert shape.kv_bytes_per_token(torch.float32) == 2 * kibibytes * 1024


@pytest.mark.parametrize("layers,kv_heads,kibibytes", [(32, 32, 512), (40, 40, 800), (48, 4, 96)])
def test_kv_bytes_of_other_public_models(layers, kv_heads, kibibytes):
    shape = replace(ModelConfig.preset("qwen3-8b"), num_layers=layers, kv_heads=kv_heads, heads=kv_heads * 8)
    assert shape.kv_bytes_per_token(torch.bfloat16) == kibibytes * 1024


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(
        ValueError, match=r"no preset 'gpt-5'; presets are llama-3\.1-70b, llama-3\.1-8b, qwen3-8b, smollm2-135m"
    ):
        ModelConfig.preset("gpt-5")


def test_kv_fields_change_with_whatever_changes_kv_and_with_nothing_else():
    fields = config().kv_fields()
    assert json.loads(json.dumps(fields)) == fields
    mistral = dict(architectures=["MistralForCausalLM"], sliding_window=None)
    different = [
        config(**change).kv_fields()
        for change in (
            dict(rope_theta=1e4),
            dict(rope_scaling=dict(LLAMA3, rope_type="llama3")),
            dict(rope_scaling=dict(LLAMA3, rope_type="llama3", factor=4.0)),
            dict(rope_scaling=dict(LLAMA3, rope_type="llama3", original_max_position_embeddings=32)),
            dict(rope_scaling=dict(rope_type="linear", factor=2.0)),
            dict(rope_scaling=dict(rope_type="yarn", factor=2.0)),
            dict(rope_scaling=dict(rope_type="yarn", factor=2.0, attention_factor=1.5)),
            dict(rope_scaling=dict(rope_type="yarn", factor=2.0, beta_fast=16)),
            dict(rms_norm_eps=1e-6),
            dict(num_attention_heads=8, head_dim=16),
            dict(num_key_value_heads=4),
            dict(head_dim=24),
            dict(attention_bias=True),
            dict(mlp_bias=True),
            dict(num_hidden_layers=5),
            dict(hidden_size=128, head_dim=16),
            dict(intermediate_size=96),
            mistral,
            dict(mistral, sliding_window=8),
            dict(mistral, sliding_window=9),
        )
    ]
    distinct = {json.dumps(each, sort_keys=True) for each in [fields, *different]}
    assert len(distinct) == len(different) + 1
    for change in (
        dict(max_position_embeddings=999),
        dict(torch_dtype="float16"),
        dict(tie_word_embeddings=True),
        dict(vocab_size=98),
        dict(bos_token_id=5, use_cache=False, transformers_version="1"),
        dict(rope_theta=..., rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    ):
        assert config(**change).kv_fields() == fields


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(architectures=["GPT2LMHeadModel"]), "architecture GPT2LMHeadModel is not supported; supported are Llama"),
        (dict(architectures=None), r"architecture none \(model_type 'llama'\) is not supported"),
        (dict(architectures=["Qwen3MoeForCausalLM"]), "architecture Qwen3MoeForCausalLM is not supported"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported; supported is silu"),
        (dict(quantization_config=dict(bits=4)), "quantization_config .* is not supported"),
        (dict(is_causal=False), "is_causal False is not supported"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported"),
        (dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor 0.5 is not supported"),
        (dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_type 'dynamic' is not supported; supported"),
        (dict(rope_scaling=dict(rope_type="longrope")), "rope_type 'longrope' is not supported"),
        (dict(rope_scaling=dict(type="mrope", mrope_section=[1])), "rope_type 'mrope' is not supported"),
        (dict(rope_scaling=dict(rope_type="linear")), "rope_type 'linear' has factor None; it needs a number above 0"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=2.0)), "'llama3' has low_freq_factor None"),
        (dict(rope_scaling=dict(rope_type="linear", factor=2, ramp=1)), "'linear' with parameter 'ramp' is not"),
        (dict(rope_scaling=[1]), r"rope_parameters is \[1\]"),
        (dict(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        (dict(head_dim=15), "head_dim 15 is odd"),
        (dict(num_hidden_layers=...), "num_hidden_layers is None in config.json; it must be a whole number"),
        (dict(hidden_size=0), "hidden_size is 0"),
        (dict(vocab_size=True), "vocab_size is True"),
        (dict(num_attention_heads="4"), "num_attention_heads is '4'"),
        (dict(architectures=["MistralForCausalLM"], sliding_window=0), "sliding_window is 0"),
        (dict(architectures=QWEN2, layer_types=["chunked_attention"] * 4), "layer type 'chunked_attention'"),
        (dict(architectures=QWEN2, layer_types=["full_attention"]), "layer_types has 1 entries for 4"),
        (dict(architectures=QWEN2, layer_types=["sliding_attention"] * 4), "contradicts sliding_window None"),
        (
            dict(architectures=["MistralForCausalLM"], sliding_window=4, layer_types=["full_attention"] * 4),
            "contradicts sliding_window 4 of Mistral",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_the_unsupported_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message) as refused:
        config(**change)
    assert "\n" not in str(refused.value)


def test_transformers_defaults_of_absent_keys():
    llama = config(num_key_value_heads=..., rms_norm_eps=...)
    assert (llama.kv_heads, llama.rms_norm_eps, llama.head_dim) == (4, 1e-6, 16)
    assert config(architectures=["MistralForCausalLM"]).windows == (4096,) * 4
    assert config(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert config(architectures=["Qwen2ForCausalLM"], sliding_window=9, max_window_layers=0).windows == (None,) * 4


@pytest.mark.parametrize(
    "content,message",
    [(None, "cannot read .*config.json"), ("{", "config.json is not JSON"), ("[]", "holds list, not an object")],
)
def test_bad_files_are_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_folder(tmp_path)
