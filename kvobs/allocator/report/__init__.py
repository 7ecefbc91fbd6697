"""The report: one self-contained HTML file that asks nobody for anything."""

from kvobs.allocator.report._data import MEANING, page_data, score_text
from kvobs.allocator.report._write import html, page_of, write_html

__all__ = ["MEANING", "html", "page_data", "page_of", "score_text", "write_html"]
