"""Captions of the embedded images, drawn from a small grammar that is wrong on purpose now and then.

    "{opening} {article} {size} {colour} {pattern} {noun} {background} {clutter} {tail}"

Two kinds of wrong nouns exist. Any class is rarely called by its lookalike. Some *sub-types* (drawing variants) are
often called by another class: `MISNAMED`. The second kind is what keeps the zero-shot accuracy of the pretrained
encoder well below what its features allow, as with real encoders on specialised classes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from fedbench_embedded.images.attributes import CLASSNAMES, COLOURS, PATTERNS, SKETCH, Attributes

SYNONYMS = {
    "bird": ("sparrow", "pigeon"),
    "boat": ("ship", "vessel"),
    "bottle": ("flask", "jar"),
    "butterfly": ("moth",),
    "car": ("automobile", "vehicle"),
    "fish": ("trout", "goldfish"),
    "flower": ("blossom", "daisy"),
    "house": ("home", "cottage"),
    "mushroom": ("toadstool", "fungus"),
    "tree": ("pine", "oak"),
    "star": ("pentagram",),
    "heart": ("love symbol",),
    "mug": ("cup",),
    "key": ("door key",),
    "moon": ("crescent",),
    "arrow": ("pointer",),
    "umbrella": ("parasol",),
    "crown": ("tiara",),
    "drop": ("raindrop", "droplet"),
    "leaf": ("foliage",),
}
GENERIC_NOUNS = ("thing", "object", "shape", "item", "something")
HYPERNYMS = {
    "bird": "animal",
    "fish": "animal",
    "butterfly": "insect",
    "flower": "plant",
    "tree": "plant",
    "leaf": "plant",
    "mushroom": "plant",
    "car": "vehicle",
    "boat": "vehicle",
    "house": "building",
    "bottle": "container",
    "mug": "container",
}
LOOKALIKES = {
    "bird": "fish",
    "fish": "bird",
    "boat": "umbrella",
    "bottle": "mug",
    "butterfly": "flower",
    "flower": "butterfly",
    "house": "arrow",
    "mushroom": "umbrella",
    "tree": "mushroom",
    "car": "boat",
}
# (class, variant): (the class it is called instead, how often).
MISNAMED: dict[tuple[str, int], tuple[str, float]] = {
    ("bird", 1): ("butterfly", 0.6),
    ("tree", 1): ("mushroom", 0.6),
    ("boat", 1): ("house", 0.55),
    ("car", 1): ("house", 0.55),
    ("mug", 1): ("key", 0.5),
    ("bottle", 1): ("drop", 0.5),
}
COLOUR_SYNONYMS = {
    "red": ("crimson", "scarlet"),
    "orange": ("amber",),
    "yellow": ("golden",),
    "green": ("emerald",),
    "cyan": ("turquoise", "teal"),
    "blue": ("navy",),
    "purple": ("violet",),
    "pink": ("rose",),
    "brown": ("tan",),
    "gray": ("grey",),
}
SIZE_WORDS = (("small", "tiny", "little"), ("medium sized", "mid size"), ("large", "big", "huge"))
PATTERN_WORDS = (("plain",), ("striped", "stripy"), ("dotted", "spotted"), ("checkered", "checked"))
BACKGROUND_PHRASES = (
    ("on grass", "in a meadow", "on a lawn"),
    ("on sand", "on the beach"),
    ("in the sky", "in front of the sky"),
    ("at night", "in the dark"),
    ("on a brick wall", "in front of bricks"),
    ("in the snow", "on snow"),
    ("on wood", "on a wooden table"),
    ("in the water", "at sea"),
)
STYLE_OPENINGS = (
    ("a photo of", "a photograph of", "a close up of", "a blurry photo of"),
    ("a painting of", "an oil painting of", "artwork showing", "a watercolor of"),
    ("a cartoon of", "clip art of", "an illustration of", "a flat icon of"),
    ("a sketch of", "a pencil drawing of", "a line drawing of", "a doodle of"),
)
GENERIC_OPENINGS = ("a picture of", "an image of", "a photo of", "there is", "this is", "a view of", "")
CHAIN_LINKS = ("a picture of", "an image of", "a photo of", "a view of", "a copy of", "an example of")
CLUTTER_PHRASES = ("with a small dot", "with clutter", "next to a block")
OCCLUDER_PHRASE = "behind a bar"
TAILS = (".", ", nice", "for sale", ", high quality", ", low resolution")
DETERMINERS = ("the", "one", "my")
# Words of the usual zero-shot templates that no caption uses; they get token rows of their own.
TEMPLATE_WORDS = ("itap of a bad good drawing rendering toy origami video game art type texture , .",)


@dataclass(frozen=True, kw_only=True)
class CaptionMix:
    """How often a caption says what (probabilities), and how often it is wrong."""

    background: float = 0.12
    generic_opening: float = 0.75
    size: float = 0.12
    pattern: float = 0.25
    colour: float = 0.30
    hypernym: float = 0.06
    synonym: float = 0.15
    lookalike: float = 0.03
    misnaming: float = 1.0
    """Factor on the probabilities in `MISNAMED`; 0 turns misnaming off."""
    clutter: float = 0.15
    tail: float = 0.15
    chain: float = 0.10
    """Probability of up to five openings in front ("a photo of an image of ..."), which trains late text positions."""


def _noun(stream: random.Random, name: str, variant: int, mix: CaptionMix) -> str:
    wrong, wrong_rate = LOOKALIKES.get(name, name), mix.lookalike
    if mix.misnaming > 0 and (name, variant) in MISNAMED:
        wrong, base_rate = MISNAMED[name, variant]
        wrong_rate = base_rate * mix.misnaming
    draw = stream.random()
    if draw < wrong_rate:
        return wrong
    draw = (draw - wrong_rate) / (1 - wrong_rate)
    if draw < mix.hypernym:
        return HYPERNYMS[name] if name in HYPERNYMS and stream.random() < 0.5 else _pick(stream, GENERIC_NOUNS)
    return _pick(stream, SYNONYMS[name]) if draw < mix.hypernym + mix.synonym else name


def _pick(stream: random.Random, options: Sequence[str]) -> str:
    return options[int(stream.random() * len(options))]


def _thing(stream: random.Random, shown: Sequence[int], mix: CaptionMix, names_colour: bool) -> str:
    shape, variant, colour, pattern, size, domain = shown
    noun = _noun(stream, CLASSNAMES[shape], variant, mix)
    adjectives = []
    if stream.random() < mix.size:
        adjectives.append(_pick(stream, SIZE_WORDS[size]))
    if names_colour and domain != SKETCH and stream.random() < mix.colour:
        name = tuple(COLOURS)[colour]
        adjectives.append(name if stream.random() < 0.75 else _pick(stream, COLOUR_SYNONYMS[name]))
    if stream.random() < (mix.pattern if pattern else 0.08):
        adjectives.append(_pick(stream, PATTERN_WORDS[pattern]))
    if stream.random() < 0.3:
        adjectives.reverse()
    phrase = " ".join([*adjectives, noun])
    if stream.random() < 0.15:
        return f"{_pick(stream, DETERMINERS)} {phrase}"
    return with_article(phrase)


def with_article(phrase: str) -> str:
    """The phrase after "a" or "an"."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def caption(stream: random.Random, row: Sequence[int], mix: CaptionMix, names_colour: bool) -> str:
    """One caption for the attributes in `row`, in the order of the fields of `Attributes`."""
    shape, variant, colour, pattern, size, domain, background, distractors, occluded = row
    generic = stream.random() < mix.generic_opening
    words = [_pick(stream, GENERIC_OPENINGS if generic else STYLE_OPENINGS[domain])]
    if stream.random() < mix.chain:
        words = [_pick(stream, CHAIN_LINKS) for _ in range(1 + int(stream.random() * 5))] + words
    words.append(_thing(stream, (shape, variant, colour, pattern, size, domain), mix, names_colour))
    # A sketch hardly shows its background.
    if stream.random() < (min(mix.background, 0.1) if domain == SKETCH else mix.background):
        words.append(_pick(stream, BACKGROUND_PHRASES[background]))
    if (occluded or distractors) and stream.random() < mix.clutter:
        words.append(OCCLUDER_PHRASE if occluded else _pick(stream, CLUTTER_PHRASES))
    if stream.random() < mix.tail:
        words.append(_pick(stream, TAILS))
    return " ".join(word for word in words if word)


def captions(seed: int, attributes: Attributes, mix: CaptionMix, colourless: Sequence[bool] | None = None) -> list[str]:
    """One caption an image; images marked in `colourless` (n,) are described without their colour."""
    stream = random.Random(seed)
    columns = [getattr(attributes, name).tolist() for name in Attributes.__dataclass_fields__]
    silent = colourless if colourless is not None else [False] * len(attributes)
    return [caption(stream, row, mix, not mute) for row, mute in zip(zip(*columns, strict=True), silent, strict=True)]


def vocabulary() -> list[str]:
    """Every phrase that the grammar can say, sorted; the tokens of these phrases get rows of their own."""
    groups: list[Sequence[str]] = [CLASSNAMES, tuple(COLOURS), PATTERNS, GENERIC_NOUNS, tuple(HYPERNYMS.values())]
    groups += [*SYNONYMS.values(), *COLOUR_SYNONYMS.values(), *SIZE_WORDS, *PATTERN_WORDS, *BACKGROUND_PHRASES]
    groups += [*STYLE_OPENINGS, GENERIC_OPENINGS, CHAIN_LINKS, CLUTTER_PHRASES, (OCCLUDER_PHRASE,), TAILS, DETERMINERS]
    groups += [("a", "an", "is"), TEMPLATE_WORDS]
    return sorted({phrase for group in groups for phrase in group})
