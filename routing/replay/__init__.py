"""Replay of recorded routes in a forward pass, and its proof."""

from routing.record.sources import Native, Record, Recorded, ReplayRecorded, ReplayRecords, ReplayReport, RouteSource

__all__ = ["Native", "Record", "Recorded", "ReplayRecorded", "ReplayRecords", "ReplayReport", "RouteSource"]
