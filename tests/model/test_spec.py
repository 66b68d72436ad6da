"""Models as shapes: real configs give the published totals, and what a config leaves out is asked for in a
sentence.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_config import LLAMA, read

from labkit.model.spec import (
    ConfigError,
    list_models,
    load_spec,
    model_dir,
)
from labkit.model.tensors import all_tensors

PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352 + 58 * 256,  # the routers' correction biases are buffers, not parameters
}

# ---- counts


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_real_shapes_give_the_published_totals(name: str, total: int) -> None:
    assert load_spec(name).num_parameters == total


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("mixtral-8x7b", 12.8e9, 13.0e9),
        ("qwen3-30b-a3b", 3.3e9, 3.4e9),
        ("qwen3-235b-a22b", 22e9, 22.3e9),
        ("deepseek-v3", 37e9, 38e9),
    ],
)
def test_a_token_passes_the_active_parameters_that_the_names_promise(
    name: str, low: float, high: float
) -> None:
    assert low < load_spec(name).num_active_parameters < high


@pytest.mark.parametrize("name", list_models())
def test_parameters_by_part_are_the_sum_over_every_tensor(name: str) -> None:
    spec = load_spec(name)
    total: dict[str, int] = {}
    for tensor in all_tensors(spec):
        total[tensor.part] = total.get(tensor.part, 0) + tensor.num_elements
    assert spec.parameters() == total
    assert spec.num_parameters == sum(total.values())


def test_the_labs_own_models_are_as_large_as_their_names_say() -> None:
    assert 29e6 < load_spec("lab-30m").num_parameters < 30e6
    assert 4.5e6 < load_spec("lab-5m").num_parameters < 5.5e6
    assert 7e6 < load_spec("lab-moe-8x").num_parameters < 9e6
    for name in ("lab-30m", "lab-5m", "lab-moe-8x", "lab-heavy-head"):
        spec = load_spec(name)
        assert (spec.bos_token_ids, spec.eos_token_ids) == ((256,), (257,))
        assert spec.vocab_size > 260 and spec.dtype == "float32" and spec.max_positions == 8192


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("llama-3.1-8b", 2 * 8 * 128 * 32 * 2),
        ("qwen2.5-7b", 2 * 4 * 128 * 28 * 2),
        ("deepseek-v3", (512 + 64) * 61 * 2),  # one latent and one rotary key for all heads
    ],
)
def test_kv_bytes_a_token(name: str, num_bytes: int) -> None:
    assert load_spec(name).kv_bytes_per_token(2) == num_bytes


def test_flops_of_a_decode_step_are_two_a_parameter_plus_attention() -> None:
    spec = load_spec("llama-3.1-8b")
    parts = spec.flops(1, 0)
    norms, embedding = spec.parameters()["norm"], spec.parameters()["embedding"]
    assert sum(parts.values()) - parts["attention_scores"] == 2 * (spec.num_parameters - norms - embedding)
    assert spec.flops(1, 999)["attention_scores"] == 4 * 32 * 128 * 32 * 1000
    assert spec.flops(1, 999)["mlp"] == parts["mlp"]


@pytest.mark.parametrize("name", ["lab-30m", "mixtral-8x7b", "deepseek-v3"])
def test_a_prefill_in_chunks_costs_what_it_costs_whole(name: str) -> None:
    spec = load_spec(name)
    whole = spec.flops(1000, 0)
    chunks = [
        spec.flops(n, start, num_logits=int(start == 700)) for start, n in ((0, 300), (300, 400), (700, 300))
    ]
    assert {part: sum(chunk[part] for chunk in chunks) for part in whole} == whole


def test_a_sliding_window_bounds_the_keys_that_are_seen() -> None:
    windowed = read(model_type="mistral", sliding_window=16)
    pairs = [
        windowed.flops(n, context)["attention_scores"] // (4 * 64 * 2) for n, context in ((1, 99), (20, 0))
    ]
    assert pairs == [16, sum(min(i + 1, 16) for i in range(20))]


# ---- finding models


def test_a_model_is_found_by_name_by_folder_and_by_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_spec(tmp_path) == load_spec(tmp_path / "config.json")
    assert model_dir(tmp_path / "config.json") == model_dir(str(tmp_path)) == tmp_path.resolve()
    assert model_dir("lab-30m").name == "lab-30m"
    assert load_spec("lab-30m").name == "lab-30m"


def test_an_edited_config_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert load_spec(tmp_path).num_layers == 2
    file.write_text(json.dumps({**LLAMA, "num_hidden_layers": 30}))
    assert load_spec(tmp_path).num_layers == 30


def test_an_unknown_model_names_the_known_and_the_nearest() -> None:
    with pytest.raises(FileNotFoundError, match="Did you mean lab-30m.*one of the [0-9]+ names"):
        load_spec("lab-30mm")


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="JSON object"):
        load_spec(tmp_path)


def test_shapes_and_layouts_need_no_torch() -> None:
    code = (
        "import sys; from labkit.layout import *; from labkit.model.spec import load_spec;"
        "s = load_spec('lab-30m'); l = Layout(dp=2, tp=2); step_card(l, s, StepShape(8, 8, 8));"
        "weight_slices(l, s, 3); legal_layouts(s, 8);"
        "assert not {'torch', 'transformers', 'pandas'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
