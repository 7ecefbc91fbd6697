"""Dashboards as code: boards whose queries are functions of catalog rows, and the rules beside them. Pure."""

from kvobs.dashboards._coverage import WAIVED
from kvobs.dashboards._files import boards, generated
from kvobs.dashboards._json import FORMS, Form, document, text
from kvobs.dashboards._model import Board, Panel, Query, Section
from kvobs.dashboards._runbooks import runbooks
from kvobs.dashboards.boards import BOARDS, waterfall_parts

__all__ = [
    "BOARDS",
    "FORMS",
    "WAIVED",
    "Board",
    "Form",
    "Panel",
    "Query",
    "Section",
    "boards",
    "document",
    "generated",
    "runbooks",
    "text",
    "waterfall_parts",
]
