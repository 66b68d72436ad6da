"""What an operator or a kernel is for: a matrix product, attention, normalisation, a copy, a collective, or something
else; and the work of a product by its shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

CLASSES = ("matrix product", "attention", "normalisation", "copy", "collective", "other")
_OTHER = "other"
_OPERATORS = (
    ("collective", ("c10d::", "nccl:", "gloo:", "_c10d_functional")),
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention", "_fused_sdp", "flash_attn")),
    ("normalisation", ("rms_norm", "layer_norm", "group_norm", "batch_norm")),
    ("matrix product", ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear",
                        "aten::_scaled_mm", "aten::_grouped_mm", "mkldnn_linear", "mkl_linear", "_linear_pointwise",
                        "aten::mv", "aten::dot")),
    ("copy", ("aten::copy_", "aten::cat", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::to",
              "aten::fill_", "aten::index_copy", "aten::index_put", "aten::_index_put", "aten::index_select",
              "aten::gather", "aten::embedding", "aten::zero_", "aten::index")),
)  # fmt: skip
"""Parts of operators' names. The first that fits the outermost operator counts: a product inside attention is
attention's, a copy inside a product the product's."""
_KERNELS = (
    ("collective", ("nccldevkernel", "ncclkernel")),
    ("attention", ("flash_fwd", "fmha", "attention", "splitkv")),
    ("normalisation", ("rms_norm", "rmsnorm", "layer_norm", "layernorm")),
    ("matrix product", ("gemm", "gemv", "cutlass", "nvjet", "splitk", "wgmma", "cublas")),
    ("copy", ("memcpy", "memset", "copy_kernel", "catarray", "index_copy", "indexselect")),
)
_LINEAR = "mkldnn::_linear_pointwise"
_FIRST_FACTOR = {"aten::mm": 0, "aten::bmm": 0, _LINEAR: 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Which of its inputs is the left factor; the right one follows."""
ITEM_BYTES = {"float": 4, "double": 8, "c10::bfloat16": 2, "c10::half": 2, "bfloat16": 2, "half": 2,
               "int": 4, "long": 8, "byte": 1, "char": 1, "bool": 1}


def is_nccl(name: str) -> bool:
    return "nccldevkernel" in (lower := name.lower()) or "ncclkernel" in lower


def class_of_stack(stack: Sequence[str]) -> str:
    """stack: operators' names, outermost first."""
    for name in stack:
        found = _class_of(name, _OPERATORS)
        if found != _OTHER:
            return found
    return _OTHER


def class_of_kernel(name: str, cat: str, stack: Sequence[str]) -> str:
    """A kernel's class: of the operators that launched it; by its own name only where none of them tells."""
    if is_nccl(name):
        return "collective"
    if cat != "kernel":  # gpu_memcpy, gpu_memset
        return "copy"
    found = class_of_stack(stack)
    return found if found != _OTHER else _class_of(name.lower(), _KERNELS)


def _class_of(name: str, table: Sequence[tuple[str, Sequence[str]]]) -> str:
    return next((kind for kind, parts in table if any(part in name for part in parts)), _OTHER)


def product_work(name: str, args: Mapping[str, Any]) -> tuple[float, float]:
    """(operations, bytes read and written at least once) of a product whose shapes are told; else zeros.

    [b, m, k] by [b, k, n] takes 2·b·m·k·n; oneDNN's linear on a CPU is told its weight as [n, k].
    """
    dims, types = args.get("Input Dims") or [], args.get("Input type") or []
    first = _FIRST_FACTOR.get(name)
    if first is None or len(dims) < first + 2:
        return 0.0, 0.0
    left, right = dims[first], dims[first + 1]
    if len(left) < 2 or len(right) < 2:
        return 0.0, 0.0
    num_columns = right[0] if name == _LINEAR else right[-1]
    flops = 2.0 * math.prod(left) * num_columns
    item = ITEM_BYTES.get(str(types[first]).lower(), 0) if len(types) > first else 0
    return flops, float(item * (math.prod(left) + math.prod(right) + math.prod(left[:-1]) * num_columns))
