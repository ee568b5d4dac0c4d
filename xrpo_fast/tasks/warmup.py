"""Makes the tiny policy of the built-in task: python -m xrpo_fast.tasks.warmup --out DIR.

The curriculum decides whether it works at all. Documents of one turn come first: from documents of
several turns alone the model does not find out for a thousand steps that it must look at the
question's digits. Few-shot rules follow the skewed prior until 40 % of the steps, then go to
uniform by 60 %: with the prior throughout, rare rules are never copied; uniform from the start,
the plateau lasts.
"""

import argparse
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from xrpo_fast.tasks.documents import Document, DocumentWriter
from xrpo_fast.tasks.measure import tier_pass_rates
from xrpo_fast.tasks.muon import Muon
from xrpo_fast.tasks.policy import POLICY_DIR, build_policy, build_tokenizer
from xrpo_fast.tasks.symbols import TIERS, World

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

RECIPE = 1
"""Goes up with any change of the weights that a seed gives: warmed-up policies are kept by it."""
NUM_STEPS = 1400
SINGLE_TURN_FRAC = 0.2
UNIFORM_FROM_FRAC, UNIFORM_TO_FRAC = 0.4, 0.6
SINGLE_TURN_DOCUMENTS, SEVERAL_TURN_DOCUMENTS = 64, 16
"""Documents per step."""
MUON_LR, ADAM_LR = 0.02, 3e-3
LR_WARMUP_STEPS = 20
LR_FLAT_FRAC, LR_END_FRAC = 0.6, 0.02
MAX_GRAD_NORM = 1.0
_STEPS_PER_BUCKET = 8


def batches(seed: int, num_steps: int) -> Iterator[list[Document]]:
    """The documents of each step; those of eight steps are cut into batches by length."""
    writer = DocumentWriter(seed)
    single_turn_steps = round(SINGLE_TURN_FRAC * num_steps)
    for _ in range(single_turn_steps):
        yield [writer.single_turn() for _ in range(SINGLE_TURN_DOCUMENTS)]
    for first in range(single_turn_steps, num_steps, _STEPS_PER_BUCKET):
        steps = range(first, min(first + _STEPS_PER_BUCKET, num_steps))
        documents = [
            writer.several_turns(_uniform_frac(step / num_steps))
            for step in steps
            for _ in range(SEVERAL_TURN_DOCUMENTS)
        ]
        documents.sort(key=lambda document: len(document.tokens))
        yield from writer.shuffled(
            documents[i : i + SEVERAL_TURN_DOCUMENTS]
            for i in range(0, len(documents), SEVERAL_TURN_DOCUMENTS)
        )


def _uniform_frac(progress: float) -> float:
    done = (progress - UNIFORM_FROM_FRAC) / (UNIFORM_TO_FRAC - UNIFORM_FROM_FRAC)
    return min(max(done, 0.0), 1.0)


def _lr_factor(step: int, num_steps: int) -> float:
    decay = (step / num_steps - LR_FLAT_FRAC) / (1 - LR_FLAT_FRAC)
    return min((step + 1) / LR_WARMUP_STEPS, 1.0, 1.0 - (1.0 - LR_END_FRAC) * max(decay, 0.0))


def pack(documents: list[Document], token_ids: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Token ids and targets, both (S, L) int64; -100 where a token carries no loss."""
    length = max(len(document.tokens) for document in documents)
    ids = torch.full((len(documents), length), token_ids["<pad>"])
    targets = torch.full((len(documents), length), -100)
    for row, document in enumerate(documents):
        row_ids = torch.tensor([token_ids[token] for token in document.tokens])
        has_loss = torch.tensor(document.has_loss)
        ids[row, : len(row_ids)] = row_ids
        targets[row, : len(row_ids)] = torch.where(has_loss, row_ids, -100)
    return ids, targets


def optimizers(model: "LlamaForCausalLM") -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head, AdamW for everything else."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    chosen = set(matrices)
    rest = [p for p in model.parameters() if p not in chosen]
    return [
        Muon(matrices, lr=MUON_LR),
        torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def warm_up(
    seed: int = 0, num_steps: int = NUM_STEPS, report: Callable[[int, float], None] | None = None
) -> tuple["LlamaForCausalLM", list[float]]:
    """A policy trained from scratch on its documents, and the mean loss of each step in nats.

    The same seed gives the same weights on the same machine with the same number of threads.
    report(step, loss) is called after each step.

    Raises:
        ValueError: num_steps is below 1.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps: expected at least 1, got {num_steps}")
    model, token_ids = build_policy(seed), build_tokenizer().get_vocab()
    chosen = optimizers(model)
    base_lrs = [optimizer.param_groups[0]["lr"] for optimizer in chosen]
    losses = []
    for step, documents in enumerate(batches(seed, num_steps)):
        ids, targets = pack(documents, token_ids)
        # Rows are padded on the right: causal attention needs no mask for that.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for optimizer, base_lr in zip(chosen, base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = base_lr * _lr_factor(step, num_steps)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if report is not None:
            report(step, losses[-1])
    return model.eval(), losses


def save_policy(model: "LlamaForCausalLM", folder: Path) -> None:
    """Model (fp16) and tokenizer in Hugging Face format."""
    from transformers.utils import logging

    # It would be written into the middle of a caller's own progress line.
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    deepcopy(model).half().save_pretrained(folder)
    if was_shown:
        logging.enable_progress_bar()
    build_tokenizer().save_pretrained(folder)


def _parse(arguments: list[str] | None) -> tuple[argparse.Namespace, World]:
    parser = argparse.ArgumentParser(
        prog="python -m xrpo_fast.tasks.warmup",
        description="Make the tiny policy of the built-in task.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=POLICY_DIR, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and documents")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="optimizer steps")
    parser.add_argument(
        "--world-seed", type=int, default=0, help="world of the closing measurement; not trained on"
    )
    parser.add_argument("--samples", type=int, default=32, help="responses per held-out question")
    given = parser.parse_args(arguments)
    for name in ("steps", "samples"):
        if getattr(given, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(given, name)}")
    try:
        return given, World(given.world_seed)
    except ValueError as error:
        parser.error(f"--world-{error}")


def main(arguments: list[str] | None = None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from transformers import LlamaForCausalLM

    given, world = _parse(arguments)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), "{task.completed}/{task.total}")
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("warm-up", total=given.steps)

        def show(step: int, loss: float) -> None:
            progress.update(bar, completed=step + 1, description=f"warm-up, loss {loss:.3f}")

        model, _ = warm_up(given.seed, given.steps, show)
    save_policy(model, given.out)
    saved = LlamaForCausalLM.from_pretrained(given.out, dtype=torch.float32)
    tokenizer = build_tokenizer()
    console.print(f"saved in {given.out}; held-out pass rates, world {world.seed}:")
    for num_exemplars in (0, 1, 2):
        rates = tier_pass_rates(
            saved, tokenizer, world, num_exemplars=num_exemplars, num_samples=given.samples
        )
        shown = "  ".join(f"{tier} {rates[tier]:.3f}" for tier in TIERS)
        console.print(f"{num_exemplars} worked examples:  {shown}")


if __name__ == "__main__":
    main()
