"""The engine's counters and gauges, under the names of /metrics. Run: python examples/metrics.py"""

from quire import LLM, SamplingParams
from quire.logger import init_logger
from quire.v1.metrics.reader import Counter, Gauge, Histogram, Vector

logger = init_logger("examples.metrics")


def main() -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    llm = LLM(model="demo", disable_log_stats=False, speculative_config=speculative)
    outputs = llm.generate(["One, two, three, one, two,"] * 3, SamplingParams(temperature=0.0, max_tokens=32))
    logger.warning("%d tokens were generated", sum(len(output.outputs[0].token_ids) for output in outputs))
    for metric in llm.get_metrics():
        match metric:
            case Gauge():
                print(f"{metric.name} (gauge) = {metric.value}")
            case Counter():
                print(f"{metric.name} (counter) = {metric.value}")
            case Vector():
                print(f"{metric.name} (vector) = {metric.values}")
            case Histogram():
                print(f"{metric.name} (histogram)")
    times = outputs[0].metrics
    if times is not None and times.first_token_time is not None and times.finished_time is not None:
        print(f"first token after {times.first_token_time - times.arrival_time:.4f} s")
    print(f"computed since the start: {llm.get_metrics().prefix_cache_queries_total} prompt tokens")


if __name__ == "__main__":
    main()
