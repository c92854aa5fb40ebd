"""Checkpoints: sharded, tied, damaged; random weights; the digest of the files."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import models.weights
from models.config import ModelConfig
from models.decoder import Decoder
from models.weights import Weights, fingerprint_files, load_weights, random_weights
from tests.models.checkpoints import one_pass, random_tokens


def tensors(weights: Weights) -> list[torch.Tensor]:
    found = [weights.embedding, weights.norm, weights.lm_head]
    for layer in weights.layers:
        found += [value for field in fields(layer) if (value := getattr(layer, field.name)) is not None]
    return found


@pytest.fixture
def folder(checkpoint, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(checkpoint("llama").folder, tmp_path / "copy"))


def rewrite(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    stored = load_file(path)
    change(stored)
    save_file(stored, path)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, ModelConfig.from_folder(folder), dtype)


@pytest.mark.parametrize("family", ["llama-bias", "qwen2", "qwen3"])
def test_sharded_and_whole_checkpoints_give_the_same_fused_weights(checkpoint, family, tmp_path):
    source = checkpoint(family)
    source.model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    whole, sharded = load(source.folder), load(tmp_path)
    for one, other in zip(tensors(whole), tensors(sharded), strict=True):
        assert torch.equal(one, other)
    attention, mlp = source.model.model.layers[2].self_attn, source.model.model.layers[2].mlp
    layer = whole.layers[2]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert torch.equal(layer.qkv_weight, torch.cat([each.weight for each in projections]))
    if layer.qkv_bias is not None:
        assert torch.equal(layer.qkv_bias, torch.cat([each.bias for each in projections]))
    assert torch.equal(layer.gate_up_weight, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    assert not any(tensor.requires_grad for tensor in tensors(whole))


def test_tied_embeddings_are_one_tensor(checkpoint):
    weights = load(checkpoint("llama-tied").folder)
    assert weights.lm_head is weights.embedding
    assert load(checkpoint("llama").folder).lm_head is not load(checkpoint("llama").folder).embedding


def test_a_tied_head_that_was_saved_too_must_be_the_embedding(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint("llama-tied").folder, tmp_path / "copy"))
    rewrite(folder, lambda stored: stored.update({"lm_head.weight": stored["model.embed_tokens.weight"].clone()}))
    assert load(folder).lm_head.shape == (97, 64)
    rewrite(folder, lambda stored: stored["lm_head.weight"][3, 4].add_(1))
    with pytest.raises(ValueError, match=r"lm_head.weight unlike its embedding although tie_word_embeddings is true"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtype_is_the_one_asked_for(checkpoint, dtype):
    folder = checkpoint("qwen3").folder
    exact = load(folder)
    for one, other in zip(tensors(load(folder, dtype)), tensors(exact), strict=True):
        assert one.dtype == dtype and torch.equal(one, other.to(dtype))


def test_one_tensor_at_a_time_is_held_beside_the_result(folder, monkeypatch):
    alive: list[weakref.ref] = []

    class Spy:
        def __init__(self, *args, **kwargs):
            self.file = models.weights.safe_open_original(*args, **kwargs)

        def __enter__(self):
            self.file = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            assert not any(reference() is not None for reference in alive)
            tensor = self.file.get_tensor(name)
            alive.append(weakref.ref(tensor))
            return tensor

    monkeypatch.setattr(models.weights, "safe_open_original", models.weights.safe_open, raising=False)
    monkeypatch.setattr(models.weights, "safe_open", Spy)
    load(folder)
    assert len(alive) > 30


def test_rotary_buffers_of_old_checkpoints_are_passed_over(folder):
    rewrite(folder, lambda s: s.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(folder)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda s: s.pop("model.layers.3.mlp.up_proj.weight"), "lacks 1 tensors, first model.layers.3.mlp.up_proj"),
        (lambda s: s.update(extra=torch.zeros(1)), "has tensor extra, which this architecture has no use for"),
        (
            lambda s: s.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}),
            "has tensor model.layers.1.self_attn.q_proj.bias, which",
        ),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(65)}),
            r"model.norm.weight in .* has shape \[65\] and should have \[64\]",
        ),
        (
            lambda s: s.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64)}),
            r"k_proj.weight in .* has shape \[64, 64\] and should have \[32, 64\]",
        ),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            "model.norm.weight in .* is torch.int8; quantised weights are not supported",
        ),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(64, dtype=torch.float8_e4m3fn)}),
            "is torch.float8_e4m3fn; quantised",
        ),
    ],
    ids=["missing", "unexpected", "bias", "norm-shape", "kv-shape", "int8", "fp8"],
)
def test_wrong_tensors_are_refused(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


def test_missing_and_damaged_files_are_refused(folder):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"cannot read .*model.safetensors .*; download the checkpoint again"):
        load(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors; give the folder of a checkpoint in safetensors"):
        load(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"has no b.safetensors"):
        load(folder)
    for broken in ("{", "{}", "[]"):
        index.write_text(broken)
        with pytest.raises(ValueError, match=r"cannot read a weight_map from .*index.json; download"):
            load(folder)


def test_random_weights_are_seeded_and_usable_without_a_checkpoint(checkpoint):
    config = ModelConfig.from_folder(checkpoint("qwen3").folder)
    first, again, other = (random_weights(config, seed, torch.float32) for seed in (3, 3, 4))
    low = random_weights(config, 3, torch.bfloat16)
    for one, two, three, rounded in zip(*map(tensors, (first, again, other, low)), strict=True):
        assert torch.equal(one, two) and not torch.equal(one, three) and torch.isfinite(one).all()
        assert torch.equal(rounded, one.to(torch.bfloat16))
    logits, _, _ = one_pass(Decoder(config, first), random_tokens(20))
    assert torch.isfinite(logits).all() and 0.3 < float(logits.std()) < 3


def test_fingerprint_follows_contents_not_places(folder, tmp_path):
    before = fingerprint_files(folder)
    assert len(before) == 64 and before == fingerprint_files(str(folder))
    assert fingerprint_files(shutil.copytree(folder, tmp_path / "elsewhere")) == before
    (folder / "README.md").write_text("no part of it")
    assert fingerprint_files(folder) == before
    seen = {before}
    for name in ("model.safetensors", "config.json"):
        content = bytearray((folder / name).read_bytes())
        content[-3] ^= 1
        (folder / name).write_bytes(content)
        seen.add(fingerprint_files(folder))
    assert len(seen) == 3


def test_fingerprint_reads_a_file_again_only_when_it_changed(folder):
    path = folder / "model.safetensors"
    before, status = fingerprint_files(folder), path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint_files(folder) == before  # size and time say that nothing changed, so it was not read
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))
    assert fingerprint_files(folder) != before


def test_fingerprint_needs_the_files(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors"):
        fingerprint_files(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json"):
        fingerprint_files(folder)
