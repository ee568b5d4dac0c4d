"""What a planner plays against: the prompts of one step and the rollouts that they would give.

P prompts of the step. A rollout is drawn by a uniform number that depends on (seed, prompt, sample
index) alone, so that all planners meet the same luck: their difference is paired.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

OPTIONAL_COLUMNS = {"step": 0, "seeded": False, "num_tokens": 0, "shared_tokens": 0}
HARD_RATE = 0.25
"""A recorded prompt is hard where its solved rate is above 0 and at most this."""

# The synthetic mixture: share, and pass rate.
SYNTHETIC_SHARES = {"never": 0.25, "hard": 0.20, "middle": 0.25, "easy": 0.15, "always": 0.15}


class WorldError(ValueError):
    """The log cannot be replayed; the message says why."""


def uniforms(seed: int, prompts: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """(R,) float64 in [0, 1), a hash of (seed, prompt, sample index)."""
    with np.errstate(over="ignore"):
        state = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
        for part in (prompts, samples):
            state = state ^ (part.astype(np.uint64) + np.uint64(0x632BE59BD9B4E019))
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Draws:
    """R rollouts."""

    rewards: np.ndarray
    """(R,) float64, NaN = unscored."""
    solved: np.ndarray
    """(R,) bool."""
    num_tokens: np.ndarray
    """(R,) int64."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of a log; rollouts are drawn from each prompt's own, with replacement."""

    prompt_ids: list[str]
    pass_rate: np.ndarray
    """(P,) share solved of the prompt's unseeded rollouts; of all where none is unseeded."""
    mean_reward: np.ndarray
    """(P,) of the same rollouts; NaN where none was scored."""
    total_rollouts: int
    pools: tuple[np.ndarray, np.ndarray]
    """Rows of the plain and of the seeded rollouts, by prompt."""
    offsets: tuple[np.ndarray, np.ndarray]
    """(P + 1,) where each prompt's rows begin."""
    rows: Draws

    @property
    def is_hard(self) -> np.ndarray:
        return (self.pass_rate > 0) & (self.pass_rate <= HARD_RATE)

    @property
    def can_be_seeded(self) -> np.ndarray:
        """(P,) bool: the log holds seeded rollouts of the prompt."""
        return np.diff(self.offsets[1]) > 0

    def draw(self, prompts: np.ndarray, is_seeded: np.ndarray, luck: np.ndarray) -> Draws:
        chosen = np.empty(len(prompts), np.int64)
        for kind, (pool, offsets) in enumerate(zip(self.pools, self.offsets, strict=True)):
            mine = is_seeded == bool(kind)
            first, size = offsets[prompts[mine]], np.diff(offsets)[prompts[mine]]
            chosen[mine] = pool[first + (luck[mine] * size).astype(np.int64)]
        rows = self.rows
        return Draws(rows.rewards[chosen], rows.solved[chosen], rows.num_tokens[chosen])


@dataclass(frozen=True, slots=True)
class SyntheticStep:
    """Prompts of known pass rate; a reward is 0 or 1, a rollout has no length."""

    prompt_ids: list[str]
    pass_rate: np.ndarray
    total_rollouts: int
    is_hard: np.ndarray
    seeding_odds: float = 1.0
    """ASSUMED effect of worked examples: they multiply the odds of success by this."""

    @property
    def mean_reward(self) -> np.ndarray:
        return self.pass_rate

    @property
    def can_be_seeded(self) -> np.ndarray:
        return np.full(len(self.prompt_ids), self.seeding_odds != 1.0)

    def draw(self, prompts: np.ndarray, is_seeded: np.ndarray, luck: np.ndarray) -> Draws:
        p = self.pass_rate[prompts]
        raised = self.seeding_odds * p / (1.0 + (self.seeding_odds - 1.0) * p)
        solved = luck < np.where(is_seeded, raised, p)
        return Draws(solved.astype(np.float64), solved, np.zeros(len(prompts), np.int64))


Step = RecordedStep | SyntheticStep


def synthetic_step(seed: int, *, num_prompts: int = 256, mean_rollouts: int = 8) -> SyntheticStep:
    """25 % never solved, 20 % U(.02, .1), 25 % Beta(2, 2), 15 % U(.9, .98), 15 % always solved."""
    rng = np.random.default_rng([seed, 1])
    kind = rng.choice(len(SYNTHETIC_SHARES), num_prompts, p=list(SYNTHETIC_SHARES.values()))
    rates = [
        np.zeros(num_prompts),
        rng.uniform(0.02, 0.1, num_prompts),
        rng.beta(2.0, 2.0, num_prompts),
        rng.uniform(0.9, 0.98, num_prompts),
        np.ones(num_prompts),
    ]
    return SyntheticStep(
        prompt_ids=[str(q) for q in range(num_prompts)],
        pass_rate=np.choose(kind, rates),
        total_rollouts=num_prompts * mean_rollouts,
        is_hard=kind == list(SYNTHETIC_SHARES).index("hard"),
    )


def synthetic_history(step: SyntheticStep, seed: int) -> dict[str, tuple[float, float]]:
    """Priors from one earlier visit of 8 rollouts, at half weight, by a policy that was weaker:
    log-odds lower by N(0.25, 0.35)."""
    rng = np.random.default_rng([seed, 2])
    p = np.clip(step.pass_rate, 1e-12, 1.0 - 1e-12)
    odds = np.log(p / (1.0 - p)) - rng.normal(0.25, 0.35, len(p))
    is_open = (step.pass_rate > 0) & (step.pass_rate < 1)
    wins = rng.binomial(8, np.where(is_open, 1.0 / (1.0 + np.exp(-odds)), step.pass_rate))
    return {
        prompt_id: (0.3 + 0.5 * float(won), 0.3 + 0.5 * float(8 - won))
        for prompt_id, won in zip(step.prompt_ids, wins, strict=True)
    }


def read_log(path: Path) -> list[RecordedStep]:
    """The steps of a run folder (rollouts/step_N.parquet), a folder of such files, or one file.

    Columns: prompt_id and reward; step, solved, seeded, num_tokens where they exist. Without solved
    a rollout is solved at the largest reward of the log.

    Raises:
        WorldError: no file, a missing column, no rollout, or the leaves of trees.
    """
    table = pa.concat_tables([_read_file(file) for file in _log_files(path)])
    if len(table) == 0:
        raise WorldError(f"{path}: expected at least one rollout, got none")
    if any(table["shared_tokens"].to_numpy() > 0):
        raise WorldError(
            f"{path}: expected independent rollouts, got leaves of trees, which share their first "
            "tokens; record a run with tree.enabled = false"
        )
    columns = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
    columns["reward"] = columns["reward"].astype(np.float64)
    if "solved" not in columns:
        columns["solved"] = columns["reward"] >= np.nanmax(columns["reward"])
    steps = columns["step"]
    return [
        _recorded_step({name: values[steps == step] for name, values in columns.items()})
        for step in np.unique(steps)
    ]


def _log_files(path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = sorted(folder.glob("*.parquet"), key=lambda file: (len(file.name), file.name))
    if not files:
        raise WorldError(
            f"{path}: expected a run folder with rollouts/step_N.parquet, or a parquet file"
        )
    return files


def _read_file(file: Path) -> pa.Table:
    names = pq.read_schema(file).names
    missing = [name for name in ("prompt_id", "reward") if name not in names]
    if missing:
        raise WorldError(
            f"{file}: expected the columns prompt_id and reward, found {', '.join(names)}"
        )
    wanted = ["prompt_id", "reward", "solved", *OPTIONAL_COLUMNS]
    table = pq.read_table(file, columns=[name for name in wanted if name in names])
    for name, value in OPTIONAL_COLUMNS.items():
        if name not in names:
            table = table.append_column(name, pa.array([value] * len(table)))
    return table


def _recorded_step(columns: dict[str, np.ndarray]) -> RecordedStep:
    prompt_ids, group = np.unique(columns["prompt_id"].astype(str), return_inverse=True)
    seeded = columns["seeded"].astype(bool)
    num_plain = np.bincount(group[~seeded], minlength=len(prompt_ids))
    # A prompt without a plain rollout has nothing else to draw from.
    is_plain = ~seeded | (num_plain[group] == 0)
    pools, offsets = [], []
    for mine in (is_plain, ~is_plain):
        rows = np.flatnonzero(mine)
        pools.append(rows[np.argsort(group[rows], kind="stable")])
        sizes = np.bincount(group[rows], minlength=len(prompt_ids))
        offsets.append(np.concatenate([[0], np.cumsum(sizes)]))
    reward, solved = columns["reward"], columns["solved"].astype(bool)

    def mean_of(values: np.ndarray, mine: np.ndarray) -> np.ndarray:
        count = np.bincount(group[mine], minlength=len(prompt_ids))
        total = np.bincount(group[mine], values[mine], minlength=len(prompt_ids))
        return np.divide(total, count, out=np.full(len(prompt_ids), np.nan), where=count > 0)

    return RecordedStep(
        prompt_ids=prompt_ids.tolist(),
        pass_rate=mean_of(solved.astype(np.float64), is_plain),
        mean_reward=mean_of(reward, is_plain & ~np.isnan(reward)),
        total_rollouts=len(group),
        pools=(pools[0], pools[1]),
        offsets=(offsets[0], offsets[1]),
        rows=Draws(reward, solved, columns["num_tokens"].astype(np.int64)),
    )
