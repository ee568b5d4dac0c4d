"""Embedders: unit rows, sensible cosines, errors."""

import math
import random

import numpy as np
import pytest
from scipy import sparse

from xrpo_fast.exemplars.embed import codes, make_embedder


def cosines(embedder, texts):
    vectors = embedder.embed(texts)
    product = vectors @ vectors.T
    return product.toarray() if sparse.issparse(product) else product


def test_tfidf_equals_its_formula():
    texts = ["red apple", "red red pear", "blue plum"]
    embedder = make_embedder("tfidf")
    embedder.fit(texts)
    common, rare = 1 + math.log(4 / 3), 1 + math.log(4 / 2)
    first, second = [common, rare], [(1 + math.log(2)) * common, rare]
    expected = first[0] * second[0] / (math.hypot(*first) * math.hypot(*second))
    assert cosines(embedder, texts)[0, 1] == pytest.approx(expected, rel=1e-6)
    assert cosines(embedder, texts)[0, 2] == 0


def test_codes():
    assert codes("?kamo:54") == ["ka", "mo"]
    embedder = make_embedder("codes")
    embedder.fit(["?ka:77", "?mo:12", "?kamo:54"])
    found = cosines(embedder, ["?ka:11", "?ka:93", "?ko:11", "?kamo:00"])
    assert found[0, 1] == pytest.approx(1, abs=1e-6)
    assert found[0, 2] == 0
    assert found[0, 3] == pytest.approx(math.sqrt(0.5), abs=1e-6)


def test_latent_directions_bring_synonyms_together():
    """Words that never share a text, but share their company, become similar (20 topics, 20
    directions)."""
    rng = random.Random(0)
    company = [f"word{i}" for i in range(60)]
    texts = []
    for _ in range(160):
        topic = rng.randrange(20)
        shared = rng.sample(company[3 * topic : 3 * topic + 3], 2)
        name = rng.choice((f"car{topic}", f"auto{topic}"))
        texts.append(" ".join([name, *shared]))
    latent, plain = make_embedder("tfidf"), make_embedder("tfidf")
    latent.fit(texts)
    plain.fit(texts[:100])
    assert cosines(plain, ["car3", "auto3"])[0, 1] == 0
    assert cosines(latent, ["car3", "auto3"])[0, 1] > 0.5
    assert cosines(latent, ["car3", "auto4"])[0, 1] < 0.3
    vectors = latent.embed([*texts[:5], "unknown"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 1, 1, 1, 0], atol=1e-6)


@pytest.mark.parametrize("name", ["tfidf", "codes"])
def test_text_without_words_and_no_text(name):
    embedder = make_embedder(name)
    embedder.fit(["one two", ""])
    assert embedder.embed([]).shape[0] == 0
    assert not cosines(embedder, ["", "!?"]).any()


def test_same_vectors_every_time():
    texts = [f"a{i % 17} b{i % 19} c{i % 23} d{i}" for i in range(300)]
    first, second = make_embedder("tfidf"), make_embedder("tfidf")
    first.fit(texts)
    second.fit(texts)
    np.testing.assert_array_equal(first.embed(texts), second.embed(texts))


def test_errors():
    with pytest.raises(RuntimeError, match="embed: expected a fitted embedder, got none"):
        make_embedder("codes").embed(["?ka:77"])
    with pytest.raises(ValueError, match="embedder: expected 'tfidf', 'codes' or"):
        make_embedder("")


def test_sentence_transformers_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match=r"'some/model', got no such package; pip install"):
        make_embedder("some/model")


def test_sentence_transformers_folder(tmp_path, require):
    """A tiny model built here: unit rows, the model's own cosines, retrieval by them."""
    require("sentence_transformers")
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sheep", "goat", "prime", "factor"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertModel(BertConfig(vocab_size=len(words), intermediate_size=16, **sizes))
    bert.save_pretrained(tmp_path / "bert")
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    parts = [models.Transformer(str(tmp_path / "bert")), models.Pooling(16)]
    model = SentenceTransformer(modules=parts)
    model.save(str(tmp_path / "model"))
    texts = ["sheep goat", "goat sheep sheep", "prime factor"]
    embedder = make_embedder(str(tmp_path / "model"))
    embedder.fit(texts)
    plain = model.encode(texts).astype(np.float64)
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(cosines(embedder, texts), plain @ plain.T, atol=1e-5)
    assert embedder.embed([]).shape[0] == 0
