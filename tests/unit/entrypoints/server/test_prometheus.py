"""/metrics as Prometheus reads it."""

import re
import subprocess
import sys
import time

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from quire.config.engine_args import EngineArgs
from quire.entrypoints.server.metrics import ServingMetrics
from quire.entrypoints.server.prometheus import Figures, HttpCounts, render
from quire.protocol.stats import Counts, EngineStats, Limits, SpeculationStats, TierStats
from tests.arrivals import arrive

LABELS = {"model_name": 'a "name"\\\n', "engine": "0"}
# Those of vLLM that its dashboard and the autoscalers read.
HISTOGRAMS = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
    "iteration_tokens_total", "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds", "request_prefill_kv_computed_tokens",
}  # fmt: skip


@pytest.fixture
def families() -> dict[str, Metric]:
    """The metrics after one request, read by Prometheus' own parser."""
    metrics = ServingMetrics(100)
    arrive(metrics, "a", 60, 30, 1, 0.0)
    metrics.on_scheduled("a", 0.4)
    metrics.on_tokens("a", 0, 1, 0.5)
    metrics.on_tokens("a", 0, 1, 0.53)
    metrics.on_finished("a", ["length"], 32, 0.6)
    metrics.event_loop_max_stall = 0.125
    stats = EngineStats(2, 3, 0.5, 7, 60, 32, {"blocks": 1, "grammar": 2})
    body, content_type = render([Figures(metrics, [stats], LABELS["model_name"])], HttpCounts(), 200.0)
    assert content_type.startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def value(families: dict[str, Metric], family: str, name: str | None = None, **labels: str) -> float:
    wanted = LABELS | labels
    (found,) = [s for s in families[family].samples if s.name == (name or family) and s.labels == wanted]
    return found.value


def test_gauges_and_counters(families: dict[str, Metric]) -> None:
    assert value(families, "vllm:num_requests_running") == 2
    assert value(families, "vllm:num_requests_waiting") == 3
    assert value(families, "vllm:kv_cache_usage_perc") == 0.5
    assert value(families, "quire:requests_waiting_by_reason", reason="grammar") == 2
    by_reason = "vllm:num_requests_waiting_by_reason"
    assert [value(families, by_reason, reason=reason) for reason in ("capacity", "deferred")] == [1, 2]
    assert value(families, "quire:event_loop_max_stall_seconds") == 0.125
    for name, expected in {
        "prompt_tokens": 60, "prompt_tokens_cached": 32, "generation_tokens": 2, "prefix_cache_queries": 60,
        "prefix_cache_hits": 32, "num_preemptions": 7,
    }.items():  # fmt: skip
        assert families[f"vllm:{name}"].type == "counter"
        assert value(families, f"vllm:{name}", f"vllm:{name}_total") == expected
    reasons = {"stop": 0, "length": 1, "abort": 0, "error": 0}
    for reason, expected in reasons.items():
        found = value(families, "vllm:request_success", "vllm:request_success_total", finished_reason=reason)
        assert found == expected


def test_blocks_and_the_tiers_below_them() -> None:
    tiers = TierStats(0.25, 2, 30, 20, 3_000, 2_000, 11, 7, disk_hits_total=5, disk_damaged_files_total=1)
    stats = EngineStats(num_forks_total=4, kv_blocks_shared=3, kv_blocks_pinned=6, tiers=tiers)
    body, _ = render([Figures(ServingMetrics(100), [stats], LABELS["model_name"])], HttpCounts(), 200.0)
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert value(families, "quire:kv_blocks_shared") == 3
    assert value(families, "quire:kv_blocks_pinned") == 6
    assert value(families, "vllm:cpu_cache_usage_perc") == 0.25
    counters = {"forks": 4} | {
        name.removesuffix("_total"): count
        for name, count in msgspec.structs.asdict(tiers).items()
        if name.endswith("_total")
    }
    assert len(counters) >= 14, "every counter of the tiers is shown"
    for name, expected in counters.items():
        assert value(families, f"quire:{name}", f"quire:{name}_total") == expected


def test_residency_of_kv_blocks() -> None:
    counts = [0] * 22
    counts[9] = 2
    residency = [Counts(counts, 1.5), Counts(counts, 1.25), Counts(counts, 1.0)]
    stats = EngineStats(prefix_cache_evictions_total=5, kv_block_residency=residency)
    body, _ = render([Figures(ServingMetrics(100), [stats], LABELS["model_name"])], HttpCounts(), 200.0)
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    name = "vllm:kv_block_lifetime_seconds"
    assert value(families, name, f"{name}_sum") == 1.5
    assert [value(families, name, f"{name}_bucket", le=le) for le in ("0.5", "1.0", "+Inf")] == [0, 2, 2]
    assert value(families, "vllm:kv_block_reuse_gap_seconds", "vllm:kv_block_reuse_gap_seconds_sum") == 1.0
    assert value(families, "quire:prefix_cache_evictions", "quire:prefix_cache_evictions_total") == 5


def test_histograms(families: dict[str, Metric]) -> None:
    assert {name.removeprefix("vllm:") for name, f in families.items() if f.type == "histogram"} == HISTOGRAMS
    name = "vllm:inter_token_latency_seconds"
    bounds = [s.labels["le"] for s in families[name].samples if s.name.endswith("_bucket")]
    assert bounds[:3] == ["0.01", "0.025", "0.05"]  # the finer ones are for the live view
    assert bounds[-1] == "+Inf"
    assert value(families, name, f"{name}_bucket", le="0.025") == 0
    assert value(families, name, f"{name}_bucket", le="0.05") == 1
    assert value(families, name, f"{name}_bucket", le="+Inf") == value(families, name, f"{name}_count") == 1
    assert value(families, name, f"{name}_sum") == pytest.approx(0.03)
    sizes = [s.labels["le"] for s in families["vllm:request_prompt_tokens"].samples if s.name.endswith("_bucket")]
    assert sizes == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"]
    steps = "vllm:iteration_tokens_total"
    assert value(families, steps, f"{steps}_count") == 2
    assert value(families, steps, f"{steps}_sum") == 62


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process(families: dict[str, Metric]) -> None:
    assert families["process_resident_memory_bytes"].samples[0].value > 0
    assert families["process_open_fds"].samples[0].value > 0
    assert families["process_cpu_seconds"].samples[0].value > 0


def test_the_recorder_needs_neither_prometheus_nor_torch() -> None:
    code = (
        "import sys, quire.entrypoints.server.metrics, quire.entrypoints.server.log_line\n"
        "print({'torch', 'prometheus_client', 'fastapi'} & {name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_drafts_are_counted_where_there_are_any(families: dict[str, Metric]) -> None:
    assert not [name for name in families if "spec_decode" in name]
    stats = EngineStats(2, 3, 0.5, 7, 60, 32, {}, speculation=SpeculationStats(5, 18, 9, [4, 3, 2]))
    body, _ = render([Figures(ServingMetrics(100), [stats], LABELS["model_name"])], HttpCounts(), 1.0)
    found = {family.name: family for family in text_string_to_metric_families(body.decode())}
    for name, expected in {"num_drafts": 5, "num_draft_tokens": 18, "num_accepted_tokens": 9}.items():
        family = f"vllm:spec_decode_{name}"
        assert value(found, family, f"{family}_total") == expected
    family = "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert [value(found, family, f"{family}_total", position=str(i)) for i in range(3)] == [4, 3, 2]


def test_limits_and_the_policy() -> None:
    limits = Limits(3, 512, "fair", {"fair_input_weight": 1.0}, 8, 2048)
    stats = EngineStats(limits=limits)
    body, _ = render([Figures(ServingMetrics(100), [stats], LABELS["model_name"])], HttpCounts(), 0.0)
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert value(families, "quire:max_num_seqs") == 3
    assert value(families, "quire:max_num_batched_tokens") == 512
    assert value(families, "quire:scheduling_policy_info", policy="fair") == 1


def test_several_engines_have_a_label_each_and_the_server_none() -> None:
    stats = [EngineStats(number, 0, 0.5, 0, 10 * number, 0, {"blocks": number}) for number in (1, 2)]
    body, _ = render([Figures(ServingMetrics(100), stats, "m")], HttpCounts(), 0.0)
    text = body.decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "one family of each name"
    samples = {
        (sample.name, sample.labels.get("engine")): sample.value for family in families for sample in family.samples
    }
    assert [samples["vllm:num_requests_running", engine] for engine in "01"] == [1, 2]
    assert [samples["vllm:prefix_cache_queries_total", engine] for engine in "01"] == [10, 20]
    assert samples["vllm:generation_tokens_total", ""] == 0
    assert ("vllm:generation_tokens_total", "0") not in samples
    assert 'quire:requests_waiting_by_reason{engine="1",model_name="m",reason="blocks"} 2.0' in text


def test_the_cache_and_adapters_by_their_labels() -> None:
    metrics, now = ServingMetrics(100), time.time()
    for request_id, adapter in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "")):
        arrive(metrics, request_id, 5, 9, 1, 0.0, adapter)
    metrics.on_scheduled("b", 0.5)
    args = EngineArgs("demo", enable_lora=True, max_loras=3, gpu_memory_utilization=0.5)
    body, _ = render([Figures(metrics, [EngineStats()], "m", args.resolve(), 96)], HttpCounts(), 1.0)
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    (cache,), (loras,) = families["vllm:cache_config_info"].samples, families["vllm:lora_requests_info"].samples
    facts = {"block_size": "32", "num_gpu_blocks": "96", "enable_prefix_caching": "True", "cache_dtype": "auto"}
    facts |= {"gpu_memory_utilization": "0.5", "swap_space": "None", "model_name": "m", "engine": "0"}
    assert (cache.labels, cache.value) == (facts, 1)
    counted = {"max_lora": "3", "running_lora_adapters": "two", "waiting_lora_adapters": "one"}
    assert loras.labels == {"model_name": "m", "engine": "0", **counted}
    assert now <= loras.value <= time.time()


def test_sleep() -> None:
    metrics = ServingMetrics(100)
    for name in ("awake", "weights_offloaded", "discard_all"):
        body, _ = render([Figures(metrics, [EngineStats(sleep_state=name)], "m")], HttpCounts(), 1.0)
        families = {family.name: family for family in text_string_to_metric_families(body.decode())}
        states = {sample.labels["sleep_state"]: sample.value for sample in families["vllm:engine_sleep_state"].samples}
        assert len(states) == 3
        assert [state for state, told in states.items() if told] == [name]


def test_requests_are_counted_as_vllms_server_counts_them() -> None:
    http = HttpCounts()
    for method, status, handler, seconds in [
        ("POST", 200, "/v1/completions", 0.3),
        ("POST", 200, "/v1/completions", 2.0),
        ("POST", 404, "/v1/completions", 0.0),
        ("\x01WHAT", 405, "none", 0.0),
    ]:
        http.count(method, status, handler, (10, 5), seconds)
    body, _ = render([], http, 1.0)
    for line in [
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 2.0',
        'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0',
        'http_requests_total{handler="none",method="other",status="4xx"} 1.0',
        'http_request_size_bytes_sum{handler="/v1/completions"} 30.0',
        'http_response_size_bytes_count{handler="/v1/completions"} 3.0',
        'http_request_duration_highr_seconds_bucket{le="0.25"} 2.0',
        'http_request_duration_highr_seconds_bucket{le="2.0"} 4.0',
        "http_request_duration_highr_seconds_count 4.0",
        'http_request_duration_seconds_bucket{handler="/v1/completions",le="0.5",method="POST"} 2.0',
        'http_request_duration_seconds_bucket{handler="/v1/completions",le="+Inf",method="POST"} 3.0',
    ]:
        assert line in body.decode().splitlines()
    bounds = re.findall(r'http_request_duration_highr_seconds_bucket.le="(.*)"', body.decode())
    assert ",".join(bounds) == (
        "0.01,0.025,0.05,0.075,0.1,0.25,0.5,0.75,1.0,1.5,2.0,2.5,3.0,3.5,4.0,4.5,5.0,7.5,10.0,30.0,60.0,+Inf"
    )
