"""A decoder that runs any band of layers over any set of tokens, over paged K and V."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

import kernels.reference
from kernels.batch import RaggedBatch, Selection
from kernels.variants import with_window
from models.config import ModelConfig
from models.weights import LayerWeights, Weights, fingerprint_files, load_weights


class Decoder:
    """A Llama, Mistral, Qwen2 or Qwen3 decoder with Hugging Face's weights. Immutable after construction, so any thread
    may call it, and several at once on different pages.

    ops: the backend, a module with the ops of `kernels.reference`.
    max_positions: length of the rotary tables and so of the longest sequence; None = what the model was made for.
    checkpoint_digest: what `fingerprint_files` gives for the files that the weights are from; None = from none.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: ModuleType = kernels.reference,
        max_positions: int | None = None,
        checkpoint_digest: str | None = None,
    ) -> None:
        self.config = config
        self.checkpoint_digest = checkpoint_digest
        self.weights = weights
        self.ops = ops
        self.max_positions = config.max_positions if max_positions is None else max_positions
        table_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._cos, self._sin = config.rope.tables(config.head_dim, self.max_positions, table_dtype, self.device)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        ops: ModuleType = kernels.reference,
        max_positions: int | None = None,
    ) -> Decoder:
        """Loads `config.json` and safetensors. Raises ValueError for what is missing, damaged or unsupported."""
        config = ModelConfig.from_folder(folder)
        weights = load_weights(folder, config, dtype, device)
        return cls(config, weights, ops, max_positions, checkpoint_digest=fingerprint_files(folder))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, hidden states, K and V."""
        return self.weights.embedding.dtype

    def warmup(self, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
        """Compile every kernel that a batch can need, if the backend compiles any. k_pages, v_pages: one layer's."""
        if self.ops.NAME != "triton":
            return
        from kernels.launch import Shape

        layer, config = self.weights.layers[0], self.config
        shape = Shape(
            config.hidden_size,
            config.intermediate_size,
            config.heads,
            k_pages,
            v_pages,
            qkv_bias=layer.qkv_bias is not None,
            qk_norm=layer.q_norm is not None,
        )
        self.ops.warmup(shape, self.device, [with_window(None, window) for window in dict.fromkeys(config.windows)])

    # Gradients are switched off on every entry, not once: the switch belongs to a thread.
    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [n] int64 or int32 on the weights' device. Returns [n, hidden]. Raises ValueError, on a CPU, for
        an id outside the vocabulary."""
        if token_ids.device.type == "cpu" and token_ids.numel():
            lowest, highest = (int(bound) for bound in torch.aminmax(token_ids))
            if lowest < 0 or highest >= self.config.vocab_size:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(f"token id {wrong} is outside the vocabulary of {self.config.vocab_size}; check ids")
        return F.embedding(token_ids, self.weights.embedding)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output projection. hidden: [n, hidden] after the last layer. Returns [n, vocab]."""
        return F.linear(self.ops.rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps), self.weights.lm_head)

    @torch.no_grad()
    def forward(
        self,
        layers: range,
        batch: RaggedBatch,
        hidden: torch.Tensor,
        pages: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Runs a band of layers, updating `hidden` and `pages` in place.

        At every layer the tokens of parts with `project` get their K and V written; at every layer but the band's last
        all tokens are advanced; through the last, only the `batch.advance` trailing tokens of each part. The rows of
        the others are left at the entry of the last layer.

        layers: adjacent and ascending. hidden: [num_tokens, hidden] at the entry of the first layer.
        pages: by layer, k_pages [num_pages, page_size, kv_heads, head_dim] and v_pages [..., v_head_dim].
        Raises ValueError for a band outside the model, a position beyond `max_positions`, or a misshapen `hidden`.
        """
        self._check(layers, batch, hidden)
        for layer in layers:
            advanced = batch.advanced if layer == layers[-1] else batch.everything
            self._layer(layer, batch.projected, advanced, hidden, pages[layer])

    def _layer(
        self,
        layer: int,
        projected: Selection,
        advanced: Selection,
        hidden: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        ops, eps, weights = self.ops, self.config.rms_norm_eps, self.weights.layers[layer]
        k_pages, v_pages = pages
        recompute = partial(
            ops.recompute,
            norm_weight=weights.input_norm,
            qkv_weight=weights.qkv_weight,
            qkv_bias=weights.qkv_bias,
            q_norm_weight=weights.q_norm,
            k_norm_weight=weights.k_norm,
            eps=eps,
            cos=self._cos,
            sin=self._sin,
            k_pages=k_pages,
            v_pages=v_pages,
        )
        x = hidden[advanced.rows]
        if projected.counts == advanced.counts:
            if not advanced.batch.num_tokens:
                return
            q = recompute(x, form="qkv", batch=advanced.batch)
        else:
            # K and V of every projected token before any attention: a later part may attend to an earlier one.
            if projected.batch.num_tokens:
                recompute(hidden[projected.rows], form="kv", batch=projected.batch)
            if not advanced.batch.num_tokens:
                return
            q = recompute(x, form="q", batch=advanced.batch)
        attended, _ = ops.attention(
            q, k_pages, v_pages, batch=advanced.batch, scale=self.config.scale, window=self.config.window(layer)
        )
        _add_linear(x, attended.flatten(1), weights.o_weight, weights.o_bias)
        self._mlp(x, weights)
        if not isinstance(advanced.rows, slice):  # a slice is a view: x was updated in place
            hidden[advanced.rows] = x

    def _mlp(self, x: torch.Tensor, weights: LayerWeights) -> None:
        normed = self.ops.rms_norm(x, weights.post_norm, self.config.rms_norm_eps)
        gate_up = F.linear(normed, weights.gate_up_weight, weights.gate_up_bias)
        _add_linear(x, self.ops.activation(gate_up), weights.down_weight, weights.down_bias)

    def _check(self, layers: range, batch: RaggedBatch, hidden: torch.Tensor) -> None:
        if not layers or layers.step != 1 or layers[0] < 0 or layers[-1] >= self.config.num_layers:
            raise ValueError(f"{layers} is no band of layers; give one within range({self.config.num_layers}), step 1")
        if max(batch.stops) > self.max_positions:
            raise ValueError(
                f"a sequence of {max(batch.stops)} tokens exceeds the {self.max_positions} positions of this decoder; "
                "shorten it or construct the Decoder with a larger max_positions"
            )
        expected = (batch.num_tokens, self.config.hidden_size)
        if hidden.shape != expected or hidden.dtype != self.dtype:
            raise ValueError(
                f"hidden is {list(hidden.shape)} {hidden.dtype}; this batch needs {list(expected)} {self.dtype}"
            )


def _add_linear(x: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """x += inputs @ weight.T + bias, the sum inside the GEMM."""
    x.addmm_(inputs, weight.T)
    if bias is not None:
        x.add_(bias)
