"""NVTX ranges of a restoration, with a recorder in place of the nvtx module (field case 25)."""

from __future__ import annotations

import threading

import pytest

from cacheflow.executor import PAYLOAD
from tests.cacheflow.toy import LAYERS, prompt, restoring
from tests.recorder import Recorder


def pushed(recorder: Recorder) -> list[tuple]:
    """(thread, name, kind, payload) of every pushed range."""
    return [call[1:] for call in recorder.calls if call[0] == "push"]


@pytest.mark.parametrize("policy", ["two-pointer", "load"])
def test_every_op_has_a_range_on_the_thread_that_does_the_work(make_engine, recorder, policy):
    engine = make_engine()
    tokens = prompt(60)
    engine.save(tokens[:33])
    recorder.calls.clear()
    with restoring(engine, [tokens], policy=policy, ids=["seven"]) as [restored]:
        spans = restored.timeline.spans
    recorder.check_balanced()
    found = pushed(recorder)
    assert found[0][1] == "restore" and found[0][0] == threading.get_ident()
    ops = [(name, kind, payload) for _, name, kind, payload in found if kind in ("compute", "fetch", "copy")]
    assert sorted(name for name, _, _ in ops) == sorted(span.op.kind for span in spans)
    seen = sorted(
        (name, int(x["first_layer"]), int(x["layers"]), int(x["chunks"]), int(x["bytes"])) for name, _, x in ops
    )
    expected = sorted(
        (
            span.op.kind,
            span.op.layers.start,
            len(span.op.layers),
            sum(len(range(*columns(restored.request, part))) for part in span.op.parts),
            span.bytes,
        )
        for span in spans
    )
    assert seen == expected
    for name, kind, payload in ops:
        assert name == kind and payload.dtype == PAYLOAD and str(payload["request"]) == "seven"
    threads = {kind: {thread for thread, _, k, _ in found if k == kind} for kind in ("compute", "copy", "fetch")}
    assert len(threads["compute"]) == len(threads["copy"]) == 1
    assert not threads["compute"] & threads["copy"] and not threads["fetch"] & (threads["compute"] | threads["copy"])
    assert sum(x["layers"] for _, _, x in ops) >= LAYERS


def columns(request, part) -> tuple[int, int]:
    return request.column_at(part.start), request.column_at(part.stop - 1) + 1


def test_saving_is_a_range_that_may_end_on_another_thread(make_engine, recorder):
    engine = make_engine()
    saved = engine.save(prompt(33))
    started = [call for call in recorder.calls if call[0] == "start"]
    assert [call[2:4] for call in started] == [("save", "save")] * saved.chunks
    assert sum(call[4] for call in started) == saved.bytes
    recorder.check_balanced()


def test_ranges_are_closed_when_a_store_raises_and_when_work_fails(make_engine, recorder, monkeypatch):
    engine = make_engine()
    engine.save(prompt(60))
    monkeypatch.setattr(engine.store, "read", lambda reads: 1 / 0)
    with restoring(engine, [prompt(60)], policy="load") as [restored]:
        assert restored.failures
    recorder.check_balanced()
    monkeypatch.setattr(type(engine.model), "forward", lambda self, *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.restore([prompt(60)], policy="recompute")
    recorder.check_balanced()


def test_every_kernel_has_a_range(make_engine, recorder, monkeypatch):
    from tests.cacheflow.test_kernels import kernels_decoder
    from tests.cacheflow.toy import ToyCosts
    from tests.interpreter import VARIABLE

    monkeypatch.setenv(VARIABLE, "1")
    model = kernels_decoder("llama", 2)
    engine = make_engine(model=model, costs=ToyCosts(model))
    with restoring(engine, [prompt(9)]):
        pass
    names = {name for _, name, kind, _ in pushed(recorder) if kind == "kernel"}
    assert {"attention_kernel", "recompute_kernel"} <= names
    recorder.check_balanced()
