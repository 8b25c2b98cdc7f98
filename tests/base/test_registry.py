"""Tools plug into weft by plain data: found, listed, refused and used without a change in the core."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.base.tools import install, python, weft, write_tool
from tests.structure import SOURCES, TOOLS
from weft.base import registry as tools
from weft.base.errors import InputError
from weft.cli.app import _command

TOML = """
api = 1
name = "{name}"
summary = "a tool of a test"
"""


def own_files() -> list[Path]:
    return [SOURCES / package / "tool.toml" for package in ("weft", *TOOLS)]


def reads(tmp_path: Path, text: str) -> tools.Tool:
    path = tmp_path / "tool.toml"
    path.write_text(text, encoding="utf-8")
    return tools._read(path, "package", own=False)


def test_wefts_own_tools_are_all_there_and_ready():
    found = tools.registry()
    assert [tool.package for tool in found.tools if tool.own] == ["weft", "weft_stitch", "weft_tune", "weft_map",
                                                                  "weft_cluster", "weft_papers"]  # fmt: skip
    assert not found.problems and not any(tool.missing() for tool in found.tools)


@pytest.mark.parametrize("path", own_files(), ids=lambda path: path.parent.name)
def test_everything_that_a_tool_of_ours_registers_is_there(path):
    tool = tools._read(path, path.parent.name, own=True)
    for section in tools.SECTIONS:
        for entry in tool.entries(section):
            if section != "pages":
                assert entry.load() is not None
            else:
                page, (module, _, name) = entry.load(), entry.name.partition(":")
                assert hasattr(page, "tables") and hasattr(__import__(module, fromlist=[name]), name)


@pytest.mark.parametrize("name", [name for name in tools.registered("commands") if " " not in name])
def test_the_list_of_commands_says_what_their_help_begins_with(name):
    shown = tools.registered("commands")[name].details["help"]
    assert (_command(name).help or "").split("\n\n")[0].replace("\n", " ").strip() == shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("api = 1", "it has no name"),
        ('api = 2\nname = "x"', "version 2 of the registry, and this weft has 1"),
        ('api = 1\nname = "x"\nwhim = 3', "'whim' is not known in tool.toml"),
        ('api = 1\nname = "x"\nneeds = "ortools"', "needs must be a list"),
        ('api = 1\nname = "x"\npolicies = 3', "policies must be a table"),
        ('api = 1\nname = "x"\n[policies]\nmine = 3', "policies.mine must name its target"),
        ('api = 1\nname = "x"\n[policies.mine]\ntarget = "a:b"\nkey = 1', "policies.mine has 'key'"),
        ("api = ", "Invalid value"),
        ('api = 1\nname = "x"\nneeds = [""]', "needs must be a list"),
        ('api = 1\nname = "x"\n[commands.x]\ntarget = "x"\nhelp = 3', "commands.x: help = 3 must be of the kind str"),
        ('api = 1\nname = "x"\n[model_kinds.x]\ntarget = "x"\ndevices = "cuda"', "must be of the kind list"),
        ('api = 1\nname = "x"\n[model_kinds.x]\ntarget = "x"\nsuffix = 3', "must be of the kind str"),
        ('api = 1\nname = "x"\n[devices.cpu]\ntarget = "x"\nexample = "cpu:0"', "not host or cpu"),
        ('api = 1\nname = "x"\n[devices.slow]\ntarget = "x"\nexample = "0"', "needs an example"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(tmp_path, text, why):
    with pytest.raises(ValueError, match=why):
        reads(tmp_path, text)


def test_what_a_tool_does_not_have_is_told_when_it_is_used(tmp_path):
    tool = reads(
        tmp_path, TOML.format(name="x") + 'extra = "x[all]"\n[names]\na = "weft:nothing"\nb = "absent_module"\n'
    )
    absent_name, absent_module = tool.entries("names")
    with pytest.raises(InputError, match="registers weft:nothing, which it does not have"):
        absent_name.load()
    with pytest.raises(InputError, match=r"x needs absent_module, which is not installed; pip install 'x\[all\]'"):
        absent_module.load()


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(InputError, match="unknown policy 'punctul'; did you mean punctual"):
        tools.find("policies", "punctul", "policy")


def test_broken_tools_are_a_line_each_and_the_others_work(tmp_path):
    write_tool(tmp_path, "good", TOML.format(name="good") + '[commands.good]\ntarget = "good.run"\nhelp = "Be good."\n',
               run='def command() -> None:\n    """Be good."""\n    print("good it is")\n')  # fmt: skip
    write_tool(tmp_path, "newer", 'api = 9\nname = "newer"\n')
    write_tool(tmp_path, "taken", TOML.format(name="taken") + '[commands.plan]\ntarget = "taken"\n')
    write_tool(tmp_path, "stitch", TOML.format(name="stitch"))
    write_tool(tmp_path, "torn", "api = 1\nname = ")
    listed = weft(tmp_path, "tools", "--json", str(tmp_path / "tools.json"))
    assert listed.returncode == 0 and "Traceback" not in listed.stderr
    lines = [line for line in listed.stderr.splitlines() if line.startswith("weft: tool ")]
    assert len(lines) == 4
    for name, why in {
        "newer": "made for version 9 of the registry, and this weft has 1",
        "taken": "weft has 'plan' among its commands already",
        "stitch": "weft_stitch has that name already",
        "torn": "Invalid value",
    }.items():
        assert any(f"'{name}' is left out" in line and why in line for line in lines), (name, lines)
    names = [tool["name"] for tool in json.loads((tmp_path / "tools.json").read_text("utf-8"))["tools"]]
    assert names == ["weft", "stitch", "tune", "map", "cluster", "papers", "good"]
    assert weft(tmp_path, "good").stdout.strip() == "good it is"
    assert "Be good." in weft(tmp_path, "--help").stdout
    assert "No such command 'good'" in weft(tmp_path, "good", WEFT_TOOLS="own").stderr


def test_a_command_whose_module_fails_is_one_line_and_the_help_works(tmp_path):
    write_tool(tmp_path, "bad", TOML.format(name="bad") + '[commands.bad]\ntarget = "bad.run"\n', run="1 / 0")
    done = weft(tmp_path, "bad")
    assert done.returncode != 0
    assert done.stderr.strip() == "weft: tool 'bad' cannot be imported: division by zero; update or remove it"
    assert weft(tmp_path, "--help").returncode == 0


def test_listing_tools_imports_none_of_them(tmp_path):
    write_tool(tmp_path, "loud", TOML.format(name="loud") + '[policies]\nloud = "loud:Loud"\n', init='print("loud")')
    code = "import sys, weft.base.registry as r; names = [tool.name for tool in r.registry().tools]; "
    code += "print(names[-1], [m for m in sys.modules if m.startswith('weft_') or m == 'loud'])"
    assert python(tmp_path, code) == "loud []"


def test_a_policy_is_one_package_and_serves_simulates_and_is_listed(tmp_path):
    install("policy", tmp_path)
    code = """
import weft
from weft.engine.policies import POLICIES
npu = weft.load_npu("tpuv3-like")
profiles = [weft.estimate(weft.load_model(name), npu) for name in ("mobilenet-v2", "ncf")]
print(list(POLICIES)[-1], weft.simulate(profiles, npu, "least-slack", weft.Saturated(2)).report.policy)
"""
    assert python(tmp_path, code) == "least-slack least-slack"


def test_a_tool_is_one_package_with_a_command_names_and_a_page(tmp_path):
    install("tool", tmp_path)
    page = tmp_path / "page.html"
    done = weft(tmp_path, "heaviest", "resnet18", "-n", "2", "--html", str(page))
    assert done.returncode == 0 and "heaviest layers of resnet18" in done.stdout
    assert "weft-data" not in page.read_text("utf-8") and "heaviest layers of resnet18" in page.read_text("utf-8")
    code = "import weft; r = weft.heaviest(weft.load_model('ncf'), 1); print('<table' in r._repr_html_(), r.plot())"
    assert python(tmp_path, code).startswith("True Figure(")


def test_tool_files_of_examples_and_tools_are_what_the_documentation_describes():
    page = (SOURCES.parent / "docs/tools.md").read_text("utf-8")
    assert not [section for section in tools.SECTIONS if f"`[{section}]`" not in page]
    for path in own_files():
        assert tomllib.loads(path.read_text("utf-8"))["api"] == tools.API


def test_the_server_says_whose_tools_it_loads_and_can_be_told_to_load_none(tmp_path):
    write_tool(tmp_path, "mine", TOML.format(name="mine"))
    (tmp_path / "models").mkdir()
    starting = ("serve", str(tmp_path / "models"), "--http-port", "0", "--grpc-port", "-1")
    assert "tool mine of package mine is loaded" in weft(tmp_path, *starting).stderr
    assert "tool mine" not in weft(tmp_path, *starting, "--no-tools").stderr


TAKEN = {
    "a public module": ('[names]\nmapping = "x"', "map has 'mapping' among its names already"),
    "a package of the core": ('[names]\nserving = "x"', "weft has a package 'serving' already"),
    "a policy of another section": ('[share_policies]\nedf = "x"', "weft has 'edf' among its share_policies already"),
    "an ending of files": (
        '[model_kinds.x]\ntarget = "x"\nsuffix = ".pt2"', "weft has a kind of models whose files end in '.pt2' already"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TAKEN)
def test_what_is_taken_is_refused_wherever_it_is_registered(tmp_path, what):
    section, why = TAKEN[what]
    tool = reads(tmp_path, TOML.format(name="x") + section)
    with pytest.raises(ValueError, match=re.escape(why)):
        tools._check_names(tool, tools.registry().tools)


def test_broken_metadata_and_modules_in_packages_are_a_line_each(tmp_path):
    write_tool(tmp_path, "strange", TOML.format(name="strange"))
    (tmp_path / "strange-1.0.dist-info/entry_points.txt").write_text("[weft.tools]\nstrange = strange y\n")
    write_tool(tmp_path, "weft_bare", "")
    (tmp_path / "weft_bare/tool.toml").unlink()
    write_tool(tmp_path, "deep", TOML.format(name="deep") + 'needs = ["absent.inside"]\n')
    listed = weft(tmp_path, "tools")
    assert listed.returncode == 0 and "Traceback" not in listed.stderr
    assert "'strange' is left out" in listed.stderr and "'weft_bare' is left out: there is no" in listed.stderr
    assert "deep needs absent.inside, which is not installed" in " ".join(listed.stdout.split())


def test_what_others_register_wrongly_breaks_only_itself(tmp_path):
    toml = """
    [commands.odd]
    target = "odd.run"
    help = "Use [/b] it"
    [commands."models odd"]
    target = "odd.run"
    [policies]
    odd = "odd.run:go"
    [devices.odd]
    target = "odd.run:go"
    example = "odd:0"
    [backends]
    odd = "odd.run:go"
    """
    write_tool(tmp_path, "odd", TOML.format(name="odd") + toml, run="def go(*given):\n    raise ValueError('no')\n")
    assert "Use [/b] it" in weft(tmp_path, "--help").stdout
    assert "its command 'odd' cannot be used: " in weft(tmp_path, "odd").stderr
    assert weft(tmp_path, "models", "--help").returncode == 0
    code = """
from weft.base.errors import InputError
from weft.engine.policies import POLICIES
from weft.runtime.backends import make_backend
from weft.runtime.device_kinds import device_kind
for ask in (lambda: POLICIES["odd"], lambda: make_backend("odd"), lambda: device_kind("odd:0")):
    try:
        ask()
    except InputError as error:
        print(error)
"""
    said = python(tmp_path, code).splitlines()
    assert [line.startswith("tool 'odd': ") for line in said] == [True] * 3


def test_the_variable_takes_one_value(tmp_path):
    assert "WEFT_TOOLS = 'none' must be 'own'" in weft(tmp_path, "tools", WEFT_TOOLS="none").stderr


def test_a_name_whose_tool_lacks_a_package_is_not_there(tmp_path):
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "ortools" else find(name, package)
import weft
from weft import *
print(hasattr(weft, "map_models"), "map_models" in dir(weft), "simulate" in dir(weft))
try:
    weft.map_models
except weft.InputError as error:
    print(error)
"""
    assert python(tmp_path, code).splitlines() == [
        "False False True", "map needs ortools, which is not installed; pip install 'weft[map]'",
    ]  # fmt: skip
