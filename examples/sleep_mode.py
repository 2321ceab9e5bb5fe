"""Give an engine's memory back while it has nothing to do. Run: python examples/sleep_mode.py"""

import time

from quire import LLM, SamplingParams

PROMPT = "The lamp went out, and"


def main() -> None:
    llm = LLM(model="demo", enable_sleep_mode=True)  # every engine can sleep: the option is vLLM's
    params = SamplingParams(temperature=0.0, max_tokens=24)
    before = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    print(f"awake:  {before!r}")
    llm.sleep(level=1)
    print(f"asleep: {llm.is_sleeping()}")
    start = time.perf_counter()
    llm.wake_up()
    print(f"awake again after {time.perf_counter() - start:.2f} s")
    after = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    print(f"the same text: {after == before}")


if __name__ == "__main__":
    main()
