"""A model made for a device, its packed weights in the store where there are such.

The worker builds its model so, and a draft model beside it. Loads nothing; knows no caches and no steps.
"""

import json
from dataclasses import replace

from quire.config.model import ModelConfig
from quire.config.worker import WorkerConfig
from quire.models.registry import CausalLM, build_model
from quire.models.sharding import Sharding
from quire.models.sources import block_types
from quire.ops.native.matrix import orders_of
from quire.worker.devices.base import Device
from quire.worker.pages import huge_pages, zero_pages
from quire.worker.weights.cache import place_of
from quire.worker.weights.store import StaleStoreError, WeightStore


def build_packed(
    config: WorkerConfig, model: ModelConfig, quantization: str | None, device: Device, shared: bool, keep: bool = True
) -> tuple[CausalLM, WeightStore]:
    """A model, and the store of its weights where the device packs them; else that stays empty.

    `shared`: among the ranks of the device's group.
    `keep`: as far as the configuration allows that, map what an earlier start has packed, or leave it to a later one.
    """
    place, blocks = None, block_types(model, config.load_format)
    group, stage = (device.group, config.stage) if shared else (None, None)
    orders = orders_of(device.kernels)
    part = orders if group is None else (*orders, group.rank, group.size)
    sharding = Sharding(group, config.enable_expert_parallel and shared, config.tp_collective == "reduce")
    part = (*part, *["whole experts"] * sharding.whole_experts, *["columns"] * (group is not None and sharding.reduces))
    if stage is not None and config.num_stages > 1:
        part = (*part, "layers", stage.layers.start, stage.layers.stop)
    if blocks:
        part = (*part, json.dumps(model.hf_config["quantization_config"], sort_keys=True), *sorted(blocks.kinds))
    if device.packs_weights and keep and config.weight_cache and config.load_format not in ("dummy", "none"):
        place = place_of(model, quantization, int(config.weight_cache_size * 2**30), part)
        place = place and replace(place, num_ranks=config.num_sharers if shared else 1)
    store = WeightStore(place, zero_pages if config.load_format == "none" else huge_pages)
    try:
        formats = device.weight_formats(quantization, store, blocks)
        return device.place(lambda: build_model(model, device.backend, formats, sharding, stage)), store.verified()
    except StaleStoreError:  # removed, or where that is not allowed done without
        return build_packed(config, model, quantization, device, shared, place is not None and not place.path.exists())
