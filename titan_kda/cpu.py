"""torchtitan 0.2.2 on a machine with no accelerator.

torchtitan takes "cuda" for its device where it finds none. ``use_cpu_if_no_accelerator`` points it at the CPU and gloo;
where there is an accelerator it does nothing. Each change stands beside the fault that it cures.
"""

from __future__ import annotations

import platform
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class _HostMemory:
    """What torchtitan's metrics ask of a device's memory monitor, for a host: nothing is counted."""

    device_name = platform.processor() or platform.machine() or "CPU"
    device_capacity_gib = 0.0

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def _set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    """torchtitan's own, without device ids in its barrier: gloo refuses them."""
    dist.barrier()
    groups = [mesh.get_group() for mesh in parallel_dims.get_all_one_dimensional_meshes().values()]
    for group in [*groups, None]:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def _fill_indices(*args: Any, **launch: Any) -> torch.Tensor:
    """Where each expert's tokens go, by torchtitan's own loop in place of its Triton kernel."""
    from torchtitan.models.moe.kernels import fill_indices_cpu

    return fill_indices_cpu(*args)


def use_cpu_if_no_accelerator() -> bool:
    """Switches torchtitan to the CPU where there is no accelerator; returns whether it did. Safe to call twice."""
    if torch.accelerator.is_available():
        return False
    import numpy as np  # with torchtitan's datasets

    # Decays fade through the denormal numbers, where a CPU's arithmetic is several times slower; GPUs flush them too.
    # Before any thread pool is made: threads take the setting from the one that starts them.
    for dtype in ("float32", "float64"):
        np.finfo(dtype)  # kept from here on; of flushed numbers NumPy 2.2 would warn
    torch.set_flush_denormal(True)

    from torchtitan.components import metrics
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed import utils as distributed_utils
    from torchtitan.models.moe import kernels as moe_kernels
    from torchtitan.tools import utils

    # Each of these modules copied the device's type, or its module, when it was imported.
    for module in (utils, distributed_utils, metrics, parallel_dims):
        for name, value in (("device_type", "cpu"), ("device_module", torch.cpu)):
            if hasattr(module, name):
                setattr(module, name, value)
    metrics.build_device_memory_monitor = _HostMemory  # it asks the device for its memory
    distributed_utils.set_pg_timeouts = _set_pg_timeouts
    moe_kernels.fill_indices_wrapper = _fill_indices
    return True
