"""Replay of recorded logs and of the synthetic mixture."""

import csv
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xrpo_fast.replay.__main__ import main, parse_rules, synthetic_rows
from xrpo_fast.replay.simulate import METRICS, Rule, bootstrap, neyman_counts, simulate
from xrpo_fast.replay.worlds import (
    SyntheticStep,
    WorldError,
    read_log,
    synthetic_step,
    uniforms,
)


def write_log(path, rewards, *, step=0, seeded=None, tokens=None, solved=None):
    """One step; rewards: prompt id -> list."""
    rows = [(prompt, reward) for prompt, values in rewards.items() for reward in values]
    columns = {
        "step": [step] * len(rows),
        "prompt_id": [prompt for prompt, _ in rows],
        "reward": [reward for _, reward in rows],
        "solved": solved or [reward == 1.0 for _, reward in rows],
        "seeded": seeded or [False] * len(rows),
        "num_tokens": tokens or [10] * len(rows),
        "response": ["text"] * len(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


RATES = np.array([0.0, 0.1, 0.25, 0.5, 0.5, 0.75, 0.9, 1.0])


def write_run(folder, num_steps=3, num_prompts=16, num_rollouts=20):
    rng = np.random.default_rng(0)
    for step in range(num_steps):
        p = np.resize(RATES, num_prompts)
        rewards = {
            f"p{q}": (rng.random(num_rollouts) < p[q]).astype(float).tolist()
            for q in range(num_prompts)
        }
        write_log(folder / "rollouts" / f"step_{step}.parquet", rewards, step=step)
    return folder


# Published table: 256 prompts, mean 8 rollouts, 120 draws. Tolerances are four standard errors of
# the difference of two such simulations (the draws of one vary by 7.6, 11.4, 1.3e-3 and 0.07).
TABLE = {
    "uniform": (91.2, 142.6, 8.98, 0.375),
    "XRPO lambda 1": (90.4, 142.6, 8.60, 0.371),
    "XRPO lambda 0.1": (88.7, 156.4, 8.10, 0.358),
    "XRPO lambda 0.01": (80.7, 195.3, 7.40, 0.305),
    "XRPO 0.1, seeding odds x3": (100.5, 156.6, 7.85, 0.549),
    "Beta yield with history": (96.4, 159.2, 8.38, 0.528),
    "oracle Neyman": (99.8, 258.6, 5.14, 0.437),
}
FOUR_ERRORS = np.array([7.6, 11.4, 1.3, 0.07]) * 4 * np.sqrt(2 / 120)


def test_synthetic_mixture_reproduces_the_table():
    rows = dict(synthetic_rows(120, seed=0))
    assert rows.keys() == TABLE.keys()
    for label, expected in TABLE.items():
        ours = np.array([rows[label][name][0] for name in list(METRICS)[:4]])
        assert (np.abs(ours - expected) < FOUR_ERRORS).all(), (label, ours, expected)
        assert rows[label]["rollouts"] == (2048.0, 2048.0, 2048.0)
    # Of the rules without an oracle only history beats uniform in every column.
    means = {label: [rows[label][name][0] for name in METRICS] for label in TABLE}
    better = [np.array(means[label][:4]) > means["uniform"][:4] for label in TABLE]
    wins = {
        label: more and signal and not mse and hard
        for label, (more, signal, mse, hard) in zip(TABLE, better, strict=True)
    }
    assert wins["Beta yield with history"]
    assert not wins["XRPO lambda 0.1"]
    assert not wins["XRPO lambda 0.01"]


def test_luck_is_uniform_and_its_own_for_each_rollout():
    prompts, samples = np.divmod(np.arange(40_000), 200)
    luck = uniforms(3, prompts, samples)
    assert len(set(luck)) == 40_000
    histogram = np.bincount((luck * 20).astype(int), minlength=20)
    assert np.abs(histogram - 2000).max() < 5 * np.sqrt(2000)
    grid = luck.reshape(200, 200)
    assert abs(np.corrcoef(grid[:, 0], grid[:, 1])[0, 1]) < 0.3
    assert not np.array_equal(luck, uniforms(4, prompts, samples))


def test_rules_are_paired():
    step = synthetic_step(5)
    same = [simulate(Rule("uniform"), [step], seed=1) for _ in range(2)]
    np.testing.assert_array_equal(same[0], same[1])
    base_only = SyntheticStep(step.prompt_ids, step.pass_rate, 256 * 4, step.is_hard)
    by_rule = [
        simulate(rule, [base_only], seed=1, base_rollouts=4)
        for rule in (Rule("uniform"), Rule("paper"), Rule("greedy"))
    ]
    np.testing.assert_array_equal(by_rule[0], by_rule[1])
    np.testing.assert_array_equal(by_rule[0], by_rule[2])


def test_metrics_by_hand(tmp_path):
    write_log(
        tmp_path / "log.parquet",
        {"never": [0.0] * 4, "always": [1.0] * 4, "mixed": [0.0, 0.0, 0.0, 1.0]},
        tokens=[7] * 4 + [5] * 4 + [11] * 4,
    )
    (step,) = read_log(tmp_path / "log.parquet")
    assert step.prompt_ids == ["always", "mixed", "never"]
    np.testing.assert_array_equal(step.pass_rate, [1.0, 0.25, 0.0])
    rows = np.array([simulate(Rule("uniform"), [step], seed=s)[0] for s in range(1000)])
    signal, np1p, mse, hard, rollouts, tokens = rows.mean(axis=0)
    p_signal = 1 - 0.75**4 - 0.25**4
    assert signal == pytest.approx(p_signal, abs=0.05)
    assert np1p == 4 * 0.25 * 0.75
    assert mse == pytest.approx(1e3 * 0.25 * 0.75 / 4 / 3, rel=0.1)
    assert hard == pytest.approx(1 - 0.75**4, abs=0.05)
    assert rollouts == 12
    assert tokens == 4 * (7 + 5 + 11)


def test_hopeless_prompts_draw_from_their_seeded_rollouts(tmp_path):
    write_log(
        tmp_path / "log.parquet",
        {"a": [0.0] * 4 + [1.0] * 4, "b": [0.0, 1.0] * 4},
        seeded=[False] * 4 + [True] * 4 + [False] * 8,
    )
    (step,) = read_log(tmp_path / "log.parquet")
    np.testing.assert_array_equal(step.pass_rate, [0.0, 0.5])
    np.testing.assert_array_equal(step.can_be_seeded, [True, False])
    rule = Rule("paper", {"rounds": 1})
    seeded = [simulate(rule, [step], seed=s)[0][0] for s in range(20)]
    plain = [
        simulate(Rule("paper", {"rounds": 1}, is_seeded=False), [step], seed=s)[0][0]
        for s in range(20)
    ]
    assert np.mean(seeded) > np.mean(plain) + 0.9


def test_log_with_the_least_columns_and_unscored_rewards(tmp_path):
    table = {"prompt_id": ["x"] * 6 + ["y"] * 6, "reward": [0.0, 2.0, None] * 4}
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    (step,) = read_log(tmp_path / "log.parquet")
    np.testing.assert_allclose(step.pass_rate, 1 / 3)
    np.testing.assert_allclose(step.mean_reward, 1.0)
    row = simulate(Rule("paper"), [step], seed=0)[0]
    assert np.isfinite(row).tolist() == [True, True, True, False, True, True]
    assert row[4] == 12


def test_leaves_of_trees_are_refused(tmp_path):
    table = {"prompt_id": ["x"] * 2, "reward": [0.0, 1.0], "shared_tokens": [0, 4]}
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    with pytest.raises(WorldError, match=r"expected independent rollouts.*tree\.enabled = false"):
        read_log(tmp_path / "log.parquet")


def test_neyman_counts():
    p = np.array([0.0, 0.5, 0.1, 1.0])
    counts = neyman_counts(p, 40)
    assert counts.sum() == 40
    assert counts[0] == counts[3] == 2
    np.testing.assert_allclose(counts[1:3] - 2, 32 * np.array([0.5, 0.3]) / 0.8, atol=1)
    assert neyman_counts(np.array([0.0, 1.0]), 10).tolist() == [5, 5]


def test_history_is_carried_from_step_to_step(tmp_path):
    steps = read_log(write_run(tmp_path, num_steps=3, num_prompts=64, num_rollouts=8))
    carried = [simulate(Rule("history"), steps, seed=seed)[2] for seed in range(20)]
    fresh = [simulate(Rule("history"), steps[2:], seed=seed)[0] for seed in range(20)]
    gain = dict(zip(METRICS, np.mean(carried, axis=0) - np.mean(fresh, axis=0), strict=True))
    assert gain["sum_np1p"] > 8
    assert gain["mse_e3"] < -1


def test_intervals_hold_their_mean_and_shrink_with_more_steps(tmp_path):
    few = read_log(write_run(tmp_path / "few", num_steps=2))
    many = read_log(write_run(tmp_path / "many", num_steps=24))
    width = []
    for steps in (few, many):
        result = bootstrap(Rule("uniform"), steps, num_replicates=60, seed=1)
        for mean, low, high in result.values():
            assert low <= mean <= high
        width.append(result["groups_with_signal"][2] - result["groups_with_signal"][1])
    assert width[1] < 0.6 * width[0]


def test_command_prints_and_saves(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run = write_run(tmp_path / "run")
    command = [str(run), "--planner", "uniform,paper,history,neyman,dapo", "--bootstrap", "5"]
    assert main([*command, "--exploration", "0.01,1"]) == 0
    out = capsys.readouterr().out
    assert "paper lambda 0.01" in out
    assert "groups with signal" in out
    rows = json.loads((run / "replay.json").read_text())
    labels = ["uniform", "paper lambda 0.01", "paper lambda 1", "history", "neyman", "dapo"]
    assert [row["planner"] for row in rows] == labels
    assert rows[0]["rollouts"] == {"mean": 320.0, "low": 320.0, "high": 320.0}
    assert rows[0]["tokens"]["mean"] == 3200.0
    assert rows[2]["sum_np1p"]["mean"] <= rows[1]["sum_np1p"]["mean"]
    assert rows[5]["rollouts"]["mean"] < 320.0
    with (run / "replay.csv").open() as file:
        table = list(csv.DictReader(file))
    assert float(table[1]["mse_e3_low"]) == rows[1]["mse_e3"]["low"]
    single = run / "rollouts" / "step_1.parquet"
    target = tmp_path / "out" / "table"
    assert main([str(single), "--bootstrap", "2", "-o", str(target)]) == 0
    assert target.with_suffix(".json").exists()
    assert target.with_suffix(".csv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}/nowhere"], r"expected a run folder with rollouts/step_N.parquet"),
        (["{run}", "--planner", "best"], r"--planner: expected some of paper, .*, got 'best'"),
        (["{run}", "--exploration", "a"], r"--exploration: expected numbers .*, got 'a'"),
        (
            ["{run}", "--exploration=-1"],
            r"paper lambda -1: exploration: expected a finite",
        ),
        (["{run}", "--base", "99"], r"paper lambda 0.01: total_rollouts: expected at least base"),
        (["{run}", "--bootstrap", "0"], r"expected an integer >= 1, got '0'"),
        ([], r"expected a run folder or parquet file, or --synthetic"),
        (["{run}/bad.parquet"], r"expected the columns prompt_id and reward, found id"),
        (["{run}/empty.parquet"], r"expected at least one rollout, got none"),
    ],
)
def test_rejects(arguments, message, tmp_path, capsys):
    run = write_run(tmp_path)
    pq.write_table(pa.table({"id": [1]}), run / "bad.parquet")
    empty = pa.table({"prompt_id": pa.array([], pa.string()), "reward": pa.array([], pa.float64())})
    pq.write_table(empty, run / "empty.parquet")
    try:
        code = main([part.format(run=run) for part in arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_unwritable_output_is_named(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert main([str(run), "--bootstrap", "2", "-o", str(tmp_path / "file" / "out")]) == 2
    assert f"--output: expected to write {tmp_path / 'file' / 'out'}" in capsys.readouterr().err


def test_one_rule_for_each_lambda():
    labels = [rule.label for rule in parse_rules("uniform,paper", "0.01,0.1", rounds=2)]
    assert labels == ["uniform", "paper lambda 0.01", "paper lambda 0.1"]
    with pytest.raises(WorldError, match=r"--planner: expected some of"):
        parse_rules("", "0.1", rounds=2)
