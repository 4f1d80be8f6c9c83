"""A Config as the C++ constants that go in front of a kernel's source, on the GPU and in the emulator."""

from __future__ import annotations

import dataclasses

from .problem import Config


def constants(config: Config) -> str:
    """The Config as C++ constants, put in front of the kernel's source (`head_dim` -> `kHeadDim`)."""
    lines = [
        f"constexpr bool kIs{name} = {str(config.dtype in dtypes).lower()};"
        for name, dtypes in (
            ("Bf16", ("bfloat16", "float8_e4m3fn")),  # numbers of 16 bits, which out of 8 bits has
            ("Fp32", ("float32",)),
            ("E4m3", ("float8_e4m3fn",)),
        )
    ]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("kernel", "dtype"):
            continue
        name = "k" + "".join(part.capitalize() for part in field.name.split("_"))
        if isinstance(value, bool):
            lines.append(f"constexpr bool {name} = {str(value).lower()};")
        else:
            lines.append(f"constexpr int {name} = {value};")
    return "\n".join(lines) + "\n"
