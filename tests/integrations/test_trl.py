"""TRL's own GRPOTrainer with our log-probs and advantages in place of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from xrpo_fast.integrations.trl import XrpoMixin, entropy_from_logits, selective_log_softmax

VOCAB = 64


@pytest.fixture(autouse=True)
def _trl(require: Callable[[str], None]) -> None:
    require("trl")


def length_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(ids) % 5 / 4 for ids in completion_ids]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="w0", eos_token="w1", pad_token="w2"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=2,
        )
    ).save_pretrained(folder)
    return folder


def train(trainer_class: type, model_folder: Path, output_dir: Path) -> tuple[list[float], Any]:
    """Losses of four updates, two iterations over each of two batches, and the trainer."""
    from datasets import Dataset
    from trl import GRPOConfig

    trainer = trainer_class(
        model=str(model_folder),
        reward_funcs=length_reward,
        train_dataset=Dataset.from_list([{"prompt": f"w{i} w{i + 9}"} for i in range(3, 11)]),
        args=GRPOConfig(
            output_dir=str(output_dir),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=8,
            num_generations=4,
            num_iterations=2,
            max_completion_length=12,
            temperature=0.8,
            beta=0.05,
            learning_rate=1e-2,
            max_steps=4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        ),
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], trainer


def test_same_losses_and_weights_with_novelty_off(model_folder: Path, tmp_path: Path) -> None:
    from trl import GRPOTrainer

    class Plain(XrpoMixin, GRPOTrainer):
        novelty_weight = 0.0

    theirs, their_trainer = train(GRPOTrainer, model_folder, tmp_path / "theirs")
    ours, our_trainer = train(Plain, model_folder, tmp_path / "ours")
    assert len(theirs) == 4
    assert max(abs(loss) for loss in theirs) > 1e-3
    assert ours == pytest.approx(theirs, abs=1e-5)
    own_weights = our_trainer.model.state_dict()
    for name, weight in their_trainer.model.state_dict().items():
        torch.testing.assert_close(own_weights[name], weight, atol=1e-4, rtol=0)


def test_novelty_in_three_lines(model_folder: Path, tmp_path: Path) -> None:
    from trl import GRPOTrainer

    class Novel(XrpoMixin, GRPOTrainer):
        novelty_weight = 2.5

    plain, _ = train(GRPOTrainer, model_folder, tmp_path / "plain")
    novel, trainer = train(Novel, model_folder, tmp_path / "novel")
    assert len(novel) == 4
    assert novel != pytest.approx(plain, abs=1e-5)
    assert all(torch.isfinite(weight).all() for weight in trainer.model.state_dict().values())


@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 33)], ids=str)
def test_drop_in_log_probs_equal_trl(shape: tuple[int, ...]) -> None:
    from trl.trainer import utils as trl_utils

    torch.manual_seed(0)
    logits = torch.randn(shape)
    index = torch.randint(shape[-1], shape[:-1])
    several = torch.randint(shape[-1], (*shape[:-1], 3))
    torch.testing.assert_close(
        selective_log_softmax(logits, index, temperature=0.7),
        trl_utils.selective_log_softmax(logits, index, temperature=0.7),
    )
    torch.testing.assert_close(
        selective_log_softmax(logits, several), trl_utils.selective_log_softmax(logits, several)
    )
    torch.testing.assert_close(entropy_from_logits(logits), trl_utils.entropy_from_logits(logits))


def test_entropy_of_a_certain_token_is_zero_where_trl_gives_nan() -> None:
    logits = torch.tensor([[0.0, float("-inf")]])
    assert entropy_from_logits(logits).item() == 0
