"""One kernel on one device: what is launched, with which argument, on torch's current stream. On a GPU through CuPy, else
in the emulator; the kernels cannot tell the difference."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter

import torch

from . import compiler, emulator
from .call import TENSORS, Call
from .params import ARGUMENT_BYTES
from .planning import shared_memory
from .problem import Config, Device, Reason

# cuLaunchKernel's limit for gridDim.x
_MAX_BLOCKS = 2**31 - 1

launched: Counter[str] = Counter()  # kernel -> launches of this process; verify counts by it


class _Thread(threading.local):
    """A buffer for a kernel's argument per thread: the driver copies it during the launch, with the GIL released."""

    def __init__(self):
        room = bytearray(ARGUMENT_BYTES + 64)
        address = ctypes.addressof((ctypes.c_char * len(room)).from_buffer(room))
        start = -address % 64  # tensor maps inside it are read at 64-byte steps
        self.buffer = memoryview(room)[start:]
        self.pointers = (ctypes.c_void_p * 1)(address + start)
        self.parameters = ctypes.addressof(self.pointers)  # cuLaunchKernel's kernelParams: one argument


_thread = _Thread()


class Kernel:
    """One Config on one device, built at the first launch. A source has one entry, named after it; a kernel whose argument
    is a struct of its own comes with its entry and its bytes of shared memory."""

    __slots__ = ("config", "device", "entry", "function", "index", "launch_kernel", "name", "shared", "threads")

    def __init__(self, device: Device, config: Config, entry: str = "", shared: int | None = None):
        self.device, self.config, self.index, self.name = device, config, device.index, config.kernel
        self.entry = entry or f"attention_{config.kernel}"
        self.threads = 32 * config.num_warps
        self.shared = shared_memory(config) if shared is None else shared
        self.function = 0

    def launch(self, blocks: int, argument: bytes, tensors, call: Call | None = None) -> None:
        """Launch `blocks` blocks on torch's current stream of the device, with that device current."""
        if not 0 < blocks <= _MAX_BLOCKS:
            if blocks == 0:
                return  # CuPy would launch one block for a grid of zero
            text = f"{blocks} tiles are more than one launch holds ({_MAX_BLOCKS}); split the batch"
            raise compiler.CompileError(Reason("grid", text))
        if self.device.backend == "emulated":
            emulator.load(self.config).launch(
                self.entry, blocks, self.threads, self.shared, argument, tensors=_ranges(tensors, call)
            )
            launched[self.name] += 1
            return
        if not self.function:
            self._load()
        index, thread = self.index, _thread
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self.launch(blocks, argument, tensors, call)
            return
        thread.buffer[: len(argument)] = argument
        self.launch_kernel(
            self.function, blocks, 1, 1, self.threads, 1, 1, self.shared, torch._C._cuda_getCurrentRawStream(index),
            thread.parameters, 0,
        )  # fmt: skip
        launched[self.name] += 1

    def _load(self) -> None:
        from cupy_backends.cuda.api import driver

        self.function = compiler.load(self.config, self.device).function(self.entry, self.shared).ptr
        self.launch_kernel = driver.launchKernel  # CuPy's Function call takes 4 us more to arrive there


def _ranges(tensors, call: Call | None) -> list[tuple[int, int, str, bool]]:
    """The memory a launch may touch, for the emulator's bounds checks: (address, bytes, name, writable)."""
    ranges = []
    read_only = () if call is None else (getattr(call, name) for name in TENSORS)
    for tensor, writable in [*((t, True) for t in tensors), *((t, False) for t in read_only)]:
        if tensor is not None and tensor.numel():
            span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            ranges.append((tensor.data_ptr(), span * tensor.element_size(), "", writable))
    return ranges
