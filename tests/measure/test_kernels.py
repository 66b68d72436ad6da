"""The profiler's traces read: a small CUDA one made by hand, and a real one of this CPU."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from labkit.engine.messages import Profile
from labkit.engine.profiling import StepProfiler
from labkit.measure.intervals import common, total, union, without
from labkit.measure.kernel_classes import class_of_kernel, class_of_stack, product_work
from labkit.measure.kernels import COLLECTIVE_CAT, STEP_CAT, TAGS_PID, parse, read_trace
from labkit.measure.nccl_match import FAMILIES, match_nccl
from labkit.measure.profile_trace import merge
from labkit.measure.recorder import AXIS_CODES, DECODE, OP_CODES, RING_DTYPE
from tests.measure.trace_form import validate


def slice_(name: str, cat: str, ts: float, dur: float, tid: int = 7, pid: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


NCCL_TOLD = {"Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "BFloat16"}
"""As torch's profiler says of a kernel of NCCL: 8 elements of 2 bytes."""


def cuda_trace() -> dict[str, Any]:
    """A step of 100 µs: a product [4, 8] by [8, 2] (20 µs), attention (10), an all-reduce on another stream (30, of
    which 10 beside the attention), a copy (5), and a kernel that no operator tells of."""
    host = {"pid": 42, "tid": 42}
    shapes = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events = [
        slice_("step 3", STEP_CAT, 0, 100, pid=TAGS_PID, tid=0),
        slice_("all_reduce (tp)", COLLECTIVE_CAT, 30, 31, pid=TAGS_PID, tid=0, op="all_reduce", bytes=16),
        slice_("aten::linear", "cpu_op", 0, 9, **host),
        slice_("aten::mm", "cpu_op", 1, 6, **host, **shapes),
        slice_("cudaLaunchKernel", "cuda_runtime", 2, 2, **host, correlation=11),
        slice_("aten::scaled_dot_product_attention", "cpu_op", 10, 8, **host),
        slice_("aten::bmm", "cpu_op", 11, 5, **host),
        slice_("cudaLaunchKernel", "cuda_runtime", 12, 2, **host, correlation=12),
        slice_("cudaLaunchKernelExC", "cuda_runtime", 20, 2, **host, correlation=13),
        slice_("cudaMemcpyAsync", "cuda_runtime", 23, 2, **host, correlation=14),
        slice_("cudaDeviceSynchronize", "cuda_runtime", 26, 2, **host, correlation=15),
        slice_("sm90_xmma_gemm_bf16", "kernel", 10, 20, correlation=11, stream=7),
        slice_("some_new_gemm_name", "kernel", 30, 10, correlation=12, stream=7),
        slice_(
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", 30, 30, tid=20, correlation=13, stream=20, **NCCL_TOLD
        ),
        slice_("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 70, 5, correlation=14, stream=7),
        slice_("void vendor::gemv<int>()", "kernel", 80, 4, stream=7),
        {"ph": "s", "id": 11, "pid": 42, "tid": 42, "ts": 2, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 11, "pid": 0, "tid": 7, "ts": 10, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}},
    ]
    return {"traceEvents": events, "baseTimeNanoseconds": 0, "labkit": {"rank": 1, "base_monotonic_ns": 5_000}}


def test_a_cuda_trace_is_told_by_class_and_adds_up() -> None:
    found = parse(cuda_trace())
    assert (found.rank, found.device, found.num_steps, found.span_ms) == (1, "cuda", 1, 0.1)
    expected = {"exposed": 0.02, "hidden": 0.01, "compute": 0.029, "idle": 0.041}
    assert found.parts == pytest.approx(expected) and sum(found.parts.values()) == pytest.approx(found.span_ms)
    assert found.covered == pytest.approx(1 / 3)
    classes = {"matrix product": 0.024, "attention": 0.01, "normalisation": 0, "copy": 0.005, "collective": 0.03}
    assert found.classes == pytest.approx({**classes, "other": 0})
    assert (found.num_nccl, found.nccl_ms, found.num_collectives) == (1, pytest.approx(0.03), 1)
    assert found.launches == {"cudaLaunchKernel": 2, "cudaLaunchKernelExC": 1, "cudaMemcpyAsync": 1}
    assert found.num_launches == 4
    assert found.gaps_ms == pytest.approx([0.016, 0.01, 0.01, 0.005])
    # 2·4·8·2 operations and 2·(32 + 16 + 8) bytes in 20 µs
    assert found.products == pytest.approx({"gflop_s": 128 / 20e3, "gb_s": 112 / 20e3})
    assert [work["name"] for work in found.to_dict(1)["works"]] == ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"]


def rows_and_kernels() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the door notes of one step with every operation, and the kernels that it launches."""
    asked = [("all_reduce", 64), ("all_gather", 32), ("all_reduce", 16), ("all_to_all", 8), ("reduce_scatter", 64),
             ("send", 24), ("send", 0), ("recv", 24), ("gather", 40), ("broadcast", 8), ("barrier", 0)]  # fmt: skip
    rows = [slice_(op, COLLECTIVE_CAT, 10 * at, 8, op=op, bytes=size) for at, (op, size) in enumerate(asked)]
    kernels = []
    for at, (op, size) in enumerate(asked):
        family, count = FAMILIES[op] if (op, size) != ("send", 0) else ("", 0)
        told = {"In msg nelems": size // 4, "dtype": "Float"} if "all_to" not in op else {"dtype": "Int"}
        kernels += [slice_(f"ncclDevKernel_{family}_f32", "kernel", 10 * at + 1 + k, 1, **told) for k in range(count)]
    return rows, kernels


def test_kernels_of_nccl_are_the_doors_rows_one_for_one() -> None:
    rows, kernels = rows_and_kernels()
    found = match_nccl(kernels[::-1], rows)
    assert (found.num_matched, found.num_same_bytes, found.num_differing) == (11, 6, 0), found.differences
    assert found.sentence == "11 NCCL kernels are the door's collectives, one for one."
    captured = [slice_("ncclDevKernel_AllReduce_f32", "kernel", 500, 1, correlation=77)]
    found = match_nccl([*kernels, *captured], rows, frozenset([77]))
    assert (found.num_in_graphs, found.num_differing) == (1, 0)
    hand_made = parse(cuda_trace()).nccl
    assert hand_made is not None and (hand_made.num_matched, hand_made.num_same_bytes) == (1, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows, kernels: (rows, kernels[1:]), "2 kernels of AllReduce ran, and the door has 3"),
        (lambda rows, kernels: (rows[:-1], kernels), "3 kernels of AllReduce ran, and the door has 2"),
        (lambda rows, kernels: (rows[:3] + rows[4:], kernels), "4 kernels of SendRecv ran, and the door has 2"),
        (lambda rows, kernels: ([{**rows[0], "args": {"op": "all_reduce", "bytes": 60}}, *rows[1:]], kernels),
         "AllReduce 1 moved 64 bytes, and the door noted 60"),
        (lambda rows, kernels: (rows, [*kernels, slice_("ncclDevKernel_Reduce_f32", "kernel", 7, 1)]),
         "1 kernels of ncclDevKernel_Reduce_f32 ran, and the door has 0"),
    ],
)  # fmt: skip
def test_what_one_of_the_two_did_not_see_is_told(change: Any, says: str) -> None:
    rows, kernels = change(*rows_and_kernels())
    found = match_nccl(kernels, rows)
    assert found.num_differing >= 1 and says in found.sentence


def test_a_door_that_missed_a_collective_shows_in_the_profile() -> None:
    trace = cuda_trace()
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") != COLLECTIVE_CAT]
    found = parse(trace)
    assert found.nccl is not None and "1 kernels of AllReduce ran, and the door has 0" in found.nccl.sentence
    assert found.to_dict()["nccl"]["num_differing"] == 1


def test_time_between_steps_is_idle_apart_from_gaps_in_steps() -> None:
    trace = {"traceEvents": [slice_("step 1", STEP_CAT, 0, 10), slice_("step 2", STEP_CAT, 25, 10),
                             slice_("aten::mm", "cpu_op", 2, 6), slice_("aten::mm", "cpu_op", 25, 10)]}  # fmt: skip
    found = parse(trace)
    assert found.parts == pytest.approx({"exposed": 0, "hidden": 0, "compute": 0.016, "idle": 0.019})
    assert found.between_steps_ms == pytest.approx(0.015) and found.gaps_ms == pytest.approx([0.002, 0.002])


def test_classes_follow_the_outermost_operator_that_tells() -> None:
    assert class_of_stack(("aten::scaled_dot_product_attention", "aten::bmm")) == "attention"
    assert class_of_stack(("aten::linear", "aten::t")) == "matrix product"
    assert class_of_stack(("aten::rms_norm", "aten::mul")) == "normalisation"
    assert class_of_stack(("aten::silu",)) == "other"
    assert class_of_kernel("elementwise_kernel", "kernel", ()) == "other"
    assert product_work("aten::addmm", {"Input Dims": [[2], [3, 4], [4, 2]]}) == (48.0, 0.0)
    assert product_work("mkldnn::_linear_pointwise", {"Input Dims": [[5, 128], [256, 128]]})[0] == 2 * 5 * 128 * 256
    assert product_work("aten::mm", {}) == (0.0, 0.0)


def test_intervals() -> None:
    assert union([(3, 4), (0, 2), (1, 3), (6, 6)]) == [(0, 4)]
    assert common([(0, 4), (6, 9)], [(3, 7), (8, 10)]) == [(3, 4), (6, 7), (8, 9)]
    assert without([(0, 4), (6, 9)], [(1, 2), (3, 7)]) == [(0, 1), (2, 3), (7, 9)]
    assert total([(0, 1), (2, 4)]) == 3


@pytest.fixture(scope="module")
def cpu_trace() -> dict[str, Any]:
    """Two steps of a product, a norm and 20 ms in a collective that is no operator, by a rank's own profiler."""
    profiler = StepProfiler(2, torch.device("cpu"))
    profiler.begin(Profile(0, 1, 2))
    x, done = torch.randn(256, 256), None
    for step_id in range(3):
        profiler.before()
        start = time.monotonic_ns()
        torch.rms_norm(x @ x, (256,))
        entered = time.monotonic_ns()
        time.sleep(0.02)
        row = np.zeros(1, RING_DTYPE)
        row["op"], row["axis"], row["phase"] = OP_CODES["all_reduce"], AXIS_CODES["tp"], DECODE
        row["enter_ns"], row["exit_ns"], row["bytes"] = entered, time.monotonic_ns(), 64
        done = profiler.after(step_id, start, time.monotonic_ns(), row.tobytes())
    assert done is not None and (done.rank, done.num_steps) == (2, 2) and profiler.end() is None
    return json.loads(gzip.decompress(done.trace))


def test_a_real_cpu_trace_is_on_our_clock_and_its_collectives_are_seen(cpu_trace: dict[str, Any]) -> None:
    found = parse(cpu_trace)
    assert (found.rank, found.device, found.num_steps, found.num_collectives) == (2, "cpu", 2, 2)
    assert sum(found.parts.values()) == pytest.approx(found.span_ms)
    assert found.parts["exposed"] >= 40 and found.classes["collective"] == pytest.approx(found.parts["exposed"])
    assert found.classes["matrix product"] > 0 and found.classes["normalisation"] > 0
    product = next(work for work in found.works if work.name == "aten::mm")
    assert (product.num, product.flops, product.bytes) == (2, 2 * 2 * 256**3, 2 * 3 * 256 * 256 * 4)
    # the operators lie within the steps that ran them: the two clocks are one
    steps = [event for event in cpu_trace["traceEvents"] if event.get("cat") == STEP_CAT]
    products = [event for event in cpu_trace["traceEvents"] if event.get("name") == "aten::mm"]
    for step, product_ in zip(steps, products, strict=True):
        assert step["ts"] - 200 <= product_["ts"] and product_["ts"] + product_["dur"] <= step["ts"] + step["dur"] + 200


def test_the_merged_trace_holds_both_and_is_of_the_documented_form(cpu_trace: dict[str, Any]) -> None:
    base_ns = cpu_trace["labkit"]["base_monotonic_ns"]
    step = next(event for event in cpu_trace["traceEvents"] if event.get("cat") == STEP_CAT)
    start_ns = base_ns + int(step["ts"] * 1e3)
    ours = {"traceEvents": [slice_("decode", "step,decode", 0, step["dur"], tid=2, pid=1)],
            "displayTimeUnit": "ms", "otherData": {"run": "r", "origin_ns": start_ns}}  # fmt: skip
    merged = merge(ours, {2: cpu_trace, 1: cuda_trace()})
    flows = [event for event in merged["traceEvents"] if event["ph"] in "sf"]
    assert {event["id"] for event in flows} == {"rank1-11"} and len(flows) == 2
    events = validate(merged)
    decode = next(event for event in events if event["name"] == "decode")
    product = next(event for event in events if event["name"] == "aten::mm" and event["pid"] // 100 == 12)
    assert decode["ts"] - 200 <= product["ts"] <= decode["ts"] + decode["dur"]
    assert not [event for event in events if event.get("cat") in (STEP_CAT, COLLECTIVE_CAT)]
    with pytest.raises(ValueError, match="rank 0 has no clock of ours"):
        merge(ours, {0: {"traceEvents": []}})


def test_what_is_no_trace_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text, sentence in [("{", "is no Chrome trace"), ("{}", "has no traceEvents")]:
        path.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            read_trace(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="nothing ran while it was taken"):
        parse(read_trace(path))
