"""What the class of a method must declare, and whose name it may have: one sentence for each fault."""

import os
import re
import signal
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fedbench.cli.app import main
from fedbench.core.errors import FedbenchError
from fedbench.kinds import registry
from fedbench.kinds.registry import GROUPS, METHOD, find_method, load_plugin_file
from fedbench.plugins import assembly as assemble
from fedbench.plugins import description

RIGHT = """
from dataclasses import dataclass
from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.hyper import hyper

@dataclass(frozen=True)
class P:
    mu: float = hyper(0.1, symbol="m", source="Eq. 1", low=0.0, high=1.0)

class Mine:
    name, citation, Params = "mine", "Nobody, A paper, 2000", P
    recipe = {"lr": 0.1}

    def __init__(self, params):
        self.params = params

    @hookimpl
    def aggregate(self, task):
        return task.weights
"""
NAME, RECIPE = '"mine", "Nobody', '{"lr": 0.1}'
FAULTS = {
    "an empty name": (NAME, '"", "Nobody', r"name='' cannot be a method's name; use up to 100 letters"),
    "the name of a stack": (NAME, '"a+b", "Nobody', r"name='a\+b' cannot be"),
    "the name of a folder": (NAME, '"..", "Nobody', r"name='\.\.' cannot be"),
    "a name with an end of line": (NAME, '"mine\\n", "Nobody', r"name='mine\\n' cannot be"),
    "a name that is a number": (NAME, '7, "Nobody', r"name=7 cannot be"),
    "a long name": (NAME, '101 * "x", "Nobody', r"cannot be a method's name; use up to 100"),
    "a name that settings begin with": (NAME, '"training", "Nobody', r"name='training' is a word that settings begin"),
    "an empty citation": ('"Nobody, A paper, 2000"', '" "', r"citation=' ' is not a text"),
    "a citation that is no text": ('"Nobody, A paper, 2000"', "2000", r"citation=2000 is not a text"),
    "no recipe": (RECIPE, "None", r"recipe=None is not a mapping from settings of the optimiser"),
    "a recipe that sets the budget": (RECIPE, '{"rounds": 3}', r"the recipe of mine sets rounds; it may set the opt"),
    "an unknown key of the recipe": (RECIPE, '{"lrr": 3}', r"unknown setting .* 'lrr'; did you mean 'lr'"),
    "a key of the recipe that is no text": (RECIPE, "{3: 3}", r"unknown setting in the recipe of mine '3'"),
    "a wrong value of the recipe": (RECIPE, '{"lr": "much"}', r"the recipe of mine has lr='much': input should be"),
    "a truth in the recipe": (RECIPE, '{"lr": True}', r"the recipe of mine has lr=True: it is a number"),
    "no dataclass": ("@dataclass(frozen=True)\n", "", r"P is not a frozen dataclass; write @dataclass\(frozen=True"),
    "a dataclass that is not frozen": ("(frozen=True)", "", r"P is not a frozen dataclass"),
    "Params that are no class": (", P\n", ", {}\n", r"Params=\{\} is not a class"),
    "a field without hyper": (
        'hyper(0.1, symbol="m", source="Eq. 1", low=0.0, high=1.0)',
        "0.1",
        r"P.mu must be declared",
    ),
    "a type that there is not": ("mu: float", 'mu: "Nowhere"', r"the types of P cannot be read: NameError"),
    "a type that has no values": (
        "@dataclass(frozen=True)\nclass P:\n    mu: float",
        "class Odd:\n    pass\n\n@dataclass(frozen=True)\nclass P:\n    mu: Odd",
        r"values of P.mu can't be checked against its type .*Odd",
    ),
    "Params that refuse their defaults": (
        "\nclass Mine:",
        "    def __post_init__(self):\n        raise KeyError(self.mu)\n\nclass Mine:",
        r"P\(\) with its defaults raises KeyError: 0.1",
    ),
    "Params that end the process": (
        "\nclass Mine:",
        "    def __post_init__(self):\n        raise SystemExit(0)\n\nclass Mine:",
        r"P\(\) with its defaults raises SystemExit: 0",
    ),
    "a default of another type": ("mu: float", "mu: bool", r"the default mine.mu=0.1 is not a bool"),
    "no argument of the constructor": ("__init__(self, params)", "__init__(self)", r"it can't be made from its Params"),
    "an unknown hook": ("aggregate(", "agregate(", r"agregate.*hooks are federate, build_model"),
    "an unknown argument": (
        "(self, task)",
        "(self, tasks)",
        r"its answer to the hook aggregate asks for tasks; the hook offers task: def aggregate\(self, task\)",
    ),
    "a further argument": ("(self, task)", "(self, task, model)", r"asks for model; the hook offers task"),
    "no self": ("(self, task)", "(task)", r"its answer to the hook aggregate lacks self; the hook offers task"),
    "no arguments at all": ("(self, task)", "()", r"lacks self"),
    "a requirement nobody can meet": (
        "    recipe",
        "    requires = ('luck',)\n    recipe",
        r"requires 'luck', which no",
    ),
    "requirements in a text": ("    recipe", "    requires = 'server_data'\n    recipe", r"is not a tuple of names"),
    "settings nobody has": ("    recipe", "    reads = ['lr']\n    recipe", r"reads 'lr', which is no setting"),
}


@pytest.fixture
def written(tmp_path):
    def write(text, name="mine.py"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_class_is_one_sentence_that_names_the_file(fault, written):
    old, new, message = FAULTS[fault]
    assert old in RIGHT
    file = written(RIGHT.replace(old, new))
    with pytest.raises(FedbenchError) as refused:
        load_plugin_file(file)
    said = str(refused.value)
    assert re.search(message, said) and repr(str(file)) in said and "class Mine: " in said, said


def test_what_is_right_is_loaded_and_may_answer_a_hook_in_any_way_that_can_be_called(written):
    ways = """
    @staticmethod
    @hookimpl
    def evaluate(task):
        return None

    @classmethod
    @hookimpl
    def private(cls, model):
        return ()

    @hookimpl
    def exchanges(this, round, further=3):
        return 1
"""
    (cls,) = load_plugin_file(written(RIGHT + ways + "\nAlias = Mine\n"))
    assert cls.__name__ == "Mine"
    owners = assemble.assemble("mine", {}, [Path(sys.modules[cls.__module__].__file__)]).owners
    assert all("mine" in owners[hook] for hook in ("evaluate", "private", "exchanges"))


def test_params_extended_without_a_decorator_would_lose_their_fields(written):
    further = "class Q(P):\n    nu: float = hyper(0.1, symbol='n', source='s')\n\nclass Mine:"
    file = written(RIGHT.replace("class Mine:", further).replace('2000", P', '2000", Q'))
    with pytest.raises(FedbenchError, match="Q is not a frozen dataclass"):
        load_plugin_file(file)


@pytest.mark.parametrize("raised", ["SystemExit(0)", "GeneratorExit", "BaseException('x')"])
def test_whatever_a_module_raises_on_import_is_an_error_that_names_it(raised, written, monkeypatch, capsys):
    file = written(f"raise {raised}\n")
    for _ in range(2):  # nothing of it is left behind
        monkeypatch.setattr(sys, "argv", ["fedbench", "list", "methods", "--plugin", str(file)])
        with pytest.raises(SystemExit) as end:
            main()
        said = " ".join(capsys.readouterr().err.split())
        assert end.value.code == 2 and raised.partition("(")[0] in said
        assert re.search(r"^error: plugin file '.*mine.py' cannot be imported: ", said)


def test_an_error_that_cannot_be_shown_is_told_by_its_kind(written):
    file = written("class Odd(Exception):\n    def __repr__(self):\n        raise ValueError\n\nraise Odd\n")
    with pytest.raises(FedbenchError, match="cannot be imported: Odd; mend it"):
        load_plugin_file(file)


def test_ctrl_c_during_an_import_is_no_fault_of_the_plugin(written, request):
    # a process that a shell starts in the background ignores Ctrl-C
    request.addfinalizer(
        partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    )
    file = written(f"import os\nos.kill({os.getpid()}, {int(signal.SIGINT)})\nimport time\ntime.sleep(60)\n")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        load_plugin_file(file)
    assert signal.getsignal(signal.SIGINT) is before


class Package:
    """A distribution as `importlib.metadata` shows it."""

    def __init__(self, name):
        self.name, self.version = name, "1.0"


def point(name, value, package):
    made = EntryPoint(name, value, GROUPS[METHOD])
    vars(made).update(dist=Package(package))
    return made


@pytest.fixture
def installed(monkeypatch):
    """Further installed methods beside those of this package."""
    real = list(registry.installed("method"))

    def install(*further):
        for module in (registry, description):
            monkeypatch.setattr(module, "installed", lambda kind: [*real, *further] if kind == "method" else [])

    return install


def test_two_packages_with_one_name_are_refused_when_it_is_asked_for_and_only_then(installed):
    installed(point("fedprox", "theirs:Prox", "their-package"))
    with pytest.raises(FedbenchError) as refused:
        find_method("fedprox")
    assert str(refused.value) == (
        "two methods are called 'fedprox': fedbench_methods.fedprox:FedProx of the package fedbench-harness and "
        "theirs:Prox of the package their-package; uninstall one."
    )
    assert find_method("moon").name == "moon"


def test_the_same_object_under_two_packages_is_one_method(installed):
    installed(point("fedprox", "fedbench_methods.fedprox:FedProx", "their-package"))
    assert find_method("fedprox").name == "fedprox"


def test_a_file_does_not_silently_replace_an_installed_method_unless_it_is_its_own_file(written):
    file = written(RIGHT.replace(NAME, '"fedprox", "Nobody'))
    with pytest.raises(FedbenchError) as refused:
        find_method("fedprox", [file])
    assert str(refused.value) == (
        "two methods are called 'fedprox': fedbench_methods.fedprox:FedProx of the package fedbench-harness and "
        f"the plugin file {str(file)!r}; rename yours, or leave --plugin out."
    )
    assert find_method("moon", [file]).name == "moon"
    source = Path(sys.modules[find_method("fedprox").__module__].__file__)
    assert find_method("fedprox", [source]).name == "fedprox"


def test_two_files_and_two_classes_with_one_name_are_refused(written, tmp_path):
    (tmp_path / "other").mkdir()
    one, other = written(RIGHT), written(RIGHT, "other/mine.py")
    with pytest.raises(
        FedbenchError, match=r"two methods are called 'mine': .*mine.py' and .*other/mine.py'; rename one"
    ):
        find_method("mine", [one, other])
    assert find_method("mine", [one, one]) is find_method("mine", [one])
    with pytest.raises(FedbenchError, match=r"Mine and Again are both called 'mine'; rename one"):
        load_plugin_file(written(RIGHT + "\nclass Again(Mine):\n    pass\n", "twice.py"))


def test_files_with_one_stem_do_not_meet(written, tmp_path):
    (tmp_path / "other").mkdir()
    one, other = written(RIGHT), written(RIGHT.replace(NAME, '"yours", "Nobody'), "other/mine.py")
    first, second = find_method("mine", [one, other]), find_method("yours", [one, other])
    assert find_method("mine", [one, other]) is first and sys.modules[second.__module__].__file__ == str(other)


def test_an_installed_method_that_is_broken_is_listed_as_such_and_stops_nobody_else(installed, monkeypatch, capsys):
    installed(point("away", "nowhere_at_all:Away", "their-package"))
    for arguments, code in ((["list", "methods"], 0), (["describe", "fedprox"], 0), (["describe", "away"], 2)):
        monkeypatch.setattr(sys, "argv", ["fedbench", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        assert (end.value.code or 0) == code, captured.err
        said = " ".join((captured.out + captured.err).split())
        if "fedprox" not in arguments:
            # a table folds it
            assert all(word in said for word in ("'away'", "(nowhere_at_all:Away)", "ModuleNotFoundError")), said
        if arguments[0] == "list":
            assert re.search(r"away broken: ", said) and "MLSys 2020" in said
