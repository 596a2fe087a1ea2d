"""The newest value of every metric, for Prometheus to scrape. Imports its library when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec

from moe_trm.errors import ConfigError
from moe_trm.observe.sinks import Sink

HOST = "127.0.0.1"
"""Metrics are for this machine; to read them elsewhere, put a proxy with a key in front."""


class Prometheus(Sink):
    """Gauges at `http://127.0.0.1:port/metrics`.

    `rollout/age_mean` is `moe_trm_rollout_age_mean`, and `moe_trm_step` is the step. A metric that a step does not have
    keeps its last value.
    """

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._registry, self._gauge, self._gauges = CollectorRegistry(), Gauge, dict[str, Gauge]()
        self._server, self._thread = start_http_server(port, HOST, self._registry)
        self.port: int = self._server.server_port

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        for name, value in {"step": float(step), **metrics}.items():
            if isinstance(value, str):
                continue
            if name not in self._gauges:
                self._gauges[name] = self._gauge(gauge_name(name), name, registry=self._registry)
            self._gauges[name].set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def gauge_name(metric: str) -> str:
    """A metric's name as Prometheus allows it."""
    return "moe_trm_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def open_prometheus(port: int) -> Prometheus:
    """Raises `ConfigError` when the library is missing or the port is taken."""
    if find_spec("prometheus_client") is None:
        raise ConfigError(
            "the library behind a setting is not installed",
            where="observe.prometheus_port",
            got="no module prometheus_client",
            fix="pip install 'moe-trm[prometheus]', or set observe.prometheus_port=0",
        )
    try:
        return Prometheus(port)
    except OSError as error:
        raise ConfigError(
            "the port for Prometheus is not available",
            where="observe.prometheus_port",
            got=f"{port} ({error.strerror})",
            expected="a free port of this machine",
        ) from error
