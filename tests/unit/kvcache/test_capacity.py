"""The size of the KV cache, from numbers to numbers."""

import json
from pathlib import Path

import pytest

from quire import EngineArgs
from quire.config.engine_args import EngineConfig
from quire.errors import ConfigError
from quire.kvcache.capacity import CPU_SHARE, plan_kv_blocks
from quire.protocol.cache import KVPlan, MemoryReport

BLOCK = 1 << 20


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def resolve(model_dir: Path, **options) -> EngineConfig:
    return EngineArgs(model=str(model_dir), load_format="dummy", block_size=16, **options).resolve()


def report(available: int = 10_000 * BLOCK, activations: int = 0) -> MemoryReport:
    return MemoryReport(available_bytes=available, activation_bytes=activations, block_bytes=BLOCK)


def test_no_more_blocks_than_all_contexts_can_use(model_dir) -> None:
    config = resolve(model_dir, max_model_len=100, max_num_seqs=3)
    assert plan_kv_blocks(config, report()) == KVPlan(7 * 3, 100)


def test_share_of_free_memory_less_activations(model_dir) -> None:
    config = resolve(model_dir, max_num_seqs=1000)
    plan = plan_kv_blocks(config, report(1000 * BLOCK, 100 * BLOCK))
    assert plan.num_blocks == int(1000 * CPU_SHARE) - 100
    config = resolve(model_dir, max_num_seqs=1000, gpu_memory_utilization=0.9)
    assert plan_kv_blocks(config, report(1000 * BLOCK, 100 * BLOCK)).num_blocks == 800


def test_bytes_and_blocks_override(model_dir) -> None:
    config = resolve(model_dir, kv_cache_memory=40 * BLOCK + 5)
    assert plan_kv_blocks(config, report()).num_blocks == 40
    config = resolve(model_dir, num_kv_blocks=33, kv_cache_memory=1)
    assert plan_kv_blocks(config, report()).num_blocks == 33


def test_context_is_shortened_only_when_left_open(model_dir) -> None:
    config = resolve(model_dir, num_kv_blocks=3)
    assert plan_kv_blocks(config, report()) == KVPlan(3, 48)
    config = resolve(model_dir, num_kv_blocks=3, max_model_len=64)
    with pytest.raises(ConfigError, match=r"max_model_len=64 needs 4\.0 MiB.*3 blocks \(48 tokens\).*at most 48"):
        plan_kv_blocks(config, report())


def test_no_memory_at_all(model_dir) -> None:
    config = resolve(model_dir)
    with pytest.raises(ConfigError, match="no memory for the KV cache: -3 MiB"):
        plan_kv_blocks(config, report(available=5 * BLOCK, activations=5 * BLOCK))
