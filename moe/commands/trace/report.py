"""Findings as tables for the terminal, and as one self-contained HTML file without scripts."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan

from jinja2 import Environment
from rich.table import Table

from moe.commands.trace.findings import CACHES, CAPACITY, PARTS, RUNS, SEGMENT, Findings

_EIGHT = RUNS.index(8)


@dataclass(frozen=True)
class ReportTable:
    """A table with a title and a caption.

    Attributes:
        name: of its plot, if it has one.
        caption: how to read it.
        columns, rows: the first column names the row.
    """

    name: str
    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def table(self) -> Table:
        """The table for the terminal."""
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def report_tables(findings: Findings) -> list[ReportTable]:
    """Every table, in the order of the report."""
    return [
        _tokens(findings),
        _context(findings),
        _load(findings),
        _company(findings),
        _coverage(findings),
        _consistency(findings),
        _position(findings),
    ]


def _tokens(findings: Findings) -> ReportTable:
    return ReportTable(
        "tokens",
        "How far the token determines the expert, %",
        "Explained: mutual information of token and expert over the expert's entropy. The others: "
        "share of visits among the top K experts of a table that is fitted on the first half of "
        "the text and tested on the second.",
        ("layer", "experts", "a token", "explained", "by popularity", "by token", "by pair"),
        [
            (str(i), str(own.num_experts), f"{own.top_k:.3g}", _percent(own.explained),
             *(_percent(own.recall.get(name)) for name in ("popular", "token", "pair")))
            for i, own in enumerate(findings.layers)
        ],
    )  # fmt: skip


def _context(findings: Findings) -> ReportTable:
    return ReportTable(
        "context",
        "Stability across contexts, %",
        "Experts in common of two occurrences of the same token, of the same token after the same "
        "one, and of any two tokens.",
        ("layer", "same token", "same pair", "any two"),
        [
            (str(i), _percent(own.same_token), _percent(own.same_pair), _percent(own.any_tokens))
            for i, own in enumerate(findings.layers)
        ],
    )


def _load(findings: Findings) -> ReportTable:
    return ReportTable(
        "load",
        "Load of experts",
        "MaxVio: heaviest load over the mean, minus 1. Unused: experts that no token visits. "
        "Second weight: median of a token's second over its first weight; of all layers "
        f"`{second_weights(findings)}`.",
        ("layer", "MaxVio", "unused", "second weight"),
        [
            (str(i), f"{own.max_violation:.2f}", str(own.load.count(0)), _number(own.weight_ratio))
            for i, own in enumerate(findings.layers)
        ],
    )


def _company(findings: Findings) -> ReportTable:
    return ReportTable(
        "company",
        "Experts that serve the same tokens",
        "The pairs of experts that serve the same tokens most often compared with chance, and "
        "their frequency over that by chance.",
        ("layer", "first", "second", "third"),
        [
            (str(i), *(f"{a}+{b} ({lift:.1f}x)" for a, b, lift in own.pairs),
             *("-" for _ in range(3 - len(own.pairs))))
            for i, own in enumerate(findings.layers)
        ],
    )  # fmt: skip


def _coverage(findings: Findings) -> ReportTable:
    def means(name: str) -> list[float]:
        return [
            findings.mean(lambda own: getattr(own, name)[i] / own.num_experts)  # noqa: B023 - called at once
            for i in range(len(RUNS))
        ]

    def row(title: str, name: str) -> tuple[str, ...]:
        return (title, *map(_percent, means(name)))

    return ReportTable(
        "coverage",
        "Share of a layer's experts that tokens need together, %",
        "The law N(t) = E (1 - (1 - K/E)^t) is for uniform, independent routing. Caches, expert "
        "sharing and verification of drafts gain if consecutive tokens need fewer experts. "
        "Unused: chunk-level sparsity.",
        ("tokens", *map(str, RUNS)),
        [
            row("law", "law"),
            row("anywhere", "distinct_apart"),
            row("consecutive", "distinct"),
            ("unused", *(_percent(1 - share) for share in means("distinct"))),
        ],
    )


def _consistency(findings: Findings) -> ReportTable:
    return ReportTable(
        "consistency",
        "Local routing consistency, %",
        f"Segments of {SEGMENT} tokens. Cache: hits of a cache that holds the segment's most "
        "visited experts, by its size in K (SCH). One set: best F1 of sending the whole segment "
        "to the same experts (SRP). 8 tokens: distinct experts, not per cent, against the law.",
        ("layer", *(f"cache {times} K" for times in CACHES), "one set", "8 tokens", "law"),
        [
            (str(i), *map(_percent, own.cache_hits), _percent(own.segment_score),
             _number(own.distinct[_EIGHT]), _number(own.law[_EIGHT]))
            for i, own in enumerate(findings.layers)
        ],
    )  # fmt: skip


def _position(findings: Findings) -> ReportTable:
    share = [findings.mean(lambda own: own.overflow[i]) for i in range(PARTS)]  # noqa: B023 - called at once
    return ReportTable(
        "position",
        "Drop towards the end, %",
        f"Visits beyond a capacity of {CAPACITY} times an equal share, by tenths of a sequence, "
        "mean over layers: what a model with capacity limits would drop. This engine drops none.",
        ("tenth", *(str(i + 1) for i in range(PARTS))),
        [("beyond", *map(_percent, share))],
    )


def second_weights(findings: Findings) -> str:
    """The medians of second over first weight, as routing policies take a number a layer."""
    return ",".join(
        "0" if isnan(own.weight_ratio) else f"{own.weight_ratio:.3f}" for own in findings.layers
    )


def _percent(share: float | None) -> str:
    return "-" if share is None or isnan(share) else f"{100 * share:.1f}"


def _number(value: float) -> str:
    return "-" if isnan(value) else f"{value:.2f}"


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
<p>{{ sheet.caption }}</p>
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
    """The report as HTML; ``images``: PNG, by the name of their table."""
    page = Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    inline = {name: b64encode(image).decode() for name, image in images.items()}
    return page.render(findings=findings, sheets=report_tables(findings), images=inline)
