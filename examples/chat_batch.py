"""Many conversations at once, with a template of one's own. Run: python examples/chat_batch.py"""

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput

CONVERSATION = [
    {"role": "system", "content": "You are an old sailor."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Good day to you!"},
    {"role": "user", "content": [{"type": "text", "text": "Tell me of the sea."}]},
]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}sailor:"


def show(outputs: list[RequestOutput]) -> None:
    for number, output in enumerate(outputs):
        print(f"{number}: {len(output.prompt_token_ids or [])} tokens in, then {output.outputs[0].text!r}")


def main() -> None:
    llm = LLM(model="demo", max_model_len=256)
    params = SamplingParams(temperature=0.7, max_tokens=16, seed=1)
    show(llm.chat(CONVERSATION, params, use_tqdm=False))
    show(llm.chat([CONVERSATION] * 4, params))
    show(llm.chat(CONVERSATION, params, use_tqdm=False, chat_template=TEMPLATE))


if __name__ == "__main__":
    main()
