"""The problems of a data set as retrieval sees them: vectors, neighbours, block list; cached."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from xrpo_fast.exemplars.embed import Embedder, Vectors, make_embedder
from xrpo_fast.exemplars.leakage import Kind, LeakageGuard, problem_groups
from xrpo_fast.exemplars.neighbours import (
    NUM_NEIGHBOURS,
    Bounds,
    NeighbourTable,
    largest_similarity,
    load_arrays,
    nearest,
    save_arrays,
)
from xrpo_fast.types import Prompt

# Part of the name of each cache file: a change of the embedders or of the search makes new ones.
_CACHE_VERSION = 1


class ProblemIndex:
    """Vectors of the training questions, made when first needed, and what is computed from them.

    Args: as ExemplarStore; `bounds` = (min_similarity, max_similarity or None).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        embedder: str,
        kind: Kind,
        bounds: Bounds,
        cache_dir: Path | None,
    ) -> None:
        self._prompts = prompts
        self._embedder_name = embedder
        self._kind: Kind = kind
        self._bounds = bounds
        self._cache_dir = cache_dir
        self._embedder: Embedder | None = None
        self._vectors: Vectors | None = None
        self._known_texts: dict[str, int] = {}
        self._groups = problem_groups(prompts, kind, self._known_texts)
        self.fingerprint = _fingerprint(prompts)
        """SHA-256 of ids and questions in their order."""

    def make_table(self) -> NeighbourTable:
        """The 64 nearest suitable training problems of each, read from disk where kept."""
        path = self._cache_path("neighbours", f"{self._bounds} {self._kind} {NUM_NEIGHBOURS}")
        arrays = load_arrays(path) if path else None
        if arrays is not None:
            return NeighbourTable(**arrays)
        vectors = self._train_vectors()
        table = nearest(
            vectors,
            vectors,
            query_groups=self._groups,
            key_groups=self._groups,
            bounds=self._bounds,
        )
        if path:
            save_arrays(
                path,
                offsets=table.offsets,
                indices=table.indices,
                similarities=table.similarities,
            )
        return table

    def make_guard(self, eval_prompts: Sequence[Prompt]) -> LeakageGuard:
        """The block list against evaluation prompts, its cosines read from disk where kept."""
        path = self._cache_path("leakage", _fingerprint(eval_prompts))
        arrays = load_arrays(path) if path else None
        if arrays is None:
            eval_vectors = self._embed([prompt.question for prompt in eval_prompts])
            similarities, _ = largest_similarity(self._train_vectors(), eval_vectors)
            arrays = {"similarities": similarities}
            if path:
                save_arrays(path, **arrays)
        return LeakageGuard(
            self._prompts,
            eval_prompts,
            self._kind,
            self._groups,
            problem_groups(eval_prompts, self._kind, self._known_texts),
            arrays["similarities"],
        )

    def nearest_outside(
        self, prompts: Sequence[Prompt], rows: np.ndarray, num_neighbours: int
    ) -> NeighbourTable:
        """Nearest of the training problems `rows`, (N,) int64, to each of other prompts, exactly;
        indices of the result count within `rows`."""
        return nearest(
            self._embed([prompt.question for prompt in prompts]),
            self._train_vectors()[rows],
            query_groups=self._groups_outside(prompts),
            key_groups=self._groups[rows],
            num_neighbours=num_neighbours,
            bounds=self._bounds,
        )

    def _groups_outside(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Problem groups of other prompts; one with the id of a training prompt is that problem."""
        groups = problem_groups(prompts, self._kind, self._known_texts)
        rows = {prompt.id: row for row, prompt in enumerate(self._prompts)}
        for query, prompt in enumerate(prompts):
            if prompt.id in rows:
                groups[query] = self._groups[rows[prompt.id]]
        return groups

    def _cache_path(self, what: str, settings: str) -> Path | None:
        if self._cache_dir is None:
            return None
        embedder = f"{self._embedder_name} {_folder_state(self._embedder_name)}"
        key = f"{_CACHE_VERSION} {embedder} {self.fingerprint} {settings}"
        return self._cache_dir / f"{what}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"

    def _train_vectors(self) -> Vectors:
        if self._vectors is None:
            self._vectors = self._embed([prompt.question for prompt in self._prompts])
        return self._vectors

    def _embed(self, texts: Sequence[str]) -> Vectors:
        if self._embedder is None:
            self._embedder = make_embedder(self._embedder_name)
            self._embedder.fit([prompt.question for prompt in self._prompts])
        return self._embedder.embed(texts)


def _folder_state(embedder: str) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a local embedder's files: a model that was trained further must not
    find the vectors of the one before. Empty for all others."""
    folder = Path(embedder)
    if not embedder or not folder.is_dir():
        return []
    stats = {path: path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return [
        (str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns)
        for path, stat in stats.items()
    ]


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Of ids and questions in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        for text in (prompt.id, prompt.question):
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
