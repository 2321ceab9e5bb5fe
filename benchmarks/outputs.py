"""What a token costs between the engine's news and the client: python benchmarks/outputs.py [MODEL] [--streams 256]

Microseconds of processor time a token, of one thread: the output processor's part for each kind of output (of deltas
the text, as the server's streams take it), then the bytes of the events of a chat that is streamed. No step is
computed, and no socket written: `benchmarks/server.py` has the whole.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median

from quire.config.engine_args import EngineArgs
from quire.engine.input_processor import InputProcessor
from quire.engine.output_processor import OutputProcessor
from quire.engine.terms import NO_TERMS
from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.dialects.chat import ChatWriter
from quire.entrypoints.server.responses import encode
from quire.entrypoints.server.service import around_text
from quire.entrypoints.server.turn import Turn
from quire.inputs import TokensPrompt
from quire.protocol.step import SequenceOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.text.configured import config_tokenizer

NUM_STEPS = 200


def measure(args: argparse.Namespace, kind: RequestOutputKind) -> tuple[float, float]:
    """Medians of steps, in us a token: of the output processor, and of the events."""
    engine_args = EngineArgs(model=args.model)
    config = engine_args.resolve()
    tokenizer = config_tokenizer(config)
    inputs, outputs = InputProcessor(config, tokenizer, True), OutputProcessor(tokenizer, engine_args)
    params = SamplingParams(max_tokens=NUM_STEPS + 1, ignore_eos=True, output_kind=kind)
    prompt: TokensPrompt = {"prompt_token_ids": list(range(10, 42))}
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "Hello"}], "stream": True})
    writers: list[ChatWriter] = []
    around: list[Sequence[bytes]] = []
    for place in range(args.streams):
        processed = inputs.process(str(place), prompt, params, None, 0.0, NO_TERMS)
        outputs.add(processed)
        head = (f"chatcmpl-{place}", 0, args.model)
        writers.append(ChatWriter(body, head, Turn(1, 1), "assistant", False))
    spent: list[tuple[int, int]] = []
    for step in range(NUM_STEPS):
        tokens = [(31 * step + 17 * place) % 900 + 20 for place in range(args.streams)]
        news = [SequenceOutput(str(place), 0, [token], None, 0) for place, token in enumerate(tokens)]
        start = time.thread_time_ns()
        ready = outputs.process(news, 1.0).ready
        if kind == RequestOutputKind.DELTA and around:
            texts = [record.text() for record in ready]
            middle = time.thread_time_ns()
            for text, ends in zip(texts, around, strict=True):
                encode(text).join(ends)
        else:
            found = [record.output() for record in ready]
            middle = time.thread_time_ns()
            if kind == RequestOutputKind.DELTA:
                for writer, output in zip(writers, found, strict=True):
                    writer.turn.take(0, output)
                    around.append(around_text(writer))
        spent.append((middle - start, time.thread_time_ns() - middle))
    first, second = (median(part) / 1000 / args.streams for part in zip(*spent, strict=True))
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--streams", type=int, default=256)
    args = parser.parse_args()
    for kind in RequestOutputKind:
        outputs, events = measure(args, kind)
        print(f"{kind.name.lower():10}: {outputs:5.2f} us a token" + f", events {events:.2f}" * (kind.name == "DELTA"))


if __name__ == "__main__":
    main()
