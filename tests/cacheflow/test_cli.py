from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

from cacheflow import cli, policies
from cacheflow.commands import _common as common
from cacheflow.stores import Layout, PartSpec, open_store

SMALL = ["simulate", "--gbps", "40", "--tokens", "4K"]


@pytest.fixture
def cacheflow(capsys):
    def call(*argv):
        status = cli.main(list(map(str, argv)))
        out, err = capsys.readouterr()
        return status, out, err

    return call


def commands(parser, path=()):
    """Every command and action, as the words that call it."""
    yield path
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, (*path, name))


@pytest.mark.parametrize("path", list(commands(cli.parser())), ids=" ".join)
def test_every_command_has_help(cacheflow, path):
    status, out, err = cacheflow(*path, "--help")
    assert status == 0 and err == ""
    assert out.startswith(f"usage: cacheflow{''.join(f' {word}' for word in path)} ")


@pytest.mark.parametrize("path", list(commands(cli.parser())), ids=" ".join)
def test_an_unknown_flag_ends_in_one_sentence(cacheflow, path):
    status, out, err = cacheflow(*path, "--no-such-flag")
    assert status == 2 and out == "" and len(err.splitlines()) == 1
    assert "--help" in err


WRONG = {
    "no number": (["--gbps", "fast"], "'fast'", "for example"),
    "not above zero": (["--gbps", "40,0"], "'0'", "above 0"),
    "infinite": (["--gbps", "inf"], "'inf'", "above 0"),
    "no tokens": (["--tokens", "4k,12x"], "'12x'", "4K"),
    "zero tokens": (["--suffix", "0"], "'0'", "4K"),
    "no batch": (["--batch", "-1"], "'-1'", "at least 1"),
    "no time": (["--fetch-us", "-5"], "'-5'", "above 0"),
    "unknown policy": (["--policy", "token,tokn"], "'tokn'", "two-pointer"),
    "policy that cannot be imported": (["--policy", "no_such:Thing"], "no_such:Thing", "import"),
    "unknown device": (["--device", "H1000", "--gemm", "1e12"], "'H1000'", "--attention, --memory, --host"),
    "unknown model": (["--model", "llama-9"], "'llama-9'", "llama-3.1-8b"),
    "too many cells for a trace": (["--trace", "out.json", "--tokens", "4K,8K"], "2 lengths", "one --tokens"),
    "nowhere to write": (["--trace", "/no/such/folder/out.json"], "/no/such/folder", "folder that exists"),
}


@pytest.mark.parametrize(("argv", "value", "remedy"), WRONG.values(), ids=WRONG)
def test_wrong_values_end_in_one_sentence_with_the_value_and_the_remedy(cacheflow, argv, value, remedy):
    status, out, err = cacheflow(*SMALL, *argv)
    assert status == 2 and out == ""
    assert len(err.splitlines()) == 1 and err.startswith("cacheflow: ")
    assert value in err and remedy in err


def test_a_checkpoint_without_configuration_ends_in_one_sentence(cacheflow, tmp_path):
    status, _, err = cacheflow(*SMALL, "--model", tmp_path)
    assert status == 2 and str(tmp_path) in err and len(err.splitlines()) == 1


def test_any_other_exception_keeps_its_traceback(cacheflow, monkeypatch):
    def broken(*args):
        raise KeyError("a bug")

    monkeypatch.setattr("cacheflow.commands.simulate._simulate", broken)
    with pytest.raises(KeyError, match="a bug"):
        cacheflow(*SMALL)


def test_numbers_are_read_as_people_write_them():
    assert [common.tokens(text) for text in ("4096", "4K", "4k", " 1M ")] == [4096, 4096, 4096, 1 << 20]
    assert common.listed(common.tokens)("4K,8K,4096") == [4096, 8192]
    assert [common.short(tokens) for tokens in (131072, 1500)] == ["128K", "1500"]


class TestSimulate:
    def test_prints_a_row_per_link_speed_and_length_with_the_best_marked(self, cacheflow):
        status, out, _ = cacheflow("simulate", "--gbps", "10,40", "--tokens", "4K,8K", "--policy", "load,token,layer")
        rows = [line.split() for line in out.splitlines() if line.lstrip().startswith(("10 ", "40 "))]
        assert status == 0
        assert [row[:2] for row in rows] == [["10", "4K"], ["10", "8K"], ["40", "4K"], ["40", "8K"]]
        for row in rows:
            times = [float(cell.lstrip("*").replace(",", "")) for cell in row[2:5]]
            assert row[2:5][times.index(min(times))].startswith("*")
            assert float(row[6]) == pytest.approx(min(times) / float(row[5].replace(",", "")), abs=5e-3)

    def test_json_has_every_policy_and_nothing_else_is_printed(self, cacheflow):
        status, out, err = cacheflow(*SMALL, "--json")
        report = json.loads(out)
        assert status == 0 and err == ""
        assert (report["device"], report["suffix"], report["chunk"], report["batch"]) == ("H100", 64, 512, 1)
        (cell,) = report["cells"]
        assert list(cell["ttft_seconds"]) == list(policies.available())
        assert cell["best_over_bound"] == min(cell["ttft_seconds"].values()) / cell["bound_seconds"] >= 0.98

    def test_a_batch_is_measured_by_its_mean(self, cacheflow):
        _, one, _ = cacheflow(*SMALL, "--policy", "load", "--json")
        _, many, _ = cacheflow(*SMALL, "--policy", "load", "--json", "--batch", "3")
        one, many = (json.loads(out)["cells"][0] for out in (one, many))
        assert one["ttft_seconds"]["load"] < many["ttft_seconds"]["load"] < 3 * one["ttft_seconds"]["load"]
        assert one["bound_seconds"] < many["bound_seconds"] <= many["ttft_seconds"]["load"]

    def test_every_fetch_may_cost_something(self, cacheflow):
        (free, text), (costly, more) = (
            (json.loads(cacheflow(*SMALL, *argv, "--json")[1]), cacheflow(*SMALL, *argv)[1].splitlines()[0])
            for argv in ((), ("--fetch-us", "1500"))
        )
        assert (free["fetch_seconds"], costly["fetch_seconds"]) == (0.0, 1500e-6)
        assert "fetch" not in text and "1,500 us a fetch" in more
        [before], [after] = (report["cells"] for report in (free, costly))
        chunks = 8  # that `load` fetches, one after another
        more_for = {name: after["ttft_seconds"][name] - before["ttft_seconds"][name] for name in ("load", "recompute")}
        assert more_for == {"load": pytest.approx(chunks * 1500e-6, rel=0.01), "recompute": 0.0}

    def test_devices_are_known_by_name_or_by_all_their_numbers(self, cacheflow):
        numbers = ["--gemm", "245e12", "--attention", "131e12", "--memory", "2.7e12", "--host", "45e9"]
        reports = [
            json.loads(cacheflow(*SMALL, "--policy", "token", "--json", *device)[1])["cells"]
            for device in (["--device", "h100"], ["--device", "Mine", *numbers])
        ]
        assert reports[0] == reports[1]

    def test_a_model_may_be_a_checkpoints_folder(self, cacheflow, tmp_path):
        from models import config

        preset = config._PRESETS / "smollm2-135m.json"
        (tmp_path / "config.json").write_text(preset.read_text())
        names = ("smollm2-135m", tmp_path, tmp_path / "config.json")
        outs = [cacheflow(*SMALL, "--policy", "token", "--json", "--model", name)[1] for name in names]
        assert len({str(json.loads(out)["cells"]) for out in outs}) == 1

    def test_windows_of_the_model_count(self, cacheflow, tmp_path):
        from models import config

        about = json.loads((config._PRESETS / "smollm2-135m.json").read_text())
        about |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 512}
        (tmp_path / "config.json").write_text(json.dumps(about))
        full, windowed = (
            json.loads(cacheflow(*SMALL, "--policy", "load", "--json", "--model", name)[1])["cells"][0]
            for name in ("smollm2-135m", tmp_path)
        )
        assert windowed["ttft_seconds"]["load"] < full["ttft_seconds"]["load"] / 2

    def test_one_run_can_be_traced_and_drawn(self, cacheflow, tmp_path):
        paths = {name: tmp_path / f"out.{name}" for name in ("json", "lanes.png", "plane.png")}
        status, _, err = cacheflow(
            *SMALL, "--policy", "token", "--trace", paths["json"],
            "--lanes", paths["lanes.png"], "--plane", paths["plane.png"],
        )  # fmt: skip
        assert status == 0 and all(str(path) in err for path in paths.values())
        events = json.loads(paths["json"].read_text())["traceEvents"]
        assert any(event["name"].startswith("compute L0-31 chunk 0") for event in events)
        assert all(paths[name].read_bytes().startswith(b"\x89PNG") for name in ("lanes.png", "plane.png"))

    def test_a_policy_faster_than_the_bound_fails_the_command(self, cacheflow, monkeypatch):
        monkeypatch.setattr("cacheflow.bounds.lower", lambda requests, costs: 1e6)
        status, out, err = cacheflow(*SMALL, "--policy", "load")
        assert status == 1 and "lower bound" in err and "4K" in out

    def test_neither_help_nor_simulate_imports_pytorch(self):
        code = f"from cacheflow.cli import main; import sys; main({SMALL}); sys.exit('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)

    def test_a_reader_that_has_seen_enough_is_no_error(self):
        command = [sys.executable, "-m", "cacheflow", *SMALL]
        reader, writer = subprocess.os.pipe()
        subprocess.os.close(reader)
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60)
        subprocess.os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")


LAYOUT = Layout(2, 2, 8, (PartSpec("k", "float32", 16), PartSpec("v", "float32", 16)))
KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(3)]  # 6e34..., 4bf5..., dbc1...


@pytest.fixture
def folder(tmp_path):
    store = open_store(tmp_path / "kv")
    payload = np.arange(LAYOUT.nbytes, dtype=np.uint8)
    for key in KEYS:
        assert store.write(key, LAYOUT, payload).ok
    store.close()
    return tmp_path / "kv"


def damage(folder, key):
    (path,) = folder.rglob(f"{key}*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


class TestStore:
    def test_ls_lists_what_is_there(self, cacheflow, folder):
        status, out, _ = cacheflow("store", "ls", folder)
        assert status == 0 and all(key[:12] in out for key in KEYS) and "3 chunks" in out
        _, out, _ = cacheflow("store", "ls", f"disk:{folder}", "--json")
        report = json.loads(out)
        assert {entry["key"] for entry in report["entries"]} == set(KEYS)
        assert report["nbytes"] == sum(entry["nbytes"] for entry in report["entries"]) >= 3 * LAYOUT.nbytes
        assert report["entries"][0]["layers"] == [0, 2] and report["entries"][0]["tokens"] == 8

    def test_verify_finds_damage_and_says_so_in_its_status(self, cacheflow, folder):
        assert cacheflow("store", "verify", folder)[:2] == (0, "3 chunks checked, 0 damaged\n")
        damage(folder, KEYS[1])
        status, out, _ = cacheflow("store", "verify", folder)
        assert status == 1 and f"{KEYS[1]}  corrupt" in out and "3 chunks checked, 1 damaged" in out
        status, out, _ = cacheflow("store", "verify", folder, KEYS[0][:6], "--json")
        assert status == 0 and json.loads(out) == {"store": str(folder), "checked": 1, "damaged": []}
        status, out, _ = cacheflow("store", "verify", folder, "--json")
        assert status == 1 and json.loads(out)["damaged"] == [{"key": KEYS[1], "reason": "corrupt"}]

    def test_rm_removes_by_the_first_digits_of_a_key(self, cacheflow, folder):
        status, out, _ = cacheflow("store", "rm", folder, KEYS[0][:4], KEYS[0][:8])
        assert status == 0 and out.startswith("removed 1 chunk,")
        assert "2 chunks" in cacheflow("store", "ls", folder)[1]

    def test_rm_removes_what_is_damaged(self, cacheflow, folder):
        damage(folder, KEYS[2])
        _, out, _ = cacheflow("store", "rm", folder, "--damaged", "--json")
        report = json.loads(out)
        assert (report["removed"], report["keys"]) == (1, [KEYS[2]])
        assert cacheflow("store", "verify", folder)[:2] == (0, "2 chunks checked, 0 damaged\n")

    def test_rm_removes_everything_when_told(self, cacheflow, folder):
        assert cacheflow("store", "rm", folder, "--all")[1].startswith("removed 3 chunks,")
        assert cacheflow("store", "ls", folder)[:2] == (0, "0 chunks, 0 B\n")

    @pytest.mark.parametrize("flags", [[], ["--all", "--damaged"], ["6e34", "--all"]], ids=" ".join)
    def test_rm_wants_to_know_what(self, cacheflow, folder, flags):
        status, _, err = cacheflow("store", "rm", folder, *flags)
        assert status == 2 and "--damaged, or --all" in err
        assert "3 chunks" in cacheflow("store", "ls", folder)[1]

    @pytest.mark.parametrize("given", ["ffff", ""], ids=["no match", "several"])
    def test_a_key_must_be_found_once(self, cacheflow, folder, given):
        status, _, err = cacheflow("store", "rm", folder, given)
        assert status == 2 and repr(given) in err and "store ls" in err

    @pytest.mark.parametrize("action", ["ls", "verify", "rm"])
    def test_what_is_no_store_is_left_alone(self, cacheflow, tmp_path, action):
        for name in (tmp_path / "absent", tmp_path, "memory:1GiB", "s3:bucket"):
            status, _, err = cacheflow("store", action, name, *["--all"] * (action == "rm"))
            assert status == 2 and len(err.splitlines()) == 1 and str(name).removeprefix("disk:") in err
        assert list(tmp_path.iterdir()) == []
