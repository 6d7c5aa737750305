"""Findings as one HTML file: no scripts, nothing from the net, images inside, texts escaped."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping

from jinja2 import Environment

from moe.tracing.findings import Findings
from moe.tracing.tables import sheets

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:;
 style-src 'unsafe-inline'">
<title>Routing of {{ findings.model }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.8rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; background: white; }
</style>
</head>
<body>
<h1>Routing of {{ findings.model }}</h1>
<p>{{ "{:,}".format(findings.num_tokens) }} tokens of {{ findings.text }} in
{{ findings.num_sequences }} sequences; {{ findings.layers | length }} MoE layers.</p>
{% for sheet in sheets %}
<h2>{{ sheet.title }}</h2>
<p>{{ sheet.says }}</p>
{% if sheet.name in images %}
<img alt="{{ sheet.title }}" src="data:image/png;base64,{{ images[sheet.name] }}">
{% endif %}
<div class="scroll"><table>
<tr>{% for column in sheet.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in sheet.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endfor %}
</body>
</html>
"""


def html(findings: Findings, images: Mapping[str, bytes]) -> str:
    """The report.

    Args:
        images: PNG, by the name of the table that they belong to.
    """
    page = Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    inline = {name: b64encode(image).decode() for name, image in images.items()}
    return page.render(findings=findings, sheets=sheets(findings), images=inline)
