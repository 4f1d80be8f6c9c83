"""What will run: `resolve(problem, device)` answers with a Plan or a Decline, from compat_matrix.yaml alone.

Nothing above or below this module asks a GPU for its generation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from .problem import Config, Decline, Device, Plan, Problem, Reason
from .support_matrix import Matrix, support

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}
# Config flag -> features of a Problem that need it compiled in. What is missing here is decided at run time.
FLAGS = {
    "has_window": {"causal", "window"},
    "has_key_ranges": {"key_ranges"},
    "has_mask": {"mask"},
    "has_bias": {"bias", "wide_bias"},
    "wide_bias": {"wide_bias"},
    "has_alibi": {"alibi"},
    "has_softcap": {"softcap"},
    "has_sinks": {"sinks"},
    "has_dropout": {"dropout"},
    "deterministic": {"deterministic"},
}


class SwitchError(ValueError):
    """FLASHPATCH_GENERATION names nothing known, or what this device cannot stand in for."""


# ---- devices ----


def device_for(capability: tuple[int, int], name: str = "", **facts) -> Device:
    """The Device of a compute capability. An unknown newer one takes its family's nearest, and its name says so."""
    matrix = support()
    known = matrix.capabilities.get(capability)
    if known is None:
        older = [number for number in matrix.capabilities if number <= capability]
        number = max(older) if older else min(matrix.capabilities)
        known = matrix.capabilities[number]
        label = f"unknown capability {capability[0]}.{capability[1]}"
        suffix = f"planned as {known.generation}" if older else "older than every generation flashpatch knows"
        name = f"{name or 'GPU'} ({label}, {suffix})"
    facts.setdefault("shared_memory", known.shared_memory)
    return Device(name or known.gpus[0], known.generation, capability, **facts)


def gpu(name: str) -> Device:
    """A GPU by name ("h200", "RTX 4090"), capability ("9.0", "sm_90") or generation ("hopper"), without owning one.

    Raises ValueError listing the known names.
    """
    matrix = support()
    wanted = _plain(name)
    for number, capability in matrix.capabilities.items():
        names = {_plain(known): known for known in capability.gpus}
        spellings = {f"{number[0]}.{number[1]}", f"{number[0]}{number[1]}"}
        if wanted in names:
            return device_for(number, names[wanted])
        if wanted.removeprefix("sm") in spellings or wanted == _plain(capability.generation):
            return device_for(number, capability.gpus[0])
    known = ", ".join(gpu for capability in matrix.capabilities.values() for gpu in capability.gpus)
    raise ValueError(f"unknown GPU {name!r}; known: {known}; or a compute capability such as 9.0")


SWITCH = "FLASHPATCH_GENERATION"


def of_switch(wanted: str) -> Device:
    """The GPU that a value of FLASHPATCH_GENERATION names, none in particular of its kind. Raises SwitchError."""
    try:
        return gpu(wanted)
    except ValueError:
        names = ", ".join(support().generations)
        text = f"{SWITCH}={wanted}: there is no such generation; known: {names}; or a compute capability such as 8.6"
        raise SwitchError(text) from None


def standing_for(device: Device, wanted: str) -> Device:
    """The device with the kernels and limits of a generation, capability or GPU that is no newer than its own.

    Raises SwitchError for an unknown one, a newer one, or one whose instructions the device does not have.
    """
    other = of_switch(wanted)
    if device.backend == "emulated":
        title = support().generations[other.generation]
        return replace(other, name=f"CPU emulator ({title})", backend=device.backend)
    if other.capability == device.capability:
        return device
    own, theirs = (".".join(map(str, d.capability)) for d in (device, other))
    if other.capability > device.capability:
        raise SwitchError(
            f"{SWITCH}={wanted}: {device.name} has compute capability {own} and cannot run kernels of the newer {theirs}; "
            "unset it, or name an older generation"
        )
    if other.generation in support().exclusive and other.generation != device.generation:
        raise SwitchError(
            f"{SWITCH}={wanted}: kernels of {support().generations[other.generation]} use instructions that "
            f"{device.name} (compute capability {own}) does not have; unset it, or name another generation"
        )
    limit = min(device.shared_memory, other.shared_memory)
    return replace(device, generation=other.generation, shared_memory=limit, stands_for=other.capability)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum() or c == ".").replace("nvidia", "").replace("geforce", "")


# ---- the decision ----


def resolve(problem: Problem, device: Device, kernels: Collection[str] | None = None) -> Plan | Decline:
    """The kernel that runs `problem` on `device`, or every reason why none does; `kernels` limits the choice."""
    matrix = support()
    answer = _plan(problem, device, kernels, matrix)
    if isinstance(answer, Plan):
        return answer
    return Decline(problem, answer, _nearest(problem, device, matrix))


def _plan(problem: Problem, device: Device, kernels, matrix: Matrix) -> Plan | tuple[Reason, ...]:
    sizes = tuple(padded_head_dim(size, problem.dtype) for size in (problem.head_dim, problem.head_dim_v))
    padded_to = sizes if sizes != (problem.head_dim, problem.head_dim_v) else None
    reasons, buckets = _head_dim_reasons(problem, sizes, matrix)
    if not reasons:
        wanted = sorted(problem.features | {"plain"})
        candidates = [
            name
            for name, direction in matrix.kernels.items()
            if direction == problem.direction and (kernels is None or name in kernels)
        ]
        for kernel in candidates:
            cells = [matrix.cell(kernel, device.generation, problem.dtype, max(buckets), f) for f in wanted]
            if all(cells) and not _excluded(problem, matrix):
                config = _config(problem, device, kernel, buckets, matrix)
                if config:
                    verified = all(cell.status == "verified" for cell in cells)
                    notes = dict.fromkeys(cell.note for cell in cells if cell.note)
                    if device.stands_for:  # what a newer GPU shows is no evidence for the generation it stands in for
                        verified, notes = False, notes | {stand_in_note(kernel, device): None}
                    return Plan(
                        problem,
                        device,
                        config,
                        "verified" if verified else "compiled",
                        "; ".join(notes),
                        tuple(cell.name for cell in cells),
                        padded_to,
                    )
                reasons = [_shared_memory_reason(problem, device)]
        reasons = reasons or _feature_reasons(problem, device, wanted, max(buckets), matrix)
    return tuple(dict.fromkeys(reasons))


def stand_in_note(kernel: str, device: Device) -> str:
    """What is said of a kernel on a device that stands in for an older generation."""
    family = kernel.rpartition("_")[2]
    return f"{family}-family source compiled for sm_{''.join(map(str, device.capability))}, on {device.name}"


def head_dim_step(dtype: str) -> int:
    """What head dims are multiples of in a kernel: at least 8 numbers, and 16 bytes."""
    return max(8, 16 // ELEMENT_BYTES.get(dtype, 2))


def padded_head_dim(size: int, dtype: str) -> int:
    """The head dim that a kernel is given for one of any size; what it lacks is padded with zeros."""
    step = head_dim_step(dtype)
    return -(-size // step) * step


def _head_dim_reasons(
    problem: Problem, padded: tuple[int, int], matrix: Matrix
) -> tuple[list[Reason], tuple[int, int]]:
    reasons, buckets = [], []
    for label, size, bucket, sizes in (
        ("head_dim", problem.head_dim, matrix.bucket(padded[0]), matrix.head_dims),
        ("head_dim_v", problem.head_dim_v, matrix.bucket_v(padded[1]), matrix.head_dims_v),
    ):
        if size == 0:
            reasons.append(Reason("head_dim", f"{label} is 0"))
        elif bucket is None:
            reasons.append(Reason("head_dim", f"{label} {size} is above {max(sizes)}, the largest compiled"))
        buckets.append(bucket or 0)
    return reasons, (buckets[0], buckets[1])


def _excluded(problem: Problem, matrix: Matrix) -> list[Reason]:
    return [
        Reason("excluded", why)
        for together, directions, why in matrix.excludes
        if together <= problem.features and problem.direction in directions
    ]


def _feature_reasons(problem: Problem, device: Device, wanted, bucket: int, matrix: Matrix) -> list[Reason]:
    reasons = _excluded(problem, matrix)
    for feature in wanted:
        key = (device.generation, problem.direction, problem.dtype, bucket, feature)
        if key in matrix.unsupported:
            reasons.append(Reason(_code(matrix, key), matrix.unsupported[key]))
    if not reasons:
        reasons.append(Reason("features", f"no single kernel has {' + '.join(wanted)} together"))
    return reasons


def _code(matrix: Matrix, key: tuple) -> str:
    """The stable code of an unsupported cell: the first axis along which nothing is supported."""
    generation, direction, dtype, head_dim, feature = key
    dtypes = matrix.supported.get((generation, direction), {})
    if not dtypes:
        return "generation"
    if dtype not in dtypes:
        return "dtype"
    return feature if any(head_dim in dims for dims in dtypes[dtype].values()) else "head_dim"


def _nearest(problem: Problem, device: Device, matrix: Matrix) -> str:
    """The closest request that does run on a kernel here, in words; empty where there is none."""
    dtypes = matrix.supported.get((device.generation, problem.direction), {})
    for dtype in (name for name in (problem.dtype, "bfloat16", "float16") if name in dtypes):
        for head_dim, head_dim_v in _nearest_head_dims(problem, dtype, matrix):
            runs = replace(problem, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, features=frozenset())
            if not isinstance(_plan(runs, device, None, matrix), Plan):
                continue
            for feature in sorted(problem.features - ({"unequal_head_dims"} if head_dim == head_dim_v else set())):
                more = replace(runs, features=runs.features | {feature})
                if isinstance(_plan(more, device, None, matrix), Plan):
                    runs = more
            sizes = f"head_dim {head_dim}" + (f", head_dim_v {head_dim_v}" if head_dim_v != head_dim else "")
            return ", ".join(filter(None, (dtype, sizes, " + ".join(sorted(runs.features)))))
    return ""


def _nearest_head_dims(problem: Problem, dtype: str, matrix: Matrix) -> Iterator[tuple[int, int]]:
    """Head dims of q and v to try: as asked, rounded up; those of one size, first the next larger, then the largest."""
    step = head_dim_step(dtype)
    asked = tuple(padded_head_dim(max(1, size), dtype) for size in (problem.head_dim, problem.head_dim_v))
    yield asked
    above = [matrix.head_dims[0], *(bucket + step for bucket in matrix.head_dims[:-1])]
    for size in (max(asked), *(size for size in above if size > max(asked)), *reversed(matrix.head_dims)):
        yield size, size


def _shared_memory_reason(problem: Problem, device: Device) -> Reason:
    return Reason(
        "shared_memory",
        f"head_dim {problem.head_dim} needs more shared memory per block than the "
        f"{device.shared_memory} bytes of {device.name}",
    )


def _config(problem: Problem, device: Device, kernel: str, buckets, matrix: Matrix) -> Config | None:
    """The first tile of the kernel's table that is for such a problem and fits the device's shared memory."""
    flags = {flag: bool(problem.features & needs) for flag, needs in FLAGS.items()}
    for tile in matrix.tiles[kernel][max(buckets)]:
        if problem.dtype not in tile.get("dtypes", ("float16", "bfloat16")):
            continue
        if not set(tile.get("features", problem.features)) <= problem.features:
            continue
        if tile.get("short", problem.short) != problem.short or tile.get("tf32", problem.tf32) != problem.tf32:
            continue
        sizes = {
            key: value
            for key, value in tile.items()
            if key not in ("dtypes", "features", "short", "tf32", "resident", "spill_bytes")
        }
        config = Config(kernel, problem.dtype, buckets[0], buckets[1], **sizes, **flags, tf32=problem.tf32)
        if _resident_blocks(config, device) >= tile.get("resident", 1):
            return config
    return None


def _resident_blocks(config: Config, device: Device) -> int:
    """Blocks whose shared memory a multiprocessor holds at a time.

    It has 1 KB more than a block may have, and 1 KB of its own goes with every block (CUDA C++ Programming Guide, compute
    capabilities 8.x to 12.x; on 7.5 neither).
    """
    return (device.shared_memory + 1024) // (shared_memory(config) + 1024)


def value_parts(config: Config) -> int:
    """Blocks that share the columns of out of one query block, as forward_sm80.cu's kVParts has it."""
    return 2 if config.kernel == "forward_sm80" and config.head_dim_v > 256 else 1


def takes_pairs(config: Config) -> bool:
    """Whether a kernel reads q, k and v in pairs of fp16, which another has split them into (cuda_src/half_pairs.cuh)."""
    kernels = ("forward_sm80", "backward_sm80")
    return config.kernel in kernels and config.dtype == "float32" and not config.tf32


def takes_value_tiles(config: Config) -> bool:
    """Whether a kernel reads v as another has transposed it (cuda_src/values_sm90.cuh)."""
    return config.kernel == "forward_sm90" and ELEMENT_BYTES[config.dtype] == 1


def shared_memory(config: Config) -> int:
    """Bytes of dynamic shared memory per block, as each kernel file's kSharedMemory has it."""
    m, n, d, dv, stages = config.block_m, config.block_n, config.head_dim, config.head_dim_v, config.num_stages
    element = ELEMENT_BYTES[config.dtype]
    bias = m * n * (4 if config.wide_bias else element) if config.has_bias else 0
    if config.kernel in ("forward_sm80", "forward_sm75"):
        dv //= value_parts(config)
        tiles = element * (m * d + stages * n * (d + dv)) + bias
        return max(tiles, element * m * dv) + 16 * config.num_warps
    if config.kernel in ("backward_sm80", "backward_sm75"):
        split = config.num_warps * 16 > n
        tiles = element * (n * (d + dv) + stages * m * (d + dv) + n * m * (2 if split else 1))
        return tiles + bias + 8 * m + (8 * m if config.has_key_ranges else 0)
    if config.kernel in ("backward_dq", "backward_dq_sm75"):
        return element * m * d
    if config.kernel in ("forward_mask", "backward_mask"):
        return m * n // 8
    if config.kernel in ("forward_split", "backward_split"):
        return 16 * config.num_warps
    if config.kernel == "forward_values_sm90":
        return 32 * config.num_warps * 128
    # Hopper's tiles are slabs of 128 bytes of columns, whatever head_dim fills of them
    slabs, slabs_v = -(-d * element // 128), -(-dv * element // 128)
    if config.kernel == "forward_sm90":
        q, out = 128 * 64 * slabs, 128 * 64 * -(-dv // 64)
        keys = stages * n * (128 * slabs + (dv if takes_value_tiles(config) else 128 * slabs_v))
        room, two_tiles = 227 * 1024 - 640 - keys, 2 * (m // 64)
        if dv <= d and two_tiles * max(q, out) <= room:  # out is stored from there
            q = max(q, out)
        q_stages = min(two_tiles, room // q)
        rings = 16 * q_stages + 2 * 16 * stages + 32 + 16
        return q_stages * q + keys + -(-rings // 64) * 64 + 2 * (64 + 16 * (m // 64))
    if config.kernel in ("backward_sm90", "backward_wide_sm90"):
        tiles = 2 * 2 * 64 * slabs * (n + stages * m) + 2 * stages * n * m
        statistics_and_barriers = 2 * stages * 4 * m + 1024
        own = 4 * n * m if config.kernel == "backward_wide_sm90" else 2 * 4 * m * d
        return tiles + statistics_and_barriers + own
    return 0
