"""Data sets -> prompts.

A source is a .jsonl or .parquet file, a data set folder, a hub id ("owner/name" or
"owner/name:config"), "builtin:symbols" (with ?seed=N), or "reasoning_gym:<dataset>" (with
?size=N). ?split=NAME names the split where the caller's is not right. Files and the built-in task
need nothing beyond the core dependencies.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from xrpo_fast.layouts import MISSING, apply_layout, look_up, resolve_columns
from xrpo_fast.sources import DataError, Record, read_records, set_name
from xrpo_fast.templates import PromptTemplate, TemplateError, question_of
from xrpo_fast.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptSet:
    """The prompts of one data set, in its own order."""

    name: str
    prompts: list[Prompt] = field(repr=False)
    fingerprint: str
    """SHA-256 over ids, token ids and answers: another set, order or template has another."""
    dropped_overlong: int
    dropped_duplicates: int
    """Rows whose prompt and answer both occurred before."""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


def load_prompts(
    source: str,
    *,
    template: PromptTemplate,
    max_prompt_tokens: int,
    columns: dict[str, str] | None = None,
    split: str = "train",
    limit: int | None = None,
    seed: int = 0,
    check_answer: Callable[[Any], object] | None = None,
    name: str | None = None,
    key: str = "data",
) -> PromptSet:
    """Read a data set and render its prompts.

    Args:
        source: see the module.
        max_prompt_tokens: longer prompts are dropped and counted.
        columns: our name -> the data set's column, "a.b" for a field of a struct; for prompt,
            answer, id and tier, and for any other name that a reward function wants. An empty
            string says that there is none.
        split: of folders, hub data sets and generated tasks; files have none.
        limit: keep only the first N prompts.
        seed: of generated tasks.
        check_answer: called with each answer; a ValueError is reported with the row.
        name: in front of the prompts' ids; default: set_name(source, split).
        key: of the config that named the source, for errors.
    Raises:
        DataError: missing file or column, no rows, only over-long prompts, a bad answer.
    """
    name = name or set_name(source, split)
    reader = _RowReader(name, source, dict(columns or {}), template, check_answer)
    prompts: list[Prompt] = []
    num_overlong = num_rows = 0
    for row, record in enumerate(_records(source, split, seed, key)):
        num_rows += 1
        prompt = reader.prompt(row, record, index=len(prompts))
        if prompt is None:
            continue
        if len(prompt.token_ids) > max_prompt_tokens:
            num_overlong += 1
            continue
        prompts.append(prompt)
        if limit and len(prompts) == limit:
            break
    if not num_rows:
        raise DataError(f"{key}: expected at least one row in {source!r}, got none")
    if not prompts:
        raise DataError(
            f"{key}: expected prompts of at most {max_prompt_tokens} tokens in {source!r}, got "
            f"{num_overlong} longer ones and no other; raise data.max_prompt_tokens"
        )
    if num_overlong or reader.num_duplicates:
        logger.warning(
            "%s: %d prompts kept; dropped %d of more than %d tokens and %d exact duplicates",
            *(source, len(prompts), num_overlong, max_prompt_tokens, reader.num_duplicates),
        )
    return PromptSet(
        name=reader.name,
        prompts=prompts,
        fingerprint=_fingerprint(prompts),
        dropped_overlong=num_overlong,
        dropped_duplicates=reader.num_duplicates,
    )


def _records(source: str, split: str, seed: int, key: str) -> Iterator[Record]:
    """The source's rows; its errors name the key."""
    try:
        yield from read_records(source, split, seed)
    except DataError as error:
        raise DataError(f"{key}: {str(error).removeprefix('data: ')}") from error


class _RowReader:
    """One row -> one prompt, with the columns that the data set turned out to have."""

    def __init__(
        self,
        name: str,
        source: str,
        columns: dict[str, str],
        template: PromptTemplate,
        check_answer: Callable[[Any], object] | None,
    ) -> None:
        self.name = name
        self.source = source
        self.columns = columns
        self.template = template
        self.check_answer = check_answer
        self.num_duplicates = 0
        self._seen_rows: set[bytes] = set()
        self._seen_ids: set[str] = set()
        self._resolved: dict[str, str] | None = None

    def prompt(self, row: int, record: Record, *, index: int) -> Prompt | None:
        """The prompt of a row; None for an exact duplicate of an earlier one."""
        record = apply_layout(record, self.columns)
        if self._resolved is None:
            self._resolved = resolve_columns(record, self.columns, self.source)
        values = {name: look_up(record, path) for name, path in self._resolved.items()}
        if absent := [name for name, value in values.items() if value is MISSING]:
            raise DataError(
                f"row {row} of {self.source!r}: expected the column "
                f"{self._resolved[absent[0]]!r} as in the first row, got {', '.join(record)}"
            )
        messages, answer = values.pop("prompt"), values.pop("answer", None)
        if self._is_duplicate(messages, answer):
            self.num_duplicates += 1
            return None
        try:
            if not messages:
                raise ValueError("prompt: expected text or messages, got an empty value")
            question = question_of(messages)
            token_ids = self.template.render(messages)
            self._check_answer(answer)
        except TemplateError as error:
            raise DataError(f"{error} (row {row} of {self.source!r})") from error
        except (TypeError, ValueError) as error:
            raise DataError(f"row {row} of {self.source!r}: {error}") from error
        used = {path.partition(".")[0] for path in self._resolved.values()}
        others = {name: value for name, value in record.items() if name not in used}
        others |= {k: v for k, v in values.items() if k not in ("id", "tier")}
        return Prompt(
            id=self._id(row, values.get("id")),
            index=index,
            question=question,
            token_ids=token_ids,
            answer=answer,
            messages=messages,
            columns=others,
            tier=str(values.get("tier") or ""),
        )

    def _check_answer(self, answer: Any) -> None:
        if self.check_answer is None:
            return
        try:
            self.check_answer(answer)
        except (TypeError, ValueError) as error:
            column = self._resolved.get("answer", "") if self._resolved else ""
            raise ValueError(
                f"{error} in the column {column!r}; correct or remove the row, or set "
                "data.columns.answer to another column"
            ) from error

    def _is_duplicate(self, messages: Any, answer: Any) -> bool:
        key = hashlib.sha256(_stable_bytes([messages, answer])).digest()
        is_known = key in self._seen_rows
        self._seen_rows.add(key)
        return is_known

    def _id(self, row: int, own_id: Any) -> str:
        """Unique in the set: the data set's own id where there is one, else the row."""
        identity = f"{self.name}/{row if own_id is None else own_id}"
        if identity in self._seen_ids:
            raise DataError(
                f"data.columns.id: expected unique ids in {self.source!r}, got {own_id!r} twice "
                '(again in row %d); name another column, or set it to "" to number the rows' % row
            )
        self._seen_ids.add(identity)
        return identity


def _fingerprint(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_stable_bytes([prompt.id, prompt.token_ids, prompt.answer]))
    return digest.hexdigest()


def _stable_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=repr).encode()
