"""The demo: a real model and a real document, stored, forgotten, and restored under every policy."""

from __future__ import annotations

import importlib.metadata
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cacheflow import demo_model, perfetto, plots, trials
from cacheflow.engine import Engine
from cacheflow.policies import available
from cacheflow.stores import DiskStore, Link
from cacheflow.text import Tokenizer, read_document
from models.decoder import Decoder

CHUNK = 128
PAGE = 16
DOCUMENT_TOKENS = 2000
ANSWER_TOKENS = 48
ROUNDS = 3
QUESTION = "What is this text about? Answer in one sentence."
# SmolLM2 was taught to chat in this form.
BEFORE = "<|im_start|>user\n"
AFTER = "\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
STOP = "<|im_end|>"


@dataclass(frozen=True)
class Row:
    """One policy. Shares are of the restoration's time (busy) or of the prefix's cells (computed, loaded counts)."""

    policy: str
    ttft_s: float
    bound_s: float
    speedup_vs_best_single: float
    ratio_to_bound: float
    ratio_to_simulated: float
    busy_compute: float
    busy_load: float
    computed_cells: int
    loaded_cells: int
    logits_rel_err: float
    text: str
    useful_compute: float
    useful_load: float
    overhead: float


@dataclass(frozen=True)
class Report:
    """rows: one per policy. Every ratio is taken within a round, of which there were `rounds`, and is the median over
    them; so are times.

    recompute_vs_transformers: TTFT of `recompute` over Transformers' unchunked prefill of the same prompt.
    load_vs_bytes: restoration of `load` over bytes over bandwidth.
    transformers_logits_rel_err: of our cold logits, against Transformers'.
    """

    model: str
    document: str
    document_tokens: int
    prompt_tokens: int
    chunk_tokens: int
    kv_bytes: int
    gbps: float
    device: str
    dtype: str
    backend: str
    threads: int
    torch: str
    rounds: int
    recompute_vs_transformers: float
    load_vs_bytes: float
    transformers_logits_rel_err: float
    rows: tuple[Row, ...]


def run(
    out: Path,
    *,
    document: Path | None = None,
    question: str = QUESTION,
    device: str = "cpu",
    dtype: str = "float32",
    backend: str | None = None,
    gbps: float | None = None,
    rounds: int = ROUNDS,
    progress: Callable[[str], None] = lambda step: None,
) -> Report:
    """Run the demo and write report.json, two pictures per policy and a Perfetto trace into `out`.

    device, dtype, backend: as for an Engine, dtype by name.
    gbps: of the link; None: such that loading everything takes as long as recomputing everything.
    Raises ValueError for a document that cannot be used.
    """
    model = demo_model.ensure(progress)
    tokenizer = Tokenizer.of(model.folder)
    name, text = (
        ("LICENSE (Apache 2.0)", license_text()) if document is None else (str(document), read_document(document))
    )
    limit = None if document else DOCUMENT_TOKENS
    prefix = tokenizer.encode(BEFORE + text)[:limit]
    prompt = prefix + tokenizer.encode(AFTER.format(question=question))
    out.mkdir(parents=True, exist_ok=True)
    progress("loading the model")
    with tempfile.TemporaryDirectory(dir=out, prefix="store-") as folder:
        link = Link(DiskStore(folder), gbps=math.inf)
        with Engine(
            model.folder,
            link,
            device=device,
            dtype=getattr(torch, dtype),
            backend=backend,
            chunk_tokens=CHUNK,
            page_size=PAGE,
            learn=False,  # or what one policy taught would serve those behind it
        ) as engine:
            baseline = _Transformers(model.folder, prompt, engine.model)
            progress("measuring costs")
            engine.warmup()
            progress("storing the document")
            engine.save(prefix)
            [cold] = trials.balance(engine, [prompt], gbps)
            assert cold.logits is not None
            outcomes = trials.run(
                engine,
                [prompt],
                list(available()),
                rounds,
                answer_tokens=ANSWER_TOKENS,
                stop_tokens=tokenizer.encode(STOP) if model.tokenizer else (),
                baseline=baseline.time,
                progress=progress,
            )
            texts = {outcome.policy: tokenizer.decode(list(outcome.trials[-1].tokens[0])) for outcome in outcomes}
            rows = tuple(_row(outcome, outcomes, cold.logits, texts[outcome.policy]) for outcome in outcomes)
            pictures(out, outcomes)
            by_name = {outcome.policy: outcome for outcome in outcomes}
            kv_bytes = len(prefix) * engine.model.config.kv_bytes_per_token(engine.model.dtype)
            report = Report(
                model=model.label,
                document=name,
                document_tokens=len(prefix),
                prompt_tokens=len(prompt),
                chunk_tokens=CHUNK,
                kv_bytes=kv_bytes,
                gbps=link.bandwidth * 8 / 1e9,
                device=str(engine.model.device),
                dtype=dtype,
                backend=engine.model.ops.NAME,
                threads=torch.get_num_threads(),
                torch=torch.__version__,
                rounds=rounds,
                recompute_vs_transformers=baseline.ratio(by_name["recompute"]),
                load_vs_bytes=by_name["load"].median(lambda trial: trial.summary.seconds) / (kv_bytes / link.bandwidth),
                transformers_logits_rel_err=trials.relative_error(cold.logits, baseline.logits),
                rows=rows,
            )
    (out / "report.json").write_text(json.dumps(asdict(report), indent=1) + "\n")
    return report


def license_text() -> str:
    """This package's LICENSE, the demo's document: real English that every copy has."""
    source = Path(__file__).parents[1] / "LICENSE"  # in a checkout; a wheel keeps it among its metadata
    if source.is_file():
        return source.read_text()
    text = importlib.metadata.distribution("cacheflow").read_text("licenses/LICENSE")
    if text is None:
        raise ValueError("the installed package lacks its LICENSE, the demo's document; name another: --document")
    return text


class _Transformers:
    """Transformers' own unchunked prefill of the same prompt: the baseline that ours has to be honest against."""

    def __init__(self, folder: Path, prompt: list[int], ours: Decoder) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=ours.dtype, attn_implementation="sdpa")
        torch.nn.Module.to(self._model, ours.device)
        self._ids = torch.tensor([prompt], device=ours.device)
        self._seconds: list[float] = []
        self.logits = torch.empty(0)
        self.time()  # the first pass also allocates; it does not count
        self._seconds.clear()

    @torch.inference_mode()
    def time(self) -> None:
        start = time.perf_counter()
        logits = self._model(self._ids, use_cache=True, logits_to_keep=1).logits[0, -1]
        int(logits.argmax())
        self._seconds.append(time.perf_counter() - start)
        self.logits = logits.cpu()

    def ratio(self, ours: trials.Outcome) -> float:
        """Ours over theirs, round by round, the median."""
        pairs = zip(ours.trials, self._seconds, strict=True)
        return statistics.median(trial.mean_ttft / theirs for trial, theirs in pairs)


def _row(outcome: trials.Outcome, outcomes: list[trials.Outcome], cold: torch.Tensor, text: str) -> Row:
    typical = outcome.typical
    return Row(
        policy=outcome.policy,
        ttft_s=outcome.median(lambda trial: trial.mean_ttft),
        bound_s=outcome.median(lambda trial: trial.bound),
        speedup_vs_best_single=trials.speedup(outcomes, outcome.policy),
        ratio_to_bound=outcome.median(lambda trial: trial.ratio_to_bound),
        ratio_to_simulated=outcome.median(lambda trial: trial.ratio_to_simulated),
        busy_compute=outcome.median(lambda trial: trial.summary.busy["compute"]),
        busy_load=outcome.median(lambda trial: trial.summary.busy["fetch"]),
        computed_cells=typical.summary.prefix["compute"].cells,
        loaded_cells=typical.summary.prefix["load"].cells,
        logits_rel_err=max(_error(trial, cold) for trial in outcome.trials),
        text=text,
        useful_compute=outcome.median(lambda trial: trial.summary.useful["compute"]),
        useful_load=outcome.median(lambda trial: trial.summary.useful["fetch"]),
        overhead=outcome.median(lambda trial: trial.overhead),
    )


def _error(trial: trials.Trial, cold: torch.Tensor) -> float:
    [restored] = trial.batch
    assert restored.logits is not None
    return trials.relative_error(restored.logits, cold)


def pictures(out: Path, outcomes: list[trials.Outcome]) -> None:
    """Two pictures and a Perfetto trace of every policy's typical round, of one prompt."""
    for trial in (outcome.typical for outcome in outcomes):
        [restored] = trial.batch
        request, timeline = restored.request, restored.timeline
        marks = {"first token": trial.summary.start + restored.ttft}
        perfetto.write(timeline, out / f"{trial.policy}.perfetto.json", requests=[request], marks=marks)
        by_id = {request.id: request}
        lanes = out / f"{trial.policy}-lanes.png"
        plots.lanes(timeline, lanes, title=trial.policy, bound=trial.bound, ttft=restored.ttft, requests=by_id)
        plots.plane(request, timeline, out / f"{trial.policy}-plane.png", title=trial.policy)
