"""The report: what it shows is what was logged; broken folders are errors or visible notes."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from xrpo_fast.report import ReportError, write_report
from xrpo_fast.report.__main__ import main
from xrpo_fast.report.mechanisms import _binned
from xrpo_fast.report.runs import load_runs
from xrpo_fast.report.tables import facts_html, summary_columns


class Strict(HTMLParser):
    """Fails on tags that do not nest; gathers text and the attributes that could load something."""

    VOID = frozenset(["meta", "br", "link", "img"])

    def __init__(self):
        super().__init__()
        self.open, self.text, self.links, self.tags, self.ids = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        named = dict(attrs)
        self.links += [named[a] for a in ("src", "href", "xlink:href") if named.get(a)]
        self.ids += [named["id"]] if "id" in named else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parse(path):
    page = Strict()
    page.feed(path.read_text())
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def compared(tmp_path_factory, write_run):
    """Page of two runs, and the rows of each run's metrics.jsonl."""
    folder = tmp_path_factory.mktemp("runs")
    xrpo, xrpo_rows = write_run(folder / "a")
    grpo, grpo_rows = write_run(folder / "b", name="grpo", algorithm="grpo", seed=1)
    page = write_report([xrpo, grpo], folder / "report.html")
    return page, [xrpo_rows, grpo_rows]


def test_page_is_whole_and_self_contained(compared):
    path, _ = compared
    page = parse(path)
    assert path.stat().st_size < 5e6
    assert "script" not in page.tags
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert not re.findall(r"url\((?!#)", path.read_text())
    assert len(set(page.ids)) == len(page.ids)
    headings = ["Learning", "Rollouts", "Seeding", "Novelty", "Lengths", "Time", "Health"]
    assert [text for text in page.text if text in headings] == headings
    pictures = {figure.stem for figure in path.with_name("report_figures").iterdir()}
    figures = re.findall(r'<figure[^>]* id="(\w+)"', path.read_text())
    assert pictures == set(figures)
    assert {"accuracy_held_out", "rollout_map_0", "rollouts_by_pass_rate", "time_0"} <= pictures
    assert {"bonus_against_num_tokens", "bonus_against_score", "similarity"} <= pictures
    # GRPO gives each prompt the same: a map of it would be one colour.
    assert "rollout_map_1" not in pictures


def test_numbers_are_those_of_the_metrics(compared):
    path, all_rows = compared
    text = " ".join(parse(path).text)
    for rows in all_rows:
        for row in (rows[0], rows[-1]):
            for end in ("", "/low", "/high"):
                assert f"{row['eval/held_out/pass@1' + end]:.3f}" in text
        assert f"{rows[-1]['eval/held_out/cons@32']:.3f}" in text
        steps = rows[1:]
        assert f"{sum(row['tokens/generated'] for row in steps) / 1e3:.0f}" in text
        seconds = sum(row["timing_s/step"] for row in steps)
        assert f"{seconds / len(steps):.2f}" in text
        assert f"generate {sum(r['timing_s/generate'] for r in steps) / seconds:.1%}" in text


def test_curves_pass_through_the_metrics(compared):
    """The drawn accuracy, read back from the SVG's coordinates, is the logged one."""
    path, all_rows = compared
    svg = re.search(r'id="accuracy_held_out">.*?</figure>', path.read_text(), re.DOTALL)[0]
    for index, rows in enumerate(all_rows):
        logged = [row["eval/held_out/pass@1"] for row in rows if "eval/held_out/pass@1" in row]
        line = re.search(
            rf'<path d="([^"]*)"[^>]*style="fill: none; stroke: var\(--run-{index}\)', svg
        )[1]
        heights = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", line)]
        scale = (heights[0] - heights[-1]) / (logged[-1] - logged[0])
        drawn = [logged[0] + (heights[0] - height) / scale for height in heights]
        assert drawn == pytest.approx(logged, abs=1e-4)


def test_columns_without_any_value_are_left_out(tmp_path, write_run):
    (run,) = load_runs([write_run(tmp_path / "a", algorithm="grpo")[0]])
    headings = [heading for heading, _ in summary_columns([run])]
    assert "held_out pass@1, before" in headings
    assert "hopeless prompts flipped" not in headings


def test_model_output_is_text_not_markup(compared):
    path, _ = compared
    page = parse(path)
    assert any("<b>& co</b>" in text for text in page.text)
    assert "b" not in page.tags


def test_half_written_run_is_shown_with_notes(tmp_path, write_run):
    path, _ = write_run(tmp_path / "a", num_steps=12, asked_steps=100)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "reward/me')
    (path / "rollouts" / "step_3.parquet").write_bytes(b"PAR1 torn")
    (path / "rollouts" / "step_4.parquet").unlink()
    text = facts_html(load_runs([path]))
    assert "Ends at step 12 of 100: stopped early or still running." in text
    assert "The last line of metrics.jsonl is cut off and left out." in text
    assert "1 rollout files cannot be read and are left out: step_3.parquet (ArrowInvalid)." in text
    assert "Rollouts of 1 of 12 steps were not recorded." in text


def test_run_without_rollouts_or_evaluation(tmp_path, write_run):
    path, rows = write_run(tmp_path / "a", num_steps=1, algorithm="grpo", has_rollouts=False)
    kept = {key: value for key, value in rows[1].items() if not key.startswith("eval/")}
    (path / "metrics.jsonl").write_text(json.dumps(kept) + "\n")
    text = " ".join(parse(write_report([path], tmp_path / "out.html")).text)
    for note in (
        "No evaluation was logged.",
        "Rollouts of 1 of 1 steps were not recorded.",
        "No run seeded prompts.",
        "No run gave a novelty bonus.",
        "No texts were recorded.",
    ):
        assert note in text


def break_config(path):
    (path / "config.toml").write_text("[run\n")


def drop_metrics(path):
    (path / "metrics.jsonl").unlink()


def tear_metrics(path):
    whole = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text('{"step": 1, \n' + whole)


def repeat_step(path):
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join([*lines, lines[-1]]))


def only_evaluate(path):
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text(lines[0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (break_config, "expected a run folder with a readable config.toml"),
        (drop_metrics, "expected a readable metrics.jsonl"),
        (tear_metrics, "expected a readable metrics.jsonl"),
        (repeat_step, "expected ascending steps"),
        (only_evaluate, "expected at least one step"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unreadable_folder(tmp_path, write_run, spoil, message):
    path, _ = write_run(tmp_path / "a", num_steps=2, has_rollouts=False)
    spoil(path)
    with pytest.raises(ReportError, match=f"run_dirs: {message}"):
        write_report([path], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_runs_of_different_tasks(tmp_path, write_run):
    one, _ = write_run(tmp_path / "a", num_steps=1)
    other, _ = write_run(tmp_path / "b", num_steps=1, data="maths.jsonl")
    with pytest.raises(ReportError, match=r"expected runs of one task, got .*maths\.jsonl"):
        write_report([one, other], tmp_path / "out.html")
    with pytest.raises(ReportError, match="expected at least one run folder, got none"):
        write_report([], tmp_path / "out.html")


HELD_OUT = '[data]\neval = {held_out = "one.jsonl"}\neval_split = "test"'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("one.jsonl", "other.jsonl", r"held_out = 'one\.jsonl'.*held_out = 'other\.jsonl'"),
        ('eval_split = "test"', 'eval_split = "dev"', "split 'test'.*split 'dev'"),
        ("[data]", "[eval]\nmax_prompts = 7\n[data]", "first 7 prompts of each set"),
    ],
    ids=["file", "split", "number of prompts"],
)
def test_sets_of_one_name_and_other_prompts_are_not_overlaid(
    tmp_path, write_run, old, new, message
):
    paths = [write_run(tmp_path / name, num_steps=1)[0] for name in "abc"]
    for path in paths:
        config = path / "config.toml"
        config.write_text(config.read_text().replace("[data]", HELD_OUT))
    assert len(load_runs(paths)) == 3
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(ReportError, match=f"expected runs of one task, got .*{message}"):
        load_runs(paths)


def test_arms_of_a_study_are_overlaid_and_its_seeds_are_not(tmp_path, write_run):
    """Each seed of a study has a world of its own: curves of two worlds share no axis."""
    ours, theirs, other = (
        write_run(tmp_path / name, name=name, data=f"builtin:symbols?seed={seed}")[0]
        for name, seed in (("xrpo-seed0", 0), ("grpo-seed0", 0), ("xrpo-seed1", 1))
    )
    assert [run.name for run in load_runs([ours, theirs])] == ["xrpo-seed0", "grpo-seed0"]
    with pytest.raises(ReportError, match=r"seed=0', .*seed=1', .*one report per task"):
        load_runs([ours, theirs, other])


def test_groups_of_equal_number_are_never_empty():
    tens = [0] * 4 + [1] * 2 + [3, 4, 4, 4, 6, 7, 8, 8, 8, 10, 10, 11, 15, 16, 17, 19, 23, 28]
    x = np.array([*tens, 31, 33, 61]) / 10
    means, _ = _binned(x, x)
    assert np.isfinite(means).all()
    assert (np.diff(means) > 0).all()


def test_equal_names_are_told_apart(tmp_path, write_run):
    paths = [write_run(tmp_path / name, num_steps=1)[0] for name in "ab"]
    assert [run.name for run in load_runs(paths)] == [str(path) for path in paths]


def test_command_line(tmp_path, write_run, capsys):
    path, _ = write_run(tmp_path / "a", num_steps=1, algorithm="grpo", has_rollouts=False)
    assert main([str(path), "-o", str(tmp_path / "out.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.html'}\n"
    assert main([str(tmp_path / "none")]) == 2
    assert "error: run_dirs: expected a run folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(path), "-o", str(tmp_path / "file" / "out.html")]) == 2
    assert f"--out: expected to write {tmp_path / 'file' / 'out.html'}" in capsys.readouterr().err
