"""The contrastive training loop that the teacher and both stages of the student share."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from open_clip.model import CLIP
from torch import Tensor, nn

from fedbench_embedded.images import Rendered
from fedbench_embedded.pretrain.augment import augment
from fedbench_embedded.pretrain.corpus import batches
from fedbench_embedded.pretrain.recipe import Recipe, Stage
from fedbench_embedded.tokens import FoldedTokenizer


@dataclass(frozen=True)
class Step:
    """What an extra loss may look at, after the forward pass of a batch."""

    pixels: Tensor
    """Normalised float32 (n, 3, 32, 32)."""
    tokens: Tensor
    """int64 (n, context_length)"""
    embedding: Tensor
    """Image embeddings before normalisation, float32 (n, dim)."""
    progress: float
    """Share of the stage already done, 0 to 1."""


ExtraLoss = Callable[[Step], Tensor]


@dataclass
class TrainingProgress:
    """What a finished stage reports."""

    samples: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    final_loss: float = math.nan
    history: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StageSetting:
    """What a stage trains on."""

    corpus: Rendered
    tokenizer: FoldedTokenizer
    recipe: Recipe
    report: Callable[[str], None]
    examine: Callable[[CLIP], str]
    """A short accuracy line for the log."""


def encode_short_text(model: CLIP, tokens: Tensor) -> Tensor:
    """`model.encode_text` on the columns up to the longest text only: same result (n, dim), less work."""
    width = int((tokens != 0).sum(dim=1).max())
    tokens = tokens[:, :width]
    hidden = model.token_embedding(tokens) + model.positional_embedding[:width]
    hidden = model.ln_final(model.transformer(hidden, attn_mask=model.attn_mask[:width, :width]))
    features: Tensor = hidden[torch.arange(len(tokens)), tokens.argmax(dim=-1)] @ model.text_projection
    return features


def symmetric_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """InfoNCE in both directions between unit embeddings (n, dim) of matching rows."""
    logits, target = scale * image @ text.T, torch.arange(len(image))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def _optimiser(model: nn.Module, extra: Iterable[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    decayed = [value for name, value in named if value.ndim >= 2 and "embedding" not in name]
    free = [value for name, value in named if value.ndim < 2 or "embedding" in name]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": [*free, *extra], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def learning_rate(stage: Stage, step: int, progress: float) -> float:
    """Linear warm-up times cosine decay."""
    return stage.learning_rate * min(1.0, (step + 1) / stage.warmup_steps) * (0.5 + 0.5 * math.cos(math.pi * progress))


def train(
    model: CLIP,
    stage: Stage,
    setting: StageSetting,
    seed: int,
    extra_loss: ExtraLoss | None = None,
    extra_parameters: Iterable[nn.Parameter] = (),
) -> TrainingProgress:
    """Train both towers in place on image-caption pairs, with bf16 arithmetic; `extra_loss` is added each step."""
    done, recipe = TrainingProgress(), setting.recipe
    generator = torch.Generator().manual_seed(seed)
    optimiser = _optimiser(model, extra_parameters, recipe)
    cpu_start, wall_start, recent, next_report = time.process_time(), time.perf_counter(), 0.0, 0.05
    model.train()
    for step, batch in enumerate(batches(setting.corpus, setting.tokenizer, stage, recipe, seed)):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(stage, step, batch.progress)
        pixels = augment(batch.images, batch.hue_rotated, stage.augmentation, generator)
        with torch.autocast("cpu", torch.bfloat16):
            image, text = model.encode_image(pixels).float(), encode_short_text(model, batch.tokens).float()
        loss = symmetric_loss(F.normalize(image, dim=-1), F.normalize(text, dim=-1), model.logit_scale.exp())
        recent = loss.item() if step == 0 else 0.99 * recent + 0.01 * loss.item()
        if extra_loss is not None:
            loss = loss + extra_loss(Step(pixels, batch.tokens, image, batch.progress))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
        optimiser.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        done.samples += len(batch.images)
        if done.samples / stage.samples >= next_report:
            next_report += 0.05
            model.eval()
            line = f"{done.samples} samples, loss {recent:.3f}, scale {model.logit_scale.exp().item():.1f}, "
            line += f"cpu {time.process_time() - cpu_start:.0f} s, {setting.examine(model)}"
            model.train()
            setting.report(line)
            done.history.append(line)
    model.eval()
    done.cpu_seconds, done.wall_seconds = time.process_time() - cpu_start, time.perf_counter() - wall_start
    done.final_loss = recent
    return done
