"""Mixture-of-experts layers (Qwen3-MoE): fused weights `[experts, 2 x inner, hidden]`, no loop.

`take_over` puts `routed_experts` in the place of the library's own. Shapes never depend on the
routing, so a step can be a graph. Two ways to compute the same sum:

    grouped  rows sorted by expert, one grouped matrix product: reads only experts that are used
    dense    every expert for every row: reads all of them, no row can notice its neighbours

Whether `grouped` gives a row the same bits beside other neighbours is for the self-check to say;
if it does not, the decode step goes over to `dense`. Prefill computes one
request alone in chunks of one shape, so it is always grouped on a GPU.

Block-wise FP8 experts (`gate_up_proj_scale_inv`, `down_proj_scale_inv`): torch has no grouped
product with 128 x 128 scales, so a kernel of ours does it on a GPU (`fp8_kernels`); elsewhere
they are dequantised for each call, which is right and slow.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Final, Literal

import torch
from torch import nn

from engines.native.fp8 import blocks_of, dequantise
from engines.native.untyped import Untyped

__all__ = ["ExpertsMode", "add_scales", "experts_mode", "routed_experts", "take_over"]

ExpertsMode = Literal["grouped", "dense"]

# Public from torch 2.10 on.
_grouped_mm: Final = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


class _Mode:
    """How the step that runs now computes experts; set around it by the model thread."""

    current: ExpertsMode = "dense"


@contextlib.contextmanager
def experts_mode(mode: ExpertsMode) -> Iterator[None]:
    """Compute experts so in this block."""
    before, _Mode.current = _Mode.current, mode
    try:
        yield
    finally:
        _Mode.current = before


def routed_experts(
    module: Untyped, rows: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Sum of each row's experts. `rows [T, hidden]`, `experts` and `shares [T, k]`."""
    if _Mode.current == "grouped":
        return _grouped(module, rows, experts, shares)
    return _dense(module, rows, experts, shares)


def _weights(module: Untyped, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    up, down = module.gate_up_proj, module.down_proj
    if up.dtype is torch.float8_e4m3fn:
        up = dequantise(up, module.gate_up_proj_scale_inv, dtype)
        down = dequantise(down, module.down_proj_scale_inv, dtype)
    return up, down


def _gate(module: Untyped, both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    out: torch.Tensor = module.act_fn(gate) * up
    return out


def _dense(
    module: Untyped, rows: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    up, down = _weights(module, rows.dtype)
    every = rows.unsqueeze(0).expand(up.shape[0], -1, -1)
    inner = _gate(module, torch.bmm(every, up.transpose(1, 2)))
    out = torch.bmm(inner, down.transpose(1, 2))  # [experts, T, hidden]
    numbers = torch.arange(rows.shape[0], device=rows.device)
    mine = out[experts, numbers[:, None]]  # [T, k, hidden]
    return (mine * shares.unsqueeze(-1)).sum(dim=1).to(rows.dtype)


def _grouped(
    module: Untyped, rows: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    k, count = experts.shape[-1], module.gate_up_proj.shape[0]
    flat = experts.reshape(-1)
    by_expert, order = torch.sort(flat, stable=True)
    edges = torch.arange(count, device=rows.device, dtype=by_expert.dtype)
    ends = torch.searchsorted(by_expert, edges, right=True).to(torch.int32)
    taken = rows[order // k]
    if module.gate_up_proj.dtype is torch.float8_e4m3fn and rows.is_cuda:
        from engines.native.fp8_kernels import grouped

        most = rows.shape[0]
        both = grouped(
            taken, module.gate_up_proj, module.gate_up_proj_scale_inv, ends, most_rows=most
        )
        out = grouped(
            _gate(module, both), module.down_proj, module.down_proj_scale_inv, ends, most_rows=most
        )
    else:
        up, down = _weights(module, rows.dtype)
        inner = _gate(module, _grouped_mm(taken, up.transpose(1, 2), offs=ends))
        out = _grouped_mm(inner, down.transpose(1, 2), offs=ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    mine = out[back].view(rows.shape[0], k, -1)
    return (mine * shares.unsqueeze(-1)).sum(dim=1).to(rows.dtype)


def take_over(model: nn.Module) -> None:
    """Let every experts module of a model compute with `routed_experts`."""
    for module in model.modules():
        if getattr(module, "gate_up_proj", None) is not None and hasattr(module, "down_proj"):
            module.forward = functools.partial(routed_experts, module)


def add_scales(module: nn.Module) -> None:
    """Make room (on `meta`) for quantised weights and their scales in an experts module."""
    for name in ("gate_up_proj", "down_proj"):
        shape = getattr(module, name).shape
        narrow = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        scale = torch.empty(shape[0], blocks_of(shape[1]), blocks_of(shape[2]), device="meta")
        setattr(module, name, nn.Parameter(narrow, requires_grad=False))
        module.register_parameter(
            f"{name}_scale_inv", nn.Parameter(scale.float(), requires_grad=False)
        )
