"""The shape of the code: imports point one way, cupy and transformers stay where they belong, kernels hold no
raw memory access, and the kernels' one argument is the same in C++ and in Python."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flashpatch"
KERNELS = ROOT / "cuda_src"

# Lowest first. A module imports from layers below its own, never from its own or from above.
LAYERS = [
    {"modes", "batching", "dropout", "requirements"},
    {"problem", "call", "tensor_layouts", "tolerance", "arguments", "families", "mask_kinds", "observations"},
    {"reference", "counting", "findings", "profiles", "dense_tracking", "sdpa_reasons"},
    {"trace_report", "operator_reading"},
    {"masks", "tagging", "score_tiles"},
    {"mask_functions", "recorded_scores"},
    {"support_matrix"},
    {"planning"},
    {"kernel_constants"},
    {"disk_cache"},
    {"emulator_builds"},
    {"compiler", "emulator", "cases", "pair_planning", "support_table"},
    {"tensor_maps", "tile_counts", "kernel_sets"},
    {"params"},
    {"kernel_launch"},
    {"workspaces", "padding"},
    {"launcher", "fallback", "pair_fallback"},
    {"execution", "pair_launching"},
    {"operators", "known_calls"},
    {"ops", "pairs", "captures", "case_runs"},
    {"call_masks", "attention_weights"},
    {"interface"},
    {"inlined", "module_reading"},
    {"attention_modules", "module_stack"},
    {"enabling"},
    {"patcher"},
    {"model_runs", "call_reading"},
    {"model_comparisons"},
    {"difference_explanations"},
    {"registration", "models", "model_verification", "environment", "tracing"},
    {"dummy_inputs"},
    {"dry_runs"},
    {"verification", "auditing", "benchmarking", "feature_peers"},
    {"feature_costs", "counted_work", "measured_ceilings"},
    {"roofline"},
    {"evidence", "call_costs"},
    {"costing"},
    {"cli"},
]
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
# What may import a third-party package at all, and what may do so only inside functions, on use.
ONLY = {
    "cupy": {"kernel_launch", "compiler"},
    "cupy_backends": {"kernel_launch", "compiler"},
    "transformers": {"interface", "attention_modules", "attention_weights", "models", "dummy_inputs"},
}
LAZY = {
    "cupy": {"kernel_launch", "compiler"},
    "cupy_backends": {"kernel_launch", "compiler"},
    "transformers": {"interface", "attention_modules", "attention_weights"},
}


def python_files() -> list[Path]:
    return [*sorted(PACKAGE.glob("*.py")), *sorted((ROOT / "cli").glob("*.py"))]


def layer_of(path: Path) -> str:
    return "cli" if path.parent.name == "cli" else path.stem


def imports(tree: ast.AST, package: str = "flashpatch"):
    """Every import as (dotted name, whether it runs when the module is imported, line number)."""

    def visit(node, eager):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, eager, child.lineno
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    base = f"{package}.{base}" if base else package
                if base == "flashpatch":
                    for alias in child.names:
                        yield f"flashpatch.{alias.name}", eager, child.lineno
                else:
                    yield base, eager, child.lineno
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or is_type_checking(child)
            yield from visit(child, eager and not inside)

    def is_type_checking(node):
        return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)

    yield from visit(tree, True)


def layer_faults(source: str, module: str) -> list[str]:
    """What `source`, as the module of that name, imports against the rules."""
    faults = []
    package = "flashpatch.cli" if module == "cli" else "flashpatch"
    for name, eager, line in imports(ast.parse(source), package):
        parts = name.split(".")
        if parts[0] == "flashpatch" and len(parts) > 1 and parts[1] in RANK and module != "__init__":
            target = parts[1]
            if RANK[target] >= RANK[module] and not (target == module == "cli"):
                faults.append(f"line {line}: {module} imports {target}, which is not below it")
            if module == "reference":
                faults.append(
                    f"line {line}: reference imports {target}; the yardstick shares nothing with what it judges"
                )
        if parts[0] in ONLY:
            if module not in ONLY[parts[0]]:
                faults.append(f"line {line}: {module} imports {parts[0]}, allowed only in {sorted(ONLY[parts[0]])}")
            elif eager and module in LAZY[parts[0]]:
                faults.append(f"line {line}: {module} imports {parts[0]} at import time; import it where it is used")
    return faults


@pytest.mark.parametrize("path", python_files(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_point_one_way(path):
    module = layer_of(path)
    assert module in RANK or module == "__init__", f"{path.name} has no layer: put it into LAYERS"
    assert layer_faults(path.read_text(), module) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("planning", "from flashpatch import ops"),
        ("planning", "from .ops import attention"),
        ("problem", "import flashpatch.planning"),
        ("ops", "import cupy"),
        ("launcher", "import cupy"),
        ("compiler", "from cupy_backends.cuda.libs import nvrtc"),
        ("fallback", "def f():\n    import transformers"),
        ("mask_functions", "def f():\n    from transformers import masking_utils"),
        ("interface", "from transformers import masking_utils"),
        ("reference", "from flashpatch.masks import MaskSpec"),
        ("compiler", "from flashpatch import emulator"),
    ],
)
def test_layer_rules_notice(module, source):
    assert layer_faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops", "from flashpatch import launcher, fallback"),
        ("kernel_launch", "def f():\n    import cupy"),
        ("interface", "def f():\n    import transformers"),
        ("models", "import transformers"),
        ("cli", "from .rendering import table\nfrom flashpatch import verification"),
    ],
)
def test_layer_rules_allow(module, source):
    assert layer_faults(source, module) == []


def test_importing_flashpatch_touches_nothing():
    """No CUDA context, no CuPy, no transformers, and no change to torch's attention, by import alone."""
    program = (
        "import sys, torch\n"
        "sdpa = torch.nn.functional.scaled_dot_product_attention\n"
        "import flashpatch\n"
        "assert torch.nn.functional.scaled_dot_product_attention is sdpa\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(*sorted({'cupy', 'transformers', 'click', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


# ---- kernels ----

# Only these touch memory, registers by name, or other threads.
ACCESSORS = {"tile.cuh"}
FORBIDDEN = {
    "inline assembly": r"\basm\b|\b__asm",
    "conditional compilation": r"^\s*#\s*(?:if|ifdef|ifndef|elif|else|endif)\b",
    "a macro": r"^\s*#\s*define\b",
    "an include that is not one of ours": r"^\s*#\s*include\s*<",
    "shared memory by name": r"\b__shared__\b",
    "a thread index": r"\b(?:threadIdx|blockIdx|blockDim|gridDim)\b",
    "a CUDA intrinsic": r"\b__(?!(?:launch_bounds|restrict|global|device|forceinline|grid_constant|noinline)__)\w+",
    "a raw dereference": r"(?:^|[=(,;{}!<>+\-/%&|?:]|\breturn)\s*\*\s*(?:\(|(?!this\b)[A-Za-z_])",
    "a pointer arrow": r"->",
}


def without_comments(source: str) -> str:
    def blank(match):
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, source, flags=re.DOTALL)


def pointer_fields() -> set[str]:
    return {name for kind, name in params_fields() if kind == "pointer"}


def kernel_faults(source: str, accessor: bool = False) -> list[str]:
    """What a kernel source does by itself that belongs into the accessors."""
    code = without_comments(source)
    faults = []
    for what, pattern in FORBIDDEN.items():
        if accessor and what in ("a raw dereference",):
            continue
        for match in re.finditer(pattern, code, flags=re.MULTILINE):
            line = code.count("\n", 0, match.start()) + 1
            faults.append(f"line {line}: {what}: {code.splitlines()[line - 1].strip()}")
    if accessor:
        return faults
    declared = re.findall(r"\b[A-Za-z]\w*\s*\*\s*(?:const\s+)?([a-z_]\w*)\s*([=;,)])\s*(\w*)", code)
    # a fragment is registers, whoever points to it
    pointers = {name for name, sign, source in declared if not (name.endswith("_frag") or source.endswith("_frag"))}
    for match in re.finditer(r"(\bparams\s*\.\s*)?\b([a-z_]\w*)\s*\[", code):
        of_params, name = match.groups()
        if (of_params and name in pointer_fields()) or (not of_params and name in pointers):
            line = code.count("\n", 0, match.start()) + 1
            faults.append(f"line {line}: a raw subscript of a pointer: {code.splitlines()[line - 1].strip()}")
    return faults


def kernel_files():
    outside = {"params.cuh"}
    return [
        path
        for path in sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")])
        if path.name not in outside and not path.name.startswith("ptx_")
    ]


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: path.name)
def test_kernels_reach_memory_through_accessors(path):
    assert kernel_faults(path.read_text(), accessor=path.name in ACCESSORS) == []


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.cu*")), ids=lambda path: str(path.relative_to(KERNELS)))
def test_kernels_include_nothing_from_outside(path):
    if path.parent.name == "emulation":
        return  # compiled by a host compiler, which brings its library
    for name in re.findall(r"^\s*#\s*include\s*(\S+)", without_comments(path.read_text()), flags=re.MULTILINE):
        assert name.startswith('"') and (KERNELS / name.strip('"')).exists(), f"{path.name} includes {name}"


@pytest.mark.parametrize(
    "source",
    [
        "float x = *pointer;",
        "  *out = 1;",
        "f(*(const float*)p);",
        "return *p;",
        "float x = params.q[0];",
        "const float* row = f();\nfloat x = row[3];",
        'asm volatile("bar.sync 0;");',
        "#ifdef __CUDA_ARCH__",
        "#include <cuda_bf16.h>",
        "int i = threadIdx.x;",
        "__syncthreads();",
        "x = p->q;",
    ],
)
def test_kernel_rules_notice(source):
    assert kernel_faults(source)


@pytest.mark.parametrize(
    "source",
    [
        "float x = a * b;  // *p",
        "const u16* q = params.q;",
        "const float* part = dq_frag[tile] + 4 * i;\nfloat x = part[0];",
        "float row_max[2]; row_max[0] = s_frag[i][j] * scale;",
        "for (int i = 0; i < n; ++i) { out_frag[i] *= scale; }",
        "/* asm */ KERNEL(128, 1) attention_forward_sm80(GRID_CONSTANT Params params) {}",
        "i64 offset = (i64)block * stride + (row_index) * 2;",
    ],
)
def test_kernel_rules_allow(source):
    assert kernel_faults(source) == []


# ---- the kernels' one argument ----

SIZES = {"i64": ("q", 8), "u64": ("Q", 8), "i32": ("i", 4), "u32": ("I", 4), "float": ("f", 4)}


def params_fields() -> list[tuple[str, str]]:
    """params.cuh's fields in order as (kind, name); kind is "pointer" or the type."""
    body = re.search(
        r"struct Params \{(.*?)\n\};", without_comments((KERNELS / "params.cuh").read_text()), re.DOTALL
    ).group(1)
    fields = []
    for declaration in body.split(";"):
        declaration = " ".join(declaration.split())
        if not declaration:
            continue
        pointer = re.fullmatch(r"(?:const )?\w+\* ?(\w+)", declaration)
        if pointer:
            fields.append(("pointer", pointer.group(1)))
            continue
        kind, names = declaration.split(" ", 1)
        fields += [(kind, name.strip()) for name in names.split(",")]
    return fields


def test_params_have_no_padding():
    sizes = [8 if kind == "pointer" else SIZES[kind][1] for kind, _ in params_fields()]
    assert sizes == sorted(sizes, reverse=True), "8-byte fields first, or the two sides may disagree on padding"
    assert len(sizes) > 50


def test_params_match_their_packing():
    params = pytest.importorskip("flashpatch.params")
    names = [field if isinstance(field, str) else field[0] for field in params.FIELDS]
    assert names == [name for _, name in params_fields()]
