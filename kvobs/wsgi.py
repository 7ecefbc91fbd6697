"""Middleware for WSGI servers: ``ErrorMiddleware`` counts how requests end and tells failures apart."""

from __future__ import annotations

from kvobs.errors._wsgi import ErrorMiddleware

__all__ = ["ErrorMiddleware"]
