"""The README stays true: its table, its commands, its Python, and the names it mentions."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashpatch
from flashpatch import cases, compiler, evidence, planning, support_table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_first_line_says_what_importing_does_not_do():
    first = next(line for line in README.splitlines()[1:] if line)
    assert "changes no model" in first and "process" in README.split("\n\n")[1]


def test_support_table_is_the_matrix():
    table = support_table.markdown(planning.support())
    renewed = support_table.with_table(README, table)
    assert renewed == README, "the table is out of date; type: flashpatch audit --markdown README.md"


def test_a_document_without_markers_is_refused():
    with pytest.raises(ValueError, match="support:begin"):
        support_table.with_table("no markers", "table")


@pytest.mark.parametrize("marker", ["command:install", "command:test"])
def test_commands_are_one_line_each_and_ci_finds_them(marker):
    command = re.search(rf"<!-- {marker} -->\n```sh\n(.+)\n```", README)
    assert command, f"README has no <!-- {marker} --> with a one-line command"
    found = subprocess.run(
        ["bash", "-c", f"sed -n '/<!-- {marker} -->/,/^```$/p' README.md | sed '/^<!--/d; /^```/d; /^$/d'"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == command.group(1)
    assert f"readme_command {marker}" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", blocks("python"), ids=range(len(blocks("python"))))
def test_python_blocks_use_what_exists(block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "flashpatch":
            assert hasattr(flashpatch, node.attr), f"flashpatch.{node.attr} does not exist"


def test_keyword_arguments_of_attention_exist():
    import inspect

    known = set(inspect.signature(flashpatch.attention).parameters)
    calls = [
        node
        for block in blocks("python")
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "flashpatch.attention"
    ]
    assert calls
    for call in calls:
        assert {keyword.arg for keyword in call.keywords} <= known


def test_attention_as_shown_runs():
    import torch

    q, k, v = torch.randn(1, 9, 4, 16), torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16)
    call = next(line for block in blocks("python") for line in block.splitlines() if "softcap" in line)
    names = {"flashpatch": flashpatch, "q": q, "k": k, "v": v}
    exec(call.replace("return_logsumexp=True", 'return_logsumexp=True, on_decline="fallback"'), names)
    assert names["out"].shape == q.shape and names["logsumexp"].shape == (1, 4, 9)


def test_environment_variables_are_those_the_code_reads():
    documented = set(re.findall(r"^\| `(FLASHPATCH_\w+)", README, flags=re.MULTILINE))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "flashpatch").glob("*.py"))
    read = set(re.findall(r"[\"'](FLASHPATCH_[A-Z_]+)[\"']", sources))
    assert documented == {name for name in read if name != "FLASHPATCH_"}


def test_commands_and_options_exist():
    pytest.importorskip("flashpatch.cli", reason="needs the editable install: pip install -e .")
    import click

    from flashpatch import cli

    context = click.Context(cli.main)
    listed = set(cli.main.list_commands(context))
    shown = set(re.findall(r"`flashpatch (\w+)", README))
    assert shown == listed
    for name, options in re.findall(r"`(?:\S+=\S+ )?(?:\.venv/bin/)?flashpatch (\w+)((?: [^`]*)?)`", README):
        known = {option for parameter in cli.main.get_command(context, name).params for option in parameter.opts}
        for option in re.findall(r"--[\w-]+", options):
            assert option in known, f"flashpatch {name} has no {option}"


def test_exit_codes_are_those_of_the_command_line():
    pytest.importorskip("flashpatch.cli", reason="needs the editable install: pip install -e .")
    from flashpatch.cli import rendering

    codes = {int(code) for code in re.findall(r"^\| (\d) \| ", README, flags=re.MULTILINE)}
    assert codes == {
        rendering.HOLDS, rendering.MISMATCH, rendering.USAGE, rendering.DECLINED, rendering.MISSING
    }  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="bash")
def test_ci_script_is_sound():
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)
    assert sys.platform.startswith("win") or os.access(ROOT / ".ci" / "run", os.X_OK)


def test_speed_table_is_what_was_measured():
    from flashpatch import benchmarking

    report = json.loads((ROOT / "tests" / "evidence" / "h200_speed.json").read_text())
    table = README.split("<!-- speed:begin -->\n")[1].split("\n<!-- speed:end -->")[0]
    assert table == benchmarking.speed_table(report)
    assert f"Host time of one forward call: {report['host_microseconds']['flashpatch']:.0f} µs" in README


@pytest.mark.parametrize("name", ["speed", "features", "fp32", "fp8"])
def test_figures_say_what_they_are_of(name):
    """Which torch, when, and which kernels: where those have changed since, it stands beside the table."""
    report = json.loads((ROOT / "tests" / "evidence" / f"h200_{name}.json").read_text())
    before = README.split(f"<!-- {name}:begin -->")[0]
    assert f"{report['date']}, torch {'.'.join(report['torch'].split('.')[:2])}" in before
    changed = report["kernels"] != compiler.sources_digest()
    assert ("an earlier build of the kernels" in before[before.rindex("\n##") :]) == changed


def test_8_bit_table_is_what_was_measured():
    from flashpatch import benchmarking

    report = json.loads((ROOT / "tests" / "evidence" / "h200_fp8.json").read_text())
    assert README.split("<!-- fp8:begin -->\n")[1].split("\n<!-- fp8:end -->")[0] == benchmarking.speed_table(report)


def ratios(report: dict, direction: str, others: tuple[str, ...]) -> str:
    """flashpatch's slowest and fastest cell from 2048 tokens on, against the best of `others`."""
    speeds: dict[tuple, dict[str, float]] = {}
    for timing in report["timings"]:
        if timing["shape"]["seqlen"] >= 2048 and timing["direction"] == direction and timing["tflops"]:
            speeds.setdefault(tuple(timing["shape"].values()), {})[timing["variant"]] = timing["tflops"]
    found = [row["flashpatch"] / max(row[name] for name in others if name in row) for row in speeds.values()]
    assert len(found) >= 8
    return f"{min(found):.2f} to {max(found):.2f} times"


def test_what_the_first_screen_says_of_speed_is_what_was_measured():
    screen = " ".join(README.split("## Try it")[0].split())
    report = json.loads((ROOT / "tests" / "evidence" / "h200_speed.json").read_text())
    assert f"forward passes run at {ratios(report, 'forward', ('sdpa_flash', 'sdpa_cudnn', 'fa3'))}" in screen
    assert f"backward passes at {ratios(report, 'backward', ('sdpa_flash', 'sdpa_cudnn'))}" in screen


def test_what_stood_in_for_older_generations_is_counted():
    for path in evidence.folder().glob("*-as-*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        claimed = cases.claimed(planning.device_for(tuple(content["stands_for"])))
        capability = ".".join(map(str, content["stands_for"]))
        row = f"[{capability}](tests/evidence/{path.name}): {len(content['cells'])} of {len(claimed)}"
        assert row in " ".join(README.split()), row


def test_feature_table_is_what_was_measured():
    from flashpatch import feature_costs

    report = json.loads((ROOT / "tests" / "evidence" / "h200_features.json").read_text())
    for marker, family in (("features", "sm80"), ("hopper_features", "sm90")):
        table = README.split(f"<!-- {marker}:begin -->\n")[1].split(f"\n<!-- {marker}:end -->")[0]
        assert table == feature_costs.table(report, family)


def test_no_feature_costs_more_than_a_fourth_in_the_family_that_has_all():
    """Dense masks and biases aside, which are beside what SDPA has for them."""
    report = json.loads((ROOT / "tests" / "evidence" / "h200_features.json").read_text())
    costs = {(c["feature"], c["direction"], c["kernel"], c["head_dim"]): c for c in report["costs"]}
    dense = ("mask", "bias", "wide_bias", "bias of heads, with gradient")
    for (feature, direction, kernel, head_dim), cost in costs.items():
        if not kernel.endswith("_sm80"):
            continue
        peer = costs.get((feature, direction, "sdpa_efficient", head_dim))
        if feature not in dense:
            assert cost["cost"] <= 1.25, (feature, kernel, head_dim)
        else:
            assert cost["tflops"] >= 1.5 * peer["tflops"], (feature, kernel, head_dim)


def test_fp32_tables_are_what_was_measured():
    """And what they show: twice as fast as SDPA's efficient backend everywhere, with smaller errors than its own."""
    from flashpatch import benchmarking

    report = json.loads((ROOT / "tests" / "evidence" / "h200_fp32.json").read_text())
    shown = README.split("<!-- fp32:begin -->\n")[1].split("\n<!-- fp32:end -->")[0]
    assert shown.startswith(benchmarking.speed_table(report)) and shown.endswith(benchmarking.accuracy_table(report))
    errors = {
        (a["shape"]["head_dim"], a["shape"]["causal"], a["tensor"], a["variant"]): a["rms"]
        for a in report["accuracies"]
    }
    for (*cell, variant), error in errors.items():
        if variant == "sdpa_efficient":
            assert errors[(*cell, "flashpatch")] < error < errors[(*cell, "flashpatch_tf32")]
    speeds = {(*t["shape"].values(), t["direction"], t["variant"]): t["tflops"] for t in report["timings"]}
    for (*cell, variant), speed in speeds.items():
        if variant == "sdpa_efficient":
            assert speeds[(*cell, "flashpatch")] > 2 * speed
