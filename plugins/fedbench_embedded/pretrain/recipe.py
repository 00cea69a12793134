"""Every constant of the pretraining, in frozen dataclasses; `SMOKE` is the same recipe at a size for tests."""

from dataclasses import dataclass, field

from fedbench_embedded.images import MID, Difficulty
from fedbench_embedded.images.captions import CaptionMix


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One training run with its own learning-rate schedule (linear warm-up, then cosine to zero)."""

    samples: int
    """Image-caption pairs seen, counted with repetition."""
    learning_rate: float
    captions: CaptionMix
    hue_share: float
    """Share of images whose hues are rotated and whose captions then name no colour."""
    easy_share: float = 0.0
    """First part of the run, as a share, on easy images only (medium or large, no occluder, at most one mark)."""
    warmup_steps: int = 100
    augmentation: float = 1.0
    """Strength of zoom, shift, rotation, contrast and brightness; 0 leaves flips (and hues) only."""
    bag_of_words: float = 0.0
    """Weight of predicting a caption's words from the image alone."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The teacher's extra losses on the student, falling linearly to zero at `end` of the run."""

    embedding_weight: float = 8.0
    """On 1 - cosine between the two image embeddings."""
    dense_weight: float = 4.0
    """On the smooth L1 between patch tokens, linearly mapped, and the teacher's standardised feature maps."""
    end: float = 0.7


@dataclass(frozen=True, kw_only=True)
class GateSizes:
    """Numbers of freshly rendered images that `gate.measure` uses."""

    ten_classes: int = 4000
    probe: int = 20000
    twenty_classes: int = 4000
    pairs: int = 3000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The whole pretraining."""

    seed: int = 21000
    images: int = 90_000
    difficulty: Difficulty = MID
    domain_weights: tuple[float, float, float, float] = (0.45, 0.20, 0.20, 0.15)
    """Photos dominate, as on the web."""
    class_skew: float = 1.2
    """Log of the ratio between the most and the least frequent class."""
    render_processes: int = 2
    render_parts: int = 18
    """Independent seeds that the images are rendered from; part of their identity, unlike the processes."""
    batch: int = 128
    swapped_captions: float = 0.05
    """Share of captions that belong to another image."""
    weight_decay: float = 0.1
    """On weight matrices, not on embeddings, gains and biases."""
    gradient_clip: float = 1.0
    context_length: int = 32
    teacher: Stage = field(
        default_factory=lambda: Stage(
            samples=560_000,
            learning_rate=1.2e-3,
            captions=CaptionMix(misnaming=0.0),
            hue_share=0.2,
            easy_share=0.4,
            augmentation=0.0,
            bag_of_words=1.0,
        )
    )
    student: Stage = field(
        default_factory=lambda: Stage(
            samples=420_000, learning_rate=1.2e-3, captions=CaptionMix(misnaming=1.1), hue_share=0.3
        )
    )
    distillation: Distillation = Distillation()
    refinement: Stage = field(
        default_factory=lambda: Stage(
            samples=80_000, learning_rate=6e-4, captions=CaptionMix(misnaming=1.6), hue_share=0.4
        )
    )
    gate: GateSizes = GateSizes()
    gate_seed: int = 990_000


DEFAULT = Recipe()

SMOKE = Recipe(
    batch=32,
    images=300,
    render_processes=1,
    render_parts=2,
    teacher=Stage(
        samples=160,
        learning_rate=1e-3,
        captions=CaptionMix(misnaming=0.0),
        hue_share=0.2,
        easy_share=0.4,
        augmentation=0.0,
        bag_of_words=1.0,
    ),
    student=Stage(samples=64, learning_rate=1e-3, captions=CaptionMix(), hue_share=0.3),
    refinement=Stage(samples=64, learning_rate=6e-4, captions=CaptionMix(misnaming=1.35), hue_share=0.4),
    gate=GateSizes(ten_classes=100, probe=150, twenty_classes=100, pairs=50),
)
