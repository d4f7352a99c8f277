"""One Slurm of four nodes for a session; without root or the packages its tests are skipped, with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing_programs


def reason_to_skip() -> str | None:
    """Why this machine cannot play a cluster, None when it can."""
    if not sys.platform.startswith("linux"):
        return "a Slurm on one machine needs Linux"
    if os.geteuid() != 0:
        return "a Slurm on one machine needs root, who alone makes namespaces"
    if missing := missing_programs():
        return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge iproute2 util-linux procps)"
    spaces = subprocess.run(["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--net", "true"], check=False)
    return "this machine refuses namespaces (CAP_SYS_ADMIN)" if spaces.returncode else None


@pytest.fixture(scope="session")
def machine() -> None:
    """A machine that can play a cluster."""
    if reason := reason_to_skip():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(machine: None) -> Iterator[Cluster]:
    """Four nodes; a test that kills one boots it again."""
    made = Cluster(4)
    try:
        yield made
    finally:
        made.stop()
