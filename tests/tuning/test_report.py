"""The picture and the file of a search: what they show is what happened."""

from __future__ import annotations

import json
import math
from base64 import b64decode
from itertools import pairwise
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.tuning import small_network, softly, tuned
from weft.base.errors import EvaluationError, InputError
from weft_tune import find_formats
from weft_tune.baselines import stripes
from weft_tune.evaluation import CallableEvaluator, Subset
from weft_tune.numbers.configuration import Configuration, describe_change
from weft_tune.numbers.format import EXP, FIXED, FLOAT16, spell
from weft_tune.pages.page import write_tuning_page
from weft_tune.pages.picture import draw_search, phase_spans
from weft_tune.result import OtherMethod, Trial, TuningResult, kept_places
from weft_tune.tuning_run import summarise


def test_every_trial_is_drawn_once_and_the_chosen_ones_are_marked(tmp_path: Path) -> None:
    tuning = tuned()
    figure = draw_search(tuning, tmp_path / "search.png", tmp_path / "search.svg")
    upper = figure.axes[0]
    points = {line.get_label(): line.get_xdata() for line in upper.lines if line.get_linestyle() == "None"}
    drawn = sorted(int(x) for its in points.values() for x in its)
    assert drawn == sorted(trial.iteration for trial in tuning.trials if trial.step != "base")
    assert set(points["chosen"]) == {tuning.trials[place].iteration for place in kept_places(tuning)} - {0}
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "search.svg").read_text()
    assert "2  fine-tuning, small set" in [text.get_text() for text in upper.texts]


def test_thresholds_are_those_of_the_set_that_a_phase_uses() -> None:
    tuning = tuned(1)
    upper = draw_search(tuning).axes[0]
    lines = [line for line in upper.lines if line.get_color() == "#b42318"]
    spans = phase_spans(tuning.trials)
    assert [line.get_ydata()[0] for line in lines] == [tuning.thresholds[span.subset] for span in spans]
    assert [span.subset for span in spans if span.phase < 3] == ["small", "small"]


def test_phases_follow_each_other_without_gaps() -> None:
    tuning = tuned()
    spans = phase_spans(tuning.trials)
    assert spans[0].first == 1 and spans[-1].last == tuning.iterations
    assert all(before.last + 1 == after.first for before, after in pairwise(spans))


def test_what_lies_far_below_the_threshold_is_drawn_on_the_edge() -> None:
    def cliff(configuration: Configuration, subset: Subset) -> float:
        return 0.98 if all(configuration[name].bits >= 4 for name in configuration) else 0.1

    tuning = find_formats(small_network(), CallableEvaluator(cliff), margin=0.01)
    upper = draw_search(tuning).axes[0]
    low, _ = upper.get_ylim()
    assert low > 0.9
    assert all(min(line.get_ydata()) >= low for line in upper.lines)
    assert any("further down, to 0.1" in text.get_text() for text in upper.texts)


def test_long_searches_name_no_steps_and_short_ones_do() -> None:
    short, long = tuned(1), tuned(2)
    assert any("\N{RIGHTWARDS ARROW}" in text.get_text() for text in draw_search(short).axes[1].texts)
    assert list(draw_search(long).axes[1].texts) == []


def test_a_search_in_one_pass_and_one_that_keeps_the_base_can_be_drawn() -> None:
    draw_search(tuned(1, two_passes=False))
    stuck = find_formats(small_network(), CallableEvaluator(lambda c, s: 0.5 if c else 1.0), margin=0.0)
    assert stuck.configuration == Configuration({})
    draw_search(stuck)


def test_a_negative_objective_is_drawn_as_it_is() -> None:
    tuning = tuned(1, objective="weights - 1e9")
    assert draw_search(tuning).axes[1].get_ylabel() == "objective"


def test_a_figure_of_another_kind_or_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a figure ends in"):
        draw_search(tuned(1), tmp_path / "search.jpeg")
    with pytest.raises(InputError, match="cannot write"):
        draw_search(tuned(1), tmp_path / "no" / "search.png")


def formats(**given: object) -> Configuration:
    return Configuration({name.replace("_", "."): form for name, form in given.items()})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (formats(a_weight=FIXED(3, 0)), formats(a_weight=FIXED(2, 0)), "a.weight I3 -> I2"),
        (formats(a_weight=FIXED(3, 0)), formats(a_weight=FIXED(3, 1)), "a.weight I3(0) -> (1)"),
        (formats(a_weight=FIXED(3, 0)), formats(a_weight=EXP(3, 1)), "a.weight I3 -> E3"),
        (formats(), formats(a_weight=FLOAT16, a_input=FLOAT16), "all F32 -> F16"),
        (formats(), formats(a_input=FIXED(4), b_input=FIXED(4)), "2 inputs F32 -> I4"),
        (formats(a_input=FIXED(8)), formats(a_input=FIXED(4), b_input=FIXED(4)), "2 inputs to I4"),
        (formats(), formats(), ""),
    ],
)
def test_a_step_is_told_in_few_words(before: Configuration, after: Configuration, text: str) -> None:
    assert describe_change(before, after).replace("\N{RIGHTWARDS ARROW}", "->") == text


def test_the_file_is_strict_json_and_says_what_failed() -> None:
    def picky(configuration: Configuration, subset: Subset) -> float:
        if any(configuration[name].kind == "EXP" for name in configuration):
            raise EvaluationError("no shifter")
        return softly(configuration, subset)

    tuning = find_formats(small_network(), CallableEvaluator(picky), margin=0.01, on_failure="skip")
    result = TuningResult(tuning=tuning, objective="weights + activations", seconds=1.0)
    written = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    failed = [trial for trial in written["trials"] if "failure" in trial]
    assert failed and all(trial["score"] is None and trial["failure"] == "no shifter" for trial in failed)
    assert len(result.failures) == len(failed)
    assert len(written["trials"]) == len(tuning.trials)


def test_the_way_in_the_file_gets_smaller_and_ends_at_the_result() -> None:
    tuning = tuned()
    written = TuningResult(tuning=tuning, objective="weights + activations", seconds=1.0).as_dict()
    way = [written["trials"][place] for place in written["path"]]
    assert way[-1]["formats"] == tuning.configuration.text
    small = [trial["objective"] for trial in way if trial["subset"] == "small"]
    assert small == sorted(small, reverse=True)


def test_other_methods_are_counted_in_the_same_bits() -> None:
    found = stripes(small_network(), CallableEvaluator(softly), margin=0.01)
    other = summarise(small_network(), found)
    assert other.weight_bits == 16 * small_network().weights
    assert other.activation_bits == sum(784 * found.configuration[f"conv{n}.input"].bits for n in (1, 2))
    assert other.feasible == (other.score >= found.threshold)


def page(path: Path) -> dict[str, object]:
    """What a page shows, as its script reads it."""
    text = path.read_text("utf-8").split('id="data">')[1].split("</script>")[0]
    return dict(json.loads(text))


def test_the_page_shows_the_layers_the_way_and_the_picture_itself(tmp_path: Path) -> None:
    tuning = tuned(1, two_passes=False)
    others = (OtherMethod("Other </script><b>", "8 bits", 4000, 6272, 0.5, False, 3),)
    result = TuningResult(tuning=tuning, objective="weights + activations", seconds=1.0, others=others)
    write_tuning_page(tmp_path / "report.html", result, ["it is small"])
    draw_search(tuning, tmp_path / "search.svg")
    shown = page(tmp_path / "report.html")
    assert b64decode(str(shown["picture"])) == (tmp_path / "search.svg").read_bytes()
    assert shown["told"] == ["it is small"]
    (layer,) = shown["layers"]
    form = tuning.configuration["conv1.weight"]
    assert layer[:6] == ["conv1", "500", spell(form), form.bits, "2.00 kB", f"{500 * form.bits / 8e3:.2f} kB"]
    assert len(shown["path"]) == len(tuning.path)
    assert shown["path"][-1][3:] == [f"{tuning.score:.4f}", f"{tuning.objective / tuning.base_objective:.2%}"]
    assert shown["methods"][-1] == ["Other </script><b>", "0.50 kB", "0.78 kB", "0.5000 too low", "3"]


def test_trials_are_what_the_picture_expects() -> None:
    """It tells bounds from scores by ``exact``, and failures by a score that is not finite."""
    tuning = tuned()
    assert all(isinstance(trial, Trial) and trial.exact and math.isfinite(trial.score) for trial in tuning.trials)


def test_the_formats_page_names_every_key_of_the_file() -> None:
    page = (ROOT / "docs/formats.md").read_text()
    written = TuningResult(tuning=tuned(1), objective="weights + activations", seconds=1.0).as_dict()
    nested = [written, written["score"], written["objective"], written["layers"][0]["weight"], written["trials"][0]]
    keys = {key for each in nested for key in each} | set(OtherMethod._fields)
    assert sorted(key for key in keys if f"`{key}`" not in page) == []
