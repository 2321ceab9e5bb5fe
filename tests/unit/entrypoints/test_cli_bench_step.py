"""`quire bench step`: a small run on the bundled model, what it counts, its picture, wrong usage."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.entrypoints.cli.bench_step import Kernel, Limits
from quire.entrypoints.cli.main import main
from quire.kvcache.pool import BlockPool
from quire.models.compiled import CompiledModel
from quire.ops.native.library import default_target, levels
from quire.ops.native.matrix import weight_format, weight_order
from quire.ops.native.structs import Type

needs_kernels = pytest.mark.skipif(len(levels()) == 1, reason="there are no compiled kernels here")
SMALL = [
    "--max-model-len",
    "256",
    "--num-kv-blocks",
    "64",
    "--batch-size",
    "3",
    "--input-len",
    "40",
    "--num-steps",
    "4",
]


@pytest.mark.slow
@needs_kernels
def test_a_run_on_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is counted is what the model's shape and the batch make: 5 layers of width 256 and 4 KV heads of 32."""
    figures, plot = tmp_path / "f.json", tmp_path / "f.svg"
    assert main(["bench", "step", "demo", *SMALL, "--output-json", str(figures), "--plot", str(plot)]) == 0
    found = json.loads(figures.read_text())
    assert all(found["limits"][rate] > 1e8 for rate in ("read", "multiply", "multiply_bytes", "multiply_floats"))
    prompts, decoding = ({one["name"]: one for one in found[phase]["kernels"]} for phase in ("prompts", "decoding"))
    assert prompts.keys() == decoding.keys() >= {"attention", "norm", "product 256 x 704 bf16"}
    down, head = "product 256 x 704 bf16", "product 4096 x 256 bf16"
    for kernels, tokens in ((prompts, 3 * 40), (decoding, 3)):
        assert kernels[down]["calls"] == 5
        kept = weight_order(default_target().level, Type.BF16)[0]
        assert kernels[down]["num_bytes"] == 5 * 256 * 704 // 512 * weight_format(kept).tile_bytes
        assert kernels[down]["operations"] == 2 * 256 * 704 * (4 * tokens + 3)  # in the last layer of the last tokens
        assert kernels[head]["operations"] == 2 * 4096 * 256 * 3  # of the last tokens only
    each = 4 * 8 * 32  # operations of a token and a key in a layer: 8 heads of 32
    assert prompts["attention"]["operations"] == each * 3 * (4 * 40 * 41 / 2 + 40)
    # 42 to 45 keys: the first step is not timed
    assert decoding["attention"]["operations"] == pytest.approx(each * 3 * 5 * 43.5)
    of_floats = [prompts[name]["floats"] for name in ("attention", down)]
    assert of_floats == [default_target().level == "avx2", False]
    step = found["decoding"]["seconds"]
    assert 0 < sum(one["seconds"] for one in decoding.values()) < step
    ElementTree.fromstring(plot.read_text())
    printed = capsys.readouterr().out
    assert printed.count("The floor is") == 2
    assert "outside of kernels" in printed


@pytest.mark.slow
@needs_kernels
def test_steps_that_are_timed_meet_cache_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first touch of memory is no part of a step: sequences of 40 tokens have a fourth block of 16 on the way."""
    used: set[int] = set()
    fresh = [0]  # blocks first used, by what model.spent() lies before: each phase calls it at the start and at the end
    allocate, spent = BlockPool.allocate, CompiledModel.spent

    def counted(pool: BlockPool, count: int) -> list[int]:
        taken = allocate(pool, count)
        fresh[-1] += len({*taken} - used)
        used.update(taken)
        return taken

    def marked(model: CompiledModel) -> object:
        fresh.append(0)
        return spent(model)

    monkeypatch.setattr(BlockPool, "allocate", counted)
    monkeypatch.setattr(CompiledModel, "spent", marked)
    assert main(["bench", "step", "demo", *SMALL, "--block-size", "16", "--num-steps", "16"]) == 0
    _, untimed, _, prompts, _, decoding, _ = fresh
    assert (untimed > 0, prompts, decoding) == (True, 0, 0)


@pytest.mark.slow
@needs_kernels
def test_experts_are_counted_by_the_rows_they_had(tmp_path: Path) -> None:
    """Two layers of six experts of width 96, of which each token has two."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "head_dim": 32}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 512}
    config |= {"intermediate_size": 128, "moe_intermediate_size": 96, "num_experts": 6, "num_experts_per_tok": 2}
    config |= {"hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    config |= {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "norm_topk_prob": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    figures = tmp_path / "f.json"
    dummy = ["--load-format", "dummy", "--skip-tokenizer-init", "--output-json", str(figures)]
    assert main(["bench", "step", str(tmp_path), *SMALL, *dummy]) == 0
    found = json.loads(figures.read_text())
    for phase, tokens in (("prompts", 3 * 40), ("decoding", 3)):
        kernels = {one["name"]: one for one in found[phase]["kernels"]}
        assert kernels["experts"]["calls"] == kernels["route"]["calls"] == kernels["mix"]["calls"] == 2
        up, down = kernels["product 192 x 64 bf16"], kernels["product 64 x 96 bf16"]
        # In the last layer of the last tokens.
        assert up["operations"] == pytest.approx(2 * 2 * 192 * 64 * (tokens + 3))
        assert down["operations"] == pytest.approx(2 * 2 * 64 * 96 * (tokens + 3))
        assert 2 * 2 <= up["calls"] == down["calls"] <= 2 * 6, "those that have rows, in each layer"
        assert 0 < down["num_bytes"] < up["num_bytes"]


@pytest.mark.slow
@needs_kernels
def test_keys_in_common_are_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "f.json"
    shared = ["--shared-len", "32", "--output-json", str(figures)]
    assert main(["bench", "step", "demo", *SMALL, *shared]) == 0
    found = json.loads(figures.read_text())
    assert "prompts" not in found  # they were cached
    kernels = {one["name"]: one for one in found["decoding"]["kernels"]}
    assert kernels["attention"]["num_bytes"] == 5 * (3 * 43.5 - 2 * 32) * 4 * 32 * 2 * 2
    assert kernels["attention"]["operations"] == 5 * 4 * 3 * 43.5 * 8 * 32
    assert main(["bench", "step", "demo", *SMALL, "--shared-len", "41"]) != 0
    assert "--shared-len must be from 0 to --input-len = 40; it is 41." in capsys.readouterr().err


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_prompts_over_several_steps_are_told_by_the_step(quantization: str, tmp_path: Path) -> None:
    figures = tmp_path / "f.json"
    chunked = ["--max-num-batched-tokens", "32", "--quantization", quantization, "--output-json", str(figures)]
    assert main(["bench", "step", "demo", *SMALL, *chunked]) == 0
    found = json.loads(figures.read_text())
    kernels = {one["name"]: one for one in found["prompts"]["kernels"]}
    down = f"product 256 x 704 {quantization}"
    assert kernels[down]["operations"] == pytest.approx(2 * 256 * 704 * (4 * 120 + 3) / 4)
    words = quantization == "w8a8" and default_target().level == "avx2"  # which can't multiply bytes and bytes
    assert [kernels[name]["rounds_x"] for name in (down, "attention")] == [0 if words else 1, 0]
    # The last prompt ends in the fourth step or later: the first sequence has decoded meanwhile, and goes on with it.
    attention = next(one for one in found["decoding"]["kernels"] if one["name"] == "attention")
    assert attention["operations"] / (5 * 4 * 3 * 8 * 32) > 43.5 + 0.9


@needs_kernels
@pytest.mark.slow
def test_sequences_that_do_not_fit_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "demo", *SMALL, "--max-num-seqs", "2"]) != 0
    assert "a sequence ended before 4 steps of all 3 were timed: lower --batch-size" in capsys.readouterr().err


def test_a_floor_is_the_longer_time() -> None:
    limits = Limits(read=10.0, multiply=100.0, multiply_bytes=200.0, multiply_floats=50.0)
    kernel = Kernel("a", 1, 4.0, num_bytes=20.0, operations=100.0)
    assert (kernel.floor(limits), kernel.bound(limits)) == (2.0, "memory")
    kernel.operations = 300.0
    assert (kernel.floor(limits), kernel.bound(limits)) == (3.0, "multiplication")
    kernel.floats = True
    assert (kernel.floor(limits), kernel.bound(limits)) == (6.0, "multiplication")
    kernel.rounds_x = 1
    assert (kernel.floor(limits), kernel.bound(limits)) == (2.0, "memory")
    kernel.rounds_x = 2
    assert (kernel.floor(limits), kernel.bound(limits)) == (3.0, "multiplication")
    assert Kernel("b", 1, 4.0).bound(limits) == "neither"


def test_plain_torch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "demo", *SMALL, "--kernels", "torch"]) != 0
    assert "times compiled kernels" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--plot", "--output-json"])
def test_what_can_not_be_written_is_told_before_a_model_is_looked_for(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what can be is left as it is when the work fails."""
    reasons = {str(tmp_path / "gone" / "f"): "No such file or directory", "f" * 300: "File name too long"}
    for path, reason in reasons.items():
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "step", str(tmp_path / "no-model"), flag, path])
        assert capsys.readouterr().err.startswith(f"error: argument {flag}: {path}: {reason}\n")
    (tmp_path / "old").write_text("as before")
    for name in ("old", "new"):
        assert main(["bench", "step", str(tmp_path / "no-model"), flag, str(tmp_path / name)]) != 0
    assert (tmp_path / "old").read_text() == "as before"
    assert not (tmp_path / "new").exists()
