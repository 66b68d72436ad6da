"""How the commands behave in a shell: pipes that close, Ctrl-C, full disks, odd files, numbers out of reach."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.model.spec import model_dir
from labkit.paths import require_writable, write_whole
from labkit.plan.measured_rows import COLUMNS

LABKIT = [sys.executable, "-m", "labkit.start"]
SIMULATE = ["simulate", "--model", "llama-3.1-8b", "--gpus", "2xh100", "--layout", "tp2", "--workload", "100/10",
            "--num-requests", "20"]  # fmt: skip
PLAN = ["plan", "--model", "llama-3.1-8b", "--gpus", "2xh100", "--workload", "100/100", "--rate", "1",
        "--ttft-p95-ms", "500", "--no-verify", "--json"]  # fmt: skip
VALUES = ("meta/Llama-3.1-8B", "h100_sxm", "vllm", "0.9", "bf16", "1000", "100", "4", "1", "1", "1", "1", "1")
ROWS = f"{','.join(COLUMNS)}\n{','.join(VALUES)}\n"


def refused(*words: str | Path, stdin: str | None = None) -> str:
    """The one sentence on stderr."""
    done = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    assert done.exit_code == 2, (done.exit_code, done.output, done.exception)
    assert done.stdout == "" and len(done.stderr.strip().splitlines()) == 1 and len(done.stderr) < 600
    return done.stderr


def changed(words: list[str], **options: str) -> list[str]:
    """The command with other values; an option that it has not is added."""
    words = list(words)
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return words


# ---- the shell


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_pipe_that_closes_ends_it_without_a_word(as_json: list[str]):
    with subprocess.Popen([*LABKIT, *SIMULATE, *as_json], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_a_sentence():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*LABKIT, *SIMULATE, "--json"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (2, "labkit: No space left on device.\n")


@pytest.mark.parametrize("wait_s", [0.1, 4.0])
def test_ctrl_c_leaves_no_traceback(wait_s: float):
    """Among the imports, and in the middle of a simulation."""
    words = changed(SIMULATE, workload="1000/300", rate="10", num_requests="2000000")
    start = "import labkit.start; print('here', flush=True); labkit.start.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", start, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job has it ignored
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        time.sleep(wait_s)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert out == "" and err in ("", "labkit: stopped.\n")
    assert process.returncode in (130, -signal.SIGINT)


def test_rows_come_through_a_pipe_and_from_stdin(tmp_path: Path):
    out = tmp_path / "out.csv"
    done = CliRunner().invoke(app, ["predict", "-", "--out", str(out), "--json"], input=ROWS)
    assert done.exit_code == 0 and json.loads(done.stdout)["rows"] == 1
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(["/bin/sh", "-c", f"printf '%s' '{ROWS}' > {fifo}"]):
        done = CliRunner().invoke(app, ["predict", str(fifo), "--out", str(out), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["refused"] == 0
    assert "is a pipe" in refused(*SIMULATE[:7], "--trace", "-")


# ---- files to write


def test_what_cannot_be_written_is_told_before_the_work(tmp_path: Path):
    for out, why in (("-", "no file"), ("", "no file"), (tmp_path, "no file"), (tmp_path / "no" / "x", "no folder")):
        with pytest.raises(ValueError, match=why):
            require_writable(out)
    for out in (tmp_path, tmp_path / "no" / "x.toml"):
        assert "--out" in refused("calibrate", "--out", out)


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, link = tmp_path / "out.csv", tmp_path / "link.csv"
    path.write_text("before")
    link.symlink_to(path)
    assert write_whole(link, "after") == link and link.is_symlink() and path.read_text() == "after"

    def full(self: Path, text: str, encoding: str) -> int:
        with open(self, "w", encoding=encoding) as file:
            file.write(text[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="out.csv"):
        write_whole(path, "never")
    assert path.read_bytes() == b"after" and sorted(each.name for each in tmp_path.iterdir()) == ["link.csv", "out.csv"]


def test_a_device_is_written_to_and_stays_one():
    assert write_whole(Path(os.devnull), "x") == Path(os.devnull)
    assert Path(os.devnull).is_char_device()


def test_csv_that_python_cannot_read_is_a_sentence(tmp_path: Path):
    path, huge = tmp_path / "rows.csv", "x" * (csv.field_size_limit() + 1)
    path.write_text(f"{','.join(COLUMNS)}\n{huge}\n")
    assert "is not CSV: field larger" in refused("predict", path, "--out", tmp_path / "out.csv")
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{huge},1,1\n")
    assert "is not CSV: field larger" in refused(*SIMULATE[:7], "--trace", path)


# ---- what files hold


@pytest.mark.parametrize(
    ("model", "key", "value", "sentence"),
    [
        ("llama-3.1-8b", "num_hidden_layers", 10**9, "from 1 to 4,096"),
        ("llama-3.1-8b", "vocab_size", 10**40, "from 1 to 2,147,483,648"),
        ("llama-3.1-8b", "rope_theta", [1], "rope_theta is '[1]'; it must be a number above 0"),
        ("llama-3.1-8b", "rms_norm_eps", float("inf"), "rms_norm_eps is 'inf'"),
        ("llama-3.1-8b", "sliding_window", "wide", "sliding_window is 'wide'"),
        ("llama-3.1-8b", "eos_token_id", {"a": 1}, "no token ids"),
        ("llama-3.1-8b", "model_type", ["llama"], "is unknown; known families"),
        ("llama-3.1-8b", "quantization_config", "fp8", "must be a table"),
        ("llama-3.1-8b", "quantization_config", {"quant_method": "fp8", "weight_block_size": 5}, "has the block 5"),
        ("llama-3.1-8b", "quantization_config", {"quant_method": "fp8", "ignore": ["re:("]}, "no regular expression"),
        ("llama-3.1-8b", "quantization_config", {"quant_method": "fp8", "ignore": [5]}, "a value of another kind"),
        ("qwen3-235b-a22b", "num_experts_per_tok", 1000, "goes to 1000 experts, and there are 128"),
        ("qwen3-235b-a22b", "decoder_sparse_step", "a", "decoder_sparse_step is 'a'"),
        ("qwen3-235b-a22b", "mlp_only_layers", 5, "a value of another kind"),
        ("deepseek-v3", "moe_layer_freq", "x", "moe_layer_freq is 'x'"),
        ("deepseek-v3", "q_lora_rank", "x", "q_lora_rank is 'x'"),
    ],
)
def test_a_config_with_one_bad_value_gets_a_sentence(
    tmp_path: Path, model: str, key: str, value: object, sentence: str
):
    config = json.loads((model_dir(model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    assert sentence in refused(*changed(PLAN, model=str(tmp_path)))


def test_a_config_too_deep_or_from_windows_is_read_or_refused(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    assert "is not valid JSON" in refused(*changed(PLAN, model=str(tmp_path)))
    folder = tmp_path / "模型 é"
    folder.mkdir()
    config = (model_dir("llama-3.1-8b") / "config.json").read_bytes()
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + config)
    done = CliRunner().invoke(app, changed(PLAN, model=str(folder)))
    assert done.exit_code == 0 and json.loads(done.stdout)["model"] == "模型 é"


@pytest.mark.parametrize("text", ["device = 5", "[device]\nmemory_bytes = 5\nmemory_bandwidth = 5\nrates = 5"])
def test_a_hardware_file_of_another_form_gets_a_sentence(tmp_path: Path, text: str):
    path = tmp_path / "own.toml"
    path.write_text(text)
    assert refused(*changed(PLAN, gpus=f"2x{path}"))


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ("shape = 'choice', choices = [5, 6], weights = [0, 0]", "weights of choices"),
        ("shape = 'choice', choices = [5, 6], weights = [-1, 2]", "weights of choices"),
        ("shape = 'lognormal', median_tokens = 5, sigma = 1e10", "sigma up to 10"),
        ("shape = 'lognormal', median_tokens = 1e300, sigma = 1", "sigma up to 10"),
    ],
)
def test_lengths_that_cannot_be_drawn_get_a_sentence(tmp_path: Path, lengths: str, sentence: str):
    path = tmp_path / "own.toml"
    other = "output_tokens = { shape = 'constant', tokens = 5 }"
    path.write_text(f"name = 'a'\ntitle = 'a'\n[[parts]]\nprompt_tokens = {{ {lengths} }}\n{other}\n")
    assert sentence in refused(*changed(SIMULATE, workload=str(path)))


# ---- numbers out of reach


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (changed(PLAN, gpus="4096xh100", nodes="512"), "every layout of up to 128"),
        (changed(PLAN, gpus="9" * 5000 + "xh100"), "names no GPUs"),
        (changed(PLAN, rate="1e308"), "at most 1,000,000,000"),
        (changed(PLAN, workload="9" * 30 + "/1"), "is no pair of lengths"),
        (changed(PLAN, length_scale="1e300"), "llama-3.1-8b takes 131,072"),
        (changed(SIMULATE, num_requests="1000000000"), "5,000,000 are the most"),
        ([*SIMULATE[:9], "--rate", "1e6", "--seconds", "1e6"], "5,000,000 are the most"),
        (changed(SIMULATE, rate="1e-308"), "--rate is 1e-308: give a number from 1e-06"),
        (changed(SIMULATE, length_scale="1e300"), "--length-scale is 1e+300"),
    ],
)
def test_numbers_out_of_reach_get_a_sentence(words: list[str], sentence: str):
    assert sentence in refused(*words)


@pytest.mark.parametrize(
    ("table", "values", "sentence"),
    [
        ("kv_cache", {"block_size": [1]}, "block_size is [1]"),
        ("kv_cache", {"num_gpu_blocks": "many"}, "num_gpu_blocks is 'many'"),
        ("kv_cache", {"gpu_memory_utilization": "a"}, "gpu_memory_utilization is 'a'"),
        ("engine_kwargs", {"max_model_len": "a"}, "max_model_len is 'a'"),
    ],
)
def test_a_meta_file_with_one_bad_value_names_it(tmp_path: Path, table: str, values: dict[str, object], sentence: str):
    request = {"input_toks": 100, "output_toks": 1, "arrival_time": 0.0, "queued_ts": 0.0, "first_token_ts": 0.5,
               "last_token_ts": 0.5}  # fmt: skip
    meta = {"model": "llama-3.1-8b", "hardware": {"device_name": "NVIDIA H100"}, table: values}
    rows, path = tmp_path / "r.jsonl", tmp_path / "meta.json"
    rows.write_text(json.dumps(request) + "\n")
    path.write_text(json.dumps(meta))
    assert sentence in refused("replay", rows, path)
    rows.write_text(json.dumps({**request, "input_toks": 10**30}) + "\n")
    assert "line 1: 1000" in refused("replay", rows, path)
