"""From recorded steps to a file and back: made-up steps of known cost come out as that cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from labkit.layout import Layout
from labkit.measure.records import RequestRecord, StepRecord
from labkit.model.counts import visible_pairs
from labkit.model.spec import load_spec
from labkit.plan.calibration import Calibration, calibration_path, load_calibration, save_calibration
from labkit.plan.calibration_fit import client_measures, fit_layout
from labkit.plan.calibration_hardware import save_hardware
from labkit.plan.cost import step_cost
from labkit.plan.fitted_cost import FittedCost, stage_cost
from labkit.plan.hardware import load_hardware
from labkit.plan.step_samples import overlap_ns, samples_of, work_of
from labkit.plan.work import EngineSettings, StepWork

ALONE = {"step": 9e-3, "rows_1_4": 2e-3, "rows_4_16": 1.2e-3, "rows_16_64": 9e-4, "rows_64_256": 8e-4,
         "rows_256_up": 8e-4, "prompt_pairs": 4e-7, "decode_context": 3e-6}  # fmt: skip
COMPANY = {"step": 2e-3, "rows_64_256": 2e-4, "rows_256_up": 2e-4}
TURN_NS = 100_000


def made_step(at: int, start_ns: int, seconds: float, rng: np.random.Generator, **more: object) -> StepRecord:
    end_ns = start_ns + round(seconds * 1e9)
    return StepRecord(
        run_id="r", epoch=1, step_id=at, replica=0, layout="tp1", start_ns=start_ns, end_ns=end_ns,
        ranks=[0], rank_start_ns=[start_ns], rank_end_ns=[end_ns], compute_ns=[0], wait_ns=[0],
        transfer_ns=[0], collective_bytes=0, num_collectives=0, **more,
    )  # fmt: skip


def composition(rng: np.random.Generator) -> dict[str, int]:
    """A step's counts: a prompt's chunk, decodes, or both."""
    kind, chunk, decodes = rng.integers(3), int(rng.integers(8, 513)), int(rng.integers(1, 17))
    chunk, decodes = (0 if kind == 0 else chunk), (0 if kind == 1 else decodes)
    before = int(rng.choice([0, 512])) if chunk else 0
    ends = int(rng.integers(2)) if chunk else 0
    read = int(decodes * rng.integers(20, 600))
    return {
        "num_prefill_seqs": int(chunk > 0), "num_decode_seqs": decodes, "prefill_tokens": chunk,
        "context_tokens": before + read, "prefill_context": before, "num_sampled": decodes + ends,
        "prefill_pairs": visible_pairs(chunk, before, None) if chunk else 0,
    }  # fmt: skip


def made_steps(cost: FittedCost, num: int = 500, noise: float = 0.03, seed: int = 0) -> list[StepRecord]:
    """One step after another on one replica, the engine's turn between them."""
    rng, now, found = np.random.default_rng(seed), 10**9, []
    for at in range(num):
        counts = composition(rng)
        probe = made_step(at, now, 1.0, rng, **counts)
        seconds = cost.seconds(work_of(probe)) * rng.normal(1, noise)
        found.append(made_step(at, now, seconds - TURN_NS / 1e9, rng, **counts))
        now = found[-1].end_ns + TURN_NS
    return found


def decodes(num: int) -> StepWork:
    return StepWork(decodes=num, decode_context=150 * num, decode_window_context=150 * num, logits=num)


PROMPT = StepWork(prefill_tokens=400, prefill_seqs=1, prefill_pairs=80200, prefill_window_pairs=80200, logits=1)


def test_a_recorded_step_has_the_work_that_the_engine_planned():
    counts = {"num_prefill_seqs": 1, "num_decode_seqs": 2, "prefill_tokens": 100, "context_tokens": 350,
              "prefill_context": 50, "num_sampled": 3, "prefill_pairs": visible_pairs(100, 50, None)}  # fmt: skip
    work = work_of(made_step(0, 1, 0.1, np.random.default_rng(0), **counts))
    assert (work.prefill_context, work.decodes, work.decode_context, work.logits) == (50, 2, 302, 3)


def test_a_step_recorded_before_pairs_were_kept_is_no_sample():
    step = made_step(0, 1, 0.1, np.random.default_rng(0), num_prefill_seqs=1, num_decode_seqs=0, prefill_tokens=9,
                     context_tokens=0)  # fmt: skip
    assert samples_of([step], Layout()) == []


def test_made_up_steps_of_a_known_cost_come_out_as_that_cost():
    truth = FittedCost("tp1", (stage_cost(ALONE),))
    fit = fit_layout(Layout(), made_steps(truth))
    for work in (decodes(1), decodes(6), decodes(16), PROMPT):
        assert fit.cost().seconds(work) == pytest.approx(truth.seconds(work), rel=0.03)
    assert fit.error < 0.04 and abs(fit.bias) < 0.01 and fit.num_steps == 500
    assert all(each.origin == "measured" and each.residual is not None for each in fit.stages[0][0].values())
    assert not fit.stages[0][1] and not fit.pipeline and not fit.crossing
    assert fit.spread["step"].value < 0.05 and fit.spread["second"].value < 0.03


def test_what_replicas_cost_each_other_is_told_from_what_they_cost_alone():
    truth = FittedCost("dp2", (stage_cost(ALONE, COMPANY),))
    together = truth.with_company(1.0)
    found = made_steps(truth, 300)
    rng, now = np.random.default_rng(1), found[-1].end_ns + TURN_NS
    for at in range(300, 900, 2):  # both do the same, and so begin and end together
        counts = composition(rng)
        probe = made_step(at, now, 1.0, rng, **counts)
        seconds = together.seconds(work_of(probe)) * rng.normal(1, 0.03)
        pair = [made_step(at + replica, now, seconds - TURN_NS / 1e9, rng, **counts) for replica in (0, 1)]
        pair[1].replica = 1
        found += pair
        now = pair[0].end_ns + TURN_NS
    fit = fit_layout(Layout(dp=2), found)
    for share in (0.0, 1.0):
        for work in (decodes(4), PROMPT):
            expected = truth.with_company(share).seconds(work)
            assert fit.cost().with_company(share).seconds(work) == pytest.approx(expected, rel=0.05)


def test_overlap_counts_what_lies_inside_the_span():
    spans = [(0, 10), (20, 30), (40, 50)]
    assert overlap_ns((5, 45), spans) == 5 + 10 + 5
    assert overlap_ns((10, 20), spans) == 0 and overlap_ns((22, 24), spans) == 2


def test_the_clients_share_is_read_off_requests_that_were_alone():
    rng, steps, lone = np.random.default_rng(0), [], []
    for at in range(12):
        due, tokens = 10**9 + at * 10**8, 50 + 40 * at
        start = due + 1_000_000 + 2_000 * tokens
        for i in range(3):
            counts = composition(rng) | {"num_sampled": 1}
            steps.append(made_step(3 * at + i, start + i * 10**7, 0.009, rng, **counts))
        ends = [step.end_ns for step in steps[-3:]]
        lone.append(RequestRecord("", at, "completed", due, due, ends[0] + 1_500_000, ends[-1] + 400_000,
                                  ends[-1] + 500_000, prompt_tokens=tokens, n=3, chunk_tokens=[1, 1, 1]))  # fmt: skip
    found = client_measures(steps, lone)
    assert found["request"].value == pytest.approx(1e-3) and found["prompt_token"].value == pytest.approx(2e-6)
    assert found["first_token"].value == pytest.approx(1.5e-3) and found["next_token"].value == pytest.approx(4e-4)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    return tmp_path


def made_calibration() -> Calibration:
    alone = fit_layout(Layout(), made_steps(FittedCost("tp1", (stage_cost(ALONE),)), 200))
    about = {"model": "lab-30m", "host": "box", "num_cores": 2, "num_ranks": 2, "memory_bytes": 8 << 30,
             "dtype": "float32", "load_average_before": 0.25, "measured_at": "2026-01-01T00:00:00+00:00",
             "versions": {"torch": "2.13.0"}}  # fmt: skip
    return Calibration(about, {"tp1": alone}, ('A note with "quotes".',))


def test_the_file_comes_back_as_it_was_written(home: Path):
    calibration = made_calibration()
    path = save_calibration(calibration, calibration_path("lab-30m"))
    assert path.parent == home / "calibrations" and path.name.endswith("-lab-30m.toml")
    again = load_calibration("lab-30m")
    assert again.about == calibration.about and again.notes == calibration.notes
    for work in (decodes(1), decodes(9), PROMPT):
        assert again.cost("tp1").seconds(work) == pytest.approx(calibration.cost("tp1").seconds(work), rel=1e-5)
    text = path.read_text()
    assert text.count('origin = "measured"') == text.count("value = ") > 5
    assert not list(home.rglob("*.begun"))


def test_what_was_not_measured_is_refused_with_what_was_and_what_to_do(home: Path):
    with pytest.raises(ValueError, match="labkit calibrate --model lab-30m"):
        load_calibration("lab-30m")
    with pytest.raises(ValueError, match="dp2 was not measured here: the calibration has tp1"):
        made_calibration().cost("dp2")
    broken = home / "broken.toml"
    broken.write_text("[layouts.tp1]\nnum_steps = 1\n")
    with pytest.raises(ValueError, match="is no calibration"):
        load_calibration(broken)


def test_the_machine_stands_as_hardware_once_tp_was_measured_too(home: Path):
    calibration, spec = made_calibration(), load_spec("lab-30m")
    assert save_hardware(calibration, spec) is None
    together = made_steps(FittedCost("tp2", (stage_cost(ALONE),)), 200)
    for step in together:
        rows = step.prefill_tokens + step.num_decode_seqs
        step.ranks, step.num_collectives = [0, 1], 18
        step.wait_ns, step.transfer_ns = [0, 500_000], [900_000 + 5_000 * rows] * 2
    calibration.layouts["tp2"] = fit_layout(Layout(tp=2), together)
    assert save_hardware(calibration, spec) is not None
    hardware = load_hardware("here")
    assert hardware.num_gpus == 2 and hardware.inside.kind == "shm"
    assert hardware.inside.latency_s.value == pytest.approx(900e-6 / 18, rel=0.02)
    assert hardware.inside.bandwidth.value == pytest.approx(512 * 4 * 18 / 5e-6, rel=0.02)
    read = spec.num_parameters * 4
    assert hardware.device.memory_bandwidth.value == pytest.approx(read / 9e-3, rel=0.1)
    assert hardware.device.rates["float32"].origin == "measured"


def test_our_engine_on_the_machine_at_hand_costs_what_was_measured(home: Path):
    calibration, spec = made_calibration(), load_spec("lab-30m")
    together = made_steps(FittedCost("tp2", (stage_cost(ALONE),)), 200)
    for step in together:
        rows = step.prefill_tokens + step.num_decode_seqs
        step.ranks, step.num_collectives = [0, 1], 18
        step.wait_ns, step.transfer_ns = [0, 500_000], [900_000 + 5_000 * rows] * 2
    calibration.layouts["tp2"] = fit_layout(Layout(tp=2), together)
    save_hardware(calibration, spec)
    here, settings = load_hardware("here"), EngineSettings(policy="labkit", max_num_batched_tokens=512, max_num_seqs=64)
    assert not isinstance(step_cost(Layout(), spec, here, settings, "labkit"), FittedCost), "nothing was kept yet"
    save_calibration(calibration, calibration_path(spec.name))
    cost = step_cost(Layout(), spec, here, settings, "labkit")
    assert cost.seconds(decodes(4)) == pytest.approx(calibration.cost("tp1").seconds(decodes(4)), rel=1e-4)
    assert not isinstance(step_cost(Layout(pp=2), spec, here, settings, "labkit"), FittedCost), "pp2 was not measured"
    assert not isinstance(step_cost(Layout(), spec, here, settings, "vllm"), FittedCost), "measured of our engine only"
