"""Which kernels one call launches: the main one of its Config and the small ones around it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from . import compiler, planning
from .problem import Config


def launches(config: Config) -> tuple[str, ...]:
    """The kernels one call of this Config launches, by source name."""
    return tuple(part.kernel for part in configs(config))


def configs(config: Config) -> tuple[Config, ...]:
    """Every Config that must be compiled to run this one, in the order of their launches."""
    if config.kernel in ("forward_sm80", "forward_sm75"):
        return (
            *((mask_helper(config),) if config.has_mask else ()),
            *((split_helper(config),) if planning.takes_pairs(config) else ()),
            config,
        )
    if config.kernel in ("backward_sm80", "backward_sm75"):
        suffix = "" if config.kernel == "backward_sm80" else "_sm75"
        return (
            *((mask_helper(config),) if config.has_mask else ()),
            _helper(config, "backward_delta", 4),
            *((split_helper(config),) if planning.takes_pairs(config) else ()),
            config,
            _helper(config, f"backward_dq{suffix}", 4),
            *((bias_helper(config, config.wide_bias),) if config.has_bias else ()),
        )
    if planning.takes_value_tiles(config):
        return (values_helper(config), config)
    if config.kernel.startswith("backward"):
        around = [_helper(config, *kernel) for kernel in (("backward_prepare_sm90", 8), ("backward_finish_sm90", 4))]
        before, after = (replace(helper, block_n=config.block_n) for helper in around)
        return (before, config, after)
    return (config,)


def digest(config: Config) -> str:
    """What evidence of this Config stands for: all that is compiled to run it, the small kernels around it included."""
    parts = [compiler.digest(part) for part in configs(config)]
    return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _helper(config: Config, kernel: str, num_warps: int) -> Config:
    """The Config of a small kernel before or after the main one: only what its source reads, so that few are built."""
    return Config(kernel, config.dtype, config.head_dim, config.head_dim_v, config.block_m, 0, num_warps)


def mask_helper(config: Config) -> Config:
    """What packs the boolean mask for the threads of a kernel: nothing in it depends on the head dim."""
    kernel = f"{config.kernel.split('_')[0]}_mask"
    return Config(kernel, config.dtype, 32, 32, config.block_m, config.block_n, config.num_warps)


def split_helper(config: Config) -> Config:
    """What splits q, k, v and dout in fp32 into pairs of fp16, in the blocks of a kernel."""
    return replace(_helper(config, f"{config.kernel.split('_')[0]}_split", 8), block_n=config.block_n)


def values_helper(config: Config) -> Config:
    """What transposes v of 8 bits into the tiles of a kernel: it knows no q."""
    helper = _helper(config, "forward_values_sm90", 4)
    return replace(helper, head_dim=config.head_dim_v, block_m=64, block_n=config.block_n)


def bias_helper(config: Config, wide: bool) -> Config:
    """What brings the gradient of a bias from the order of a kernel's threads into its own, in fp32 or q's dtype."""
    wide = wide and config.dtype != "float32"
    tile = config.block_m, config.block_n, config.num_warps
    kernel = "backward_bias" if config.kernel == "backward_sm80" else "backward_bias_sm75"
    return Config(
        kernel, config.dtype, 32, 32, *tile, deterministic=config.deterministic, wide_bias=wide, has_bias=True
    )
