"""Devices and servers by name, and what is said of names that are none."""

from __future__ import annotations

import pytest

from labkit.plan.hardware import ORIGINS, list_devices, load_hardware


def test_every_device_is_there_and_says_where_its_numbers_are_from() -> None:
    shipped = {"a100", "a100-pcie", "h100", "h200", "b200", "l40s", "rtx4090", "rtxpro6000", "mi300x"}
    assert shipped <= set(list_devices())
    for name in list_devices():
        hardware = load_hardware(f"2x{name}")
        links = [link for link in (hardware.fast, hardware.inside) if link]
        parameters = [hardware.device.memory_bandwidth, *hardware.device.rates.values()]
        parameters += [getattr(link, what) for link in links for what in ("latency_s", "bandwidth")]
        assert all(each.origin in ORIGINS and each.source and each.unit and each.value > 0 for each in parameters)
        assert all(each.residual is not None for each in parameters if each.origin == "fitted")


def test_rates_are_dense_and_links_one_way() -> None:
    h100 = load_hardware("8xh100").device
    assert h100.rates["bfloat16"].value == pytest.approx(989.4e12)
    assert h100.rate(8).value == pytest.approx(2 * h100.rate(16).value, rel=1e-3)
    assert load_hardware("a100").device.rate(8).value == load_hardware("a100").device.rate(16).value  # no FP8 there
    fast = load_hardware("8xh100").fast
    assert fast is not None and fast.bandwidth.value < 450e9


def test_servers_join_their_gpus_differently() -> None:
    whole, pairs, alone = load_hardware("8xh100"), load_hardware("4xa100-pairs"), load_hardware("4xh100-pcie")
    assert (whole.fast_group, pairs.fast_group, alone.fast_group) == (8, 2, 1)
    assert pairs.link((0, 1)).kind == "nvlink-pairs" and pairs.link((1, 2)).kind == "pcie"
    assert alone.fast is None and alone.link((0, 1)).kind == "pcie"
    two = load_hardware("16xh100", nodes=2)
    assert two.link((0, 7)).kind == "nvlink" and two.link((7, 8)).kind == "network"
    without, having = load_hardware("2xrtx4090").inside, load_hardware("2xl40s").inside
    assert without.bandwidth.value == pytest.approx(having.bandwidth.value / 2)  # no peer access: through the host


@pytest.mark.parametrize("name", ["8xh300", "x", "8xh200-ring", "0xh200", "3xnope.toml", "here"])
def test_an_unknown_name_gets_a_sentence(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"\w+ .*\."):
        load_hardware(name)


def test_gpus_must_share_nodes_evenly() -> None:
    with pytest.raises(ValueError, match="evenly"):
        load_hardware("9xh100", nodes=2)


def test_a_file_of_ones_own(tmp_path) -> None:
    file = tmp_path / "mine.toml"
    number = 'origin = "measured", source = "here"'
    file.write_text(f"""
[device]
title = "Mine"
memory_bytes = {{ value = 1e9, unit = "B", {number} }}
memory_bandwidth = {{ value = 1e10, unit = "B/s", {number} }}
server = "pcie"
inside = "shm"
rates.bfloat16 = {{ value = 1e11, unit = "FLOP/s", {number} }}
[links.shm]
latency_s = {{ value = 2e-5, unit = "s", {number} }}
bandwidth = {{ value = 5e9, unit = "B/s", {number} }}
""")
    mine = load_hardware(f"2x{file}")
    assert (mine.num_gpus, mine.inside.kind, mine.inside.bandwidth.value) == (2, "shm", 5e9)
    assert mine.device.rates["bfloat16"].origin == "measured"
