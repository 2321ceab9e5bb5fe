"""The training of adapters: one very short training of each kind, whose files the engine takes."""

import importlib.util
import sys
from pathlib import Path

import pytest

from quire import LLM, LoRARequest, PromptAdapterRequest, SamplingParams
from quire.utils.hub import resolve_model_path

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.mark.slow
def test_short_trainings_make_adapters_that_the_engine_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train_demo", "train_adapters"):
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    text, base = tmp_path / "text.txt", str(resolve_model_path("demo"))
    text.write_text("\n\n".join(f"Ship {i} lay at anchor, and the captain slept on deck." for i in range(200)))
    for name, kind in (("lora", "--rank 4"), ("soft", "--virtual 6 --rate 0.03")):
        sizes = f"{kind} --steps 12 --windows 4 --length 32 --base {base}"
        sys.modules["train_adapters"].main([str(text), "--out", str(tmp_path / name), *sizes.split()])
        losses = [line.split()[4] for line in capsys.readouterr().out.splitlines()]
        assert float(losses[-1]) < float(losses[0])
        assert (tmp_path / name / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644
    lora = LoRARequest("lora", 1, str(tmp_path / "lora"))
    soft = PromptAdapterRequest("soft", 2, str(tmp_path / "soft"), 6)
    llm = LLM("demo", enable_lora=True, enable_prompt_adapter=True, show_progress=False)
    outputs = llm.generate(
        ["Ship 7"] * 3,
        SamplingParams(max_tokens=12, temperature=0.0),
        use_tqdm=False,
        lora_request=[lora, None, None],
        prompt_adapter_request=[None, soft, None],
    )
    assert len({output.outputs[0].text for output in outputs}) == 3
