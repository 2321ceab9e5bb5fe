"""The histograms of how long contents of KV blocks stay, under vLLM's names and with its bounds.

The block pools count into one set of them; their counts travel in `EngineStats`, and /metrics shows them in another.
"""

from quire.metrics.histogram import Histogram

_SECONDS = [
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
]


def residency_histograms() -> list[Histogram]:
    """Empty histograms: lifetime, idle before eviction, gap between uses."""
    names = {
        "lifetime": "From a cached block's being findable to its eviction; one block in 16 is looked at.",
        "idle_before_evict": "From a cached block's last use to its eviction; one block in 16.",
        "reuse_gap": "From a use of a cached block to the next; one block in 16.",
    }
    return [Histogram(f"vllm:kv_block_{name}_seconds", help, _SECONDS) for name, help in names.items()]
