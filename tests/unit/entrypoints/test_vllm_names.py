"""What vLLM's scripts import: there, or an error that says why not; and nothing of Quire's own is in its way."""

import importlib.resources
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import quire
from quire.entrypoints.vllm_names import NotHereError, named, vllm_names
from quire.errors import NotYetSupportedError

ROOT = Path(__file__).parents[3]


def test_every_place_in_the_table_exists() -> None:
    for module, names in vllm_names().items():
        for name, found in names.items():
            if " " not in found:
                assert named(module, name) is not None
            else:
                assert found.startswith("is ")
                assert found.endswith(".")


@pytest.mark.parametrize("module", [name for name in vllm_names() if name.startswith("quire.")])
def test_every_module_of_the_table_is_found(module: str) -> None:
    names = vllm_names()[module]
    if "*" in names:
        with pytest.raises(NotHereError, match=f"^{module} is not here"):
            importlib.import_module(module)
        return
    found = importlib.import_module(module)
    assert isinstance(found, ModuleType)
    for name, home in names.items():
        if " " not in home:
            assert getattr(found, name) is not None
        elif not hasattr(type(found), name):
            with pytest.raises(NotHereError, match=f"^{module}.{name} is "):
                getattr(found, name)


@pytest.mark.parametrize(
    "line",
    [
        "from quire import LLM, AsyncEngineArgs, EngineArgs, LLMEngine, RequestOutput, SamplingParams",
        "from quire.engine.arg_utils import AsyncEngineArgs, EngineArgs",
        "from quire.engine.async_llm_engine import AsyncLLMEngine",
        "from quire.v1.engine.async_llm import AsyncLLM",
        "from quire.v1.engine.exceptions import EngineDeadError, EngineGenerateError",
        "from quire.utils.argparse_utils import FlexibleArgumentParser",
        "from quire.utils import FlexibleArgumentParser, suggest",
        "from quire.logger import init_logger",
        "from quire.config import VllmConfig, model",
        "from quire.sampling_params import RequestOutputKind, StructuredOutputsParams",
        "from quire.inputs import TextPrompt, TokenInputs, TokensPrompt",
        "from quire.distributed import cleanup_dist_env_and_memory",
        "from quire.v1.metrics.reader import Counter, Gauge, Histogram, Vector",
        "from quire.lora.request import LoRARequest",
        "from quire.outputs import RequestOutput",
        "from quire.logprobs import Logprob, PromptLogprobs",
        "from quire.sequence import Logprob, RequestMetrics",
        "from quire.tokenizers import TokenizerLike",
        "from quire.utils import random_uuid; assert random_uuid() + '' != random_uuid()",
        "from quire.platforms import current_platform",
        "from quire.usage.usage_lib import UsageContext; UsageContext.OPENAI_API_SERVER",
        "from quire.inputs.data import TextPrompt, TokensPrompt",
        "from quire.sequence import PromptLogprobs, SampleLogprobs",
        "from quire.beam_search import BeamSearchOutput",
        "from quire.entrypoints.chat_utils import ChatCompletionMessageParam, ConversationMessage",
        "from quire.distributed.kv_events import KVEventBatch",
        "import quire.v1.metrics.reader as reader; reader.Gauge",
        "from quire.utils.print_utils import print_embeddings; print_embeddings([0.5])",
        "from quire.config.vllm import VllmConfig",
        "from quire.config.parallel import ParallelConfig",
    ],
)
def test_lines_of_scripts(line: str) -> None:
    exec(line, {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from quire import ModelRegistry", "quire.ModelRegistry is not here: models are Quire's own"),
        ("from quire.model_executor.models.llama import X", "quire.model_executor is not here: models are Quire's own"),
        ("from quire.v1.sample.logits_processor import LogitsProcessor", r"SamplingParams\(logits_processors="),
        ("from quire.config import CompilationConfig", "CompilationConfig is not here: nothing is compiled"),
        ("from quire.config.compilation import CompilationConfig", "quire.config.compilation is not here: nothing is"),
        ("from quire.config.kv_transfer import KVTransferConfig", "quire.config.kv_transfer is not here yet"),
        ("import quire.collect_env", "'quire collect-env' shows"),
        ("from quire.v1.core.sched.output import X", "quire.v1.core is not here: the scheduler"),
        ("from quire.utils.math_utils import cdiv", "quire.utils.math_utils is not here: -"),
        ("from quire.v1.engine import FinishReason", "FinishReason is not here: CompletionOutput.finish_reason is"),
        ("from quire.inputs.parse import parse_and_batch_prompt", "quire.inputs.parse is not here: LLM.generate takes"),
        ("from quire.tasks import SupportedTask", "quire.tasks is not here: a model here generates"),
        ("from quire.config import PoolerConfig", "PoolerConfig is not here yet: a vector is the last token's."),
        ("from quire.entrypoints.openai.protocol import ChatCompletionRequest", "'quire serve' is the server"),
        ("from quire.entrypoints.openai.api_server import build_app", "build_app is not here: 'quire serve' is"),
        ("import quire.multimodal.image", "quire.multimodal is not here yet: a prompt is text or token ids."),
        ("from quire.config import WeightTransferConfig", "WeightTransferConfig is not here yet: update_weights takes"),
        ("from quire.distributed.weight_transfer.base import X", "weight_transfer is not here yet: update_weights"),
        ("from quire.distributed.device_communicators.pynccl import X", "ranks meet in Quire's own groups"),
        ("from quire.utils.serial_utils import binary2tensor", "serial_utils is not here: a vector that a server"),
        ("from quire.entrypoints.serve.utils.api_utils import with_cancellation", "'quire serve' is the server"),
        ("from quire.entrypoints.openai.run_batch import BatchRequestInput", "'quire run-batch' answers a file"),
    ],
)
def test_lines_that_say_why_not(line: str, message: str) -> None:
    with pytest.raises(ImportError, match=message) as refusal:
        exec(line, {})
    assert isinstance(refusal.value, NotYetSupportedError)


@pytest.mark.parametrize(
    "line", ["import quire.nonsense", "from quire.utils import nonsense", "from quire.config import nonsense"]
)
def test_names_that_nobody_knows(line: str) -> None:
    with pytest.raises(ImportError) as refusal:
        exec(line, {})
    assert not isinstance(refusal.value, NotHereError)
    with pytest.raises(AttributeError, match="module 'quire' has no attribute 'nonsense'"):
        quire.nonsense  # noqa: B018


def test_quires_own_modules_are_as_they_are() -> None:
    import quire.config
    import quire.sampling_params as own

    assert own.SamplingParams is quire.SamplingParams
    assert own.__file__ is not None
    assert Path(own.__file__).name == "sampling_params.py"
    assert not hasattr(quire.config, "nonsense")
    loader: Any = own.__loader__
    assert "class SamplingParams(" in loader.get_source("quire.sampling_params"), "runpy, resources and the like ask it"
    assert importlib.resources.files("quire.entrypoints").joinpath("not_yet.txt").is_file()
    missing: Any = getattr(own, "SamplingParamz", None)
    assert missing is None


def test_vllms_module_of_the_server_is_the_server() -> None:
    """Charts and compose files start it so."""
    for flags, words in ((["--help=port"], "--port"), (["--model", "/nowhere", "--port", "0"], "'/nowhere'")):
        command = [sys.executable, "-m", "quire.entrypoints.openai.api_server", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert words in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert done.returncode == (0 if words == "--port" else 1)


def test_vllms_module_of_batches_answers_files(tmp_path: Path) -> None:
    flags = ["-i", str(tmp_path / "nowhere.jsonl"), "-o", str(tmp_path / "results.jsonl"), "--model", "demo"]
    command = [sys.executable, "-m", "quire.entrypoints.openai.run_batch", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "nowhere.jsonl" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_importing_quire_stays_light() -> None:
    code = "import sys, quire; print(sorted({'torch', 'numpy', 'argparse', 'msgspec', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
