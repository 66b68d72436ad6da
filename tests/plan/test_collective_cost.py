"""Collectives by topology: the formula by hand, and the fit against the profiles beside the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from labkit.plan.collective_cost import collective_seconds, seconds_on, wire_bytes
from labkit.plan.fit_collectives import Sample, fit, read_samples
from labkit.plan.hardware import load_hardware

DATA = Path(os.environ.get("LABKIT_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_profiles = pytest.mark.skipif(
    not (DATA / "gpu-profiles").is_dir(), reason="the network profiles do not lie in ../shared/data/gpu-profiles"
)


def test_wire_bytes_of_a_ring() -> None:
    assert wire_bytes("all_reduce", 1000, 4) == 1500
    assert wire_bytes("reduce_scatter", 1000, 4) == wire_bytes("all_to_all", 1000, 4) == 750
    assert wire_bytes("all_gather", 250, 4) == 750
    assert wire_bytes("isend", 1000, 2) == 1000
    with pytest.raises(ValueError, match="no collective"):
        wire_bytes("broadcast", 1, 2)


def test_latency_and_bandwidth_by_hand() -> None:
    hardware = load_hardware("8xh100")
    link = hardware.fast
    assert link is not None
    expected = link.latency_s.value + 2 * 7 / 8 * 64e6 / link.bandwidth.value
    assert collective_seconds(hardware, "all_reduce", 64e6, tuple(range(8))) == pytest.approx(expected)
    assert collective_seconds(hardware, "all_reduce", 64e6, (3,)) == 0
    small = collective_seconds(hardware, "all_reduce", 16384, tuple(range(8)), small_latency_s=8e-6)
    assert small == pytest.approx(8e-6 + 2 * 7 / 8 * 16384 / link.bandwidth.value)


def test_a_slow_hop_costs_what_it_costs() -> None:
    size, pairs = 64 * 2**20, load_hardware("4xa100-pairs")
    inside, over = (collective_seconds(pairs, "all_reduce", size, tuple(range(n))) for n in (2, 4))
    assert 6 < over / inside < 16  # 0.384 and 4.268 ms were measured
    two = load_hardware("16xa100", nodes=2)
    near, far = (collective_seconds(two, "all_reduce", size, ranks) for ranks in ((0, 1), (7, 8)))
    assert far > 6 * near


def test_a_mesh_gives_a_pair_one_of_its_links() -> None:
    mesh = load_hardware("8xmi300x").fast
    assert mesh is not None
    pair, all_of_them = (seconds_on(mesh, "all_gather", 1e9 / (n - 1), n) for n in (2, 8))
    assert pair / all_of_them == pytest.approx(7, rel=0.01)


def test_the_fit_finds_what_it_was_made_from() -> None:
    sizes = [(n, 2.0**k) for n in (2, 4, 8) for k in range(11, 27)]
    samples = [Sample(n, n, size, 20e-6 + wire_bytes("all_reduce", size, n) / 200e9) for n, size in sizes]
    found = fit(samples, "all_reduce")
    assert found.latency_s == pytest.approx(20e-6, rel=1e-3)
    assert found.bandwidth == pytest.approx(200e9, rel=1e-3)
    assert found.residual < 1e-3


@needs_profiles
@pytest.mark.parametrize(
    ("file", "degree", "name"), [("h100_dgx", 8, "8xh100"), ("a100_pairwise_nvlink", 4, "4xa100-pairs")]
)
def test_large_messages_against_the_profiles(file: str, degree: int, name: str) -> None:
    samples = read_samples(DATA / "gpu-profiles" / f"{file}.all_reduce.csv", "all_reduce")
    large = [s for s in samples if s.degree == s.ranks_per_node == degree and s.num_bytes >= 16 * 2**20]
    assert large
    hardware = load_hardware(name)
    found = [collective_seconds(hardware, "all_reduce", s.num_bytes, tuple(range(degree))) for s in large]
    errors = [abs(seconds / s.seconds - 1) for seconds, s in zip(found, large, strict=True)]
    assert sum(errors) / len(errors) < 0.25


def bus_bandwidth(gpus: str, num_ranks: int, num_bytes: float) -> float:
    """As nccl-tests tells it: wire bytes of a ring over the time."""
    seconds = collective_seconds(load_hardware(gpus), "all_reduce", num_bytes, tuple(range(num_ranks)))
    return wire_bytes("all_reduce", num_bytes, num_ranks) / seconds


def test_a_ring_over_both_sockets_is_as_fast_as_the_way_between_them() -> None:
    eight = load_hardware("8xa100-pcie")
    assert eight.sockets is not None and eight.inside.bandwidth.value > 1.5 * eight.sockets.bandwidth.value
    assert eight.link((0, 1, 2, 3)) is eight.inside and eight.link((4, 7)) is eight.inside
    assert eight.link(tuple(range(8))) is eight.link((3, 4)) is eight.sockets
    assert load_hardware("4xa100-pcie").sockets is None  # they hang under one
    sixteen = load_hardware("16xa100-pcie", nodes=2)
    assert sixteen.link((8, 11)) is sixteen.inside and sixteen.link((11, 12)) is sixteen.sockets
    assert sixteen.link((7, 8)).kind == "network"
    assert load_hardware("8xh100").link(tuple(range(8))).kind == "nvlink"
    pairs = load_hardware("8xa100-pairs")
    assert [pairs.link(ranks).kind for ranks in ((0, 1), (1, 2), (3, 4))] == ["nvlink-pairs", "pcie", "pcie-sockets"]
    without = load_hardware("8xrtx4090")  # its messages go through the host's memory anyway, and are slower than that
    assert without.sockets is not None and without.sockets.bandwidth.value == without.inside.bandwidth.value


def test_between_sockets_an_all_to_all_has_less_than_a_ring() -> None:
    link = load_hardware("8xa100-pcie").sockets
    assert link is not None
    seconds = seconds_on(link, "all_to_all", 1e9, 8) - link.latency_s.value
    assert seconds == pytest.approx(4 * 1e9 / 2 / link.bandwidth.value)  # half of what each of four ranks sends
    assert seconds > 2 * (seconds_on(link, "reduce_scatter", 1e9, 8) - link.latency_s.value)


@pytest.mark.parametrize(
    ("gpus", "num_ranks", "num_bytes", "measured"),
    [
        # voipmonitor/rtx6kpro hardware/pcie-bandwidth.md: two EPYC Turin with 8 channels or more (22 GB/s where NCCL
        # knew but one rate of all EPYC), and what switches under one CPU give
        ("8xrtxpro6000", 8, 256 * 2**20, 37.6e9),
        ("4xrtxpro6000", 4, 256 * 2**20, 41.1e9),
        # NVIDIA/nccl issue 841: two EPYC 7543, between 8 (no peers) and 21 GB/s (after tuning the host)
        ("8xa100-pcie", 8, 128 * 2**20, (8e9 * 21e9) ** 0.5),
    ],
)
def test_rings_over_pcie_as_others_measured_them(gpus: str, num_ranks: int, num_bytes: int, measured: float) -> None:
    assert bus_bandwidth(gpus, num_ranks, num_bytes) == pytest.approx(measured, rel=0.25)


def test_an_unknown_host_gets_a_sentence(tmp_path: Path) -> None:
    from labkit.plan.hardware import hardware_dir

    file = tmp_path / "own.toml"
    file.write_text((hardware_dir() / "l40s.toml").read_text().replace('"pcie4"', '"pcie9"'))
    with pytest.raises(ValueError, match="host 'pcie9' is unknown: choose one of pcie4, pcie5, pcie5-2024"):
        load_hardware(f"8x{file}")
