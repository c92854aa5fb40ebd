"""CUDA streams, with a recorder in place of torch.cuda: what is waited for, and what the steady state leaves out."""

from __future__ import annotations

import threading

import pytest
import torch

from cacheflow import engine as engine_module
from cacheflow.cuda import EVENTS, CudaDevice, CudaEvent
from cacheflow.devices import open_device
from cacheflow.loop import AHEAD
from cacheflow.policies import available
from tests.cacheflow.fake_cuda import FakeCuda
from tests.cacheflow.toy import CHUNK, ToyCosts, check, decoder, objects, poison, prompt, restoring

every_policy = pytest.mark.parametrize("policy", available())


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda(monkeypatch)
    monkeypatch.setattr(engine_module, "open_device", lambda name: CudaDevice(torch.device("cpu", 0)))
    return fake


@every_policy
@pytest.mark.parametrize("slow", [0.0, 0.003])
def test_restoring_and_saving_are_exact(make_engine, cuda, policy, slow):
    engine = make_engine(costs=ToyCosts(decoder(), loads=0.7))
    cuda.slow = slow
    prompts = [prompt(60), prompt(41, seed=1), prompt(23, seed=2)]
    for tokens in prompts[:2]:
        assert engine.save(tokens[:-3]).chunks
    saved = objects(engine.store)
    poison(engine, float("nan"))
    with restoring(engine, prompts, policy=policy) as batch:
        for restored in batch:
            check(engine, restored, saved)
            assert not restored.failures
    [generated] = engine.generate([prompts[0]], 6, policy=policy)
    with restoring(engine, [prompts[0] + generated.tokens], policy="load") as [restored]:
        check(engine, restored, objects(engine.store))


@every_policy
def test_the_steady_state_makes_nothing_and_synchronises_nothing(make_engine, cuda, policy):
    engine = make_engine()
    tokens = prompt(60)
    engine.save(tokens)
    since = len(cuda.calls)
    with restoring(engine, [tokens, prompt(60, seed=1)], policy=policy):
        pass
    assert not cuda.named("device synchronize")
    assert not cuda.named("stream", since) and not cuda.named("event", since)
    # Nothing but what the host wants to see: each prompt's logits and first token.
    shown = [engine.model.config.vocab_size * 4, 8] * 2
    assert sorted(call[1] for call in cuda.named("pinned", since)) == sorted(shown)
    # The loop's thread waits for no event: each stream has a thread for that.
    waiters = {call[-1] for call in cuda.named("synchronize", since)}
    assert waiters <= {"cacheflow-compute", "cacheflow-copy"}


def test_staging_is_pinned_once_and_double(make_engine, cuda):
    engine = make_engine()
    engine.warmup()
    staging = engine._executor._staging
    assert [call[1] for call in cuda.named("pinned")] == [buffer.host.nbytes for buffer in staging]
    assert len(staging) == AHEAD
    for buffer in staging:
        assert buffer.host.data_ptr() != buffer.device.data_ptr() and buffer.host.shape == buffer.device.shape


def streams(engine) -> dict[str, int]:
    """Numbers of the executor's streams by name."""
    executor = engine._executor
    return {name: getattr(executor, name)._stream.number for name in ("compute", "copy", "offload")}


def launches(cuda, since: int) -> list[tuple[str, int, int]]:
    """("run", stream, end event) and ("wait", stream, event) in the order of their launch. Work records two events."""
    found, begun = [], {}
    for call in cuda.calls[since:]:
        if call[0] == "wait":
            found.append(("wait", call[1], call[2]))
        elif call[0] == "record" and call[2] is not None:
            event, stream = call[1], call[2]
            if begun.get(stream) is None:
                begun[stream] = event
            else:
                begun[stream] = None
                found.append(("run", stream, event))
    return found


@pytest.mark.parametrize("policy", ["load", "layerwise-load"])
def test_compute_waits_for_the_copies_of_its_layers_and_for_nothing_else(make_engine, cuda, policy):
    engine = make_engine()
    tokens = prompt(60)
    engine.save(tokens)
    cuda.slow = 0.02  # so that no copy has ended by the time compute is launched behind it
    since = len(cuda.calls)
    with restoring(engine, [tokens], policy=policy):
        pass
    number = streams(engine)
    latest, waited, copies = {}, {}, []
    runs = 0
    for kind, stream, event in launches(cuda, since):
        if kind == "wait":
            assert stream == number["compute"], "copies and fetches wait for no event"
            waited[stream] = event
        else:
            if stream == number["compute"]:
                runs += 1
                # Whole columns were copied, so that the latest copy is of every layer; or layers, one after another.
                assert waited[stream] == latest[number["copy"]] if policy == "load" else waited[stream] in copies
            latest[stream] = event
            copies += [event] if stream == number["copy"] else []
    assert runs and len(copies) > 1


def test_saving_waits_for_what_compute_and_copies_have_queued(make_engine, cuda):
    engine = make_engine()
    with restoring(engine, [prompt(CHUNK + 1)]) as [restored]:
        executor, number = engine._executor, streams(engine)
        cuda.slow = 0.02
        since = len(cuda.calls)
        for stream in (executor.compute, executor.copy):
            stream.run(lambda: None, lambda start, end, error: None)
        executor.save(restored.session, 0, engine.layout, "ab" * 32, lambda result: None)
        executor.flush()
    ends = {stream: event for kind, stream, event in launches(cuda, since) if kind == "run"}
    waits = [event for kind, stream, event in launches(cuda, since) if (kind, stream) == ("wait", number["offload"])]
    assert waits == [ends[number["compute"]], ends[number["copy"]]]


def test_no_wait_is_launched_for_what_has_ended():
    """Its event may have been recorded anew, for other work."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda(patch)
        device = CudaDevice(torch.device("cpu", 0))
        first, second = device.stream("copy"), device.stream("compute")
        first.run(lambda: None, lambda start, end, error: None)
        event = first.record()
        event.wait()
        second.wait(event)
        assert not cuda.named("wait")
        for stream in (first, second):
            stream.close()


def test_times_are_those_of_events_and_errors_go_to_whoever_waits(cuda):
    device = CudaDevice(torch.device("cpu", 0))
    stream = device.stream("compute")
    seen: list[tuple[float, float, BaseException | None]] = []

    def fail() -> None:
        raise ZeroDivisionError

    for work in (lambda: None, fail):
        stream.run(work, lambda *ended: seen.append(ended))
    stream.record().wait()
    stream.close()
    assert [type(error) for _, _, error in seen] == [type(None), ZeroDivisionError]
    assert all(start <= end for start, end, _ in seen) and seen[0][1] <= seen[1][0]


def test_events_are_used_again_and_more_are_made_only_for_more_work(cuda):
    device = CudaDevice(torch.device("cpu", 0))
    stream = device.stream("store")
    held = threading.Event()
    since = len(cuda.calls)
    for _ in range(3 * EVENTS):
        stream.run(lambda: None, lambda start, end, error: None)
        stream.record().wait()
    # A pair is given back just after its work is said to have ended: another one may be needed in between.
    assert not cuda.named("event", since)
    for _ in range(EVENTS + 3):
        stream.run(lambda: None, lambda start, end, error: held.wait())
    assert len(cuda.named("event", since)) >= 2 * 2
    held.set()
    stream.close()


def test_an_interrupted_launch_is_not_lost(make_engine, cuda, monkeypatch):
    """Ctrl-C while kernels are launched: the call ends with it, and the engine goes on."""
    engine = make_engine()
    tokens = prompt(60)
    engine.save(tokens)
    forward, calls = type(engine.model).forward, []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return forward(self, *args)

    monkeypatch.setattr(type(engine.model), "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.restore([tokens], policy="recompute")
    with restoring(engine, [tokens], policy="token") as [restored]:
        check(engine, restored, objects(engine.store))


def test_an_event_without_work_is_reached(cuda):
    stream = CudaDevice(torch.device("cpu", 0)).stream("compute")
    event = stream.record()
    assert isinstance(event, CudaEvent)
    event.wait()
    stream.close()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cuda", "device 'cuda' is not here: PyTorch .* sees 0 GPUs; use cpu"),
        ("cuda:3", "device 'cuda:3' is not here"),
        ("gpu", "there is no device 'gpu'; use cpu, cuda or cuda:N"),
        ("meta", "device 'meta' is not supported; use cpu, cuda or cuda:N"),
    ],
)
def test_devices_that_are_not_here(monkeypatch, name, sentence):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=sentence):
        open_device(name)
