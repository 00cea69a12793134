"""The student: the small vision transformer that ships, taught by the convolutional teacher and then on its own."""

from typing import Any

import torch
import torch.nn.functional as F
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from torch import Tensor, nn

from fedbench_embedded.pretrain.augment import normalise
from fedbench_embedded.pretrain.contrastive import StageSetting, Step, TrainingProgress, train
from fedbench_embedded.pretrain.teacher import (
    EMBED_DIM,
    LAYER1_CHANNELS,
    LAYER2_CHANNELS,
    TEXT_HEADS,
    TEXT_LAYERS,
    TEXT_WIDTH,
)

PATCH, WIDTH, LAYERS = 8, 192, 4
GRID = 32 // PATCH
# Blocks (from 0) whose patch tokens imitate the teacher's layer 1 and layer 2.
LOW_BLOCK, HIGH_BLOCK = 1, 2


def student_config(vocab_size: int, context_length: int) -> dict[str, Any]:
    """The model in the form of an open_clip model configuration file."""
    return {
        "embed_dim": EMBED_DIM,
        "vision_cfg": {
            "image_size": 32,
            "patch_size": PATCH,
            "width": WIDTH,
            "layers": LAYERS,
            "head_width": 32,
            "mlp_ratio": 3.0,
        },
        "text_cfg": {
            "context_length": context_length,
            "vocab_size": vocab_size,
            "width": TEXT_WIDTH,
            "heads": TEXT_HEADS,
            "layers": TEXT_LAYERS,
        },
    }


def build(config: dict[str, Any]) -> CLIP:
    """An untrained model from an open_clip model configuration."""
    return CLIP(config["embed_dim"], CLIPVisionCfg(**config["vision_cfg"]), CLIPTextCfg(**config["text_cfg"]))


def grid_positions() -> Tensor:
    """Sines and cosines of the patch rows and columns (GRID * GRID, WIDTH)."""
    frequency = 1 / 100 ** (torch.arange(WIDTH // 4) / (WIDTH // 4))
    places = torch.arange(GRID) * 2.0 * 8 / GRID
    row, column = torch.meshgrid(places, places, indexing="ij")
    waves = [function(axis.reshape(-1, 1) * frequency) for axis in (row, column) for function in (torch.sin, torch.cos)]
    return torch.cat(waves, dim=1)


def build_student(teacher: CLIP, setting: StageSetting) -> CLIP:
    """A student with sine positions and the teacher's text tower and logit scale."""
    torch.manual_seed(setting.recipe.seed + 1)
    model = build(student_config(setting.tokenizer.vocab_size, setting.recipe.context_length))
    text_side = {name: value for name, value in teacher.state_dict().items() if not name.startswith("visual.")}
    model.load_state_dict(text_side, strict=False)
    with torch.no_grad():
        model.visual.positional_embedding[0] = 0
        model.visual.positional_embedding[1:] = 0.3 * grid_positions()
    return model


class Imitation(nn.Module):
    """Loss that draws the student's embedding and patch tokens towards what the teacher sees in the same pixels."""

    def __init__(self, teacher: CLIP, student: CLIP, setting: StageSetting) -> None:
        """Hook both models and standardise the teacher's maps on some images."""
        super().__init__()
        self.weights = setting.recipe.distillation
        self._teach = teacher.encode_image  # a bound method: the teacher is no submodule, so it is never trained
        self._seen: dict[str, Tensor] = {}
        for name, module in (
            ("layer1", teacher.visual.layer1),
            ("layer2", teacher.visual.layer2),
            ("low", student.visual.transformer.resblocks[LOW_BLOCK]),
            ("high", student.visual.transformer.resblocks[HIGH_BLOCK]),
        ):
            module.register_forward_hook(self._keeper(name))
        self.low = nn.Linear(WIDTH, 4 * LAYER1_CHANNELS)
        self.high = nn.Linear(WIDTH, LAYER2_CHANNELS)
        _, *maps = self._look(normalise(torch.from_numpy(setting.corpus.images[:500])))
        self.statistics = [(target.mean((0, 1)), target.std((0, 1)) + 1e-3) for target in maps]

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self._seen[name] = output

        return keep

    @torch.no_grad()
    def _look(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The teacher's unit embedding (n, dim) and two maps, one row a patch of the student (n, GRID * GRID, c)."""
        with torch.autocast("cpu", torch.bfloat16):
            embedding = self._teach(pixels.contiguous(memory_format=torch.channels_last))
        # Layer 1 has 2 x 2 cells in each of the student's patches: fold them into channels.
        low = F.pixel_unshuffle(self._seen["layer1"].float(), 2).flatten(2).transpose(1, 2)
        high = self._seen["layer2"].float().flatten(2).transpose(1, 2)
        return F.normalize(embedding.float(), dim=-1), low, high

    def forward(self, step: Step) -> Tensor:
        """The weighted loss of a batch whose student forward pass has just run; zero after the schedule's end."""
        fade = 1 - step.progress / self.weights.end
        if fade <= 0:
            return torch.zeros(())
        student_maps = (self._seen["low"][:, 1:], self._seen["high"][:, 1:])
        target, *teacher_maps = self._look(step.pixels)
        loss = self.weights.embedding_weight * (1 - F.cosine_similarity(step.embedding, target)).mean()
        for readout, tokens, seen, (mean, std) in zip(
            (self.low, self.high), student_maps, teacher_maps, self.statistics, strict=True
        ):
            with torch.autocast("cpu", torch.bfloat16):
                guess = readout(tokens)
            loss = loss + self.weights.dense_weight * F.smooth_l1_loss(guess.float(), (seen - mean) / std)
        return fade * loss


def distil_student(teacher: CLIP, setting: StageSetting) -> tuple[CLIP, TrainingProgress]:
    """Stage 1: contrastive training with the teacher's help, which fades out before the end."""
    model = build_student(teacher, setting)
    imitation = Imitation(teacher, model, setting)
    stage = setting.recipe.student
    done = train(model, stage, setting, setting.recipe.seed + 2000, imitation, imitation.parameters())
    # Rebuilt without the hooks, which would keep the teacher alive.
    plain = build(student_config(setting.tokenizer.vocab_size, setting.recipe.context_length))
    plain.load_state_dict(model.state_dict())
    return plain.eval(), done


def refine_student(model: CLIP, setting: StageSetting) -> TrainingProgress:
    """Stage 2, in place: contrastive training alone, with sub-types misnamed more often."""
    return train(model, setting.recipe.refinement, setting, setting.recipe.seed + 3000)
