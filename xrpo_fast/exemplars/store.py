"""ExemplarStore: the corpus of own successes, and who is shown what.

    admit(successes)  after the update      retrieve(prompt, step)  while a step is rolled out

Retrieval is a look-up among the 64 nearest training problems of a prompt, found once per data set
and kept on disk; a problem outside the data set is compared with the whole corpus.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xrpo_fast.exemplars.corpus import Corpus, Entry, Success
from xrpo_fast.exemplars.index import ProblemIndex
from xrpo_fast.exemplars.leakage import Kind
from xrpo_fast.types import Exemplar, Prompt

STATE_VERSION = 1
_NUM_REPORTED = 20


class ExemplarStore:
    """Corpus of verified own successes with nearest-neighbour retrieval and a leakage guard.

    Args:
        prompts: the training set; prompts[i].index == i.
        eval_prompts: all evaluation sets: the block list (see leakage.py).
        embedder: "tfidf", "codes", or a sentence-transformers id or folder.
        num_exemplars: most exemplars per prompt.
        min_similarity, max_similarity: cosines in [min, max) are suitable; None = no upper bound.
        max_age_steps: an entry of step s is shown in steps s + 1 .. s + max_age_steps.
        max_bytes: UTF-8 bytes of all responses; the oldest leave first.
        kind: "natural" language or "generated" task: what counts as leakage.
        cache_dir: where tables are kept, by fingerprint of data and settings; None = nowhere.
    Raises:
        ValueError: a value out of range, or prompts whose index is not their position.
    Source: XRPO, arXiv:2510.06672 (nearest solved problems as exemplars); limits are ours.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
        *,
        embedder: str = "tfidf",
        num_exemplars: int = 2,
        min_similarity: float = 0.5,
        max_similarity: float | None = 0.95,
        max_age_steps: int = 200,
        max_bytes: int = 256 * 2**20,
        kind: Kind = "natural",
        cache_dir: Path | None = None,
    ) -> None:
        _check(prompts, num_exemplars, min_similarity, max_similarity, kind)
        self._prompts = prompts
        self._num_exemplars = num_exemplars
        self._index = ProblemIndex(
            prompts, embedder, kind, (min_similarity, max_similarity), cache_dir
        )
        self._table = self._index.make_table()
        self._guard = self._index.make_guard(eval_prompts)
        self._corpus = Corpus(max_age_steps, max_bytes)
        self._refused: Counter[str] = Counter()
        self._blocked_at_retrieval = 0

    def retrieve(self, prompt_index: int, step: int) -> tuple[Exemplar, ...]:
        """Nearest suitable successes of earlier steps, nearest first; at most num_exemplars.

        Empty where none is suitable: the prompt then stays zero-shot.
        """
        found: list[Exemplar] = []
        for neighbour, similarity in zip(*self._table.row(prompt_index), strict=True):
            entry = self._corpus.get(neighbour, step)
            if entry is None:
                continue
            if self._guard.is_blocked(neighbour):
                self._blocked_at_retrieval += 1
                continue
            found.append(self._exemplar(entry, similarity))
            if len(found) == self._num_exemplars:
                break
        return tuple(found)

    def retrieve_outside(self, prompts: Sequence[Prompt], step: int) -> list[tuple[Exemplar, ...]]:
        """As retrieve, for prompts that are not of the training set: exact, over the corpus."""
        entries = [e for e in self._corpus if self._corpus.get(e.prompt_index, step) is not None]
        blocked = [e for e in entries if self._guard.is_blocked(e.prompt_index)]
        self._blocked_at_retrieval += len(blocked)
        entries = [e for e in entries if not self._guard.is_blocked(e.prompt_index)]
        rows = np.array([e.prompt_index for e in entries], np.int64)
        table = self._index.nearest_outside(prompts, rows, self._num_exemplars)
        return [
            tuple(self._exemplar(entries[i], s) for i, s in zip(*table.row(query), strict=True))
            for query in range(len(prompts))
        ]

    def admit(self, successes: Iterable[Success], step: int) -> int:
        """Takes in what may enter, after the update of the step, and drops what is too old for the
        next; returns how many entered.

        A newer success of a problem takes the place of the older. Refused, and counted by reason:
        blocked, quotes_evaluation (leakage), too_large (for the whole corpus).
        """
        num_admitted = 0
        for success in successes:
            reason = self._refusal(success)
            if reason is None:
                self._corpus.add(success, step)
                num_admitted += 1
            else:
                self._refused[reason] += 1
        self._corpus.trim(step)
        return num_admitted

    def stats(self) -> dict[str, float]:
        """Size of the corpus and all counts since the run began."""
        stats = {
            "corpus_size": float(len(self._corpus)),
            "corpus_bytes": float(self._corpus.num_bytes),
            "blocked_at_retrieval": float(self._blocked_at_retrieval),
        }
        stats |= {f"refused/{name}": float(n) for name, n in sorted(self._refused.items())}
        stats |= {f"removed/{name}": float(n) for name, n in sorted(self._corpus.removed.items())}
        return stats

    def leakage_report(self) -> dict[str, Any]:
        """What the guard found and refused, as plain values for a JSON file."""
        reasons = self._guard.reasons
        return {
            "num_eval_prompts": self._guard.num_eval_prompts,
            "num_blocked_prompts": len(reasons),
            "blocked_by_reason": self._guard.counts(),
            "instruction_grams_ignored": self._guard.num_instruction_grams,
            "largest_similarity": self._guard.largest_similarity,
            "refused_at_admission": self._refused["blocked"] + self._refused["quotes_evaluation"],
            "refused_at_retrieval": self._blocked_at_retrieval,
            "first_blocked": [
                {"id": self._prompts[row].id, "reason": reasons[row]}
                for row in sorted(reasons)[:_NUM_REPORTED]
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        """Corpus and counts, as plain lists, numbers and strings; the table is remade or cached."""
        return {
            "version": STATE_VERSION,
            "data": self._index.fingerprint,
            "corpus": self._corpus.state_dict(),
            "refused": dict(self._refused),
            "blocked_at_retrieval": self._blocked_at_retrieval,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what state_dict gave, exactly.

        An entry that a new evaluation set blocks is kept, and refused at each retrieval.

        Raises:
            ValueError: another version, or another training set.
        """
        if state["version"] != STATE_VERSION:
            raise ValueError(f"state: expected version {STATE_VERSION}, got {state['version']}")
        if state["data"] != self._index.fingerprint:
            raise ValueError(
                f"state: expected data {self._index.fingerprint}, got {state['data']}; "
                "resume with the data set of the checkpoint"
            )
        self._corpus.load_state_dict(state["corpus"])
        self._refused = Counter(state["refused"])
        self._blocked_at_retrieval = state["blocked_at_retrieval"]

    def _refusal(self, success: Success) -> str | None:
        if not 0 <= success.prompt_index < len(self._prompts):
            raise ValueError(
                f"prompt_index: expected 0..{len(self._prompts) - 1}, got {success.prompt_index}"
            )
        reason = self._corpus.refusal(success)
        if reason is None and self._guard.is_blocked(success.prompt_index):
            return "blocked"
        if reason is None and self._guard.quotes_evaluation(success.response):
            return "quotes_evaluation"
        return reason

    def _exemplar(self, entry: Entry, similarity: float) -> Exemplar:
        prompt = self._prompts[entry.prompt_index]
        return Exemplar(
            prompt_id=prompt.id,
            question=prompt.question,
            response=entry.response,
            num_tokens=entry.num_tokens,
            step=entry.step,
            similarity=similarity,
        )


def _check(
    prompts: Sequence[Prompt],
    num_exemplars: int,
    min_similarity: float,
    max_similarity: float | None,
    kind: str,
) -> None:
    for position, prompt in enumerate(prompts):
        if prompt.index != position:
            raise ValueError(
                f"prompts: expected index {position} at position {position}, got {prompt.index}"
            )
    if num_exemplars < 1:
        raise ValueError(f"num_exemplars: expected >= 1, got {num_exemplars}")
    if not 0 < min_similarity <= 1:
        raise ValueError(f"min_similarity: expected 0 < s <= 1, got {min_similarity}")
    if max_similarity is not None and not min_similarity < max_similarity:
        raise ValueError(
            f"max_similarity: expected more than min_similarity = {min_similarity} or None, "
            f"got {max_similarity}"
        )
    if kind not in ("natural", "generated"):
        raise ValueError(f"kind: expected 'natural' or 'generated', got {kind!r}")
