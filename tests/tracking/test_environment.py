import json
import platform

from paxkv.tracking.environment import environment


def test_it_names_versions_and_takes_more():
    found = environment(device="cpu")
    assert found["python"] == platform.python_version()
    assert found["packages"]["numpy"]
    assert found["device"] == "cpu"
    assert found["cpu_count"] >= 1
    json.dumps(found, allow_nan=False)
