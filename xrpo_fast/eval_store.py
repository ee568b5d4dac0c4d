"""What an evaluation leaves on disk: samples as Parquet, the result as JSON; and how it is found.

<out>/result.json             metrics of every set, grader, sampling; the same bytes each time
<out>/samples_<set>.parquet   every graded response; an evaluation goes on from them
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from xrpo_fast.config import ConfigError
from xrpo_fast.evaluator import Sample
from xrpo_fast.files import replacing
from xrpo_fast.types import Prompt, Verdict

RESULT = "result.json"
FINGERPRINT_CHARS = 16

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("prompt_index", pa.int64()),
        ("sample_index", pa.int64()),
        ("tier", pa.string()),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("response", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("num_tokens", pa.int64()),
        ("truncated", pa.bool_()),
        ("reward", pa.float64()),
        ("solved", pa.bool_()),
        ("error", pa.string()),
        ("extracted", pa.string()),
    ]
)


def fingerprint(values: Any) -> str:
    """Short hash of JSON values: equal where everything that was hashed is equal."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_CHARS]


def questions_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Of ids and gold answers: results can be paired where it is equal, whatever the template."""
    return fingerprint([[prompt.id, prompt.answer] for prompt in prompts])


@dataclass(frozen=True, slots=True)
class SampleFile:
    """The samples of one set; the fingerprint says what they were drawn from and graded by."""

    path: Path
    fingerprint: str

    def read(self) -> list[Sample]:
        """Samples of an earlier evaluation, or none.

        Raises:
            ConfigError: they are those of another model, data set, sampling or grader.
        """
        if not self.path.exists():
            return []
        samples, found = read_samples(self.path)
        if found != self.fingerprint:
            raise ConfigError(
                f"--out: expected a new folder or one with samples of the same model, data, "
                f"sampling and grader ({self.fingerprint}), but {self.path} holds others "
                f"({found}); choose another --out"
            )
        return samples

    def write(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> None:
        """All samples so far, in one move; ordered, so that the same samples are the same file."""
        ordered = sorted(samples, key=lambda s: (s.prompt_index, s.sample_index))
        owners = [prompts[sample.prompt_index] for sample in ordered]
        table = pa.table(
            {
                "prompt_id": [prompt.id for prompt in owners],
                "prompt_index": [s.prompt_index for s in ordered],
                "sample_index": [s.sample_index for s in ordered],
                "tier": [prompt.tier for prompt in owners],
                "question": [prompt.question for prompt in owners],
                "answer": [_text(prompt.answer) for prompt in owners],
                "response": [s.text for s in ordered],
                "token_ids": [list(s.token_ids) for s in ordered],
                "num_tokens": [len(s.token_ids) for s in ordered],
                "truncated": [s.is_truncated for s in ordered],
                "reward": [s.verdict.reward for s in ordered],
                "solved": [s.verdict.solved for s in ordered],
                "error": [s.verdict.error for s in ordered],
                "extracted": [s.verdict.extracted for s in ordered],
            },
            schema=SCHEMA.with_metadata({"fingerprint": self.fingerprint}),
        )
        with replacing(self.path) as temporary:
            pq.write_table(table, temporary)


def read_samples(path: Path) -> tuple[list[Sample], str]:
    """Samples of a file, and its fingerprint.

    Raises:
        ConfigError: the file is missing or not one of ours.
    """
    try:
        table = pq.read_table(path)
        found = (table.schema.metadata or {})[b"fingerprint"].decode()
        rows = table.to_pylist()
    except (OSError, KeyError, pa.ArrowException) as error:
        raise ConfigError(
            f"samples: expected those of an evaluation in {path}, got {error!r:.200}"
        ) from None
    samples = [
        Sample(
            prompt_index=row["prompt_index"],
            sample_index=row["sample_index"],
            token_ids=tuple(row["token_ids"]),
            is_truncated=row["truncated"],
            verdict=Verdict(
                reward=row["reward"],
                solved=row["solved"],
                error=row["error"],
                extracted=row["extracted"],
            ),
            text=row["response"],
        )
        for row in rows
    ]
    return samples, found


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, default=str)


def write_result(folder: Path, result: dict[str, Any]) -> Path:
    path = folder / RESULT
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def read_result(path: Path) -> dict[str, Any]:
    """A result.json.

    Raises:
        ConfigError: missing, or not the result of an evaluation.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--against: expected a readable {path}, got {error}") from None
    if not isinstance(result, dict) or not {"sets", "grader", "sampling"} <= result.keys():
        raise ConfigError(
            f"--against: expected the result of an evaluation in {path}, got other JSON"
        )
    return result


def find_result(path: Path, questions: dict[str, str]) -> Path:
    """The result to compare with: a result.json, its folder, or the latest evaluation of a run
    whose sets (name -> questions fingerprint) are among ours.

    Raises:
        ConfigError: there is none.
    """
    if path.is_file():
        return path
    if (path / RESULT).exists():
        return path / RESULT
    found = []
    for candidate in sorted(path.glob(f"evaluations/*/{RESULT}")):
        result = read_result(candidate)
        if any(s["questions_fingerprint"] == questions.get(n) for n, s in result["sets"].items()):
            rank = result["step"] or 0, result["sampling"]["samples"]
            found.append((rank, candidate))
    if not found:
        raise ConfigError(
            f"--against: expected a result.json, or a run with an evaluation of the same "
            f"questions, in {path}, found none; run python -m xrpo_fast.evaluate {path} first"
        )
    return max(found)[1]
