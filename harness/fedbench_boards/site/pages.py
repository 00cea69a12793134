"""Builds the site: pages of suites, data sets and methods, pictures and the folders' own pages beside them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from fedbench.core.errors import FedbenchError
from fedbench.core.files import replacing
from fedbench.core.version import __version__
from fedbench.core.wording import counted
from fedbench.datasets.catalogue import DataCard, card_of, plain_name
from fedbench.kinds.registry import METHOD, installed
from fedbench.models import pretraining_of
from fedbench.plugins.description import Description, Descriptions
from fedbench_boards.site.answers import front_pictures, what_to_try, worth
from fedbench_boards.site.folders import BoardLine, BoardTable, ResultsOf, read_folders
from fedbench_boards.site.text import Told, findings, seeds_shown, slug, told, with_code


@dataclass(frozen=True)
class DataOf:
    """A data set in the results."""

    name: str
    card: DataCard | None
    """The card of a listed data set; None for others."""
    typed: tuple[str, ...]
    """The names that runs have for it, with options."""
    places: tuple[tuple[ResultsOf, BoardTable], ...]

    @property
    def slug(self) -> str:
        return slug(self.name)

    @property
    def suites(self) -> list[ResultsOf]:
        """The result folders with a row on it."""
        return list({results.name: results for results, _ in self.places}.values())


def name_of(dataset: str) -> str:
    """The data set's name: that of its card, else the runs' name without options."""
    card = card_of(dataset)
    return card.title if card is not None else plain_name(dataset)


def data_of(folders: Sequence[ResultsOf]) -> list[DataOf]:
    """The data sets, by name."""
    typed: dict[str, dict[str, None]] = {}
    places: dict[str, dict[tuple[str, int], tuple[ResultsOf, BoardTable]]] = {}
    for results in folders:
        for table, entry in results.entries:
            if entry.dataset:
                name = name_of(entry.dataset)
                typed.setdefault(name, {})[entry.dataset] = None
                places.setdefault(name, {})[results.name, table.number] = (results, table)
    return [
        DataOf(name, card_of(next(iter(typed[name]))), tuple(typed[name]), tuple(places[name].values()))
        for name in sorted(places, key=str.lower)
    ]


def seen_in(table: BoardTable) -> Iterator[str]:
    """A sentence for each backbone of the table that was trained on data of the kind that it is tested on."""
    for backbone, dataset in dict.fromkeys((entry.backbone, entry.dataset) for entry in table.entries):
        try:
            known = pretraining_of(backbone) if backbone else None
        except FedbenchError:  # of a package that is not installed here
            known = None
        if known is not None and name_of(dataset) in known.datasets:
            yield f"{backbone} saw data of this kind in pretraining: {known.text}"


@dataclass(frozen=True)
class RankedRow:
    """A row of a table of a folder."""

    results: ResultsOf
    table: BoardTable
    entry: BoardLine

    @property
    def anchor(self) -> str:
        """Anchor of the row in the folder's own page."""
        return f"{self.table.anchor}-row-{self.table.entries.index(self.entry)}"


@dataclass(frozen=True)
class MethodOf:
    """A method of the site."""

    name: str
    description: Description | None
    """None if the method is not installed here, or can't be used."""
    told: Told | None
    parameters: list[dict[str, str]]
    """The hyper-parameters in words, by `_PARAMETER`."""
    source: str
    """Path of the method's module; "" if it is not installed here."""
    places: tuple[RankedRow, ...]

    @property
    def slug(self) -> str:
        return slug(self.name)

    @property
    def first(self) -> int:
        """The number of tables in which one of its rows has rank 1."""
        return sum(place.entry.rank == 1 for place in self.places)


def methods_of(folders: Sequence[ResultsOf]) -> list[MethodOf]:
    """The installed methods and those that only results have, by name."""
    places: dict[str, list[RankedRow]] = {}
    for results in folders:
        for table, entry in results.entries:
            for name in entry.methods:
                places.setdefault(name, []).append(RankedRow(results, table, entry))
    modules = {point.name: point.value.partition(":")[0] for point in installed(METHOD)}
    known = Descriptions()
    methods = []
    for name in sorted({*modules, *places}):
        description = _described(known, name) if name in modules else None
        methods.append(
            MethodOf(
                name=name,
                description=description,
                told=told(description.text) if description else None,
                parameters=_parameters(description) if description else [],
                source=f"{modules[name].replace('.', '/')}.py" if name in modules else "",
                places=tuple(places.get(name, ())),
            )
        )
    return methods


def _described(known: Descriptions, name: str) -> Description | None:
    try:
        return known.of(name)
    except FedbenchError:  # a page that says so is of more use than no site
        return None


_PARAMETER = ("name", "symbol", "kind", "default", "bounds", "neutral", "source")


def _parameters(description: Description) -> list[dict[str, str]]:
    parameters = []
    for row, searched in zip(description.parameters, description.searched, strict=True):
        parameter = dict(zip(_PARAMETER, row, strict=True))
        bounds = parameter["bounds"].partition(", tuned ")[0]
        parameters.append(parameter | {"bounds": bounds, "searched": searched or "no"})
    return parameters


LISTING = ".fedbench-site"
"""Name of the list of written pages, a path per line. The next site removes those that it no longer has, and nothing
else."""
_REMEDY = "choose another --site"


def write_site(folder: Path, results: Path) -> str:
    """Write the site of the folders below ``results`` into ``folder``; what was written, in words.

    A site among the folders (``leaderboards/site``) links to their own pages and figures, any other has copies of them.
    FedbenchError where there are no results, ``folder`` has an index.html of something else, or a file can't be
    written.
    """
    listing = folder / LISTING
    if (folder / "index.html").exists() and not listing.is_file():
        raise FedbenchError(f"--site {str(folder)!r} has an index.html that is no page of a site; {_REMEDY}.")
    before = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    beside = folder.resolve().parent == results.resolve()
    site = _Site(folder, read_folders(results), beside=beside)
    site.write_all()
    for name in set(before) - set(site.written):
        path = folder / name
        if path.resolve().is_relative_to(folder.resolve()):
            path.unlink(missing_ok=True)
    with replacing(listing, "list of pages", _REMEDY) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in sorted(site.written)), encoding="utf-8")
    return (
        f"{counted(len(site.folders), 'suite')}, {counted(len(site.methods), 'method')}, "
        f"{counted(len(site.data), 'data set')}; {counted(len(site.written), 'file')}, {site.size / 1e6:.1f} MB"
    )


class _Site:
    def __init__(self, folder: Path, folders: list[ResultsOf], *, beside: bool) -> None:
        self.folder, self.folders = folder, folders
        self.beside = beside
        """Whether the site lies among the result folders, whose files it then links to instead of copying them."""
        self.methods, self.data = methods_of(folders), data_of(folders)
        self.written: list[str] = []
        self.size = 0
        self._pages = {results.path.resolve(): results for results in folders}
        environment = Environment(
            loader=FunctionLoader(_shipped),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        # package files; autoescape would break their quotes
        environment.globals.update(js=Markup(_shipped("site.js")), to_try=what_to_try(folders), version=__version__)
        tables = [table for results in folders for table in results.tables]
        environment.globals.update(worth=partial(worth, tables=tables), place=self._place)
        environment.globals.update(slug=slug, data_name=name_of)
        environment.filters.update(code=with_code, shown_seeds=seeds_shown)
        self._environment = environment

    def write_all(self) -> None:
        self._write("site.css", _shipped("site.css").encode())
        front = []
        for file, words in front_pictures(self.folders[0].path.parent):
            place = f"../{file.name}" if self.beside else f"pictures/{slug(file.stem)}{file.suffix}"
            front.append((quote(place), words))
            if not self.beside:
                self._write(place, file.read_bytes())
        for results in self.folders:
            if not self.beside and results.page:
                self._write(f"suites/{results.slug}/board.html", results.page.encode())
            for file in () if self.beside else results.figures:
                self._write(self._figure(results, file), file.read_bytes())
            figures = {file.stem: quote(self._figure(results, file)) for file in results.figures}
            seen = dict.fromkeys(sentence for table in results.tables for sentence in seen_in(table))
            told = findings(results.findings, partial(self._target, results)) if results.findings else Markup()
            # what the text shows stands there already
            rest = {name: place for name, place in figures.items() if f'src="../{place}"' not in told}
            content = {"results": results, "findings": told, "figures": rest, "seen": list(seen)}
            content |= {"tables": [(results, table) for table in results.tables]}
            self._page(f"suites/{results.slug}.html", "suite.html.j2", **content)
        for method in self.methods:
            self._page(f"methods/{method.slug}.html", "method.html.j2", method=method)
        for data in self.data:
            self._page(f"data/{data.slug}.html", "data.html.j2", data=data)
        entries = list(self._searched())
        self._page(
            "index.html",
            "index.html.j2",
            folders=self.folders,
            methods=self.methods,
            data=self.data,
            front=front,
            entries=entries,
        )

    def _searched(self) -> Iterator[dict[str, str]]:
        for results in self.folders:
            about = " ".join([results.description, *(table.title for table in results.tables)])
            yield _search_entry("suite", results.name, f"suites/{results.slug}.html", about)
        for method in self.methods:
            reference = method.told.reference if method.told else "not installed where this site was written"
            yield _search_entry("method", method.name, f"methods/{method.slug}.html", reference)
        for data in self.data:
            about = " ".join([*data.typed, *(results.name for results in data.suites)])
            yield _search_entry("data set", data.name, f"data/{data.slug}.html", about)

    def _page(self, name: str, template: str, **content: Any) -> None:
        root = "../" * name.count("/")
        self._write(name, self._environment.get_template(template).render(root=root, **content).encode())

    def _write(self, name: str, content: bytes) -> None:
        self.written.append(name)
        with replacing(self.folder / name, "page", _REMEDY) as temporary:
            temporary.write_bytes(content)
        self.size += len(content)

    def _figure(self, results: ResultsOf, file: Path) -> str:
        """Path from the site's first page of a picture: the folder's own, or its copy beside the suite's page."""
        if self.beside:
            return f"../{results.path.name}/figures/{file.name}"
        return f"suites/{results.slug}/{slug(file.stem)}{file.suffix}"

    def _place(self, results: ResultsOf, anchor: str = "") -> str:
        """Path from the site's first page of a table or row in the folder's own page, else of the suite's page."""
        if not results.page:
            return quote(f"suites/{results.slug}.html")
        own = f"../{results.path.name}/index.html" if self.beside else f"suites/{results.slug}/board.html"
        return quote(own) + (f"#{anchor}" if anchor and f'id="{anchor}"' in results.page else "")

    def _target(self, results: ResultsOf, link: str) -> str:
        """The target, seen from the suite's page, of a link in a folder's findings; "" where the site has none."""
        if re.match(r"https?://|#", link):
            return link
        path, _, _ = unquote(link).partition("#")
        if path in ("index.html", "leaderboard.md", "leaderboard.csv.gz"):
            return "#tables"
        target = results.path / path
        shown = next((file for file in results.figures if target in (file, file.with_suffix(".png"))), None)
        if shown is not None:
            return quote(f"../{self._figure(results, shown)}")
        whole = Path(posixpath.normpath(target.absolute().as_posix()))
        other = self._pages.get((whole.parent if whole.name in ("findings.md", "index.html") else whole).resolve())
        return "" if other is None else quote(f"{other.slug}.html")


def _search_entry(kind: str, name: str, url: str, about: str) -> dict[str, str]:
    return {"kind": kind, "name": name, "url": quote(url), "about": about}


def _shipped(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")
