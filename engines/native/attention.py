"""The attention function that `transformers` calls in every layer, over slots of a KV memory.

Registered under `NAME`; the model code of the library stays as it is. Everything a step needs
(where to write, what to attend to, the mask) is built once before the step and travels to the
layers as a keyword argument, so a layer does two writes and one attention call.

WARNING: bits depend on the kernel. `scaled_dot_product_attention` is proven at start (`selfcheck`),
on the CPU for one thread; changing the call, the mask's dtype or the layout needs that proof.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from transformers import AttentionInterface

from engines.native.kv import KvMemoryView

if TYPE_CHECKING:
    from engines.native.decode_attention import DecodeAttention

__all__ = ["NAME", "RowPasts", "SlotWindow", "StepInputs", "register"]

NAME: Final = "understudy_slots"


@dataclass(frozen=True, slots=True)
class SlotWindow:
    """What a step attends to through the library's attention."""

    slot: int | torch.Tensor | None  # None for all (decode), one in prefill
    attended_tokens: int
    mask: torch.Tensor  # [slots or 1, 1, queries, attended_tokens], added to the scores


@dataclass(frozen=True, slots=True)
class RowPasts:
    """What a decode step attends to through our own kernel: each row to its own past."""

    positions: torch.Tensor  # [slots]
    kernel: "DecodeAttention"


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the layers of one step share."""

    kv: KvMemoryView
    rows: torch.Tensor  # [layers, 2, written rows]
    attends: SlotWindow | RowPasts
    before_layer: Callable[[], None] | None = None  # may raise, to give the step up


def slot_attention(  # noqa: PLR0917 - the library calls it by position
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the library's signature
    scaling: float,
    dropout: float = 0.0,  # noqa: ARG001 - the library's signature
    *,
    understudy_step: StepInputs,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values, attend. `[batch, heads, tokens, head_dim]` in and out."""
    step = understudy_step
    if step.before_layer is not None:
        step.before_layer()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    flat, head_dim = step.kv.flat, key.shape[-1]
    flat.index_copy_(0, step.rows[layer, 0], key.reshape(-1, head_dim))
    flat.index_copy_(0, step.rows[layer, 1], value.reshape(-1, head_dim))
    memory, attends = step.kv.slots[layer], step.attends
    if isinstance(attends, RowPasts):
        return attends.kernel.attend(query, memory, attends.positions, scaling), None
    memory = memory.narrow(3, 0, attends.attended_tokens)
    if isinstance(attends.slot, int):
        memory = memory.narrow(1, attends.slot, 1)
    elif attends.slot is not None:  # an input of a graph: costs a copy of what one slot holds
        memory = memory.index_select(1, attends.slot)
    out = F.scaled_dot_product_attention(
        query, memory[0], memory[1], attn_mask=attends.mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


def register() -> None:
    """Make the function known to the library; idempotent."""
    AttentionInterface.register(NAME, slot_attention)
