"""The teacher: a small convolutional dual encoder, which learns these images from scratch where a ViT does not."""

import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from torch import Tensor, nn

from fedbench_embedded.images import Attributes
from fedbench_embedded.images.captions import captions
from fedbench_embedded.pretrain.contrastive import StageSetting, Step, TrainingProgress, train

EMBED_DIM = 128
TEXT_WIDTH, TEXT_HEADS, TEXT_LAYERS = 64, 2, 2
WIDTH, HEAD_WIDTH = 24, 32

# Channels of the feature maps that the student imitates: 8 x 8 after layer 1, 4 x 4 after layer 2.
LAYER1_CHANNELS, LAYER2_CHANNELS = 4 * WIDTH, 8 * WIDTH


def build_teacher(vocab_size: int, context_length: int) -> CLIP:
    """A ModifiedResNet with one block a layer beside the student's text tower."""
    vision = CLIPVisionCfg(layers=[1, 1, 1, 1], width=WIDTH, image_size=32, head_width=HEAD_WIDTH)
    text = CLIPTextCfg(
        context_length=context_length, vocab_size=vocab_size, width=TEXT_WIDTH, heads=TEXT_HEADS, layers=TEXT_LAYERS
    )
    return CLIP(EMBED_DIM, vision, text)


class BagOfWords(nn.Module):
    """Loss of predicting which words a caption has from the image embedding, rare words counting more.

    It gives the image tower something to learn while the text tower still maps all captions to one place.
    """

    def __init__(self, setting: StageSetting) -> None:
        """Weigh each token row by its inverse document frequency in captions of the first images."""
        super().__init__()
        stage, tokenizer = setting.recipe.teacher, setting.tokenizer
        self.weight = stage.bag_of_words
        self.special = [0, tokenizer.sot_token_id, tokenizer.eot_token_id]
        self.readout = nn.Linear(EMBED_DIM, tokenizer.vocab_size)
        sample: Attributes = setting.corpus.attributes.take(slice(5000))
        share = self._occurrences(tokenizer(captions(setting.recipe.seed, sample, stage.captions))).mean(dim=0)
        self.rarity = (1 / (share + 1e-4)).log().clamp(0, 6) * (share > 0)

    def _occurrences(self, tokens: Tensor) -> Tensor:
        """1 where a row of the token table occurs in a text, specials apart: (n, vocab_size)."""
        found = torch.zeros(len(tokens), self.readout.out_features).scatter_(1, tokens, 1.0)
        found[:, self.special] = 0
        return found

    def forward(self, step: Step) -> Tensor:
        """The weighted cross-entropy between the words' distribution and the predicted one."""
        target = self._occurrences(step.tokens) * self.rarity
        target = target / target.sum(dim=1, keepdim=True).clamp(min=1e-6)
        guess = self.readout(step.embedding).log_softmax(dim=1)
        loss: Tensor = -self.weight * (target * guess).sum(dim=1).mean()
        return loss


def train_teacher(setting: StageSetting) -> tuple[CLIP, TrainingProgress]:
    """Train the teacher on cleanly named captions, easy images first; it comes back in evaluation mode."""
    recipe = setting.recipe
    torch.manual_seed(recipe.seed)
    model = build_teacher(setting.tokenizer.vocab_size, recipe.context_length)
    model.visual.to(memory_format=torch.channels_last)
    words = BagOfWords(setting)
    return model, train(model, recipe.teacher, setting, recipe.seed + 1000, words, words.parameters())
