"""Make the demo model: a small Llama that tells tales, answers short questions and counts.

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb .data/austen
    demo="python configs/models/train_demo.py"
    for stage in first second; do
        $demo prepare --stage $stage --austen .data/austen --work .data/demo
        $demo train --stage $stage --work .data/demo
    done
    $demo export --work .data/demo --folder configs/models/demo

`prepare` packs the corpus (and trains the tokenizer in the first stage), `train` wants a GPU,
`export` writes the Hugging Face folder. The prose is Jane Austen's (public domain), from the Debian
package named above; everything else is written by the grammar in `demo_text`.

Invariant: one seed and one version of the package give one corpus, one tokenizer and one order of
batches. The weights also depend on the kind of GPU, as floating point always does.
"""

# transformers and parts of torch carry no annotations for these calls.
# mypy: disable-error-code="no-untyped-call, arg-type"

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from demo_text.corpus import FIRST_STAGE, SECOND_STAGE, SPECIAL_TOKENS, documents
from demo_text.prose import paragraphs
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

VOCAB_TOKENS = 2048
MAX_POSITION_TOKENS = 4096
HELD_OUT_PARAGRAPHS = 40  # the end of each novel is kept for the validation loss
CHAT_TEMPLATE = Path(__file__).parent / "demo_text" / "chat_template.jinja"

Novels = list[list[str]]
Rows = NDArray[np.uint16]


class Stage(StrEnum):
    """The first stage learns the language, the second learns to answer anything with grace."""

    FIRST = "first"
    SECOND = "second"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The numbers that decide how the weights come out."""

    rows_per_step: int = 64
    steps: int = 5914
    warmup_steps: int = 200
    peak_rate: float = 3e-3
    final_rate: float = 3e-5
    weight_decay: float = 0.05
    seed: int = 20

    def rate(self, step: int) -> float:
        """Learning rate at a step: linear warm-up, then a cosine down to the final rate."""
        if step < self.warmup_steps:
            return self.peak_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.final_rate + (self.peak_rate - self.final_rate) * share


RECIPES = {
    Stage.FIRST: Recipe(),
    Stage.SECOND: Recipe(steps=892, warmup_steps=60, peak_rate=1.5e-3, final_rate=1e-5, seed=21),
}
SHARES = {Stage.FIRST: FIRST_STAGE, Stage.SECOND: SECOND_STAGE}
SHARDS = {Stage.FIRST: 64, Stage.SECOND: 16}
DOCUMENTS_PER_SHARD = {Stage.FIRST: 5000, Stage.SECOND: 2600}
FIRST_SEED = {Stage.FIRST: 100, Stage.SECOND: 1000}  # one seed per shard, counted from here
ROW_TOKENS = 2048

StageOption = Annotated[Stage, typer.Option(help="which part of the schedule")]
WorkOption = Annotated[Path, typer.Option(help="folder for tokenizer, token rows and weights")]


def model_config(end_id: int, pad_id: int) -> LlamaConfig:
    """The shape of the model; every engine test depends on it, so it changes rarely."""
    return LlamaConfig(
        vocab_size=VOCAB_TOKENS,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITION_TOKENS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype="float32",
    )


# --- prepare -----------------------------------------------------------------------------------


@app.command()
def prepare(
    stage: StageOption,
    austen: Annotated[Path, typer.Option(help="folder with the unpacked Debian package")],
    work: WorkOption,
    shards: Annotated[int | None, typer.Option(help="instead of the stage's own number")] = None,
) -> None:
    """Pack the corpus of one stage into rows of tokens; the first stage trains the tokenizer."""
    shards = shards or SHARDS[stage]
    work.mkdir(parents=True, exist_ok=True)
    novels = list(paragraphs(austen))
    seen = [novel[:-HELD_OUT_PARAGRAPHS] for novel in novels]
    kept = [novel[-HELD_OUT_PARAGRAPHS:] for novel in novels]
    if stage is Stage.FIRST:
        texts = documents(seed=1, novels=seen, count=6000, shares=SHARES[stage])
        train_tokenizer(texts).save(str(work / "tokenizer.json"))

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    make = partial(shard_rows, work / "tokenizer.json", stage)
    seeds = range(FIRST_SEED[stage], FIRST_SEED[stage] + shards)
    with ProcessPoolExecutor() as pool:
        parts = pool.map(make, seeds, [seen] * shards, [DOCUMENTS_PER_SHARD[stage]] * shards)
        rows = np.concatenate(list(parts))
    np.save(work / f"{stage}.npy", rows)
    np.save(work / f"{stage}-held-out.npy", make(2, kept, 400))
    typer.echo(f"{len(rows)} rows of {ROW_TOKENS} tokens, {rows.size / 1e6:.1f} M tokens")


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE: any text goes in and comes out unchanged; digits stay single."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_without_marks(text) for text in texts), trainer)
    return tokenizer


def _without_marks(text: str) -> str:
    """Special tokens are not words: keep them out of the merges."""
    for mark in SPECIAL_TOKENS:
        text = text.replace(mark, "")
    return text


def shard_rows(
    tokenizer_file: Path, stage: Stage, seed: int, novels: Novels, document_count: int
) -> Rows:
    """Tokenize one shard and pack it; every row begins with the beginning of a document.

    What does not fit at the end of a row is dropped, so the model often sees a document from its
    first token on, as a server will show it, and is never shown the middle of one without a start.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    rows: list[list[int]] = []
    row: list[int] = []
    for text in documents(seed, novels, document_count, SHARES[stage]):
        row += tokenizer.encode(text).ids
        if len(row) > ROW_TOKENS:
            rows.append(row[: ROW_TOKENS + 1])
            row = []
    return np.array(rows, dtype=np.uint16)


# --- train -------------------------------------------------------------------------------------


@app.command()
def train(
    stage: StageOption,
    work: WorkOption,
    steps: Annotated[int | None, typer.Option(help="instead of the recipe's")] = None,
    rows_per_step: Annotated[int, typer.Option()] = 64,
    *,
    max_minutes: Annotated[
        float | None, typer.Option(help="shorten the schedule to fit, by the measured speed")
    ] = None,
    compile_model: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
) -> None:
    """Train one stage; the second starts from the weights of the first."""
    recipe = replace(RECIPES[stage], rows_per_step=rows_per_step)
    recipe = replace(recipe, steps=steps or recipe.steps)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    model = LlamaForCausalLM(model_config(end_id=0, pad_id=1))
    if stage is Stage.SECOND:
        load_weights(model, work / "first.safetensors")
    model.to(device)
    decayed = [weight for weight in model.parameters() if weight.ndim >= 2]
    plain = [weight for weight in model.parameters() if weight.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": recipe.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=recipe.peak_rate,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    step_loss = torch.compile(row_loss) if compile_model else row_loss
    rows = torch.from_numpy(np.load(work / f"{stage}.npy").astype(np.int16)).to(device)
    order = batches(len(rows), recipe)

    log: list[dict[str, float]] = []
    started_s = time.monotonic()
    measured_from_s = started_s
    step = 0
    while step < recipe.steps:
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = step_loss(model, rows[next(order).to(device)].long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0 or step in (1, 20):
            spent_s = time.monotonic() - started_s
            log.append({"step": step, "loss": round(loss.item(), 4), "seconds": round(spent_s, 1)})
            typer.echo(log[-1])
        if step == 20:
            measured_from_s = time.monotonic()  # compilation and warm-up are over
        if step == 200 and max_minutes is not None:
            recipe = shortened(recipe, measured_from_s, started_s, max_minutes * 60)
            typer.echo(f"planned steps: {recipe.steps}")

    held_out = validation_loss(model, work / f"{stage}-held-out.npy", device)
    typer.echo(f"held-out loss {held_out:.4f} per token")
    save_weights(model, work / f"{stage}.safetensors")
    summary = {"recipe": asdict(recipe), "held_out_loss": held_out, "steps": log}
    (work / f"{stage}.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")


def row_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token over whole rows."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def batches(row_count: int, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Endless batches of row numbers: every row once per pass, in a seeded order."""
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        order = torch.randperm(row_count, generator=generator)
        yield from order.split(recipe.rows_per_step)[: max(1, row_count // recipe.rows_per_step)]


def shortened(recipe: Recipe, since_s: float, started_s: float, budget_s: float) -> Recipe:
    """The recipe with as many steps as the rest of the budget holds at the speed seen so far."""
    now_s = time.monotonic()
    step_s = (now_s - since_s) / 180
    left = int((budget_s - (now_s - started_s)) / step_s)
    return replace(recipe, steps=min(recipe.steps, 200 + max(0, left)))


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, held_out: Path, device: str) -> float:
    """Loss on text from unseen seeds and from the unseen ends of the novels."""
    model.eval()
    rows = torch.from_numpy(np.load(held_out).astype(np.int64))
    losses = [row_loss(model, part.to(device)).item() for part in rows.split(16)]
    return sum(losses) / len(losses)


def save_weights(model: LlamaForCausalLM, file: Path) -> None:
    """Write the parameters; the output layer shares the embedding and is not written twice."""
    weights = {name: weight.detach().cpu() for name, weight in model.named_parameters()}
    weights.pop("lm_head.weight", None)
    save_file(weights, file)


def load_weights(model: LlamaForCausalLM, file: Path) -> None:
    """Read what `save_weights` wrote; anything missing or left over is an error."""
    missing, unexpected = model.load_state_dict(load_file(file), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise typer.BadParameter(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()


# --- export ------------------------------------------------------------------------------------


@app.command()
def export(
    work: WorkOption,
    folder: Annotated[Path, typer.Option(help="the Hugging Face folder to write")],
    stage: StageOption = Stage.SECOND,
) -> None:
    """Write configuration, weights, tokenizer and chat template in the Hugging Face layout."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(work / "tokenizer.json")),
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[1],
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE.read_text("utf-8"),
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITION_TOKENS,
    )
    end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = LlamaForCausalLM(model_config(end_id, pad_id))
    load_weights(model, work / f"{stage}.safetensors")
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=end_id, pad_token_id=pad_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    total = sum(path.stat().st_size for path in folder.iterdir())
    typer.echo(f"{folder}: {total / 1e6:.2f} MB")


if __name__ == "__main__":
    app()
