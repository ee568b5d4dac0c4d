import csv
import json

import pytest

from xrpo_fast.config import ConfigError
from xrpo_fast.config_file import dump_config
from xrpo_fast.study.__main__ import main
from xrpo_fast.study.figures import (
    BETTER_COLOUR,
    MUTED,
    OTHER_COLOUR,
    _labels,
    _sign_colour,
    _spread,
    learning_curves,
)
from xrpo_fast.study.measure import Cost
from xrpo_fast.study.output import write_results
from xrpo_fast.study.resampling import estimate, ratio
from xrpo_fast.study.results import FEW_SEEDS, collect
from xrpo_fast.study.state import note_exit, note_start, state_of, states_of
from xrpo_fast.study.study_file import load_study
from xrpo_fast.study.tables import to_markdown
from xrpo_fast.study.texts import ratio_text

ACCURACIES = {
    "xrpo-seed0": [0.1, 0.5, 0.9],
    "xrpo-seed1": [0.2, 0.6, 1.0],
    "grpo-seed0": [0.1, 0.2, 0.7],
    "grpo-seed1": [0.2, 0.3, 0.8],
}


@pytest.fixture
def study(write_study, write_run):
    """Two arms, two seeds, all finished, XRPO .2 ahead in both."""
    study = load_study(write_study())
    for run in study.runs:
        write_run(run, ACCURACIES[run.name])
    return study


def test_arms_are_compared_paired(study):
    results = collect(study, states_of(study))
    xrpo, grpo = results.arms
    assert xrpo.final["pass@1"].mean == pytest.approx(0.95)
    assert xrpo.final["pass@1"].by_seed == {0: 0.9, 1: 1.0}
    assert not xrpo.differences
    gap = grpo.differences["pass@1"]
    assert (gap.mean, gap.low, gap.high) == pytest.approx((-0.2, -0.2, -0.2))
    # .5: XRPO after 2 and 1.5 steps, GRPO after 3.2 and 2.8.
    assert grpo.ratios["steps"]["50%"].least == pytest.approx(3.5 / 6.0)
    found = grpo.ratios["steps"]["90%"]
    assert (found.least, found.most) == (0.0, pytest.approx((4 + 3.5) / 8))
    assert results.missing == []


def test_tables_show_bounds_and_differences(study):
    text = to_markdown(collect(study, states_of(study)), "two arms")
    assert "| xrpo | 2 | .950 [.900, 1.000] |" in text
    assert "| grpo | -.200 [-.200, -.200] |" in text
    assert "| xrpo : grpo | 0.58 [" in text
    assert "| xrpo : grpo | < 0.94 [< 1.00] |" in text
    assert (
        "| grpo | 2 | .750 [.700, .800] | .800 [.750, .850] | .770 [.720, .820] | 3 [3, 3] | > 4 |"
        in text
    )
    assert "| grpo | .375 [.350, .400] |" in text


def test_tables_show_what_a_target_cost_in_every_unit(study):
    text = to_markdown(collect(study, states_of(study)), "two arms")
    # .5: XRPO after 2 and 1.5 steps of 72 rollouts and half a second; step s makes 100 s tokens.
    assert "| to 50% | steps | rollouts | generated tokens | training seconds |" in text
    assert "| xrpo | 2 [2, 2] | 126 [108, 144] | 250 [200, 300] | 1 [1, 1] |" in text
    assert "| grpo | > 4 | > 288 | > 1,000 | > 2 |" in text


def test_mechanisms_are_compared_paired(study):
    for run in study.runs:
        path = run.path / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["grad_norm"] = run.seed + 11.5 * (run.arm == "grpo")
            row["groups/zero_variance_frac"] = 0.25 * (1 + (run.arm == "grpo"))
            if row["step"] % 2 == 0:
                row["eval/heldout/mean_length"] = 20.0 + 2 * run.seed - 3 * (run.arm == "grpo")
            if run.arm == "grpo":
                row.pop("icl/hopeless_prompts", None)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = collect(study, states_of(study))
    xrpo, grpo = results.arms
    assert not xrpo.mechanism_differences
    gap = grpo.mechanism_differences["grad_norm"]
    # Paired: the seeds' own difference, 1, is not in the interval.
    assert (gap.mean, gap.low, gap.high) == (11.5, 11.5, 11.5)
    assert grpo.mechanism_differences.keys() == {"dead_groups", "answer_tokens", "grad_norm"}
    line = "| grpo | +0.250 [+0.250, +0.250] | - | -3.0 [-3.0, -3.0] | +11.500 [+11.500, +11.500] |"
    assert line in to_markdown(results, "two arms")


def test_outputs_are_written_and_hold_every_seed(study):
    results = collect(study, states_of(study))
    paths = write_results(study, results, "two arms", "a command")
    assert {path.name for path in paths} == {
        "results.json",
        "results.csv",
        "results.md",
        "learning_curves.png",
        "steps_to_target.png",
        "final.png",
        "mechanisms.png",
    }
    assert all(path.stat().st_size for path in paths)
    saved = json.loads(paths[0].read_text())
    assert saved["command"] == "a command"
    assert saved["versions"]["torch"]
    assert saved["arms"][1]["runs"][1]["accuracy"] == [0.2, 0.3, 0.8]
    with paths[1].open() as file:
        rows = {(r["arm"], r["seed"], r["metric"]): r for r in csv.DictReader(file)}
    assert rows["grpo", "1", "final/pass@1"]["value"] == "0.8"
    assert rows["grpo", "1", "steps_to/90%"]["is_lower_bound"] == "True"


def test_unlike_engines_have_no_ratio_of_seconds(write_study, write_run):
    study = load_study(write_study("", "[arms.xrpo]\n[arms.grpo]\nrollout.engine = 'vllm'"))
    for run in study.runs:
        write_run(run, ACCURACIES[run.name])
    results = collect(study, states_of(study))
    assert "seconds" not in results.arms[1].ratios
    assert results.arms[1].ratios["steps"]
    assert "| grpo | > 4 | > 288 | > 1,000 | - |" in to_markdown(results, "two engines")
    assert any("seconds are not compared" in note for note in results.notes)


def test_more_rollouts_than_the_budget_are_noted(study):
    path = study.runs[0].path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"planner/rollouts": 72', '"planner/rollouts": 80', 1))
    notes = collect(study, states_of(study)).notes
    assert "xrpo-seed0: spent more than 72 rollouts in 1 steps, first in 1." in notes


def test_an_arm_that_leaves_budget_unspent_is_noted(study):
    for run in study.runs[1::2]:
        path = run.path / "metrics.jsonl"
        path.write_text(path.read_text().replace('rollouts": 72', 'rollouts": 36'))
    results = collect(study, states_of(study))
    assert [note.partition(";")[0] for note in results.notes if "spent" in note] == [
        "grpo: spent 36 of 72 rollouts a step on average"
    ]
    # Half the rollouts for its steps: the ratio of rollouts is twice that of steps.
    ratios = results.arms[1].ratios
    assert ratios["rollouts"]["50%"].least == pytest.approx(2 * ratios["steps"]["50%"].least)


def test_tables_leave_out_the_other_k(write_study, write_run):
    study = load_study(write_study())
    for run in study.runs:
        write_run(run, ACCURACIES[run.name])
        path = run.path / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        more = {"pass@4": 0.9, "pass@16": 0.9, "cons@16": 0.9, "cons@4": 0.9}
        rows[-1] |= {f"eval/heldout/{name}": value for name, value in more.items()}
        rows[-1]["eval/other/pass@1"] = 0.3
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = collect(study, states_of(study))
    assert results.final_names == ["pass@1", "pass@2", "cons@16", "tier/vhard", "other pass@1"]
    assert results.arms[0].final["pass@16"].mean == 0.9


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ({0: Cost(3, True)}, {0: Cost(6, True)}, "0.50"),
        (
            {0: Cost(3, True), 1: Cost(3, True)},
            {0: Cost(6, True), 1: Cost(3, True)},
            "0.67 [0.50, 1.00]",
        ),
        ({0: Cost(3, True)}, {0: Cost(6, False)}, "< 0.50"),
        ({0: Cost(6, False)}, {0: Cost(3, True)}, "> 2.00"),
        (
            {0: Cost(3, True), 1: Cost(5, True)},
            {0: Cost(6, True), 1: Cost(8, False)},
            "< 0.57 [< 0.62]",
        ),
        ({0: Cost(6, False)}, {0: Cost(6, False)}, "neither in all seeds"),
    ],
)
def test_a_ratio_is_shown_with_its_bounds(ours, theirs, text):
    found = ratio(ours, theirs)
    assert found is not None
    assert ratio_text(found) == text


def test_arms_of_fewer_seeds_are_shown_beside_the_same_seeds(write_study, write_run):
    arms = "".join(f"[arms.a{i}]\nseeds = 1\n" for i in range(6)) + "[arms.xrpo]\n"
    study = load_study(write_study('reference = "xrpo"', arms))
    for run in study.runs:
        write_run(run, [0.1, 0.5, 0.9] if run.seed == 0 else [0.1, 0.2, 0.3])
    results = collect(study, states_of(study))
    assert _labels(results)["a0"] == "a0, 1 seed"
    assert _labels(results)["xrpo"] == "xrpo"
    lines = learning_curves(results).axes[0].get_lines()
    # Not the mean of the reference's two seeds, .6 at the end.
    assert [line.get_ydata()[-1] for line in lines] == [0.9, 0.9]


def test_labels_that_lie_together_push_each_other_apart():
    spread = _spread([0.94, 0.70, 0.72, 0.70])
    assert spread[0] == pytest.approx(0.94)
    low, middle, high = sorted(spread[1:])
    assert (middle - low, high - middle) == pytest.approx((0.05, 0.05), abs=1e-3)
    assert spread[2] == high
    assert low + middle + high == pytest.approx(0.70 + 0.72 + 0.70)


def test_an_interval_of_few_seeds_has_no_colour():
    few = {seed: -0.2 - 0.01 * seed for seed in range(FEW_SEEDS - 1)}
    assert _sign_colour(estimate(few)) == MUTED
    assert _sign_colour(estimate(few | {9: -0.2})) == OTHER_COLOUR
    assert _sign_colour(estimate(few | {9: 0.9})) == MUTED
    assert _sign_colour(estimate({s: -v for s, v in few.items()} | {9: 0.2})) == BETTER_COLOUR


def test_unfinished_runs_are_listed_and_not_counted(study):
    path = study.runs[0].path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:20])
    results = collect(study, states_of(study))
    assert results.missing == ["xrpo-seed0: broken off before its first checkpoint"]
    xrpo, grpo = results.arms
    assert [run.seed for run in xrpo.runs] == [1]
    assert list(grpo.differences["pass@1"].by_seed) == [1]


def test_complete_metrics_of_a_run_that_did_not_end_well_do_not_count(study):
    failed, killed, well = study.runs[:3]
    note_start(failed)
    note_exit(failed, 1)
    note_start(killed)
    note_start(well)
    note_exit(well, 0)
    kinds = {name: state.kind for name, state in states_of(study).items()}
    assert [kinds[run.name] for run in study.runs] == ["early", "early", "finished", "finished"]
    text = to_markdown(collect(study, states_of(study)), "two arms")
    assert f"- {failed.name}: failed with exit code 1; its log in logs/ says why" in text
    assert f"- {killed.name}: broken off before its first checkpoint" in text
    assert "| xrpo | 1 |" in text


@pytest.mark.parametrize(
    "text",
    [
        'not json\n{"step": 1}\n',
        '{"step": 0}\n{"step": 2}\n',
        "[1, 2]\n",
    ],
    ids=["garbage", "a step is missing", "no objects"],
)
def test_unreadable_metrics_are_listed_and_not_run_again(study, text):
    run = study.runs[0]
    (run.path / "metrics.jsonl").write_text(text)
    state = state_of(run, "heldout")
    assert state.kind == "unreadable"
    assert f"{run.name}: cannot be read (" in collect(study, states_of(study)).missing[0]


def test_a_finished_run_without_numbers_is_listed(study):
    path = study.runs[0].path / "metrics.jsonl"
    path.write_text(path.read_text().replace("tokens/generated", "tokens/made"))
    missing = collect(study, states_of(study)).missing
    assert missing == [
        "xrpo-seed0: cannot be read (tokens/generated: expected a number at step 1, got None)"
    ]


def test_a_folder_of_another_config_is_an_error_that_names_the_key(study):
    run = study.runs[0]
    changed = dump_config(run.config).replace("learning_rate = 0.0005", "learning_rate = 0.0001")
    (run.path / "config.toml").write_text(changed)
    with pytest.raises(ConfigError, match=r"arms.xrpo: expected optim.learning_rate = 0.0005 in"):
        states_of(study)


def test_a_half_written_config_is_an_error_that_names_the_file(study):
    path = study.runs[0].path / "config.toml"
    path.write_text(path.read_text()[:40])
    with pytest.raises(ConfigError, match=r"config: expected a TOML file, got .*xrpo-seed0"):
        states_of(study)


def test_a_folder_without_a_config_is_an_error(study):
    (study.runs[0].path / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"output_dir: expected the run folder .*xrpo-seed0"):
        states_of(study)


def test_report_only_writes_what_is_finished(write_study, write_run, capsys):
    path = write_study()
    for run in load_study(path).runs[:3]:
        write_run(run, ACCURACIES[run.name])
    assert main([str(path), "--report-only"]) == 0
    assert "missing: grpo-seed1: not run yet" in capsys.readouterr().out


def test_report_only_of_nothing_says_so(write_study, tmp_path):
    assert main([str(write_study()), "--report-only"]) == 0
    assert "No run is finished." in (tmp_path / "out" / "results.md").read_text()
    assert not (tmp_path / "out" / "learning_curves.png").exists()


def test_a_bad_study_file_exits_with_2(write_study, capsys):
    assert main([str(write_study("sed = 1"))]) == 2
    assert "error: sed: unknown key" in capsys.readouterr().err
