"""Rows of a data set as dictionaries, wherever they come from.

JSONL needs the standard library, Parquet pyarrow; folders and hub ids need the extra `data`,
generated tasks the extra `reasoning-gym`.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from xrpo_fast.config import ConfigError

Record = dict[str, Any]

_HELD_OUT_SEED_OFFSET = 1_000_003
"""Far from the seeds of training sets, which count up from small numbers."""


class DataError(ConfigError):
    """A data set cannot be used; the message says what was found. Exit code 2."""


def split_source(source: str, split: str) -> tuple[str, dict[str, str], str]:
    """(address, options, split) of a source; "?split=..." in it wins over `split`."""
    if _is_file(source):
        return source, {}, split
    address, _, query = source.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    return address, options, options.get("split", split)


def set_name(source: str, split: str) -> str:
    """What a data set is called in the ids of its prompts, wherever its file or folder lies."""
    address, _, split = split_source(source, split)
    path = Path(address)
    return path.stem if _is_file(address) else f"{path.name}/{split}"


def set_identity(source: str, split: str) -> tuple[str, str, str]:
    """Equal for equal rows: two sets of one name are told apart by it."""
    address, options, split = split_source(source, split)
    if os.path.exists(os.path.expanduser(address)):
        address = os.path.realpath(os.path.expanduser(address))
    options = sorted((k, v) for k, v in options.items() if k != "split")
    return address, "" if _is_file(address) else split, str(options)


def _is_file(address: str) -> bool:
    return address.endswith((".jsonl", ".parquet"))


def read_records(source: str, split: str, seed: int) -> Iterator[Record]:
    """Rows of a source, as dictionaries.

    Raises:
        DataError: the source is of no known kind, or cannot be read.
    """
    address, options, split = split_source(source, split)
    known = {"builtin": {"seed", "split"}, "reasoning_gym": {"seed", "size", "split"}}
    if unknown := set(options) - known.get(address.partition(":")[0], {"split"}):
        raise DataError(f"data: expected no option {sorted(unknown)} in {source!r}")
    if address == "builtin:symbols":
        return _read_symbols(options, split)
    if address.startswith("reasoning_gym:"):
        return _read_reasoning_gym(address.partition(":")[2], options, split, seed)
    path = os.path.expanduser(address)
    if _is_file(path):
        if not os.path.isfile(path):
            raise DataError(f"data: expected a file, found none at {source!r}")
        return _read_jsonl(path) if path.endswith(".jsonl") else _read_parquet(path)
    if os.path.isdir(path):
        return _read_folder(path, split)
    if address.count("/") != 1 or address.startswith((".", "/", "~")):
        raise DataError(
            f"data: expected a .jsonl or .parquet file, a folder, a hub id 'owner/name', "
            f"builtin:symbols or reasoning_gym:<dataset>, got {source!r}, which is none of them"
        )
    return _read_hub(address, split)


def _read_symbols(options: dict[str, str], split: str) -> Iterator[Record]:
    from xrpo_fast.tasks import symbols

    try:
        return iter(symbols.load(int(options.get("seed", 0)), split))  # pyright: ignore
    except ValueError as error:
        raise DataError(f"builtin:symbols: {error}") from error


def _read_jsonl(path: str) -> Iterator[Record]:
    # utf-8-sig: some editors put a byte-order mark in front.
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.encode("utf-8", "surrogateescape"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(
                    f"data: expected one JSON object per line in {path!r}, line {number} is not: "
                    f"{error}"
                ) from error
            if not isinstance(record, dict):
                raise DataError(
                    f"data: expected one JSON object per line in {path!r}, line {number} is a "
                    f"{type(record).__name__}"
                )
            yield record


def _read_parquet(path: str) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"data: expected a Parquet file at {path!r}, got {error}") from error


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "data: expected the package 'datasets' for folders and hub ids, found none; "
            "pip install 'xrpo-fast[data]', or use a .jsonl or .parquet file"
        ) from error
    return datasets


def _read_folder(path: str, split: str) -> Iterator[Record]:
    """A folder made by save_to_disk, or one that load_dataset takes (data files, a script-less
    repository)."""
    datasets = _import_datasets()
    is_saved = any(Path(path, n).exists() for n in ("dataset_dict.json", "state.json"))
    if not is_saved:
        return _from_datasets(lambda: datasets.load_dataset(path, split=split), path, split)
    loaded = datasets.load_from_disk(path)
    if isinstance(loaded, dict):
        if split not in loaded:
            raise DataError(
                f"data.split: expected one of {', '.join(sorted(loaded))} in {path!r}, "
                f"got {split!r}"
            )
        loaded = loaded[split]
    return iter(loaded)


def _read_hub(source: str, split: str) -> Iterator[Record]:
    name, _, config = source.partition(":")
    datasets = _import_datasets()
    return _from_datasets(
        lambda: datasets.load_dataset(name, config or None, split=split), source, split
    )


def _from_datasets(load: Callable[[], Any], source: str, split: str) -> Iterator[Record]:
    try:
        return iter(load())
    # datasets raises many kinds, also its own and the hub client's: all mean the same here.
    except Exception as error:
        raise DataError(
            f"data: expected {source!r} with split {split!r} to load, got "
            f"{type(error).__name__}: {error}; check its name and split, or give a local .jsonl or "
            ".parquet file; the hub needs the network, and HF_TOKEN for gated data"
        ) from error


def _read_reasoning_gym(
    name: str, options: dict[str, str], split: str, seed: int
) -> Iterator[Record]:
    """Generated problems; other splits than train take other seeds."""
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            "data: expected the package 'reasoning-gym' for reasoning_gym:<dataset>, found none; "
            "pip install 'xrpo-fast[reasoning-gym]'"
        ) from error
    is_train = split == "train"
    size = int(options.get("size", 1000 if is_train else 100))
    seed = int(options.get("seed", seed)) + (0 if is_train else _HELD_OUT_SEED_OFFSET)
    try:
        generated = reasoning_gym.create_dataset(name, size=size, seed=seed)
    # An unknown name, or an assertion of the data set's own configuration.
    except (AssertionError, ValueError) as error:
        raise DataError(f"reasoning_gym: expected a data set {name!r}, got {error}") from error
    return (
        {
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "reasoning_gym": name,
        }
        for entry in generated
    )
