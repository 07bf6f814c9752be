"""Decode speed of `transformers` generate: `python -m benchmarks.library_speed FOLDER BATCH...`.

Prints one JSON object, samples of tokens per second by batch size. The time of the prompt is taken
off, as it is for ours.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

_PROMPT_TOKENS: Final = 128
_TOKENS: Final = 64
_ROUNDS: Final = 3


def main() -> None:
    """Measure each batch size some times, after a warm-up."""
    folder, *batches = sys.argv[1:]
    library: Any = AutoModelForCausalLM
    model = library.from_pretrained(
        Path(folder), dtype=torch.bfloat16, device_map="cuda:0", local_files_only=True
    )
    model.generation_config.eos_token_id = None
    found: dict[str, list[float]] = {}
    for batch in map(int, batches):
        ids = torch.randint(1000, (batch, _PROMPT_TOKENS), device="cuda:0")
        mask = torch.ones_like(ids)

        def seconds(tokens: int, ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            model.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
            torch.cuda.synchronize()
            return time.perf_counter() - began

        seconds(8)  # warm-up
        found[str(batch)] = [
            round(batch * (_TOKENS - 1) / (seconds(_TOKENS) - seconds(1)), 1)
            for _ in range(_ROUNDS)
        ]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
