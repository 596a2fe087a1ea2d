from __future__ import annotations

import urllib.request

import pytest

pytest.importorskip("prometheus_client")

from moe_trm.errors import ConfigError
from moe_trm.observe.prometheus import HOST, open_prometheus


def test_the_newest_value_of_every_number_can_be_scraped() -> None:
    sink = open_prometheus(0)
    try:
        sink.write(1, {"rollout/age_mean": 0.5, "queue/age/1": 3.0, "verdict": "all is well"})
        sink.write(2, {"rollout/age_mean": 0.25})
        with urllib.request.urlopen(f"http://{HOST}:{sink.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        assert "moe_trm_step 2.0" in lines
        assert "moe_trm_rollout_age_mean 0.25" in lines
        assert "moe_trm_queue_age_1 3.0" in lines
        assert not [line for line in lines if "verdict" in line]
        with pytest.raises(ConfigError, match="not available"):
            open_prometheus(sink.port)
    finally:
        sink.close()
