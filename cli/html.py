"""Reports as one HTML file: styles and drawings inside, nothing fetched, readable on a phone."""

from __future__ import annotations

from pathlib import Path

from flashpatch import families
from flashpatch.findings import grouped, grouped_violations, places, size

from .rendering import MISSING, USAGE, Fault, figure


def write(path: str, template: str, **values) -> None:
    """Render a template beside this file to `path`."""
    text = render(template, **values)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Fault(f"--html {path}: {error}", USAGE) from None


def render(template: str, **values) -> str:
    """A template beside this file with these values."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise Fault("--html needs jinja2: pip install jinja2", MISSING) from None
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(
        families=families.BY_NAME, grouped=grouped, grouped_violations=grouped_violations, places=places, size=size, figure=figure,
        breakable=lambda path: Markup(".<wbr>").join(path.split(".")),
    )  # fmt: skip
    return environment.get_template(template).render(**values)
