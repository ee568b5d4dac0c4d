"""Embedders: texts -> unit vectors whose dot product is the cosine of two questions.

"tfidf"      hashed words, sublinear TF-IDF; no download, no GPU
"codes"      TF-IDF over single letters, digits and punctuation masked: the built-in symbols task
anything else  a sentence-transformers model id or a local folder
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from scipy import sparse

# A scipy CSR matrix or array, or an ndarray; scikit-learn's stubs know neither.
Vectors = Any

NUM_FEATURES = 2**20
# Words in more than a tenth of the questions tell them apart little and cost the most: work in the
# sparse product grows with the square of a word's count. Small data sets lose nothing.
MAX_DOCUMENT_FRAC = 0.1
MIN_DOCUMENT_CAP = 1000

# On the 7,473 questions of GSM8K, 3 % have two neighbours at cosine >= 0.5 in plain TF-IDF, 97 % in
# 128 latent directions, of which 1.4 % exceed 0.9 to a test question.
NUM_DIRECTIONS = 128
MIN_QUESTIONS_PER_DIRECTION = 8
MIN_DIRECTIONS = 16

_WORD = re.compile(r"\w+")
_CODE = re.compile(r"[^\W\d_]{2}")


class Embedder(Protocol):
    """Fitted once on the training questions, then applied to any text."""

    name: str

    def fit(self, texts: Sequence[str]) -> None: ...
    def embed(self, texts: Sequence[str]) -> Vectors: ...


def words(text: str) -> list[str]:
    """Lower-cased words and numbers of a text."""
    return _WORD.findall(text.casefold())


def codes(text: str) -> list[str]:
    """Pairs of letters of a text, case kept: '?kamo:54' -> ['ka', 'mo']."""
    return _CODE.findall(text)


class TfidfEmbedder:
    """Hashed TF-IDF, unit rows.

        weight = (1 + log count) * (1 + log((1 + N) / (1 + document count)))

    A word that no training question holds weighs most, so a text of unknown words is near nothing.
    """

    def __init__(self, name: str, analyzer: Callable[[str], list[str]]) -> None:
        from sklearn.feature_extraction.text import HashingVectorizer

        self.name = name
        settings: dict[str, Any] = {
            "analyzer": analyzer,
            "n_features": NUM_FEATURES,
            "norm": None,
            "alternate_sign": False,
            "dtype": np.float32,
        }
        self._hasher = HashingVectorizer(**settings)
        self._idf: np.ndarray | None = None

    def fit(self, texts: Sequence[str]) -> None:
        """Counts in how many texts each word occurs."""
        document_counts = np.zeros(NUM_FEATURES, np.int64)
        if texts:
            words_of_texts: Vectors = self._hasher.transform(texts)
            document_counts = np.bincount(words_of_texts.indices, minlength=NUM_FEATURES)
        idf = 1.0 + np.log((1.0 + len(texts)) / (1.0 + document_counts))
        cap = max(MIN_DOCUMENT_CAP, int(MAX_DOCUMENT_FRAC * len(texts)))
        self._idf = np.where(document_counts > cap, 0.0, idf).astype(np.float32)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """(len(texts), NUM_FEATURES) float32; a text without words is a row of zeros."""
        from sklearn.preprocessing import normalize

        if self._idf is None:
            raise RuntimeError("embed: expected a fitted embedder, got none; call fit first")
        if not texts:
            return sparse.csr_matrix((0, NUM_FEATURES), dtype=np.float32)
        vectors: Vectors = self._hasher.transform(texts)
        vectors.data = (1.0 + np.log(vectors.data)) * self._idf[vectors.indices]
        vectors.eliminate_zeros()
        return normalize(vectors, copy=False)


class LatentEmbedder:
    """TF-IDF projected on its leading right singular vectors (latent semantic analysis).

    Keeps one direction per 8 questions, at most 128; below 128 questions plain TF-IDF is kept.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tfidf = TfidfEmbedder(name, words)
        self._columns = np.empty(0, np.int64)
        self._directions: np.ndarray | None = None

    def fit(self, texts: Sequence[str]) -> None:
        """Fits word weights, then the directions on words that stand in two texts or more."""
        from sklearn.decomposition import TruncatedSVD

        self._tfidf.fit(texts)
        vectors = self._tfidf.embed(texts)
        self._columns = np.flatnonzero(np.bincount(vectors.indices, minlength=NUM_FEATURES) > 1)
        num_directions = min(
            NUM_DIRECTIONS, len(texts) // MIN_QUESTIONS_PER_DIRECTION, len(self._columns) - 1
        )
        if num_directions < MIN_DIRECTIONS:
            self._directions = None
            return
        svd = TruncatedSVD(num_directions, random_state=0).fit(vectors[:, self._columns])
        self._directions = np.asarray(svd.components_).T.astype(np.float32)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """(len(texts), directions) float32, or sparse TF-IDF of a small training set."""
        vectors = self._tfidf.embed(texts)
        if self._directions is None:
            return vectors
        latent: np.ndarray = vectors[:, self._columns] @ self._directions
        norms = np.linalg.norm(latent, axis=1, keepdims=True)
        return np.divide(latent, norms, out=np.zeros_like(latent), where=norms > 0)


class SentenceEmbedder:
    """A sentence-transformers model; its vectors are normalised."""

    def __init__(self, name: str) -> None:
        try:
            from sentence_transformers import (  # pyright: ignore[reportMissingImports]
                SentenceTransformer,
            )
        except ModuleNotFoundError as error:
            raise ValueError(
                f"embedder: expected 'tfidf', 'codes' or an installed sentence-transformers for "
                f"{name!r}, got no such package; pip install sentence-transformers"
            ) from error
        self.name = name
        try:
            self._model = SentenceTransformer(name)
        # The hub, the file system and the package each have errors of their own for this.
        except Exception as error:
            raise ValueError(
                f"embedder: expected 'tfidf', 'codes' or an available sentence-transformers model, "
                f"got {name!r}: {error}"
            ) from error

    def fit(self, texts: Sequence[str]) -> None:
        """Nothing to fit: the model is trained."""

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts), width) float32."""
        if not texts:
            return np.zeros((0, 1), np.float32)
        return self._model.encode(
            list(texts), normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        ).astype(np.float32)


def make_embedder(name: str) -> Embedder:
    """The embedder of that name.

    Raises:
        ValueError: empty name, or sentence-transformers is needed and not installed.
    """
    if name == "tfidf":
        return LatentEmbedder(name)
    if name == "codes":
        return TfidfEmbedder(name, codes)
    if not name:
        raise ValueError(
            "embedder: expected 'tfidf', 'codes' or a sentence-transformers id or folder, got ''"
        )
    return SentenceEmbedder(name)
