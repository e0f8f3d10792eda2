"""One thread per library: tests run side by side on small machines, and sums keep one order."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; child processes inherit it
os.environ["LOCKSTEP_OFFLINE"] = "1"  # nothing is fetched but by the tests of that, from this machine

from collections.abc import Generator

import cv2
import pytest
import torch

torch.set_num_threads(1)
cv2.setNumThreads(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make text of what a test said: names of files that are none can't travel between pytest-xdist's processes."""
    report = yield
    report.sections = [(title, said.encode("utf-8", "backslashreplace").decode()) for title, said in report.sections]
    return report
