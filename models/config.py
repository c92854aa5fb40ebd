"""What a decoder's shape and arithmetic are, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.rope import Rope

if TYPE_CHECKING:  # reading a configuration must not take as long as importing PyTorch does
    import torch


ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_PRESETS = Path(__file__).parent / "presets"

# Keys that change the arithmetic, and the only values implemented; a key that is absent has that value.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None,),
    "compression_config": (None,),
    "is_causal": (True, None),
    "add_cross_attention": (False, None),
}


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a Llama, Mistral, Qwen2 or Qwen3 decoder.

    hidden_size, intermediate_size, head_dim: elements. num_layers, heads, kv_heads, vocab_size: counts.
    max_positions: positions the model was made for. windows: per layer, tokens a query sees (None = all).
    qkv_bias, o_bias, mlp_bias: which projections add a bias. qk_norm: RMSNorm of every Q and K head before RoPE.
    tie_embeddings: the output projection is the embedding. dtype: what the checkpoint says it is in, or None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads {self.heads} is not a multiple of num_key_value_heads {self.kv_heads}; "
                "only grouped heads of equal size are supported"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one")

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """From `folder/config.json`. Raises ValueError if that is missing, no JSON, or asks for the unsupported."""
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read {path} ({error.strerror}); give the folder of a checkpoint") from error
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}); download the checkpoint again") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path} holds {type(config).__name__}, not an object; download the checkpoint again")
        return cls.from_dict(config)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """A public model's shape by name, e.g. "llama-3.1-8b". Raises ValueError for an unknown name."""
        known = sorted(path.stem for path in _PRESETS.glob("*.json"))
        if name not in known:
            raise ValueError(f"no preset {name!r}; presets are {', '.join(known)}")
        return cls.from_dict(json.loads((_PRESETS / f"{name}.json").read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the object in a `config.json`; keys without effect on these architectures are ignored, as Transformers
        does. Raises ValueError, naming the value and what is supported, for anything else."""
        architecture = _architecture(config)
        for key, supported in _ONLY.items():
            if key in config and config[key] not in supported:
                shown = " or ".join(str(value) for value in supported)
                raise ValueError(f"{key} {config[key]!r} is not supported; supported is {shown}")
        heads = _integer(config, "num_attention_heads")
        hidden_size = _integer(config, "hidden_size")
        num_layers = _integer(config, "num_hidden_layers")
        max_positions = _integer(config, "max_position_embeddings")
        qwen2, qwen3 = (architecture == name for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"))
        llama = architecture == "LlamaForCausalLM"
        attention_bias = bool(config.get("attention_bias", False)) and (llama or qwen3)
        return cls(
            architecture=architecture,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=num_layers,
            heads=heads,
            kv_heads=_integer(config, "num_key_value_heads", heads),
            head_dim=_integer(config, "head_dim", 128 if qwen3 else hidden_size // heads),
            max_positions=max_positions,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=Rope.from_config(config),
            windows=_windows(architecture, config, num_layers),
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and llama,
            qk_norm=qwen3,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=config.get("dtype") or config.get("torch_dtype"),
        )

    @property
    def v_head_dim(self) -> int:
        """Elements of a V head; K's in these architectures."""
        return self.head_dim

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return self.head_dim**-0.5

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees, its own included; None = all."""
        return self.windows[layer]

    def kv_fields(self) -> dict[str, Any]:
        """The fields that change K and V for given weights, as plain JSON values: a part of every cache key."""
        left_out = {"vocab_size", "max_positions", "tie_embeddings", "dtype"}
        fields = {name: value for name, value in asdict(self).items() if name not in left_out}
        return fields | {"windows": list(self.windows)}

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of K and V of one token over all layers."""
        return self.num_layers * self.kv_heads * (self.head_dim + self.v_head_dim) * dtype.itemsize


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        shown = ", ".join(named) or f"none (model_type {config.get('model_type')!r})"
        raise ValueError(f"architecture {shown} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return named[0]


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r} in config.json; it must be a whole number of at least 1")
    return value


def _windows(architecture: str, config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Per layer, following each architecture's configuration class in Transformers."""
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    mistral = architecture == "MistralForCausalLM"
    window = config.get("sliding_window", 4096) if mistral or config.get("use_sliding_window", False) else None
    if window is not None:
        window = _integer({"sliding_window": window}, "sliding_window")
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = 0 if mistral else int(config.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer type {layer_type!r} is not supported; supported are full_attention, sliding_attention"
            )
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for {num_layers} layers; give one per layer")
    sliding = [layer_type == "sliding_attention" for layer_type in layer_types]
    # Transformers' Mistral does not look at layer_types, and its Qwen cannot slide without a window.
    if (any(sliding) and window is None) or (mistral and window is not None and not all(sliding)):
        raise ValueError(
            f"layer_types {layer_types} contradicts sliding_window {window} of {architecture}; make the two agree"
        )
    return tuple(window if slides else None for slides in sliding)
