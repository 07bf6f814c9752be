"""Decode speed of `transformers` generate: `python -m benchmarks.library_speed FOLDER BATCH...`.

Prints one JSON object, tokens per second by batch size. The time of the prompt is taken off, as it
is for ours.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

_PROMPT_TOKENS: Final = 128
_TOKENS: Final = 128


def main() -> None:
    """Measure each batch size once, after a warm-up."""
    folder, *batches = sys.argv[1:]
    library: Any = AutoModelForCausalLM
    model = library.from_pretrained(
        Path(folder), dtype=torch.bfloat16, device_map="cuda:0", local_files_only=True
    )
    model.generation_config.eos_token_id = None
    found = {}
    for batch in map(int, batches):
        ids = torch.randint(1000, (batch, _PROMPT_TOKENS), device="cuda:0")
        mask = torch.ones_like(ids)
        spent = {}
        for tokens in (8, 1, _TOKENS):  # warm-up, prompt alone, everything
            torch.cuda.synchronize()
            began = time.perf_counter()
            model.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
            torch.cuda.synchronize()
            spent[tokens] = time.perf_counter() - began
        found[str(batch)] = round(batch * (_TOKENS - 1) / (spent[_TOKENS] - spent[1]), 1)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
