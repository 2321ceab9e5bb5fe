"""Chooses the device that a worker computes on. The worker asks once, at start-up; a new device is one line here."""

import torch

from quire.config.worker import WorkerConfig
from quire.worker.devices.base import Device
from quire.worker.devices.cpu import CpuDevice


def make_device(config: WorkerConfig) -> Device:
    """The device that `config.device` names; "auto" is a GPU where torch finds one, or else the CPU.

    Raises:
        ConfigError: it can't be had, or not with these options.
    """
    has_gpu = torch.cuda.is_available() and torch.version.hip is None  # else it is an AMD one, by CUDA's name
    if config.device == "cpu" or (config.device == "auto" and not has_gpu):
        return CpuDevice(config)
    from quire.worker.devices.cuda import CudaDevice  # what it brings, few need

    return CudaDevice(config)
