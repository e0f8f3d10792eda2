"""Random numbers and torch's choice of kernels: seeded at the start, kept in checkpoints, put back for a caller."""

import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed Python, NumPy and torch, and choose between repeatable and fastest kernels.

    Args:
        seed: for all three generators and every device.
        deterministic: take the repeatable kernel wherever there is one. On the CPU that is all of them; on CUDA an
            operation without one warns, instead of ending a long run.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it first starts
    torch.set_deterministic_debug_mode("warn" if deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, changes nothing
    torch.backends.cudnn.deterministic = deterministic


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators as plain numbers and tensors, which a checkpoint can hold.

    Args:
        device: what the run computes on; another device's generator is not touched, for that would claim its memory.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put all generators where `rng_state` saw them; a run that moves from GPU to CPU or back keeps the CUDA seed."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"]))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextlib.contextmanager
def choices_kept() -> Iterator[None]:
    """Put back what a run sets for its whole process: random numbers, torch's choice of kernels, the current GPU."""
    python, numpy_state = random.getstate(), np.random.get_state()
    torch_state, repeatable = torch.get_rng_state(), torch.get_deterministic_debug_mode()
    cudnn = torch.backends.cudnn.deterministic
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        with _gpus_kept():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        torch.set_deterministic_debug_mode(repeatable)
        torch.backends.cudnn.deterministic = cudnn
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


@contextlib.contextmanager
def _gpus_kept() -> Iterator[None]:
    """Put back the random numbers of GPUs, and which of them is the current one; GPUs that nobody uses stay unused."""
    used, seed = torch.cuda.is_initialized(), torch.initial_seed()
    states, current = (torch.cuda.get_rng_state_all(), torch.cuda.current_device()) if used else ([], 0)
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.set_device(current)
        if used:
            torch.cuda.set_rng_state_all(states)
        else:
            torch.cuda.manual_seed_all(seed)  # at their first use, as `torch.manual_seed` has it
        if mps is not None:
            torch.mps.set_rng_state(mps)
