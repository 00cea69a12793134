"""Class names as words that can stand in a prompt, by an explicit table and never by guess."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.files import read_bytes
from fedbench.datasets.sources import Asked, Files

log = logging.getLogger(__name__)

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100 = tuple(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm""".split()  # noqa: SIM905 - a list of literals would fill a page
)
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

OFFICE_HOME = tuple(
    """Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards Computer
    Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flowers Folder Fork Glasses Hammer Helmet
    Kettle Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil
    Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon Table
    Telephone ToothBrush Toys Trash_Can Webcam""".split()  # noqa: SIM905
)

# A name of lowercase letters, spaces and hyphens stands for itself, so PACS, VLCS, CIFAR-10 and CINIC-10 need no words.
_IN_LOWER_CASE = (
    *(name for name in CIFAR100 if "_" in name),
    *(name for name in FASHION if name != "T-shirt/top"),
    *OFFICE_HOME,
    "laptop_computer",  # Office-Caltech-10
    *("ice_cream", "wine_glass"),  # DomainNet, the ten classes used in federated learning
)
WORDS = {name: name.lower().replace("_", " ") for name in _IN_LOWER_CASE} | {
    "cra": "crab",  # so spelt in the Hub's copy of CIFAR-100
    # Fashion-MNIST, in torchvision's and the Hub's spelling
    "T-shirt/top": "t-shirt",
    "T - shirt / top": "t-shirt",
    "back_pack": "backpack",  # Office-Caltech-10
    # VLCS, in Dassl's copy
    "0_bird": "bird",
    "1_car": "car",
    "2_chair": "chair",
    "3_dog": "dog",
    "4_person": "person",
    # Office-Home
    "Flipflops": "flip-flops",
    "Postit_Notes": "post-it notes",
    "TV": "TV",
}
"""The words of names that do not stand for themselves."""

LABEL_ORDERS = {
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "fashion-mnist": FASHION,
    "digits": DIGITS,
}
"""What the labels 0, 1, ... stand for in copies of well-known data sets that carry numbers only."""

CHOICES = {
    "domainnet-10": (
        *("bird", "feather", "headphones", "ice_cream", "teapot"),
        *("tiger", "whale", "windmill", "wine_glass", "zebra"),
    )
}
"""Classes that papers take of a larger data set: FedBN's ten of DomainNet."""
_WNID = re.compile("n[0-9]{8}")
STANDS_FOR_ITSELF = re.compile("[a-z]+([ -][a-z]+)*")


def words_for(names: Sequence[str], where: str, own: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The words for each raw name; ``own`` words win over the table. ``where`` names the data in the error."""
    own = own or {}
    missing = [n for n in names if n not in own and n not in WORDS and not STANDS_FOR_ITSELF.fullmatch(n)]
    if missing:
        shown = ", ".join(repr(name) for name in missing[:5]) + (", ..." if len(missing) > 5 else "")
        digits = "type ?names=digits if they are digits, " if set(names) <= set("0123456789") else ""
        raise FedbenchError(
            f"{where}: no words are known for the class names {shown}, and prompts are never guessed; {digits}put "
            f'classnames.json ({{"{missing[0]}": "its words", ...}}) beside the data, or type ?classnames=FILE.'
        )
    return tuple(own.get(name) or WORDS.get(name, name) for name in names)


def label_order(data: str) -> tuple[str, ...]:
    """The published class names of a well-known data set, in label order; ImageNet's are open_clip's."""
    if data != "imagenet":
        return LABEL_ORDERS[data]
    from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES

    return tuple(IMAGENET_CLASSNAMES)


def published_words(data: str, raw: Sequence[str], where: str) -> dict[str, str]:
    """Words by raw name from ``?names=known``: raw names are labels, or all of ImageNet's folders n01440764, ...

    FedbenchError for others.
    """
    order = label_order(data)
    if data == "imagenet" and len(raw) == len(order) and all(_WNID.fullmatch(name) for name in raw):
        return dict(zip(sorted(raw), order, strict=True))
    if not all(name.isascii() and name.isdigit() and int(name) < len(order) for name in raw):
        raise FedbenchError(
            f"{where}: option names={data!r} names the labels 0 to {len(order) - 1}"
            f"{' or the 1,000 folders n01440764, ...' if data == 'imagenet' else ''}, but there are {raw[0]!r} and "
            f"{len(raw) - 1} others; leave it out, or complete the data."
        )
    chosen = [order[int(name)] for name in raw]
    return dict(zip(raw, chosen if data == "imagenet" else words_for(chosen, where), strict=True))


def chosen_classes(given: str, raw: Sequence[str], where: str) -> tuple[str, ...]:
    """The classes of ``raw`` that ``?classes=`` asks for, by name or as one of `CHOICES`. FedbenchError for others."""
    wanted = CHOICES.get(given, tuple(given.split(",")))
    for name in wanted:
        if name not in raw:
            raise unknown_name(f"class of {where}", name, raw, f"Choices with a name: {', '.join(CHOICES)}.")
    return tuple(wanted)


def read_words(file: str, text: bytes, names: Sequence[str]) -> dict[str, str]:
    """Words by raw name from ``classnames.json`` or ``classnames.txt``.

    The JSON is {raw: words}, or like the lines of the text file a list of words in label order.
    """
    todo = "one name a line, in the order of the labels"
    try:
        if file.endswith(".json"):
            todo = 'an object like {"raw_name": "its words"}, or a list of words in the order of the labels'
            own = json.loads(text.decode("utf-8-sig"))
        else:
            own = text.decode("utf-8-sig").strip().splitlines()
    except (ValueError, RecursionError) as error:
        raise FedbenchError(f"class names in {file!r} can't be read ({error}); it must hold {todo}.") from error
    if isinstance(own, list) and all(isinstance(words, str) for words in own):
        own = listed_words(own, names, f"class names file {file!r}")
    if not isinstance(own, dict) or not all(_is_text(raw) and _is_text(words) for raw, words in own.items()):
        raise FedbenchError(f"class names in {file!r} are not all words; it must hold {todo}.")
    return {raw: words.strip() for raw, words in own.items()}


def _is_text(words: object) -> bool:
    """Whether they are words that can be shown and stored: JSON may also hold half a surrogate pair."""
    return isinstance(words, str) and bool(words.strip()) and not any("\ud800" <= one <= "\udfff" for one in words)


def listed_words(words: Sequence[str], names: Sequence[str], where: str) -> dict[str, str]:
    """Words given in label order, by raw name. ``where`` names their origin in the error."""
    if len(words) != len(names) or not all(each.strip() for each in words):
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise FedbenchError(
            f"{where} has {len([each for each in words if each.strip()])} class names for {len(names)} classes; give "
            f"one for each of {shown}, in that order."
        )
    return {name: each.strip() for name, each in zip(names, words, strict=True)}


def words_in(file: Path, names: Sequence[str]) -> dict[str, str]:
    """``read_words`` of a file on disk."""
    try:
        return read_words(str(file), read_bytes(file), names)
    except OSError as error:
        raise FedbenchError(f"class names can't be read from {str(file)!r}: {error.strerror}; check it.") from error


def words_beside(folder: Path, names: Sequence[str]) -> dict[str, str] | None:
    """Words from ``classnames.json`` or ``classnames.txt`` in ``folder``; None where there is neither."""
    for file in (folder / "classnames.json", folder / "classnames.txt"):
        if file.exists():
            return words_in(file, names)
    return None


def typed_words(asked: Asked[Files], names: Sequence[str]) -> dict[str, str] | None:
    """Words as the options ``names=KNOWN``, ``classnames=a,b,c`` or ``classnames=FILE`` give them; None without any."""
    where = repr(asked.location)
    published, given = asked.options.names, asked.options.classnames
    if published is not None:
        return published_words(published, names, where)
    if given is None:
        return None
    if "," in given:
        return listed_words(given.split(","), names, f"{where}: option classnames={given!r}")
    return words_in(asked.find(given, "class names file"), names)


def class_words(
    asked: Asked[Files], raw: Sequence[str], folder: Path | None, default: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The words for each raw name: as typed, else from a file in ``folder``, else by ``default`` or the table.

    Numbers have no words of their own: these need one of the first three.
    """
    own = typed_words(asked, raw)
    if own is None and folder is not None:
        own = words_beside(folder, raw)
    if not own and default is not None:
        log.info("%r: taking the published class names", asked.location)
    words, where = own or default or {}, repr(asked.location)
    if list(raw) == [str(number) for number in range(len(raw))]:
        return words_of_numbers(raw, words, where, folder)
    return words_for(raw, where, words)


def words_of_numbers(names: Sequence[str], own: Mapping[str, str], where: str, folder: Path | None) -> tuple[str, ...]:
    """The words for labels that are numbers, which ``own`` has to name; they may stand in ``folder``."""
    missing = next((number for number in names if number not in own), None)
    if missing is not None:
        known = [f"?names={name}" for name, order in LABEL_ORDERS.items() if len(order) == len(names)]
        maybe = f"{' or '.join(known)} if they are that data set, " if known else ""
        file = f"put classnames.txt with {len(names)} names, one a line in label order, into {str(folder)!r}, or "
        raise FedbenchError(
            f"{where}: label {missing} has no name; {file if folder else ''}type {maybe}?classnames=a,b,c or "
            "?classnames=FILE."
        )
    return tuple(own[number] for number in names)
