"""Tiny models of several architectures and requests for them, for the engines' tests."""

import pytest
import torch

from xrpo_fast.types import Request

VOCAB_SIZE = 128


@pytest.fixture(scope="session")
def build_model():
    """Function (architecture, seed=0, **config) -> causal model in fp32, head size 32."""

    def build(architecture, seed=0, **overrides):
        import transformers

        config_class = getattr(transformers, f"{architecture}Config")
        config = config_class(
            **{
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "max_position_embeddings": 512,
                "tie_word_embeddings": False,
                "sliding_window": None,
                "initializer_range": 0.1,
                "pad_token_id": 0,
                "bos_token_id": None,
                "eos_token_id": 5,
                **overrides,
            }
        )
        torch.manual_seed(seed)
        return getattr(transformers, f"{architecture}ForCausalLM")(config).float()

    return build


@pytest.fixture(scope="session")
def make_requests():
    """Function (prompt_lengths, rollouts=1, max_tokens=16, ...) -> requests, prompt by prompt."""

    def make(prompt_lengths, rollouts=1, max_tokens=16, first_id=0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        requests = []
        for group, length in enumerate(prompt_lengths):
            prompt = torch.randint(10, VOCAB_SIZE, (length,), generator=generator).tolist()
            for sample_index in range(rollouts):
                number = first_id + len(requests)
                requests.append(
                    Request(
                        id=number,
                        group=group,
                        sample_index=sample_index,
                        prompt_ids=tuple(prompt),
                        seed=1000 * seed + number,
                        max_tokens=max_tokens,
                    )
                )
        return requests

    return make


@pytest.fixture(scope="session")
def run_engine():
    """Function (engine, requests) -> completions by request id, all of them."""

    def run(engine, requests):
        engine.submit(requests)
        done = []
        while len(done) < len(requests):
            done += engine.step()
        return {completion.request.id: completion for completion in done}

    return run
