"""Workers with one tiny model, to be driven by hand."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import EngineArgs
from quire.config.worker import WorkerConfig
from quire.executor.inprocess import InProcessExecutor
from quire.protocol.cache import CacheLayout
from quire.speculative.base import Proposer
from quire.worker.speculation import Speculation

sys.path.insert(0, str(Path(__file__).parent))  # for driving.py

from driving import BLOCK_SIZE, MAX_DRAFTS, VOCAB, Driver


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers without weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 96, "torch_dtype": "float32",
    }  # fmt: skip
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def drive(tiny_model: Path) -> Callable[..., Driver]:
    """Makes drivers of fresh workers: `drive(proposer=None, kernels="auto")`."""

    def make(proposer: Proposer | None = None, kernels: str = "auto") -> Driver:
        model = EngineArgs(model=str(tiny_model), load_format="dummy", skip_tokenizer_init=True).resolve().model
        config = WorkerConfig(
            model=model,
            block_size=BLOCK_SIZE,
            max_num_seqs=6,
            max_num_batched_tokens=64,
            max_num_drafts=MAX_DRAFTS,
            kernels=kernels,
            load_format="dummy",
            debug=True,
        )

        executor = InProcessExecutor(config)
        executor.start(progress=False)
        report = executor.cache_report()
        layout = CacheLayout(block_size=BLOCK_SIZE, groups=report.groups, num_blocks=[100], max_model_len=96)
        executor.initialize_cache(layout)
        if proposer is not None:
            executor.worker.runner.speculation = Speculation(executor.worker.device, proposer)
        return Driver(executor, 100)

    return make
