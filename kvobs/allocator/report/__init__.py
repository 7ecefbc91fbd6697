"""The report: one self-contained HTML file that asks nobody for anything."""

from kvobs.allocator.report._write import html, write_html

__all__ = ["html", "write_html"]
