"""The local store: SQLite files in one directory, one writer per process, readers anywhere, Parquet for analysis."""

from __future__ import annotations

from kvobs.store._export import export_parquet
from kvobs.store._reader import AttentionSecond, Point, Process, StepSecond, Stored, StoreReader
from kvobs.store._schema import StoreError
from kvobs.store._series import Series, SessionFact, latest_attention, series, session_facts, spans
from kvobs.store._serving import actions, decisions, phases, pools, preemptions, requests
from kvobs.store._tail import News, Tail
from kvobs.store._traces import last_traced, trace_before, turns_of_trace
from kvobs.store._watch import touch, watched
from kvobs.store._writer import StoreWriter

__all__ = ["AttentionSecond", "News", "Point", "Process", "Series", "SessionFact", "StepSecond", "StoreError",
           "StoreReader", "StoreWriter", "Stored", "Tail", "actions", "decisions", "export_parquet", "last_traced",
           "latest_attention", "phases", "pools", "preemptions", "requests", "series", "session_facts", "spans",
           "touch", "trace_before", "turns_of_trace", "watched"]
