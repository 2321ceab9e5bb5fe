"""`quire bench serve`: sends load to any OpenAI-compatible server, and tells how long its tokens took.

What has to be asked of the server is asked, and requests and arrivals are made ready, before the clock starts; while
it runs, this process does as little as it can.
"""

import asyncio
import contextlib
import math
import random
import sys
import time
from datetime import datetime
from typing import Any

import msgspec

from quire.entrypoints.cli.files import OutputFile, write_figures, write_text
from quire.entrypoints.cli.load import plot, report
from quire.entrypoints.cli.load.client import Client
from quire.entrypoints.cli.load.options import LoadArgs
from quire.entrypoints.cli.load.outcome import send_all
from quire.entrypoints.cli.load.workload import Request, fit_lengths, make_requests
from quire.entrypoints.cli.remote import Model, RemoteError, Server, authority
from quire.entrypoints.server.address import raise_file_limit
from quire.errors import ConfigError, QuireError


def run(args: LoadArgs) -> None:
    """Send the load, then print and write the figures; where no request succeeded, that is a RemoteError."""
    url, model = args.base_url or f"http://{authority(args.host, args.port)}", args.served_model_name or args.model
    server, models = _find(url, args, model)
    max_model_len = next((model.max_model_len for model in models if model.id == server.model), None)
    vocab_size = _vocab_size(args, server)
    if (fitted := fit_lengths(args, vocab_size, max_model_len)) != args:
        lengths = f"prompts of {fitted.random_input_len} and outputs of {fitted.random_output_len} tokens"
        print(f"{lengths}, to fit in the server's max_model_len of {max_model_len}.", file=sys.stderr)
    requests = make_requests(fitted, vocab_size, max_model_len)
    asked = random.Random(args.seed).choices(args.lora_modules or [server.model], k=len(requests))
    bodies = [_body(args, name, request) for name, request in zip(asked, requests, strict=True)]
    raise_file_limit()  # each request under way is a file
    base, route = server.address.path, "/chat/completions" if args.backend == "openai-chat" else "/completions"
    client, arrivals = Client(server.address, server.headers), [request.arrival for request in requests]
    path = f"{base.removesuffix('/v1')}/{args.endpoint.lstrip('/')}" if args.endpoint else base + route
    rate = args.request_rate or math.inf
    facts = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "endpoint_type": args.backend,
        "label": args.label,
        "model_id": server.model,
        "tokenizer_id": args.tokenizer or server.model,
        "dataset_name": args.dataset_name,
        "request_rate": "trace" if args.keeps_trace_times else "inf" if rate == math.inf else rate,
        "burstiness": args.burstiness or 1.0,
        "max_concurrency": args.max_concurrency,
        **dict(text.split("=", 1) for text in args.metadata or ()),
    }
    saves, flag = args.save_result or args.append_result, f"--result-{'filename' if args.result_filename else 'dir'}"
    results = OutputFile(args.result_path(facts), flag) if saves else None
    warmups = bodies[: args.num_warmups]
    if warmups and asyncio.run(send_all(client, path, warmups, [0.0] * len(warmups), args.max_concurrency))[1]:
        raise KeyboardInterrupt
    start, cpu_start = time.perf_counter(), time.process_time()
    outcomes, interrupted = asyncio.run(send_all(client, path, bodies, arrivals, args.max_concurrency))
    duration = max((outcome.end for outcome in outcomes), default=time.perf_counter()) - start
    cpu_seconds = time.process_time() - cpu_start
    facts |= {"num_prompts": len(outcomes), "client_cpu_seconds": cpu_seconds}
    figures = report.figures(outcomes, duration, args.bounds, args.percentiles)
    saved = facts | figures | (report.details(outcomes) if args.save_detailed else {})
    print(f"{report.table(figures)}\n\nThis client used {cpu_seconds / duration:.0%} of a processor core.")
    write_figures(args.output_json, saved)
    write_figures(results, saved, args.append_result)
    if args.plot is not None:
        write_text(args.plot, "--plot", plot.render(outcomes, figures, facts))
    if interrupted:
        raise KeyboardInterrupt
    if not figures["completed"]:
        raise RemoteError(f"none of the {len(outcomes)} requests succeeded.")


def _find(url: str, args: LoadArgs, model: str | None) -> tuple[Server, list[Model]]:
    """The server and its models, as soon as it tells them."""
    end = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            server = Server(url, args.api_key, model)
            return server, server.models()
        except RemoteError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.25)


def _vocab_size(args: LoadArgs, server: Server) -> int | None:
    """How many token ids prompts can be made of; None where they have to be text."""
    with contextlib.suppress(QuireError, LookupError, TypeError, ValueError):  # only some servers tell
        if args.backend != "openai-chat":
            facts = msgspec.json.decode(server.get(server.address.path.removesuffix("/v1") + "/tokenizer_info"))
            return max(1, int(facts["vocab_size"]))
    return None


def _body(args: LoadArgs, model: str, request: Request) -> bytes:
    question: dict[str, Any] = {"prompt": request.prompt}
    if args.backend == "openai-chat":
        if not isinstance(request.prompt, str):
            raise ConfigError("--backend openai-chat takes prompts of text, not of token ids.")
        question = {"messages": [{"role": "user", "content": request.prompt}]}
    fields = {"model": model, **question, "max_tokens": request.max_tokens}
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    ignores = args.dataset_name != "custom" if args.ignore_eos is None else args.ignore_eos
    chosen = {"ignore_eos": ignores or None, "temperature": args.temperature}
    fields |= {name: value for name, value in chosen.items() if value is not None}
    return msgspec.json.encode(fields | (args.extra_body or {}))
