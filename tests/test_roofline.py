"""Ceilings, counted work, what bounds attention, and the drawings; small, on a CPU."""

import dataclasses
import datetime
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from tiny_models import BY_NAME, ids

pytest.importorskip("flashpatch.cli", reason="needs the editable install: pip install -e .")

import jsonschema
from click.testing import CliRunner
from flashpatch.cli import charts
from flashpatch.cli import roofline as printing

from flashpatch import cli, counted_work, measured_ceilings, roofline
from flashpatch.benchmarking import Shape
from flashpatch.measured_ceilings import Ceilings
from flashpatch.roofline import Experiment, Point, RooflineReport

CPU = torch.device("cpu")
SHAPE = Shape(1, 64, 2, 2, 16, False)
CEILINGS = Ceilings(100.0, "", 1000.0, 900.0)


@pytest.fixture
def quick(monkeypatch):
    """One call is a measurement."""

    def once(run, device, budget=0, samples=0):
        run()
        return 2.0

    monkeypatch.setattr(roofline, "milliseconds", once)
    monkeypatch.setattr(roofline, "measure_ceilings", lambda *_, **__: CEILINGS)


@pytest.mark.parametrize("variant", ["eager", "sdpa_math"])
def test_a_dense_call_is_counted_operator_by_operator(variant):
    run = roofline._runner(variant, SHAPE, "forward", torch.float32, CPU)
    flops, moved = counted_work.count(run, SHAPE, "forward", 4)
    matrix = 4 * 2 * 64 * 64
    assert flops == SHAPE.flops("forward")
    # the scores are written, read and scaled, written by the softmax, read by the second product
    assert moved >= 4 * matrix + counted_work.compulsory(SHAPE, "forward", 4) - 4 * 64 * 2
    flops, moved = counted_work.count(
        roofline._runner(variant, SHAPE, "backward", torch.float32, CPU), SHAPE, "backward", 4
    )
    assert (
        flops == 2 * SHAPE.flops("forward") and moved >= 5 * matrix
    )  # scores are kept, so they are not computed again


def test_a_fused_call_moves_its_inputs_and_outputs_once():
    run = roofline._runner("sdpa_flash", SHAPE, "forward", torch.float32, CPU)
    flops, moved = counted_work.count(run, SHAPE, "forward", 4)
    assert flops == SHAPE.flops("forward")
    assert moved == counted_work.compulsory(SHAPE, "forward", 4) == 4 * 4 * 64 * 2 * 16 + 4 * 64 * 2


def test_causal_is_half_the_work_of_a_fused_call_and_all_of_a_dense_one():
    causal = dataclasses.replace(SHAPE, causal=True)
    for variant, share in (("sdpa_flash", 0.5), ("eager", 1.0)):
        run = roofline._runner(variant, causal, "forward", torch.float32, CPU)
        assert counted_work.count(run, causal, "forward", 4)[0] == share * SHAPE.flops("forward")


@pytest.mark.parametrize(
    ("flops", "moved", "milliseconds", "bound", "fraction"),
    [
        (1e11, 1e8, 2.0, "compute", 0.5),
        (1e9, 1e9, 2.0, "memory", 0.5),
        (1e11, 1e8, 0.5, "failed", 2.0),
        (1e9, 1e9, 0.5, "failed", 2.0),
    ],
)
def test_what_bounds_a_point(flops, moved, milliseconds, bound, fraction):
    point = Point(SHAPE, "forward", "eager", milliseconds, flops=flops, bytes=int(moved))
    roofline.judge(point, CEILINGS)
    assert point.bound == bound and point.fraction == pytest.approx(fraction)


@pytest.mark.parametrize(
    ("to_flops", "to_bytes", "bound"), [(1.0, 0.0, "compute"), (0.1, 0.9, "memory"), (0.05, 0.1, "neither")]
)
@pytest.mark.parametrize("variant", ["eager", "sdpa_flash"])
def test_the_experiment_recovers_what_time_follows(monkeypatch, variant, to_flops, to_bytes, bound):
    """A machine whose time is flops^a * bytes^b, exactly."""

    def measured(variant, shape, direction, dtype, device, ceilings, samples=3):
        point = Point(shape, direction, variant)
        run = roofline._runner(variant, shape, direction, dtype, device)
        point.flops, point.bytes = counted_work.count(run, shape, direction, 4)
        point.milliseconds = 1e-3 * point.flops**to_flops * point.bytes**to_bytes
        roofline.judge(point, ceilings)
        return point

    monkeypatch.setattr(roofline, "measure", measured)
    result = roofline.experiment(variant, Shape(1, 64, 2, 2, 16, True), torch.float32, CPU, CEILINGS)
    assert result.bound == bound
    assert (result.to_flops, result.to_bytes) == (pytest.approx(to_flops), pytest.approx(to_bytes))


def test_a_variant_that_runs_out_of_memory_says_so_and_the_others_go_on(monkeypatch, quick):
    exact = roofline.call

    def call(variant, *arguments):
        if variant == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 GiB. GPU 0 is full")
        return exact(variant, *arguments)

    monkeypatch.setattr(roofline, "call", call)
    report = roofline.roofline([SHAPE], device="cpu", dtype=torch.float32, small=True)
    errors = {point.variant: point.error for point in report.points if point.error}
    assert set(errors) == {"eager"} and errors["eager"].startswith("out of memory: CUDA out of memory. Tried")
    text = roofline.table(dataclasses.asdict(report))
    assert "| 64 | eager | out of memory | | |" in text and "| 64 | sdpa_flash | 2 / 2 |" in text


def test_flex_is_compiled_for_every_call_anew_and_computes_the_same(monkeypatch):
    """Compiled ones run in tiles only while dynamo keeps them: it gives a function a few shapes, then runs it dense."""
    compiled, original = [], torch.compile

    def compile(function, **options):  # FlexAttention outside a compiler compiles itself, for another backend
        return original(function, **options) if "backend" in options else compiled.append(options) or function

    monkeypatch.setattr(torch, "compile", compile)
    for heads_kv, seqlen in ((2, 16), (2, 16), (4, 16), (2, 24)):
        q, k, v = (torch.randn(1, seqlen, heads, 16) for heads in (4, heads_kv, heads_kv))
        expected = roofline.call("eager", q, k, v, True)
        torch.testing.assert_close(roofline.call("flex", q, k, v, True), expected)
    assert compiled == [{"dynamic": False}] * 3 and "flex" in roofline.GPU_VARIANTS


def test_ceilings_of_this_machine():
    ceilings = measured_ceilings.measure_ceilings(CPU, torch.float32, small=True)
    assert 1e-4 < ceilings.tflops < 100 and 0.1 < ceilings.copy_gbs < 5000 and 0.1 < ceilings.read_gbs < 5000
    assert ceilings.gbs == max(ceilings.copy_gbs, ceilings.read_gbs)


def test_shapes_of_a_model():
    shapes = roofline.shapes_of(BY_NAME["llama"].model("eager"), {"input_ids": ids()}, (128, 256), batch=3)
    assert shapes == [Shape(3, seqlen, 4, 2, 16, True) for seqlen in (128, 256)]


# ---- the command ----


def bench(*arguments):
    result = CliRunner().invoke(cli.main, ["bench", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


SMALL = ("--roofline", "--device", "cpu", "--seqlens", "32,64", "--head-dims", 16, "--tokens", 64, "--rounds", 1)


def test_bench_writes_json_html_and_svg(tmp_path, quick):
    html, svg = tmp_path / "bench.html", tmp_path / "bench.svg"
    result = bench(*SMALL, "--json", "--html", html, "--svg", svg)
    document = json.loads(result.stdout)
    jsonschema.validate(document, json.loads(bench("--json-schema").stdout))
    assert document["exit_code"] == result.exit_code
    assert len(document["points"]) == 2 * 2 * len(roofline.CPU_VARIANTS)
    assert [item["variant"] for item in document["experiments"]] == list(roofline.CPU_VARIANTS)
    page = html.read_text()
    assert page.count("<svg") == 3 and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    root = ET.fromstring(svg.read_text())
    assert root.tag.endswith("svg") and "Roofline" in "".join(root.itertext())


def test_bench_in_words(quick):
    result = bench(*SMALL, "--full")
    assert "Measured ceilings" in result.stdout and "time ~ FLOPs^" in result.stdout


def test_a_result_above_a_ceiling_is_a_failed_measurement(monkeypatch, quick):
    low = Ceilings(1e-9, "1 x 1", 1e-9, 1e-9)
    monkeypatch.setattr(roofline, "measure_ceilings", lambda *_, **__: low)
    result = bench(*SMALL)
    assert result.exit_code == 1 and "FAILED measurement" in result.stdout


@pytest.mark.parametrize("arguments", [("--html", "x.html"), ("--model", "x"), ("--tokens", "16384")])
def test_options_of_the_roofline_alone(arguments):
    result = bench(*arguments)
    assert result.exit_code == 2 and "goes with --roofline" in result.output


# ---- drawings ----


def test_drawings_hold_every_point_inside_their_frame():
    points = {"a": [(1.0, 0.5), (900.0, 80.0)], "<b>": [(50.0, 20.0)]}
    for drawn in (charts.roofline("t & t", 100.0, 3000.0, points), charts.lines("t", "x", "y", points)):
        root = ET.fromstring(charts.standalone(drawn))
        circles = [e for e in root.iter() if e.tag.endswith("circle") and list(e)]
        assert len(circles) == 3
        for circle in circles:
            assert charts.LEFT <= float(circle.get("cx")) <= charts.WIDTH - charts.RIGHT
            assert charts.TOP <= float(circle.get("cy")) <= charts.HEIGHT - charts.BOTTOM
    assert charts.lines("t", "x", "y", {}) == ""


# ---- what was measured on an H200: flashpatch bench --roofline --head-dims 128 --seqlens 512,2048,8192,32768 --json ----

EVIDENCE = Path(__file__).parent / "evidence"


def drawn() -> dict[str, str]:
    """The files that show the recording: run this file as a script to renew them, with the JSON of a new one if there is."""
    document = json.loads((EVIDENCE / "h200_roofline.json").read_text(encoding="utf-8"))
    points, experiments = (
        [kind(**{**item, "shape": Shape(**item["shape"])}) for item in document[name]]
        for kind, name in ((Point, "points"), (Experiment, "experiments"))
    )
    ceilings = Ceilings(**document["ceilings"])
    report = RooflineReport(document["device"], document["dtype"], document["torch"], ceilings, points, experiments)
    text = (
        f"# Attention on one {report.device}: what bounds it\n\n{report.dtype}, causal, 16384 tokens, torch {report.torch}; forward / "
        f"backward. Ceilings measured in the same run: {ceilings.tflops:.0f} TFLOP/s ({ceilings.product}), {ceilings.gbs:.0f} GB/s.\n\n"
        f"{roofline.table(document)}\n\nHow the forward's time responds to more FLOPs and to more bytes:\n\n"
    )
    text += "".join(f"- {printing.experiment_words(item)}\n" for item in experiments)
    return {"h200_roofline.svg": charts.standalone(printing.drawings(report)[0]), "h200_roofline.md": text}


def test_the_recording_is_shown_as_it_is():
    for name, text in drawn().items():
        assert (EVIDENCE / name).read_text(encoding="utf-8") == text, f"renew it: python {Path(__file__).name}"


if __name__ == "__main__":
    if sys.argv[1:]:
        document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        document = {"date": f"{datetime.date.today()}", **{k: v for k, v in document.items() if k != "exit_code"}}
        (EVIDENCE / "h200_roofline.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name, text in drawn().items():
        (EVIDENCE / name).write_text(text, encoding="utf-8")
